"""Trains for ever and saves every step, by way of its node's default daemon: slurm_training.py JOURNAL."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

from holdfast import Checkpointer

STEP_S = 0.1


def main(journal: Path) -> None:
    """Each rank notes the step of every save that it has sealed."""
    dist.init_process_group("gloo")
    rank, weight = dist.get_rank(), torch.zeros(4096)
    with (
        Checkpointer("slurm", {"model": {"weight": weight}}) as checkpointer,
        open(journal.with_suffix(f".{rank}"), "a", buffering=1) as noted,
    ):
        step = checkpointer.restore() or 0
        assert torch.equal(weight, torch.full((4096,), float(step)))
        noted.write(f"restored {step}\n")
        while True:
            step += 1
            weight += 1
            dist.barrier()
            ticket = checkpointer.save(step)
            while not ticket.staged:
                time.sleep(0.01)
            noted.write(f"sealed {step}\n")
            time.sleep(STEP_S)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
