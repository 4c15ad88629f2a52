"""A trainer of the lane of whole runs: it takes runs of some names, one after the other, restores and saves a few steps.

    life_rank.py SOCKET SEED SECONDS NAME…

Lines: `committed LINE STEP`, where LINE is a number that a run gets when it begins from nothing and keeps in its tensor;
`refused CODE`, `failed CODE`, `wrong WHAT`.
"""

from __future__ import annotations

import random
import sys
import time
from pathlib import Path

import torch

from holdfast import Checkpointer
from holdfast_formats.errors import CheckpointError

SAVES_MAX = 4
WAIT_S = 60.0


def say(*words: object) -> None:
    print(*words, flush=True)


def train(socket: Path, run: str, luck: random.Random) -> None:
    """One launch."""
    numbers = torch.zeros(2, dtype=torch.int64)
    with Checkpointer(run, {"model": {"numbers": numbers}}, at=socket) as checkpointer:
        restored = checkpointer.restore()
        if restored == 0:
            numbers[0], numbers[1] = luck.getrandbits(40), 0
        elif int(numbers[1]) != restored:
            say("wrong", f"{run}@{restored}: {numbers.tolist()}")
        for _ in range(luck.randint(1, SAVES_MAX)):
            numbers[1] += 1
            line, step = numbers.tolist()
            try:
                checkpointer.save(step).result(WAIT_S)
            except CheckpointError as error:
                say("failed", error.code)
                return
            say("committed", line, step)


def main() -> None:
    socket, seed, seconds, *names = sys.argv[1:]
    luck, until = random.Random(int(seed)), time.monotonic() + float(seconds)
    while time.monotonic() < until:
        try:
            train(Path(socket), luck.choice(names), luck)
        except CheckpointError as error:
            say("refused", error.code)
            time.sleep(0.1)


if __name__ == "__main__":
    main()
