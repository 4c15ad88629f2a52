"""Saves and restores layers with experts that differ among ranks: `experts.py --work DIR make|read|collide`.

`make` steps, saves, and writes what each rank has; `read` restores into others and compares, on as many ranks or on one;
`collide` saves different experts under one name, which has to be refused. Paddle 3.3.1 has no forward pass of MoELayer on a
CPU: gradients are those of a sum of squares.
"""

from __future__ import annotations

import argparse
import pickle
import re
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import paddle
import pytest
from paddle import nn
from paddle.distributed import fleet
from paddle.incubate.distributed.models.moe import MoELayer, moe_layer

from holdfast.integrations import paddle as holdfast_paddle
from holdfast_formats.errors import ReplicasDiffer
from tests.integrations.paddle import gloo

WIDTH, INNER, EXPERTS = 6, 10, 4
WAIT_S = 120.0


def expert(number: int) -> nn.Layer:
    """Experts are equal at first only if they have the same number."""
    paddle.seed(number)
    return nn.Sequential(nn.Linear(WIDTH, INNER), nn.Linear(INNER, WIDTH))


class Sparse(nn.Layer):
    """As PaddleFormers has its experts: all numbers, with None for those of other ranks."""

    def __init__(self, own: range) -> None:
        super().__init__()
        self.experts = nn.LayerList([expert(number) if number in own else None for number in range(EXPERTS)])


class Model(nn.Layer):
    def __init__(self) -> None:
        super().__init__()
        rank, world = paddle.distributed.get_rank(), paddle.distributed.get_world_size()
        own = range(rank * EXPERTS // world, (rank + 1) * EXPERTS // world)
        group = paddle.distributed.new_group(list(range(world))) if world > 1 else None
        paddle.seed(99)
        self.proj = nn.Linear(WIDTH, WIDTH)
        with mock.patch.object(moe_layer, "check_nccl_version_for_p2p"):
            experts = nn.LayerList([expert(number) for number in own])
            paddle.seed(99)  # the gate is equal on all ranks
            self.moe = MoELayer(WIDTH, experts, {"type": "naive", "top_k": 2}, group)
        self.sparse = Sparse(own)
        for name, parameter in self.named_parameters():
            parameter.no_sync = ".experts." in name


def by_number(model: Model) -> dict[str, Any]:
    """The parameters, by name with the expert's number in the whole model."""
    first = paddle.distributed.get_rank() * EXPERTS // paddle.distributed.get_world_size()
    found = {}
    for name, parameter in model.named_parameters():
        own = re.fullmatch(r"(moe\.experts\.)(\d+)(.*)", name)
        found[name if own is None else f"{own[1]}{int(own[2]) + first}{own[3]}"] = parameter
    return found


def held(model: Model, optimizer: Any) -> dict[str, np.ndarray]:
    found = {}
    for name, parameter in by_number(model).items():
        found[name] = parameter.numpy()
        found |= {f"{name}/{kind}": of[parameter.name].numpy() for kind, of in optimizer._accumulators.items()}
    return found


def trained(steps: int) -> tuple[Model, Any]:
    model = Model()
    optimizer = paddle.optimizer.AdamW(0.1, parameters=model.parameters())
    for _ in range(steps):
        sum((parameter**2).sum() for parameter in model.parameters()).backward()
        optimizer.step()
        optimizer.clear_grad()
    return model, optimizer


def make(work: Path) -> None:
    model, optimizer = trained(3)
    with holdfast_paddle.attach(model, optimizer, "experts", at=work / "checkpoints") as attached:
        attached.save(3)
    rank = paddle.distributed.get_rank()
    (work / f"made.{rank}.pickle").write_bytes(pickle.dumps(held(model, optimizer)))


def read(work: Path) -> None:
    made: dict[str, np.ndarray] = {}
    for path in work.glob("made.*.pickle"):
        made |= pickle.loads(path.read_bytes())
    model, optimizer = trained(1)
    with holdfast_paddle.attach(model, optimizer, "experts", at=work / "checkpoints") as attached:
        assert attached.restore() == 3
    found = held(model, optimizer)
    assert len({name.split(".")[2] for name in made if name.startswith("moe.experts.")}) == EXPERTS
    wrong = [name for name in found if not np.array_equal(found[name], made[name])]
    assert not wrong, wrong
    (work / f"read.{paddle.distributed.get_world_size()}.{paddle.distributed.get_rank()}").touch()


def collide(work: Path) -> None:
    """A layer of the user's own, which numbers its experts on each rank from 0."""
    layer = nn.LayerList([expert(paddle.distributed.get_rank())])
    for parameter in layer.parameters():
        parameter.no_sync = True
    refused = pytest.raises(ReplicasDiffer, match=r"model/0\.")
    with refused, holdfast_paddle.attach(layer, None, "experts", at=work / "checkpoints") as attached:
        attached.save(1).result(WAIT_S)
    assert not (work / "checkpoints" / "experts" / "checkpoints").exists()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--work", type=Path)
    parser.add_argument("action")
    chosen = parser.parse_args()
    gloo.place()
    fleet.init(is_collective=True, strategy=gloo.begin(dp_degree=paddle.distributed.ParallelEnv().world_size))
    {"make": make, "read": read, "collide": collide}[chosen.action](chosen.work)


if __name__ == "__main__":
    main()
