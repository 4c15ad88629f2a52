"""Runs one call of a checkpointer at a time, and handles calls that a signal handler makes during another one."""

from __future__ import annotations

import os
import sys
import threading
from collections import deque
from collections.abc import Callable, Collection, Iterator
from contextlib import AbstractContextManager, ExitStack
from itertools import islice
from types import FrameType
from typing import NamedTuple, TypeVar

import torch

from holdfast.threads import child_deaths
from holdfast_formats.errors import InvalidRequest, TornSnapshot

_Result = TypeVar("_Result")
LATER_MAX = 64
STEP, RESTORE, CLOSE = "optimizer.step()", "restore()", "close()"
_STEP_CODE = torch.optim.Optimizer.profile_hook_step(lambda *_: None).__code__  # torch wraps every step in this


class DeferredCall(NamedTuple):
    """Work to do when the interrupted call has ended; `give_up` if that was a step that failed."""

    awaits: str
    act: Callable[[], object]
    give_up: Callable[[], object] = bool


class CallGuard:
    """Serialises calls of several threads.

    A signal handler's call must not wait for the call of its own thread, which cannot continue before the handler
    returns. It gets the name of that call instead, and may leave work to do afterwards.
    """

    def __init__(self, optimizers: Collection[torch.optim.Optimizer]) -> None:
        """During a step of these `optimizers` there is no consistent state to save."""
        self._optimizers = optimizers
        self._lock = threading.RLock()
        self._running = ""  # by the thread that holds the lock
        self._later: deque[DeferredCall] = deque()
        self._catching_up = False
        self._pid = os.getpid()
        self._closed = False

    def run(self, name: str, act: Callable[[], _Result], instead: Callable[[str], _Result]) -> _Result:
        """Run `act` alone, or `instead` with the name of the call that a signal handler interrupted in this thread.

        Raises `InvalidRequest` in a forked child: connection, threads and locks belong to its parent.
        """
        if self.forked:
            raise InvalidRequest(
                f"{name} called in process {os.getpid()}, but this checkpointer belongs to process "
                f"{self._pid}, from which this one was forked",
                hint="save and restore in the process that created the checkpointer, or create one for another run "
                "in the child",
            )
        with child_deaths.delayed(), self._lock:
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
        return os.getpid() != self._pid

    @property
    def closed(self) -> bool:
        return self._closed

    def close(self) -> None:
        """From now on, `refuse_if_closed` raises. Other calls still run."""
        self._closed = True

    def refuse_if_closed(self) -> None:
        if self._closed:
            raise InvalidRequest("the checkpointer is closed", hint="construct a new one")

    def run_between_steps(self, name: str, act: Callable[[], _Result], instead: Callable[[str], _Result]) -> _Result:
        """As `run`, but also run `instead` in the middle of an optimizer's step, when only half of the state is updated."""
        return instead(STEP) if is_stepping(self._optimizers) else self.run(name, act, instead)

    def later(self, work: DeferredCall) -> None:
        self._later.append(work)

    def catch_up(self, stepped: bool = False) -> None:
        """Do postponed work. Work that waits for a step that ended with an exception is given up."""
        if threading.current_thread() is not threading.main_thread() or (not stepped and is_stepping(self._optimizers)):
            return  # signals come in the main thread
        if self._catching_up:
            return  # this work ends calls too; the thread that began goes on with the rest
        self._catching_up = True
        try:
            for _ in range(LATER_MAX):  # work that is postponed once more waits for the next time
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
    """Whether this thread is inside a step of one of these optimizers; its hooks run before or after it."""
    for wrapper, inner in _steps():
        held = wrapper.f_locals
        stepped = getattr(held.get("func"), "__code__", None)
        if inner.f_code is stepped and any(optimizer is held["args"][0] for optimizer in optimizers):
            return True
    return False


class OtherSteps:
    """Steps of a state's optimizers in other threads: during one, only half of the state is updated.

    Each step is noted when it begins, by its frame, because one that raises has no hook at its end. The stacks of other
    threads are not walked: in CPython 3.10 and 3.11, `sys._current_frames` and `f_back` make frame objects, the garbage
    collector may start there and let the other thread run on, and the process hangs or crashes (CPython's issue 106883).
    """

    def __init__(self) -> None:
        self._running: dict[int, list[FrameType]] = {}  # by thread: those inside of others last
        self._passed = 0

    def begins(self) -> None:
        """Hook before each step."""
        self._passed += 1
        mine = self._running.setdefault(threading.get_ident(), [])
        mine[:] = [frame for frame in mine if not _has_ended(frame)]
        mine += (wrapper for wrapper, _ in islice(_steps(), 1))

    def ends(self) -> None:
        """Hook after each step."""
        self._passed += 1
        mine = self._running.get(threading.get_ident(), [])
        if mine and mine[-1] is next((wrapper for wrapper, _ in _steps()), None):
            mine.pop()  # a frame that is kept keeps those of its callers

    def between(self) -> int | None:
        """The number of this moment; None while another thread is in a step, or in hooks before the one that ends it."""
        me, passed = threading.get_ident(), self._passed  # read first: a step that begins from here on is counted
        others = [frame for thread, frames in list(self._running.items()) if thread != me for frame in list(frames)]
        return passed if all(map(_has_ended, others)) else None

    def check(self, moment: int | None) -> None:
        """`TornSnapshot` if a step was running at that moment, or began or ended since."""
        if moment is None or self.between() != moment:
            raise TornSnapshot(
                "another thread called optimizer.step() during this call of save(): the state was already partly "
                "of the next step",
                hint="save in the thread that trains, between two steps",
            )


def _has_ended(frame: FrameType) -> bool:
    """Whether a frame no longer runs, in any thread: Python refuses to clear one that does. The call allocates nothing."""
    try:
        frame.clear()
    except RuntimeError:
        return False
    return True


def is_in_hook() -> bool:
    """Whether an optimizer is stepping or calls its hooks, which cannot be removed now."""
    return any(True for _ in _steps())


def _steps() -> Iterator[tuple[FrameType, FrameType]]:
    yield from _steps_of(sys._getframe())


def _steps_of(inner: FrameType | None) -> Iterator[tuple[FrameType, FrameType]]:
    while inner is not None and inner.f_back is not None:
        if inner.f_back.f_code is _STEP_CODE:
            yield inner.f_back, inner
        inner = inner.f_back
