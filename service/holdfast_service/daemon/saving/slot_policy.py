"""Back-pressure: what gives way to a save for which no slot is free. Values in, a decision out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

from holdfast_formats.staging.wire import Policy

_Generation = TypeVar("_Generation")


def gives_way(policy: Policy, complete: Sequence[_Generation], incomplete: Sequence[_Generation]) -> _Generation | None:
    """Which of the older saves that hold this rank's slots is dropped; None when it is the new one.

    Both lists are in the order in which the saves began, without the one that is being written: it is never dropped.
    """
    if policy != "newest-wins":
        return None
    # The newest complete one goes last: were all ranks to die now, it alone would be saved. Of those that ranks still fill
    # the newest goes, so that the oldest is there when a rank that lags behind has reached it.
    order = [*complete[:-1], *reversed(incomplete), *complete[-1:]]
    return order[0] if order else None
