"""Trains in two ranks of fleet from wherever the last save was, and keeps a record: `fleet_train.py --kind KIND`.

KIND is one of `fleet_trainings`. The rows are shuffled, and changed by the generators of Python and numpy. Dropout is drawn
from Paddle's generator and from a stream of fleet's tracker.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import paddle
import torch
from paddle.distributed.fleet.meta_parallel import get_rng_state_tracker

from holdfast.integrations import paddle as holdfast_paddle
from tests.integrations.paddle import fleet_trainings, fleet_worlds, gloo
from tests.integrations.paddle.fleet_trainings import ROWS, VOCABULARY, Held
from tests.integrations.recording import Record

ALL_ROWS, TOKENS = 96, 5


class Sentences(paddle.io.Dataset):
    def __len__(self) -> int:
        return ALL_ROWS

    def __getitem__(self, row: int) -> tuple[int, np.ndarray]:
        tokens = np.random.RandomState(row).randint(0, VOCABULARY, TOKENS)
        tokens[random.randrange(TOKENS)] = np.random.randint(VOCABULARY)
        return row, tokens


def batches(progress: dict[str, int], replicas: int, replica: int) -> Iterator[Any]:
    """Endless batches of this rank, from the first row that no rank has consumed."""
    sampler = paddle.io.DistributedBatchSampler(Sentences(), ROWS, replicas, replica, shuffle=True, drop_last=True)
    while True:
        epoch, begun = divmod(progress["samples"], ALL_ROWS)
        sampler.set_epoch(epoch)
        for numbers in list(sampler)[begun // (ROWS * replicas) :]:
            rows, tokens = zip(*(sampler.dataset[number] for number in numbers), strict=True)
            progress["samples"] += ROWS * replicas
            yield list(rows), paddle.to_tensor(np.stack(tokens))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--work", type=Path)
    parser.add_argument("--kind", default="v2")
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--every", type=int, default=2)
    chosen = parser.parse_args()
    gloo.place()
    record, progress = Record(), {"samples": 0}
    one = fleet_trainings.training(chosen.kind, seed=3)
    replicas, replica = one.replicas()
    random.seed(replica)
    np.random.seed(replica)
    at = {"at": chosen.work / "checkpoints", "policy": "wait"}
    attached = holdfast_paddle.attach(one.model, one.optimizer, "fleet", more={"progress": progress}, **at)
    began = attached.restore()
    record.began(began)
    data = batches(progress, replicas, replica)
    for step in range(began + 1, chosen.steps + 1):
        numbers, rows = zip(*(next(data) for _ in range(one.accumulated)), strict=True)
        record.step(step, one.step(*rows), chain(*numbers))
        if step % chosen.every == 0:
            attached.save(step)
    attached.close()
    parts, rank = fleet_trainings.parts_of(one), paddle.distributed.get_rank()
    with get_rng_state_tracker().rng_state("local_seed"):
        parts.held[f"tracked/{rank}"] = Held(paddle.rand([4]).numpy(), (4,), None, flat=False)
    parts.held[f"random/{rank}"] = Held(paddle.rand([4]).numpy(), (4,), None, flat=False)
    whole = fleet_worlds.whole(parts, chosen.work, "end")
    values = [one.scheduler.state_dict(), progress, random.random(), np.random.random()]
    record.ended({name: torch.from_numpy(array) for name, array in whole.items()}, [str(value) for value in values])


if __name__ == "__main__":
    main()
