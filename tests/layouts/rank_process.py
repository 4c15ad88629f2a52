"""Run by torchrun: save, or restore and check, what a rank of a named layout holds.

    rank_process.py save|restore SOCKET MODEL LAYOUT[,LAYOUT…]

The local tensors are the oracle's. A restore checks them there, on every rank, and saves them again from there.
"""

from __future__ import annotations

import sys
import warnings

import numpy as np
import torch
import torch.distributed as dist

from holdfast import Checkpointer, ParallelLayout
from tests.torchruns import leave

from . import oracle
from .matrix import LAYOUTS, MODELS
from .models import Arrays, Model

GROUPS = {"model": 0, "master": 1, "ema": 2}  # and the seed of their values


def held(model: Model, layout: str, rank: int) -> dict[str, Arrays]:
    """What the rank holds, group by group; where parameters are shared out, of some of them nothing."""
    world = LAYOUTS[model.name][layout]
    found = {group: oracle.held(world, model, model.arrays(seed), rank, group) for group, seed in GROUPS.items()}
    if world.stage < 3:
        return found
    every = oracle.held(world._replace(stage=0), model, model.arrays(), rank)
    flat = world.method in ("flat", "flat-param")
    none = {name: np.empty((0,) if flat else (0, *array.shape[1:]), np.float32) for name, array in every.items()}
    return {group: {name: named.get(name, none[name]) for name in every} for group, named in found.items()}


def tensors(arrays: dict[str, Arrays], filled: bool) -> dict[str, dict[str, torch.Tensor]]:
    """The state: live tensors with these values, or with others."""
    return {
        group: {name: torch.from_numpy(np.array(a) if filled else np.full_like(a, -1)) for name, a in named.items()}
        for group, named in arrays.items()
    }


def main() -> None:
    warnings.simplefilter("ignore")
    action, socket, name, layouts = sys.argv[1:]
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    model, rank = MODELS[name], dist.get_rank()
    for layout in layouts.split(","):
        expected = held(model, layout, rank)
        held_as = ParallelLayout(LAYOUTS[name][layout].text, config=model.config)
        state = tensors(expected, filled=action == "save")
        if action == "save":
            with Checkpointer(name, state, at=socket, layout=held_as) as checkpointer:
                checkpointer.save(3, wait="durable")
        else:
            with Checkpointer(name, state, at=socket, layout=held_as) as checkpointer:
                assert checkpointer.restore() == 3
            for group, named in expected.items():
                for key, array in named.items():
                    assert np.array_equal(state[group][key].numpy(), array), f"{layout}: {group}/{key}"
            with Checkpointer(f"{name}-{layout}", state, at=socket, layout=held_as) as checkpointer:
                checkpointer.save(3, wait="durable")
        dist.barrier()
    leave()


if __name__ == "__main__":
    main()
