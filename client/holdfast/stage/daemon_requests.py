"""Runs a save's requests to the daemon in background threads, one at a time, so that training continues without an
answer.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from holdfast.threads import own_threads
from holdfast.threads.daemon_heartbeat import DaemonHeartbeat
from holdfast.threads.latch import Latch
from holdfast.threads.reentrancy import CallGuard
from holdfast_formats.errors import DaemonGone, DeadlineExceeded

SILENCE_S = 0.8  # of a daemon, that one call waits for
ASK_AFTER_S = 0.3  # seconds of waiting before a sign of life is requested
SIGN_S = 0.1  # that it has at least for that
WORK_MAX_S = 10.0  # for an answer of a daemon that gives signs of life
BRIEF_S = 0.02  # for an answer of a daemon that did not answer last time, and has gone since

_Result = TypeVar("_Result")


def _nothing(_: Any = None) -> None:
    pass


class SilenceTimer:
    """Total time that one call has waited for a daemon without a sign of life."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now, self._waited_s = now, 0.0

    @property
    def before_asking_s(self) -> float:
        """Seconds until a sign of life is requested."""
        return max(ASK_AFTER_S - self._waited_s, 0.0)

    @property
    def left_s(self) -> float:
        return max(SILENCE_S - self._waited_s, SIGN_S)

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Time the block as a wait for the daemon."""
        began = self._now()
        try:
            yield
        finally:
            self._waited_s += self._now() - began

    def broken(self) -> None:
        """Reset: the daemon gave a sign of life."""
        self._waited_s = 0.0


class DaemonRequest:
    """One request. Its caller may stop waiting; `give_back` then receives the result."""

    def __init__(self, act: Callable[[], Any], give_back: Callable[[Any], object], when_left: Callable[[], object]) -> None:
        self._act, self._give_back, self._when_left = act, give_back, when_left
        self.began, self.ended = time.monotonic(), Latch()
        self._first: dict[str, str] = {}  # what came first, the answer or the leave: noted in one step of Python
        self.result: Any = None
        self.error: BaseException | None = None

    @property
    def left(self) -> bool:
        return self._first.get("first") == "left"

    def leave(self) -> bool:
        """Stop waiting; False if it has been answered already."""
        if self.left:
            return True
        if self._first.setdefault("first", "left") != "left":
            return False
        self._when_left()
        return True

    def leave_for_good(self) -> None:
        """Pass its result to `give_back`, even if it has arrived."""
        if not self.leave() and self.error is None:
            own_threads.start(lambda: self._give_back(self.result))

    def run(self) -> None:
        try:
            self.result = self._act()
        except BaseException as error:  # raised where it is waited for
            self.error = error
        self._act = _nothing  # what it was needed for is not kept until the next errand
        try:
            if self._first.setdefault("first", "answered") == "left" and self.error is None:
                self._give_back(self.result)
        finally:
            self.ended.set()

    def take(self) -> Any:
        """Its result, once; drops all references."""
        result, self.result = self.result, None
        self._give_back = self._when_left = _nothing
        return result


class DaemonRequests:
    """Requests of one rank's saves. While one that timed out is still running, every save fails at once. Only `result`
    is thread-safe.
    """

    def __init__(self, heartbeat: Callable[[], DaemonHeartbeat | None]) -> None:
        """`heartbeat` returns the daemon's Pulse, or None before the first connection: then every request is waited for."""
        self._heartbeat = heartbeat
        self._last: DaemonRequest | None = None
        self._unanswered = False  # the last one was lost after its caller had left

    @property
    def busy(self) -> bool:
        return self._last is not None and not self._last.ended.is_set()

    def begin(
        self,
        act: Callable[[], _Result],
        give_back: Callable[[_Result], object] = bool,
        when_left: Callable[[], object] = bool,
    ) -> DaemonRequest:
        assert not self.busy, "only one request at a time"
        request = self._last = DaemonRequest(act, give_back, when_left)
        own_threads.start(request.run, "holdfast-errand")
        return request

    def run(
        self,
        act: Callable[[], _Result],
        silence: SilenceTimer | None,
        give_back: Callable[[_Result], object] = bool,
        when_left: Callable[[], object] = bool,
        work_s: float = 0.0,
        meanwhile: Callable[[], object] = _nothing,
    ) -> _Result:
        """Return `act()`; this thread does something `meanwhile`. If it takes too long, call `when_left` at once, and pass
        the result to `give_back` when it comes.

        Raises `DeadlineExceeded` if the daemon gives no sign of life for the rest of `silence`, or has not answered
        after `work_s`; without a `silence`, as `DaemonHeartbeat.until` does.
        """
        self.wait(silence)
        request = self.begin(act, give_back, when_left)
        try:
            meanwhile()
        except BaseException:  # also of a signal handler: no caller takes the result
            request.leave_for_good()
            raise
        result: _Result = self.result(request, silence, work_s)
        return result

    def asking(self, calls: CallGuard) -> Callable[[Callable[[], Any]], Any]:
        """`run` for the average, as one of these calls: an optimizer's step does not wait for a silent daemon, a restore
        does.
        """
        return lambda act: calls.run(
            "ema.update()", lambda: self.run(act, SilenceTimer()), lambda during: self.run(act, None)
        )

    def wait(self, silence: SilenceTimer | None = None) -> None:
        if self._last is None:
            return
        self._wait(self._last, silence)
        lost = isinstance(self._last.error, DaemonGone | DeadlineExceeded)
        self._unanswered = self._last.left and lost
        self._last = None

    def result(self, request: DaemonRequest, silence: SilenceTimer | None = None, work_s: float = 0.0) -> Any:
        self._wait(request, silence, work_s)
        if request.error is not None:
            raise request.error
        return request.take()

    def until(
        self, ended: Latch, silence: SilenceTimer | None, began: float | None = None, work_s: float = WORK_MAX_S
    ) -> None:
        """Wait until the event is set, until at most `work_s` after `began`. Raises `DeadlineExceeded` as `run` does."""
        heartbeat, since = self._heartbeat(), time.monotonic() if began is None else began
        if heartbeat is None:
            ended.wait()
        elif silence is None:
            heartbeat.until(ended)
        elif not _is_set(ended, heartbeat, silence, since + work_s):
            raise heartbeat.unanswered(time.monotonic() - since)

    def _wait(self, request: DaemonRequest, silence: SilenceTimer | None, work_s: float = 0.0) -> None:
        work_s = max(work_s, WORK_MAX_S)
        if silence is not None and (request.left or self._unanswered):
            work_s = 0.0 if request.left else BRIEF_S
        try:
            self.until(request.ended, silence, request.began, work_s)
        except DeadlineExceeded:
            if request.leave() or not request.ended.wait(ASK_AFTER_S):
                raise
        except BaseException:  # raised by a signal handler: no caller takes the result
            request.leave_for_good()
            raise


def _is_set(ended: Latch, heartbeat: DaemonHeartbeat, silence: SilenceTimer, limit: float) -> bool:
    """Whether it is set within the rest of `silence`, or until `limit` while the daemon gives signs of life."""
    while True:
        with silence.waiting():
            if ended.wait(max(min(silence.before_asking_s, limit - time.monotonic()), 0.0)):
                return True
        if time.monotonic() >= limit:
            return ended.is_set()
        with silence.waiting():
            if not heartbeat.answers(silence.left_s):
                return ended.is_set()
        silence.broken()
