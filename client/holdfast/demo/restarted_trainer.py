"""The trainer that `holdfast bench restart` starts and kills: `python -m holdfast.demo.restarted_trainer ROOT MIB BEGAN`.

It restores its state as a training loop does, saves it once more, prints how long each phase took as JSON, and waits to be
killed. BEGAN is the machine's monotonic clock when it was started, in seconds.
"""

from __future__ import annotations

import json
import sys
import time

RUN = "restart"
TENSORS = 64


def main(root: str, mib: int, began: float) -> None:
    """Seconds from BEGAN on, each phase from the end of the one before."""
    marks = [began]
    import torch

    marks.append(time.monotonic())
    from holdfast import Checkpointer

    marks.append(time.monotonic())
    state = {f"layer.{number}": torch.zeros(mib * 2**18 // TENSORS) for number in range(TENSORS)}
    marks.append(time.monotonic())
    checkpointer = Checkpointer(RUN, {"model": state}, at=root, fenced=True)
    step = checkpointer.restore() or 0
    marks.append(time.monotonic())
    checkpointer.prepare(wait=True)
    marks.append(time.monotonic())
    for number, tensor in enumerate(state.values()):
        torch.manual_seed(number)
        tensor.uniform_()
    saving = time.monotonic()
    ticket = checkpointer.save(step + 1)
    checkpointer.fence()
    saved = time.monotonic()
    ticket.result()
    restored = checkpointer.last_restore
    phases = ("torch", "holdfast", "state", "restore", "prepare")
    print(
        json.dumps(
            {phase: after - before for phase, before, after in zip(phases, marks, marks[1:], strict=False)}
            | {"save": saved - saving, "source": restored.source if restored else ""}
        ),
        flush=True,
    )
    sys.stdin.read()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), float(sys.argv[3]))
