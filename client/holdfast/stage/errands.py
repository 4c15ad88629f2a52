"""Asks the daemon for what a save needs, in threads of their own and one at a time: training goes on without an answer."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, TypeVar

from holdfast.threads import background_requests
from holdfast.threads.latch import Latch
from holdfast.threads.pulse import SIGN_EVERY_S, Pulse
from holdfast_formats.errors import DaemonGone, DeadlineExceeded

ANSWER_S = 0.8  # within which a daemon answers, or gives a sign of life
ASK_AFTER_S = 0.3  # after that it is asked for one
WORK_MAX_S = 10.0  # for an answer of a daemon that gives signs of life
BRIEF_S = 0.02  # for an answer of a daemon that did not answer last time, and has gone since

_Result = TypeVar("_Result")


def _nothing(_: Any = None) -> None:
    pass


class Errand:
    """One request. A caller that waits for it may leave; then `give_back` gets its result."""

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
        """Wait for it no longer; False if it has been answered already."""
        if self.left:
            return True
        if self._first.setdefault("first", "left") != "left":
            return False
        self._when_left()
        return True

    def leave_for_good(self) -> None:
        """Hand its result to `give_back`, even if it is there by now."""
        if not self.leave() and self.error is None:
            background_requests.start(lambda: self._give_back(self.result))

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
        """Its result, once; nothing of what it was needed for is kept."""
        result, self.result = self.result, None
        self._give_back = self._when_left = _nothing
        return result


class Errands:
    """The requests of one rank, for its saves. One that was not answered in time stays under way until it is; every save
    fails at once until then. Not thread-safe: its owner's lock guards it, but for `result`.
    """

    def __init__(self, pulse: Callable[[], Pulse | None]) -> None:
        """`pulse` returns the daemon's, or None while there never was a connection: then everything is waited for."""
        self._pulse = pulse
        self._last: Errand | None = None
        self._unanswered = False  # the last one was lost after its caller had left

    @property
    def busy(self) -> bool:
        return self._last is not None and not self._last.ended.is_set()

    def begin(
        self,
        act: Callable[[], _Result],
        give_back: Callable[[_Result], object] = bool,
        when_left: Callable[[], object] = bool,
    ) -> Errand:
        """Start an errand; `result` waits for it. None may be under way."""
        assert not self.busy, "one errand at a time"
        errand = self._last = Errand(act, give_back, when_left)
        background_requests.start(errand.run, "holdfast-errand")
        return errand

    def run(
        self,
        act: Callable[[], _Result],
        patient: bool,
        give_back: Callable[[_Result], object] = bool,
        when_left: Callable[[], object] = bool,
        work_s: float = 0.0,
    ) -> _Result:
        """Call `act`, and return what it returns. Where that comes too late, `when_left` is called at once and `give_back`
        gets it in the end. An honest answer may take `work_s`.

        Raises `DeadlineExceeded` where the daemon gives no sign of life: soon, or as late as `Pulse.until` if `patient`.
        """
        self.settle(patient)
        result: _Result = self.result(self.begin(act, give_back, when_left), patient, work_s)
        return result

    def settle(self, patient: bool = True) -> None:
        """Wait for the errand that is under way, if there is one."""
        if self._last is None:
            return
        self._wait(self._last, patient)
        lost = isinstance(self._last.error, DaemonGone | DeadlineExceeded)
        self._unanswered = self._last.left and lost
        self._last = None

    def result(self, errand: Errand, patient: bool, work_s: float = 0.0) -> Any:
        self._wait(errand, patient, work_s)
        if errand.error is not None:
            raise errand.error
        return errand.take()

    def _wait(self, errand: Errand, patient: bool, work_s: float = 0.0) -> None:
        pulse = self._pulse()
        try:
            if pulse is None:
                errand.ended.wait()
            elif patient:
                pulse.until(errand.ended)
            elif not self._is_answered(errand, pulse, max(work_s, WORK_MAX_S)):
                raise pulse.unanswered(time.monotonic() - errand.began)
        except DeadlineExceeded:
            if errand.leave() or not errand.ended.wait(ASK_AFTER_S):
                raise
        except BaseException:  # raised by a signal handler: no caller takes the result
            errand.leave_for_good()
            raise

    def _is_answered(self, errand: Errand, pulse: Pulse, work_s: float) -> bool:
        """Whether it is, within `ANSWER_S`, or within `work_s` if the daemon gives signs of life meanwhile."""
        if errand.left:
            return errand.ended.is_set()
        limit = errand.began + (BRIEF_S if self._unanswered else work_s)
        if errand.ended.wait(min(errand.began + ASK_AFTER_S, limit) - time.monotonic()):
            return True
        pause_s = ASK_AFTER_S
        while time.monotonic() < limit and pulse.answers(ANSWER_S - ASK_AFTER_S):
            if errand.ended.wait(pause_s):
                return True
            pause_s = min(1.5 * pause_s, SIGN_EVERY_S)
        return errand.ended.is_set()
