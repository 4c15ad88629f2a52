"""One call of a checkpointer at a time, and what becomes of one that a signal handler makes in the middle of another."""

from __future__ import annotations

import os
import sys
import threading
from collections import deque
from collections.abc import Callable, Collection, Iterator
from contextlib import AbstractContextManager, ExitStack
from types import FrameType
from typing import NamedTuple, TypeVar

import torch

from holdfast_formats.errors import InvalidRequest

_Result = TypeVar("_Result")
LATER_MAX = 64
STEP, RESTORE, CLOSE = "optimizer.step()", "restore()", "close()"
_STEP_CODE = torch.optim.Optimizer.profile_hook_step(lambda *_: None).__code__  # what torch wraps every step in


class Later(NamedTuple):
    """What is done when the call that a signal interrupted has ended; or `give_up`, where that was a step that failed."""

    awaits: str
    act: Callable[[], object]
    give_up: Callable[[], object] = bool


class Calls:
    """Calls of several threads wait for each other. A signal handler's does not wait for the call of its own thread, which
    cannot go on before the handler returns: it is told which call that is, and may leave work that is done after it."""

    def __init__(self, optimizers: Collection[torch.optim.Optimizer]) -> None:
        """The optimizers whose steps change the state: in the middle of one there is no state to save."""
        self._optimizers = optimizers
        self._lock = threading.RLock()
        self._running = ""  # by whoever holds the lock
        self._later: deque[Later] = deque()
        self._catching_up = False
        self._pid = os.getpid()

    def run(self, name: str, act: Callable[[], _Result], instead: Callable[[str], _Result]) -> _Result:
        """Do it alone; or `instead`, told in the middle of what, where this thread was interrupted by a signal there.

        Raises `InvalidRequest` in a child that was forked: connection, threads and locks are its parent's.
        """
        if self.forked:
            raise InvalidRequest(
                f"{name} called in process {os.getpid()}, but this checkpointer belongs to process "
                f"{self._pid}, from which this one was forked",
                hint="save and restore in the process that created the checkpointer, or create one for another run "
                "in the child",
            )
        with self._lock:
            if self._running:
                return instead(self._running)
            self._running = name
            try:
                with _no_inference():
                    return act()
            finally:
                self._running = ""
                if self._later:
                    self.catch_up()

    @property
    def forked(self) -> bool:
        """Whether this process is a child of the one that the checkpointer belongs to."""
        return os.getpid() != self._pid

    def run_between_steps(self, name: str, act: Callable[[], _Result], instead: Callable[[str], _Result]) -> _Result:
        """The same, and `instead` also in the middle of an optimizer's step, where half of the state is of the next one."""
        return instead(STEP) if is_stepping(self._optimizers) else self.run(name, act, instead)

    def later(self, work: Later) -> None:
        self._later.append(work)

    def catch_up(self, stepped: bool = False) -> None:
        """Do what was left for now. What waits for a step that did not end, because an exception ended it, is given up."""
        if threading.current_thread() is not threading.main_thread() or (not stepped and is_stepping(self._optimizers)):
            return  # signals come in the main thread
        if self._catching_up:
            return  # what is done there ends calls too; whoever began goes on with the rest
        self._catching_up = True
        try:
            for _ in range(LATER_MAX):  # what is put off once more waits for the next time
                if not self._later:
                    break
                work = self._later.popleft()
                (work.give_up if work.awaits == STEP and not stepped else work.act)()
        finally:
            self._catching_up = False


def _no_inference() -> AbstractContextManager[object]:
    """Leave inference mode: views made there are kept for later saves, and count no versions."""
    outside = ExitStack()
    if torch.is_inference_mode_enabled():
        outside.enter_context(torch.inference_mode(False))
        outside.enter_context(torch.no_grad())
    return outside


def is_stepping(optimizers: Collection[torch.optim.Optimizer]) -> bool:
    """Whether this thread is in the middle of the step of one of these; its hooks are before or after it."""
    for wrapper, inner in _steps():
        held = wrapper.f_locals
        stepped = getattr(held.get("func"), "__code__", None)
        if inner.f_code is stepped and any(optimizer is held["args"][0] for optimizer in optimizers):
            return True
    return False


def is_in_hook() -> bool:
    """Whether an optimizer is being stepped, or calls its hooks: they cannot be removed now."""
    return any(True for _ in _steps())


def _steps() -> Iterator[tuple[FrameType, FrameType]]:
    """The steps that this thread is in, each with what it has called."""
    inner: FrameType | None = sys._getframe()
    while inner is not None and inner.f_back is not None:
        if inner.f_back.f_code is _STEP_CODE:
            yield inner.f_back, inner
        inner = inner.f_back
