"""Python's garbage collector in a process that serves: it must not hold up who asks, and garbage must go all the same."""

from __future__ import annotations

import gc

# How many more objects there are before the youngest are looked at, and how many such looks before older ones are. A page of
# a thousand rows makes tens of thousands of objects, none of them garbage: with Python's own 700 each page was stopped fifty
# times, and every few pages everything was looked at, for up to 50 ms. Cycles that hold large buffers still go in seconds.
THRESHOLDS = (10_000, 10, 10)


def settle() -> None:
    """Called once everything that serves is there: what is alive now stays, so no collection goes through it again."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(*THRESHOLDS)
