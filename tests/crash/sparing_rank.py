"""A rank of ZeRO-1, as one process: `sparing_rank.py SOCKET RUN RANK WORLD LAUNCH`, which does what lines on stdin say.

    save N      says `staged N`, and `committed N` or `failed N CODE`
    save N!     says `sealing N` once all is copied, and waits for a line; then `asking N` when the seal is in shared memory
    restore     says `restored N SOURCE`, or `wrong` if this rank does not have all that the ranks saved at that step
    spared      says `spared BYTES`: of its tensors, the bytes that its last slot had not

At step N every weight is N, and this rank's part of the moments N + RANK.
"""

from __future__ import annotations

import os
import sys
import threading
from typing import Any

import torch

from holdfast import Checkpointer, Fragment
from holdfast.stage.slots import Slot
from holdfast_formats.errors import CheckpointError

SIDE, WEIGHTS = 512, 6
_lock = threading.Lock()


def say(*words: object) -> None:
    with _lock:
        sys.stdout.write(" ".join(map(str, words)) + "\n")
        sys.stdout.flush()


def hold_seals() -> None:
    """Let a seal wait for a line, and say when it is in shared memory."""
    seal = Slot.seal

    def held(slot: Slot, *arguments: Any) -> str:
        say("sealing", slot._step)
        sys.stdin.readline()
        proof = seal(slot, *arguments)
        say("asking", slot._step)
        return proof

    Slot.seal = held  # type: ignore[method-assign]


class Rank:
    def __init__(self, socket: str, run: str, rank: int, world: int) -> None:
        self._rank = rank
        self._weights = {f"w{number}": torch.zeros(SIDE, SIDE) for number in range(WEIGHTS)}
        self._moments = torch.zeros(SIDE, SIDE)
        whole = (world * SIDE, SIDE)
        held = Fragment(self._moments, whole, offset=(rank * SIDE, 0))
        self._checkpointer = Checkpointer(run, {"model": self._weights, "moments": {"m": held}}, at=socket, fenced=True)

    def save(self, step: int) -> None:
        self._checkpointer.fence()
        for weight in self._weights.values():
            weight.fill_(step)
        self._moments.fill_(step + self._rank)
        ticket = self._checkpointer.save(step)

        def wait() -> None:
            if ticket.wait_staged():
                say("staged", step)
            try:
                ticket.result()
                say("committed", step)
            except CheckpointError as error:
                say("failed", step, error.code)

        threading.Thread(target=wait, daemon=True).start()

    def restore(self) -> None:
        step = self._checkpointer.restore() or 0
        sound = all(weight.eq(step).all() for weight in self._weights.values()) and self._moments.eq(step + self._rank).all()
        say("restored", step, self._checkpointer.last_restore.source) if sound else say("wrong", step)

    def spared(self) -> None:
        say("spared", (WEIGHTS + 1) * self._moments.nbytes - self._checkpointer._saves._contents.layout.data_bytes)


def main() -> None:
    socket, run, rank, world, launch = sys.argv[1:6]
    os.environ.update(RANK=rank, WORLD_SIZE=world, HOLDFAST_LAUNCH=launch)
    this = Rank(socket, run, int(rank), int(world))
    for line in iter(sys.stdin.readline, ""):
        what, _, step = line.strip().partition(" ")
        if what == "save":
            if step.endswith("!"):
                hold_seals()
            this.save(int(step.rstrip("!")))
            if step.endswith("!"):
                threading.Event().wait()  # what comes on stdin is for the seal
        else:
            {"restore": this.restore, "spared": this.spared}[what]()


if __name__ == "__main__":
    main()
