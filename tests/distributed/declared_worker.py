"""Run by torchrun: save or restore what a rank holds in a layout, as Megatron-like code holds it.

    declared_worker.py save|restore SOCKET RUN LAYOUT

Local tensors are cut by hand (`tests.client.llama`). A restore checks them there, bit for bit, on every rank.
"""

from __future__ import annotations

import sys
import warnings
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

from holdfast import Checkpointer, ParallelLayout
from holdfast_formats.layout import language
from tests.client import llama
from tests.torchruns import leave

FUSED = ("qkv=ranks", "gate_up=ranks")


def local(layout: str, rank: int) -> llama.Arrays:
    """This rank's tensors in the layout, cut from the whole model."""
    made = language.parse(layout)
    mesh, at = made.mesh, made.mesh.coordinate(rank)
    whole = llama.arrays()
    if mesh.pp > 1:
        per = llama.LAYERS // mesh.pp
        layers = range(at.pp * per, (at.pp + 1) * per)
        whole = {name: whole[name] for name in llama.shapes(layers, at.pp == 0, at.pp == mesh.pp - 1)}
    found = llama.cut(whole, mesh.tp, at.tp, padding=8 * mesh.tp)
    return llama.fused(found) if all(form in layout for form in FUSED) else found


def state_of(arrays: llama.Arrays, rank: int, stepped: bool) -> dict[str, Any]:
    model = {name: nn.Parameter(torch.from_numpy(np.array(array))) for name, array in arrays.items()}
    optim = torch.optim.AdamW(model.values(), lr=0.25)
    if stepped:
        for parameter in model.values():
            parameter.grad = torch.zeros_like(parameter)
        optim.step()
        for name, parameter in model.items():
            parameter.data.copy_(torch.from_numpy(arrays[name]))
            optim.state[parameter]["exp_avg"].copy_(parameter.detach() * 3)
    return {"model": model, "optim": optim, "loader": {"rank": rank}}


def check(state: dict[str, Any], expected: llama.Arrays) -> None:
    for name, parameter in state["model"].items():
        kept = state["optim"].state[parameter]
        assert np.array_equal(parameter.detach().numpy(), expected[name]), name
        assert np.array_equal(kept["exp_avg"].numpy(), expected[name] * np.float32(3)), name
        assert kept["step"].item() == 1
    assert state["optim"].param_groups[0]["lr"] == 0.25


def main() -> None:
    warnings.simplefilter("ignore")
    action, socket, run, *chosen = sys.argv[1:]
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    for layout in chosen:
        arrays = local(layout, rank)
        held_as = ParallelLayout(f"{layout},vocab=8", config=llama.CONFIG)
        if action == "save":
            state = state_of(arrays, rank, stepped=True)
            with Checkpointer(run, state, at=socket, layout=held_as) as checkpointer:
                checkpointer.save(3, wait="durable")
        else:
            state = state_of({name: array * 0 - 1 for name, array in arrays.items()}, rank, stepped=rank % 2 == 1)
            with Checkpointer(run, state, at=socket, layout=held_as) as checkpointer:
                assert checkpointer.restore() == 3
            check(state, arrays)
            with Checkpointer(
                f"{run}-again-{layout.replace('=', '').replace(',', '-')}", state, at=socket, layout=held_as
            ) as checkpointer:
                checkpointer.save(3, wait="durable")
        dist.barrier()
    leave()


if __name__ == "__main__":
    main()
