"""Trains in two ranks of fleet from wherever the last save was, and keeps a record: `fleet_train.py --kind KIND`.

KIND is one of `fleet_trainings`. Dropout is drawn from Paddle's generator and from a stream of fleet's tracker.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

import paddle
import torch
from paddle.distributed.fleet.meta_parallel import get_rng_state_tracker

from holdfast.integrations import paddle as holdfast_paddle
from tests.integrations.paddle import fleet_trainings, fleet_worlds, gloo
from tests.integrations.paddle.fleet_trainings import Held
from tests.integrations.recording import Record

EVERY = 2


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--work", type=Path)
    parser.add_argument("--kind", default="v2")
    parser.add_argument("--steps", type=int, default=12)
    chosen = parser.parse_args()
    rank, world = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    gloo.place(rank, world, int(os.environ.get("MASTER_PORT", "0")))
    record = Record()
    one = fleet_trainings.training(chosen.kind, seed=3)
    attached = holdfast_paddle.attach(one.model, one.optimizer, "fleet", at=chosen.work / "checkpoints", policy="wait")
    began = attached.restore()
    record.began(began)
    for step in range(began + 1, chosen.steps + 1):
        loss = one.step(fleet_trainings.rows(step, chosen.kind))
        if step % EVERY == 0:
            attached.save(step)
        record.step(step, loss)
    attached.close()
    parts = fleet_trainings.held(one)
    with get_rng_state_tracker().rng_state("local_seed"):
        parts[f"tracked/{rank}"] = Held(paddle.rand([4]).numpy(), (4,), None, flat=False)
    parts[f"random/{rank}"] = Held(paddle.rand([4]).numpy(), (4,), None, flat=False)
    whole = fleet_worlds.whole(parts, chosen.work, "end")
    record.ended({name: torch.from_numpy(array) for name, array in whole.items()}, repr(one.scheduler.state_dict()))


if __name__ == "__main__":
    main()
