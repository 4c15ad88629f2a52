"""Back-pressure: decide which save is dropped if no slot is free. Pure values in, a decision out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

from holdfast_formats.staging.messages import Policy

_Generation = TypeVar("_Generation")


def gives_way(policy: Policy, complete: Sequence[_Generation], incomplete: Sequence[_Generation]) -> _Generation | None:
    """Which of the older saves in this rank's slots is dropped; None if it is the new one.

    Both lists are in the order in which the saves started, without the one being written: it is never dropped.
    """
    if policy != "newest-wins":
        return None
    # The newest complete one goes last: were all ranks to die now, it alone would be saved. Of those that ranks still fill
    # the newest goes, so that the oldest is there when a rank that lags behind has reached it.
    order = [*complete[:-1], *reversed(incomplete), *complete[-1:]]
    return order[0] if order else None
