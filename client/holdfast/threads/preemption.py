"""Makes all ranks of a launch stop at one step, after a signal has reached some of them.

The loop checks at the end of every step, which costs a lock. Once a signal has come, to any rank, a background thread
reports the last step that the loop has passed. The loop waits at its next step until the daemon has the reports of all
ranks, and answers: the step after the last one that any rank has passed. No rank waits for long, for these reports need
no rank's main thread. A rank without an answer in time gives up for good: it ignores later answers, because others may
have given up as well.
"""

from __future__ import annotations

import logging
import os
import signal
import threading
import time
import weakref
from collections.abc import Callable, Collection
from types import FrameType
from typing import Any, Protocol

from holdfast.threads import child_deaths, own_threads
from holdfast.threads.latch import Latch
from holdfast_formats.errors import CheckpointError, DeadlineExceeded, InvalidRequest, StateMismatch
from holdfast_formats.staging.messages import NOWHERE
from holdfast_formats.staging.wire import StopAt

log = logging.getLogger(__name__)

POLL_S = (0.05, 0.5)  # while not all ranks have answered: at first, and at most
REPEAT_S = 1.0  # interval of repeating where this rank stops: a new daemon does not know
RANKS_NAMED_MAX = 8
_SIGNALS_MAX = 8

_set: weakref.WeakSet[Preemption] = weakref.WeakSet()


class Report(Protocol):
    def __call__(self, passed: int, step: int | None) -> StopAt:
        """Report the last step that this rank has passed, and where it stops, if known."""


class Preemption:
    """The signals of one checkpointer, and the step at which its launch stops. Without a `report` this rank is the only
    one.
    """

    def __init__(self, signals: Collection[int], grace_s: float, report: Report | None) -> None:
        """Raises `InvalidRequest` for invalid signals and times."""
        self._signals, self._grace_s, self._report = _checked(signals), _checked_grace(grace_s), report
        self._before: dict[signal.Signals, Any] = {}  # the handlers that there were
        self._lock = threading.Lock()
        self._passed = NOWHERE
        self._pending = False  # `_passed` was reported, and is fixed
        self._came, self._decided, self._closed = Latch(), Latch(), Latch()
        self._since = 0.0
        self._why = "another rank is stopping"
        self._missing: tuple[int, ...] = ()
        self._apart = False
        self._unheard: CheckpointError | None = None  # why the daemon has not answered
        self._step: int | None = None  # one of the two, once it is decided
        self._failed: CheckpointError | None = None
        self._deaths: child_deaths.Delay | None = None

    def begin(self) -> None:
        """Set the handlers. Raises `InvalidRequest` outside of the main thread."""
        if threading.current_thread() is not threading.main_thread():
            raise InvalidRequest(
                "on_preemption() was called outside the main thread",
                hint="call it in the main thread: Python sets handlers of signals only there",
            )
        _set.add(self)
        for one in self._signals:
            self._before[one] = signal.getsignal(one)
            signal.signal(one, self._hear)
        own_threads.begin(self._agree, "holdfast-preemption", self._end_waits)

    @property
    def left_s(self) -> float:
        """Seconds left of the grace period."""
        return max(self._since + self._grace_s - time.monotonic(), 0.0)

    def asked(self) -> None:
        """The daemon requests this rank's last step. Called in the thread that reads from it."""
        self._came.set()

    def reached(self, step: int) -> bool:
        """Whether the launch stops at this step, or before. Raises `DeadlineExceeded` where the ranks cannot agree."""
        with self._lock:
            if not self._pending:
                if step < self._passed:
                    raise InvalidRequest(
                        f"should_stop({step}) was called after should_stop({self._passed})",
                        hint="pass the step that has just ended",
                    )
                self._passed = step
                return False
            if step <= self._passed:
                return False
        self._decided.wait(self._since + self._patience_s - time.monotonic())
        self._decide(None)
        if self._step is None:
            assert self._failed is not None
            raise self._failed
        return step >= self._step

    def close(self) -> None:
        self._end_waits()
        self._restore()
        if self._deaths is not None:
            self._deaths.forget()
            self._deaths = None

    def _end_waits(self) -> None:
        self._closed.set()
        self._came.set()

    def leave_to_parent(self) -> None:
        """Restore the signals in a forked child, which otherwise would not end by them."""
        self._closed.set()
        self._restore()

    def _restore(self) -> None:
        if threading.current_thread() is threading.main_thread():
            for one, before in self._before.items():
                if signal.getsignal(one) == self._hear and before is not None:
                    signal.signal(one, before)

    def _hear(self, signum: int, frame: FrameType | None) -> None:
        """Signal handler. Takes no lock, for its thread may hold it."""
        before = self._before.get(signal.Signals(signum))
        if self._closed.is_set():  # another handler was set after this one, and calls it
            if before is signal.SIG_DFL:
                signal.signal(signum, signal.SIG_DFL)
                os.kill(os.getpid(), signum)
        else:
            self._why = f"{signal.Signals(signum).name} came"
            if self._deaths is None:  # of workers, which this signal may kill as well
                self._deaths = child_deaths.delay()
            self._came.set()
        if callable(before) and before is not signal.default_int_handler:
            before(signum, frame)

    @property
    def _patience_s(self) -> float:
        """How long to wait for all ranks' answers: the rest is for the running step and the save."""
        return self._grace_s / 2

    def _agree(self) -> None:
        self._came.wait()
        if self._closed.is_set():
            return
        with self._lock:
            self._since = time.monotonic()
            self._pending = True
        log.info("%s: this rank has passed step %d", self._why, self._passed)
        if self._report is None:
            self._decide(self._passed + 1)
            return
        pause_s = POLL_S[0]
        while self._failed is None and not self._closed.is_set():
            self._tell(self._report)
            if time.monotonic() > self._since + self._patience_s:
                self._decide(None)
            self._closed.wait(pause_s if self._step is None else REPEAT_S)
            pause_s = min(pause_s * 1.5, POLL_S[1])

    def _tell(self, report: Report) -> None:
        try:
            answer = report(self._passed, self._step)
        except CheckpointError as error:
            self._unheard = error
            return
        self._missing, self._apart, self._unheard = answer.missing, answer.apart, None
        if answer.step is not None and answer.step <= self._passed:  # it was away when the others agreed
            self._unheard = StateMismatch(
                f"the other ranks stop after step {answer.step}, but this rank has passed step {self._passed}"
            )
            self._decide(None)
        elif answer.step is not None:
            self._decide(answer.step)

    def _decide(self, step: int | None) -> None:
        """Record the first decision; without a step, that the ranks did not agree in time."""
        with self._lock:
            if self._decided.is_set():
                return
            self._step, self._failed = step, self._undecided() if step is None else None
            self._decided.set()
        if step is not None:
            log.warning("%s: training stops after step %d, which is saved", self._why, step)

    def _undecided(self) -> DeadlineExceeded:
        if self._unheard is not None:
            text = f"{self._why}, and the ranks could not agree on a step: {self._unheard}"
            return DeadlineExceeded(text, hint=self._unheard.hint)
        named = ", ".join(map(str, self._missing[:RANKS_NAMED_MAX])) + ", …" * (len(self._missing) > RANKS_NAMED_MAX)
        have = f"rank {named} has" if len(self._missing) == 1 else f"ranks {named} have"
        silent = f"{have} not answered" if self._missing else "the daemon has not answered"
        hint = "every rank must call on_preemption() before its first step; check whether these ranks still run"
        if self._apart:
            silent += ", and the catalog, through which nodes communicate, is not available"
            hint = "check whether PostgreSQL answers (`holdfast doctor`)"
        text = f"{self._why}, and the ranks did not agree on a step within {self._patience_s:.0f} s: {silent}"
        return DeadlineExceeded(text, hint=hint)


class TrainingStop:
    """Whether training stops early. It does not before `begin`, which sets the handlers of signals."""

    def __init__(self) -> None:
        self._preemption: Preemption | None = None
        self._stopped = False

    @property
    def stopped(self) -> bool:
        """Whether `after` has returned True."""
        return self._stopped

    def begin(
        self, signals: Collection[int], grace_s: float, report: Report | None, connect: Callable[[], object] = bool
    ) -> None:
        """Let these signals end the training; `connect` is called before, so that `report` has a connection.

        Raises `InvalidRequest` for invalid signals and times, for a second call, and outside of the main thread.
        """
        if self._preemption is not None:
            raise InvalidRequest("on_preemption() was already called", hint="call it once, with all signals")
        preemption = Preemption(signals, grace_s, report)
        connect()
        preemption.begin()
        self._preemption = preemption

    def asked(self) -> None:
        """The daemon requests this rank's last step. Called in the thread that reads from it."""
        if self._preemption is not None:
            self._preemption.asked()

    def after(self, step: int, save: Callable[[float], object] | None) -> bool:
        """Whether training stops after this step. Calls `save` the first time, with the seconds that are left."""
        if self._preemption is None:
            raise InvalidRequest(
                "should_stop() was called without on_preemption()", hint="call on_preemption() once, before the loop"
            )
        if not self._preemption.reached(step):
            return False
        if save is not None and not self._stopped:
            save(self._preemption.left_s)
        self._stopped = True
        return True

    def close(self) -> None:
        """Restore the handlers that were set before."""
        if self._preemption is not None:
            self._preemption.close()


def _checked(signals: Collection[int]) -> tuple[signal.Signals, ...]:
    try:
        chosen = tuple(dict.fromkeys(signal.Signals(one) for one in signals))
    except (TypeError, ValueError) as error:
        raise InvalidRequest(f"signals= must contain signals, such as (signal.SIGTERM,), not {signals!r}") from error
    fatal = [one.name for one in chosen if one in (signal.SIGKILL, signal.SIGSTOP, signal.SIGCHLD)]
    if not chosen or fatal or len(chosen) > _SIGNALS_MAX:
        raise InvalidRequest(
            f"{fatal[0]} cannot be handled"
            if fatal
            else f"{len(chosen)} signals were given: pass at least one, and at most {_SIGNALS_MAX}",
            hint="pass the signals that announce the end of the job, such as signal.SIGTERM and signal.SIGUSR1",
        )
    return chosen


def _checked_grace(grace_s: float) -> float:
    if isinstance(grace_s, bool) or not isinstance(grace_s, int | float) or not 0 < grace_s <= threading.TIMEOUT_MAX:
        raise InvalidRequest(f"grace_s must be a number of seconds above 0, not {grace_s!r}")
    return float(grace_s)


def _leave_all_to_parent() -> None:
    for preemption in list(_set):
        preemption.leave_to_parent()
    _set.clear()


os.register_at_fork(after_in_child=_leave_all_to_parent)
