"""A trainer whose signal handler saves, at every moment of its own calls in turn: a process of its own, as it may hang.

    python -m tests.regressions.preempted SOCKET FIRST EVERY

The handler runs where a signal could have it run: in the main thread, between two lines of the client, once a call, from the
FIRST such moment on and then at every EVERY-th.
"""

from __future__ import annotations

import faulthandler
import sys
import warnings
from collections.abc import Callable
from types import FrameType
from typing import Any

import torch
from torch import nn

from holdfast import Checkpointer, CheckpointError, SaveWarning

HANGS_AFTER_S = 150
PARTS = {"save": 1, "durable": 2, "prepare": 2, "restore": 5}  # how many times EVERY lies between two moments


class Moments:
    """Calls `handler` once, at the `wanted`-th line that the main thread executes in the client, counted from `begin`."""

    def __init__(self, handler: Callable[[], None]) -> None:
        self._handler, self._wanted, self._seen = handler, 0, 0

    def begin(self, wanted: int) -> None:
        self._wanted, self._seen = wanted, 0
        sys.settrace(self._enter)

    def end(self) -> bool:
        """Whether there were so many lines."""
        sys.settrace(None)
        return self._seen >= self._wanted

    def _enter(self, frame: FrameType, event: str, argument: Any) -> Any:
        name = frame.f_globals.get("__name__", "")
        return self._line if name.startswith("holdfast") or name in ("threading", "logging") else None

    def _line(self, frame: FrameType, event: str, argument: Any) -> Any:
        self._seen += event == "line"
        if self._seen == self._wanted and event == "line":
            self._handler()
        return self._line


def main(socket: str, first: int, every: int) -> None:
    """Print what became of every save; a hang ends the process with the stacks of all threads."""
    faulthandler.dump_traceback_later(HANGS_AFTER_S, exit=True)
    warnings.simplefilter("ignore", SaveWarning)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 2048), nn.Linear(2048, 64))
    optimizer = torch.optim.AdamW(model.parameters())
    checkpointer = Checkpointer("preempted", {"model": model, "optim": optimizer}, at=socket, policy="wait")
    tickets, said = [], []
    steps = iter(range(1, 10**6))

    def preempted() -> None:
        wait = ("durable", None, "staged")[len(said) % 3]
        said.append(wait)
        try:
            tickets.append(checkpointer.save(next(steps), wait=wait))
            tickets[-1].wait_staged(60)
        except CheckpointError as error:
            tickets.append(error.code)

    def train(part: str) -> None:
        if part == "restore":
            checkpointer.restore()
            return
        if part == "prepare":
            checkpointer.prepare(wait=True)
        model(torch.randn(2, 64)).sum().backward()
        tickets.append(checkpointer.save(next(steps), wait="durable" if part == "durable" else None))
        optimizer.step()

    for part, stride in PARTS.items():
        train(part)
        moments, wanted = Moments(preempted), first
        while True:
            moments.begin(wanted)
            try:
                train(part)
            finally:
                reached = moments.end()
            if not reached:
                break
            wanted += every * stride
    outcomes: dict[str, int] = {}
    for ticket in tickets:
        if not isinstance(ticket, str):
            try:
                ticket.result(180)
                ticket = "saved"
            except CheckpointError as error:
                ticket = error.code
        outcomes[ticket] = outcomes.get(ticket, 0) + 1
    checkpointer.close()
    print(f"{len(said)} moments, {outcomes}")


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
