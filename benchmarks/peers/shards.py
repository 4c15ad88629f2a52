"""This rank's rows as parts of global tensors, for the peers that know DTensors."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from benchmarks.state import State


def as_global(state: State) -> dict[str, Any]:
    """The live tensors themselves when one rank holds everything, else DTensors over the same memory."""
    tensors: dict[str, torch.Tensor] = dict(state.tensors)
    if state.world == 1:
        return tensors
    mesh = _mesh(state.world)
    return {name: DTensor.from_local(tensor, mesh, [Shard(0)], run_check=False) for name, tensor in tensors.items()}


@cache
def _mesh(world: int) -> DeviceMesh:
    """Made once a process, as a trainer does: process groups are no part of a load."""
    return init_device_mesh("cpu", (world,), mesh_dim_names=("dp",))
