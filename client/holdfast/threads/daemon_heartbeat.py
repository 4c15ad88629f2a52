"""Waits for a daemon that may not answer: stopped by SIGSTOP, on a paused machine, swapped out.

A pending request proves nothing: a valid answer may take long. So the daemon is pinged on a separate connection, which
any running daemon answers at once.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable

from holdfast.threads.latch import Latch
from holdfast_formats.errors import DaemonGone, DeadlineExceeded

FIRST_SIGN_S = 0.5  # after which a wait counts as one
SIGN_EVERY_S = 2.0  # while something is waited for
SIGN_WAIT_S = 2.0
SILENCE_MAX_S = 10.0  # of a daemon that a caller waits for
_HINT = (
    "the daemon may be stopped, swapped out or overloaded: check its log; continue a stopped daemon with `kill "
    "-CONT`, or restart it"
)


class DaemonHeartbeat:
    """Whether one daemon answers. `daemon` names it in errors; `ping(seconds)` raises `DeadlineExceeded` or `DaemonGone`."""

    def __init__(self, daemon: Callable[[], str], ping: Callable[[float], None]) -> None:
        self._daemon, self._ping = daemon, ping
        self._silent_since: float | None = None

    def answers(self, within_s: float) -> bool:
        """Whether it answers a ping within so many seconds. True for one that is gone: the connection reports its loss."""
        asked = time.monotonic()
        try:
            self._ping(within_s)
        except DeadlineExceeded:
            self._silent_since = self._silent_since or asked
            return False
        except DaemonGone:
            pass
        self._silent_since = None
        return True

    def until(self, ended: Latch, timeout: float | None = None, remind: Callable[[], object] = bool) -> bool:
        """Wait until it is set; False after `timeout` seconds. `remind` is called now and then.

        Raises `DeadlineExceeded` if the daemon gives no sign of life for `SILENCE_MAX_S`.
        """
        limit, pause_s = math.inf if timeout is None else time.monotonic() + timeout, FIRST_SIGN_S
        while not ended.wait(max(min(pause_s, limit - time.monotonic()), 0.0)):
            if time.monotonic() >= limit:
                return False
            remind()
            pause_s = SIGN_EVERY_S
            if self._too_long_silent() and not ended.is_set():
                raise self.unanswered(self._silence_s)
        return True

    def check(self) -> None:
        """Ping it once; `DeadlineExceeded` if it has given no sign of life for `SILENCE_MAX_S`."""
        if self._too_long_silent():
            raise self.unanswered(self._silence_s)

    def _too_long_silent(self) -> bool:
        return not self.answers(SIGN_WAIT_S) and self._silence_s >= SILENCE_MAX_S

    def unanswered(self, seconds: float) -> DeadlineExceeded:
        return DeadlineExceeded(f"{self._daemon()} did not answer for {seconds:.1f} s", hint=_HINT)

    @property
    def _silence_s(self) -> float:
        return 0.0 if self._silent_since is None else time.monotonic() - self._silent_since
