"""Saves and restores one state in each form of fleet's parallelism: `fleet_worlds.py --work DIR ACTION…`.

`make:KIND:RUN` trains, saves, and leaves the whole tensors behind, put together of what each rank has by Paddle's own order
of the ranks; `read:KIND:RUN` restores into an untrained one of that kind, compares all whole tensors with those, and trains
on; `differ:KIND:RUN` saves what has to be refused. KIND is one of `fleet_trainings`.
"""

from __future__ import annotations

import argparse
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import paddle
import pytest

from holdfast.integrations import paddle as holdfast_paddle
from holdfast_formats.errors import ReplicasDiffer
from tests.integrations.paddle import fleet_trainings, gloo
from tests.integrations.paddle.fleet_trainings import Held, Training

STEPS = 3
WAIT_S = 120.0


def attached(one: Training, run: str, work: Path) -> Any:
    return holdfast_paddle.attach(one.model, one.optimizer, run, at=work / "checkpoints", policy="wait")


def whole(parts: dict[str, Held], work: Path, name: str) -> dict[str, np.ndarray]:
    """The whole tensors of which this rank has these parts. Every rank calls it."""
    rank, world = paddle.distributed.get_rank(), paddle.distributed.get_world_size()
    (work / f"{name}.{rank}.pickle").write_bytes(pickle.dumps(parts))
    if world > 1:
        paddle.distributed.barrier()
    return fleet_trainings.whole([pickle.loads((work / f"{name}.{rank}.pickle").read_bytes()) for rank in range(world)])


def make(kind: str, run: str, work: Path) -> None:
    one = fleet_trainings.training(kind, seed=3)
    with attached(one, run, work) as saved:
        assert saved.restore() == 0
        for step in range(STEPS):
            one.step(fleet_trainings.rows(step, kind))
        saved.save(STEPS)
    found = whole(fleet_trainings.held(one), work, f"{run}-made")
    np.savez(work / f"{run}.npz", **found)


def read(kind: str, run: str, work: Path) -> None:
    one = fleet_trainings.training(kind, seed=7)
    with attached(one, run, work) as saved:
        assert saved.restore(STEPS) == STEPS
        found = whole(fleet_trainings.held(one), work, f"{run}-as-{kind}")
        made = dict(np.load(work / f"{run}.npz"))
        assert found.keys() == made.keys(), sorted(found.keys() ^ made.keys())
        wrong = [name for name in made if not np.array_equal(found[name], made[name])]
        assert not wrong, wrong
        assert one.scheduler.last_epoch == STEPS
        one.step(fleet_trainings.rows(STEPS, kind))  # with all of the optimizer
    if paddle.distributed.get_rank() == 0:
        with (work / "done.txt").open("a") as file:
            file.write(f"{run} {kind}\n")


def differ(kind: str, run: str, work: Path) -> None:
    """The stages' copies of the weight that they share are not equal: no save may choose one."""
    one = fleet_trainings.training(kind, seed=3)
    one.step(fleet_trainings.rows(0, kind))
    if paddle.distributed.get_rank() == 1:
        copy = one.net.shared_layers["embedding"].weight
        copy.set_value(copy + 1.0)
    refused = pytest.raises(ReplicasDiffer, match=r"shared_layers\.embedding\.weight")
    with refused, attached(one, run, work) as saved:  # closing reports it too
        saved.save(1).result(WAIT_S)
    assert not (work / "checkpoints" / run / "checkpoints").exists()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--work", type=Path)
    parser.add_argument("action")
    chosen = parser.parse_args()
    gloo.place()
    what, kind, run = chosen.action.split(":")
    {"make": make, "read": read, "differ": differ}[what](kind, run, chosen.work)


if __name__ == "__main__":
    main()
