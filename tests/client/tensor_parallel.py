"""Ranks of torch's tensor parallelism without layout=: how they go on after a change of the world.

`grow SOCKET FOLDER` restores step 1, of one rank, on two rows of two, and saves step 2. `shrink SOCKET FOLDER` restores
that on two replicas. Each rank writes what it draws and where its loader is.
"""

from __future__ import annotations

import json
import random
import sys
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from holdfast import Checkpointer, LeftOutWarning
from tests.torchruns import leave


class Loader:
    """A loader that has read as many rows as `at` says."""

    def __init__(self, at: int) -> None:
        self.at = at

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = state["at"]


def model() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 4))


def cut(names: tuple[str, str]) -> nn.Module:
    """The model on two rows of two ranks: each row has it once."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=names)
    return parallelize_module(model(), mesh[names[1]], {"0": ColwiseParallel(), "1": RowwiseParallel()})


def drawn() -> list[float]:
    return [random.random(), float(np.random.rand()), float(torch.rand(()))]


def grow(socket: str, folder: Path) -> None:
    rank = dist.get_rank()
    state: dict[str, Any] = {"model": cut(("dp", "tp")), "loader": Loader(0)}
    with Checkpointer("tensor-parallel", state, at=socket) as checkpointer:
        assert checkpointer.restore() == 1
        state["loader"].at += 10 * (rank // 2)
        found = {"grown": drawn()}
        checkpointer.save(2, wait="durable")
        found["next"] = drawn()
    (folder / f"grow-{rank}.json").write_text(json.dumps(found))
    with (
        Checkpointer("tensor-parallel", {"model": cut(("rows", "columns")), "loader": Loader(0)}, at=socket) as checkpointer,
        warnings.catch_warnings(record=True) as told,
    ):
        warnings.simplefilter("always", LeftOutWarning)
        assert checkpointer.restore(1) == 1
    texts = [str(one.message) for one in told if "which ranks share tensors" in str(one.message)]
    assert len(texts) == (rank > 0) and all("('rows', 'columns')" in text and "layout=" in text for text in texts), texts


def shrink(socket: str, folder: Path) -> None:
    state: dict[str, Any] = {"model": model(), "loader": Loader(0)}
    with Checkpointer("tensor-parallel", state, at=socket) as checkpointer:
        assert checkpointer.restore(2) == 2
    found = {"next": drawn(), "at": state["loader"].at}
    (folder / f"shrink-{dist.get_rank()}.json").write_text(json.dumps(found))


def main(what: str, socket: str, folder: str) -> None:
    dist.init_process_group("gloo")
    (grow if what == "grow" else shrink)(socket, Path(folder))
    leave()


if __name__ == "__main__":
    main(*sys.argv[1:])
