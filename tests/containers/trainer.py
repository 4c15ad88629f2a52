"""A trainer in a container of the daemon's image, with the Checkpointer of the image and the torch of the tests (`/site`).

    trainer.py SOCKET RUN MIB STEPS

It restores, proves what it got, and saves so many steps more. Lines: `restored N`, `done N`, `failed N CODE`, `notices: …`,
and what ends it.
"""

from __future__ import annotations

import sys
import time

from holdfast_formats.errors import CheckpointError

PAUSE_S = 0.2


def train(socket: str, run: str, mib: int, steps: int) -> None:
    sys.path.append("/site")  # last: everything but torch is the image's own
    import torch

    from holdfast import Checkpointer

    weights = torch.zeros(mib * 2**18)
    checkpointer = Checkpointer(run, {"model": {"w": weights}}, at=socket)
    first = checkpointer.restore()
    assert bool((weights == first).all()), f"step {first} is not what was saved"
    print("restored", first, flush=True)
    for step in range(first + 1, first + steps + 1):
        weights.fill_(step)
        try:
            checkpointer.save(step).result(timeout=240)
            print("done", step, flush=True)
        except CheckpointError as error:
            print("failed", step, error.code, flush=True)
        time.sleep(PAUSE_S)
    print("notices:", *checkpointer.notices, flush=True)
    checkpointer.close()


def main() -> int:
    socket, run, mib, steps = sys.argv[1:]
    try:
        train(socket, run, int(mib), int(steps))
    except CheckpointError as error:
        print(error, flush=True)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
