"""The daemon's main thread is ended by a signal, at whatever line of its wait the signal comes."""

from __future__ import annotations

import sys
import threading
from types import FrameType
from typing import Any

from holdfast_service.__main__ import StopSignal


class Signalled:
    """A thread that waits, and whose wait is interrupted once, before the `wanted`-th line of Python that it executes."""

    def __init__(self, wanted: int) -> None:
        self._stop, self._wanted, self._lines = StopSignal(), wanted, 0
        self.came = False
        self.ended = threading.Event()
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        sys.settrace(self._line)
        while not self._stop.wait(0.05):
            pass
        sys.settrace(None)
        self.ended.set()

    def _line(self, frame: FrameType, event: str, argument: Any) -> Any:
        self._lines += event == "line"
        if self._lines == self._wanted and not self.came:
            self.came = True
            self._stop.set("SIGTERM")  # what the handler of a signal does, between two lines
        return self._line


def test_a_signal_at_any_line_of_the_wait_ends_it() -> None:
    for line in range(1, 60):
        waited = Signalled(line)
        assert waited.ended.wait(180), f"a signal before line {line} of the wait: it has not ended"
        assert waited.came
