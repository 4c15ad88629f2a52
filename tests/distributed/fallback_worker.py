"""A rank that saves steps, or restores the newest one and writes down what it got: socket|root|url PLACE save|restore …

`save` saves steps 100, 200 and 300, of which every value tells. `restore OUT` restores; `again` saves step 300 anew then.
`fail OUT` restores what is damaged throughout, and tries to save all the same.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist

from holdfast import Checkpointer
from holdfast_formats.errors import CheckpointError
from tests.torchruns import leave

ROWS = 40_000


def refusal(act: Callable[..., object], *arguments: object, **options: object) -> str | None:
    """The code of the error that it raises."""
    try:
        act(*arguments, **options)
    except CheckpointError as error:
        return error.code
    return None


def main() -> None:
    place, act, *more = sys.argv[1:]
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    mine = torch.zeros(ROWS)
    # What one rank alone holds, and reads: the other's restore is sound whatever becomes of it.
    checkpointer = Checkpointer("r", {"model": {f"of_rank_{rank}": mine}}, at=place)
    if act == "save":
        for step in (100, 200, 300):
            mine.fill_(step + rank)
            checkpointer.save(step, wait="durable")
    elif act == "fail":
        Path(f"{more[0]}.{rank}").write_text(
            json.dumps([refusal(checkpointer.restore, strict=False), refusal(checkpointer.save, 400)])
        )
    else:
        step = checkpointer.restore(strict=False)  # the other rank has names of its own
        report = checkpointer.last_restore
        found = {
            "step": step,
            "value": mine.unique().tolist(),
            "notes": list(report.notes) if report else [],
            "notices": list(checkpointer.notices),
        }
        Path(f"{more[0]}.{rank}").write_text(json.dumps(found))
        if "again" in more:  # training goes on, and comes to the step that is damaged
            mine.fill_(1000 + rank)
            checkpointer.save(300, wait="durable")
    checkpointer.close(wait=act != "fail")
    dist.barrier()
    leave()


if __name__ == "__main__":
    main()
