"""Trains until it is stopped, and saves every step through its node's daemon: slurm_training.py JOURNAL [on-preemption].

With `on-preemption` only the step at which SIGTERM lets all ranks stop is saved.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

from holdfast import Checkpointer

STEP_S = 0.1
PREEMPTED = 143  # as if SIGTERM had ended it: the job is not complete


def main(journal: Path, asks: bool) -> None:
    """Each rank notes the step of every save that it has sealed, and the one at which it stopped."""
    dist.init_process_group("gloo")
    rank, weight = dist.get_rank(), torch.zeros(4096)
    with (
        Checkpointer("slurm", {"model": {"weight": weight}}) as checkpointer,
        open(journal.with_suffix(f".{rank}"), "a", buffering=1) as noted,
    ):
        step = checkpointer.restore() or 0
        assert torch.equal(weight, torch.full((4096,), float(step)))
        noted.write(f"restored {step}\n")
        if asks:
            checkpointer.on_preemption()
        while True:
            step += 1
            weight += 1
            dist.barrier()
            if asks:
                noted.write(f"trained {step}\n")
                if checkpointer.should_stop(step):
                    noted.write(f"stopped {step}\n")
                    sys.exit(PREEMPTED)
                time.sleep(STEP_S)
                continue
            ticket = checkpointer.save(step)
            while not ticket.staged:
                time.sleep(0.01)
            noted.write(f"sealed {step}\n")
            time.sleep(STEP_S)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:] == ["on-preemption"])
