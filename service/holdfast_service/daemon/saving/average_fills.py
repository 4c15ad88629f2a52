"""Requests averages for the slots of saves, before these are written or sent to other nodes."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from holdfast_formats.errors import CheckpointError
from holdfast_service.daemon.arena.segment import SealedSlot
from holdfast_service.daemon.averaging.averages import Averages
from holdfast_service.daemon.averaging.rank_set import RankSetKey
from holdfast_service.daemon.saving.rounds import SaveRound

Done = Callable[[SaveRound, Mapping[int, SealedSlot], CheckpointError | None], None]


class AverageFills:
    """Methods are called with the saver's lock."""

    def __init__(self, averages: Averages | None, done: Done) -> None:
        """`done` is called without the lock, in another thread, when nothing writes into these slots any more."""
        self._averages = averages
        self._done = done

    def wants(self, current: SaveRound) -> bool:
        """Whether slots of a save still need averages; then they are requested, and `done` is called later."""
        if self._averages is None or all(sealed.table.average is None for sealed in current.sealed.values()):
            return False
        ranks = set(current.sealed)
        if current.averaged == ranks:
            return False
        rank_set = _rank_set_of(current)
        if current.averaging is not None and (
            current.averaging == ranks or not self._averages.withdraw(rank_set, current.key.step)
        ):
            return True
        parts = current.begin_averaging()
        self._averages.fill(rank_set, parts, lambda error: self._done(current, parts, error))
        return True

    def leave(self, current: SaveRound) -> None:
        """The save has ended. `done`, not the caller, frees the slots that are being filled."""
        if current.averaging is None or self._averages is None:
            return
        if self._averages.withdraw(_rank_set_of(current), current.key.step):
            current.end_averaging()
        else:
            current.sealed.clear()


def _rank_set_of(current: SaveRound) -> RankSetKey:
    return RankSetKey(current.key.run, current.key.attempt, current.world)
