"""Finds out when the next save may begin before the one under way is written: then its slot is prepared ahead of it."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from itertools import pairwise

from holdfast.stage.slots import Slots
from holdfast.threads import own_threads
from holdfast.threads.latch import Latch

SHARE = 0.5  # of the time to the next save: the rest is for touching its slot
RECENT_SAVES = 8
# The interval is unknown during the first save. Memory that is touched needlessly is returned after some saves, but a step
# that waits for it is lost: so only a save that is over soon does without.
UNKNOWN_S = 2.0


class SavePace:
    """When this rank's last saves began."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._began = deque[float](maxlen=RECENT_SAVES + 1)

    def begins(self) -> float:
        """A save begins. Returns the seconds after which the next one looms, if this one is not durable by then."""
        self._began.append(self._now())
        shortest_s = min((later - earlier for earlier, later in pairwise(self._began)), default=None)
        return UNKNOWN_S if shortest_s is None else SHARE * shortest_s


def foreseen(looms_s: float, slots: Slots, over: Latch) -> Sequence[int]:
    """The slot that the next save needs, if the one that began now is not over after so many seconds, and if there is
    memory to spare. The calling thread has a low priority from then on.
    """
    slot = None if over.wait(looms_s) else slots.foresee()
    own_threads.give_way()  # not before: others wait for the link's locks
    return [] if slot is None else [slot]
