"""Notes how long garbage collections hold a process up. Python imports this before anything else.

Nothing of the product knows of it: with this directory on PYTHONPATH, and GC_PAUSES set, every collection of a millisecond
or more of the processor appends a line to that file: which generation, how many milliseconds, and when (monotonic clock).
"""

from __future__ import annotations

import gc
import os
import time

NOTED_MS_MIN = 1.0
_began = 0.0


def _note(phase: str, about: dict[str, int]) -> None:
    global _began
    if phase == "start":
        _began = time.thread_time()
        return
    took_ms = (time.thread_time() - _began) * 1000
    if took_ms >= NOTED_MS_MIN:
        os.write(_file, f"{about['generation']} {took_ms:.3f} {time.monotonic():.3f}\n".encode())


if "GC_PAUSES" in os.environ:
    _file = os.open(os.environ["GC_PAUSES"], os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    gc.callbacks.append(_note)
