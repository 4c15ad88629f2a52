"""Assigns old checkpoints to scrubbing nodes, so that each reads different ones."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence

from sqlalchemy.orm import Session

from holdfast_formats.naming import CheckpointId
from holdfast_service.control.database.cluster_schema import DUTY_CHARS_MAX
from holdfast_service.wings.cluster.duties import Duties

SCRUB = "scrub"


class CheckClaims:
    """Claims of this node. They are duties, so they end with its membership."""

    def __init__(self, duties: Duties) -> None:
        self._duties = duties

    def take(self, places: Sequence[CheckpointId]) -> CheckpointId | None:
        """Claim the first of these that no node reads; None also while the catalog is away."""
        names = {duty_of(place): place for place in places}
        taken = self._duties.take_first(list(names))
        return None if taken is None else names[taken]

    def leave(self, place: CheckpointId) -> None:
        self._duties.give_up(duty_of(place))

    def fence(self, place: CheckpointId) -> Callable[[Session], bool]:
        """A check that this node still has the claim, run in the transaction that records the result."""
        name = duty_of(place)
        return lambda session: self._duties.holds(session, name)


def duty_of(place: CheckpointId) -> str:
    """The name of the duty to read this checkpoint back."""
    name = f"{SCRUB} {place.run}@{place.step}"
    return name if len(name) <= DUTY_CHARS_MAX else f"{SCRUB} {hashlib.sha256(name.encode()).hexdigest()[:40]}"
