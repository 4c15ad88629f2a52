"""A rank that trains one tensor of masters, of which the daemon keeps an average; whatever becomes of that daemon.

    averaging_rank.py SOCKET RUN RANK WORLD LAUNCH STEPS SAVES SIZE

Lines: `restored N of NUPDATES`, `folded N`, `committed N`. Each step waits until its update is in the average. A step of
SAVES (`10,20`) is saved. The values of a step follow from its number.
"""

from __future__ import annotations

import sys
import time

import torch

from holdfast import Checkpointer, Ema, Fragment

LIMIT_S = 180.0
DECAY = 0.97


def values(step: int, size: int) -> torch.Tensor:
    """The masters of a step, of all ranks."""
    made = torch.Generator().manual_seed(step)
    return torch.randn(size, generator=made) * 0.01 + torch.arange(size).remainder(7) - 3


def part(rank: int, world: int, size: int) -> slice:
    """The elements of a rank."""
    return slice(size * rank // world, size * (rank + 1) // world)


def say(text: str) -> None:
    print(text, flush=True)


def main() -> None:
    socket, run, rank_text, world_text, _, steps, saves, size_text = sys.argv[1:]
    rank, world, size = int(rank_text), int(world_text), int(size_text)
    mine = part(rank, world, size)
    held = torch.zeros(mine.stop - mine.start)
    whole = Fragment(held, (size,), offset=(mine.start,)) if world > 1 else held
    ema = Ema(decay=DECAY, of="master", every=1, correction="none")
    with Checkpointer(run, {"master": {"w": whole}}, at=socket, ema=ema, fenced=True) as checkpointer:
        restored = checkpointer.restore()
        say(f"restored {restored}")
        for step in range(restored + 1, int(steps) + 1):
            checkpointer.fence()
            held.copy_(values(step, size)[mine])
            checkpointer.ema.update()
            limit = time.monotonic() + LIMIT_S
            while checkpointer.ema.n < step or not checkpointer.ema.ready:
                if time.monotonic() > limit:
                    raise SystemExit(f"update {step} was not folded: {checkpointer.ema.n}")
                time.sleep(0.002)
            say(f"folded {step}")
            if str(step) in saves.split(","):
                checkpointer.save(step).result(LIMIT_S)
                say(f"committed {step}")


if __name__ == "__main__":
    main()
