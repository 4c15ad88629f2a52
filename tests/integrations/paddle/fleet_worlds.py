"""Saves and restores one state in each form of fleet's parallelism: `fleet_worlds.py --work DIR ACTION…`.

`make:KIND:RUN` trains, saves, and leaves the whole tensors behind, put together of what each rank has by Paddle's own order
of the ranks, and the next random numbers of each rank; `read:KIND:RUN` restores into an untrained one of that kind, compares
all whole tensors with those, and what the ranks draw, and trains on; `differ:KIND:RUN` saves what has to be refused. KIND is
one of `fleet_trainings`.
"""

from __future__ import annotations

import argparse
import pickle
import random
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import paddle
import pytest
from paddle.distributed import fleet
from paddle.distributed.fleet.meta_parallel import get_rng_state_tracker

from holdfast.integrations import paddle as holdfast_paddle
from holdfast_formats.errors import ReplicasDiffer
from tests.integrations.paddle import fleet_trainings, gloo
from tests.integrations.paddle.fleet_trainings import RankParts, Training

STEPS = 3
WAIT_S = 120.0


def attached(one: Training, run: str, work: Path) -> Any:
    return holdfast_paddle.attach(one.model, one.optimizer, run, at=work / "checkpoints", policy="wait")


def of_all_ranks(own: Any, work: Path, name: str) -> list[Any]:
    """What each rank has. Every rank calls it."""
    rank, world = paddle.distributed.get_rank(), paddle.distributed.get_world_size()
    (work / f"{name}.{rank}.pickle").write_bytes(pickle.dumps(own))
    if world > 1:
        paddle.distributed.barrier()
    return [pickle.loads((work / f"{name}.{rank}.pickle").read_bytes()) for rank in range(world)]


def whole(parts: RankParts, work: Path, name: str) -> dict[str, np.ndarray]:
    """The whole tensors of which this rank has these parts. Every rank calls it."""
    return fleet_trainings.whole(of_all_ranks(parts, work, name))


class Drawn(NamedTuple):
    """Where a rank stands, and its next random numbers."""

    replica: int  # of the rows
    stage: int
    tensor_ranks: int
    process: list[float]
    device: list[float]
    named: list[float]  # of the stream that differs among the ranks of a tensor

    @property
    def of_rows(self) -> tuple[int, list[float]]:
        return self.replica, self.process


def drawn(one: Training) -> Drawn:
    with get_rng_state_tracker().rng_state("local_seed"):
        named = paddle.rand([4]).tolist()
    process = [random.random(), float(np.random.random())]
    stage = fleet.get_hybrid_communicate_group().get_stage_id()
    return Drawn(one.replicas()[1], stage, one.tensor_ranks, process, paddle.rand([4]).tolist(), named)


def check_drawn(saved: list[Drawn], now: list[Drawn]) -> None:
    """Ranks that train on the same rows draw the same for them, and those of one tensor for dropout; other ranks do not.

    What was saved goes on.
    """
    assert (
        len({str(one.of_rows) for one in now}) == len({one.replica for one in now}) == len({str(one.process) for one in now})
    )
    before = {one.replica: one for one in saved}
    assert all(one.process == before[one.replica].process for one in now if one.replica in before)
    assert now[0].device == saved[0].device
    tensor_ranks = {one.tensor_ranks for one in (*saved, *now)}
    groups = {(one.replica, one.stage) for one in now}
    assert (
        len({str((one.replica, one.stage, one.device)) for one in now})
        == len(groups)
        == len({str(one.device) for one in now})
    )
    assert len({str(one.named) for one in now}) == len(now)
    if len(tensor_ranks) == 1:
        assert now[0].named == saved[0].named


def make(kind: str, run: str, work: Path) -> None:
    one = fleet_trainings.training(kind, seed=3)
    with attached(one, run, work) as saved:
        assert saved.restore() == 0
        for step in range(STEPS):
            one.step(fleet_trainings.rows(step, one.replicas()[1]))
        one.seed(40)
        saved.save(STEPS)
    (work / f"{run}-drawn.pickle").write_bytes(pickle.dumps(of_all_ranks(drawn(one), work, f"{run}-drawn")))
    found = whole(fleet_trainings.parts_of(one), work, f"{run}-made")
    np.savez(work / f"{run}.npz", **found)


def read(kind: str, run: str, work: Path) -> None:
    one = fleet_trainings.training(kind, seed=7)
    with attached(one, run, work) as saved:
        assert saved.restore(STEPS) == STEPS
        found = whole(fleet_trainings.parts_of(one), work, f"{run}-as-{kind}")
        made = dict(np.load(work / f"{run}.npz"))
        assert found.keys() == made.keys(), sorted(found.keys() ^ made.keys())
        wrong = [name for name in made if not np.array_equal(found[name], made[name])]
        assert not wrong, wrong
        assert one.scheduler.last_epoch == STEPS
        numbers = of_all_ranks(drawn(one), work, f"{run}-drawn-as-{kind}")
        check_drawn(pickle.loads((work / f"{run}-drawn.pickle").read_bytes()), numbers)
        one.step(fleet_trainings.rows(STEPS, one.replicas()[1]))  # with all of the optimizer
    if paddle.distributed.get_rank() == 0:
        with (work / "done.txt").open("a") as file:
            file.write(f"{run} {kind}\n")


def differ(kind: str, run: str, work: Path) -> None:
    """The stages' copies of the weight that they share are not equal: no save may choose one."""
    one = fleet_trainings.training(kind, seed=3)
    one.step(fleet_trainings.rows(0, 0))
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
