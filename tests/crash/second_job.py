"""A trainer of its own process: `second_job.py URL|SOCKET STEPS`. It says what it restored and what became of its saves.

Lines: `restored N`, `saved N`, `refused CODE`. It waits for a line on stdin before every step, and ends with stdin.
"""

from __future__ import annotations

import os
import sys

import torch

from holdfast import Checkpointer
from holdfast_formats.errors import CheckpointError


def main() -> None:
    try:
        with Checkpointer("run", {"model": torch.nn.Linear(8, 8)}, at=sys.argv[1]) as checkpointer:
            print("restored", checkpointer.restore(), flush=True)
            for line in sys.stdin:
                ticket = checkpointer.save(int(line), wait="durable")
                ticket.result()
                print("saved", line.strip(), flush=True)
    except CheckpointError as error:
        print("refused", error.code, flush=True)
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
