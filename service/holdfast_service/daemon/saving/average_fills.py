"""Has averages put into the slots of saves, before these are written or brought to other nodes."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from holdfast_formats.errors import CheckpointError
from holdfast_service.daemon.arena.segment import SealedSlot
from holdfast_service.daemon.averaging.averages import Averages
from holdfast_service.daemon.averaging.crew import CrewKey
from holdfast_service.daemon.saving.rounds import SaveRound

Done = Callable[[SaveRound, Mapping[int, SealedSlot], CheckpointError | None], None]


class AverageFills:
    """Every method is called with the saver's lock. `averages` is None until the node has any."""

    def __init__(self, done: Done) -> None:
        """`done` is called without the lock, in another thread, when nothing is written into these slots any more."""
        self.averages: Averages | None = None
        self._done = done

    def wants(self, current: SaveRound) -> bool:
        """Whether averages are still to be put into the slots of a save; then that is seen to, and `done` is called."""
        if self.averages is None or all(sealed.table.average is None for sealed in current.sealed.values()):
            return False
        ranks = set(current.sealed)
        if current.averaged == ranks:
            return False
        crew = _crew_of(current)
        if current.averaging is not None and (
            current.averaging == ranks or not self.averages.withdraw(crew, current.key.step)
        ):
            return True
        current.averaging, parts = ranks, dict(current.sealed)
        self.averages.fill(crew, parts, lambda error: self._done(current, parts, error))
        return True

    def leave(self, current: SaveRound) -> None:
        """The save has ended. Slots into which something is put just now are for `done` to free, not for the caller."""
        if current.averaging is None or self.averages is None:
            return
        if self.averages.withdraw(_crew_of(current), current.key.step):
            current.averaging = None
        else:
            current.sealed.clear()


def _crew_of(current: SaveRound) -> CrewKey:
    return CrewKey(current.key.run, current.key.attempt, current.world)
