"""A thread at idle priority that looks at runs, one after the other, when something about them has changed."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from holdfast_service.daemon.writing.priority import give_way

CLOSE_S = 10.0  # a worker that hangs in a disk is left behind


class RunWorker:
    """Calls `act` with each run that is due. Its thread starts with the first one. `act` raises nothing, and returns soon
    once this `is_closed`.
    """

    def __init__(self, name: str, act: Callable[[str], None]) -> None:
        self._name, self._act = name, act
        self._changed = threading.Condition()
        self._due: dict[str, None] = {}
        self._again: dict[str, float] = {}  # runs that are looked at again, and when
        self._closed = threading.Event()
        self._busy = False
        self._thread: threading.Thread | None = None

    @property
    def is_closed(self) -> bool:
        return self._closed.is_set()

    def due(self, run: str) -> None:
        """Look at this run soon; returns at once."""
        with self._changed:
            if self._closed.is_set():
                return
            self._due[run] = None
            if self._thread is None:
                self._thread = threading.Thread(target=self._loop, name=self._name, daemon=True)
                self._thread.start()
            self._changed.notify_all()

    def again(self, run: str, after_s: float) -> None:
        """Look at it again after so many seconds, if not before."""
        at = time.monotonic() + after_s
        with self._changed:
            self._again[run] = min(at, self._again.get(run, at))

    def settle(self, wait_s: float = 30.0) -> bool:
        """Wait until all due runs were looked at; False after `wait_s`."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._busy and not self._due, wait_s)

    def close(self) -> None:
        """Stop, and wait for that."""
        with self._changed:
            self._closed.set()
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join(CLOSE_S)

    def _loop(self) -> None:
        give_way()
        while (run := self._awaited()) is not None:
            self._act(run)

    def _awaited(self) -> str | None:
        """The next run to look at; None after this was closed."""
        with self._changed:
            self._busy = False
            self._changed.notify_all()
            while not self._due and not self._closed.is_set():
                soonest = min(self._again.values(), default=None)
                self._changed.wait(None if soonest is None else max(soonest - time.monotonic(), 0))
                for run in [run for run, at in self._again.items() if at <= time.monotonic()]:
                    del self._again[run]
                    self._due[run] = None
            if self._closed.is_set():
                return None
            run = next(iter(self._due))
            del self._due[run]
            self._busy = True
            return run
