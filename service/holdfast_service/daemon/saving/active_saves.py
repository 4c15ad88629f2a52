"""Open saves and connected ranks: the state under the saver's lock, and which of it concerns other nodes."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from holdfast_formats.errors import STORAGE, Awaited
from holdfast_service.daemon.arena.segment import ArenaSegment
from holdfast_service.daemon.saving.connected_ranks import ConnectedRanks
from holdfast_service.daemon.saving.rounds import GivenUp, LaunchKey, Participant, RoundKey, SaveRound
from holdfast_service.daemon.saving.stuck_rounds import OpenSaves

APART_S = 5.0  # the nodes count as apart for so long after they could not be met
NAMED_MAX = 8


class ActiveSaves:
    """The saver's state. A method takes the lock itself, unless its docstring says that it is called with it."""

    def __init__(self, jointly: bool, storage: Callable[[], Awaited] = lambda: STORAGE) -> None:
        """`jointly`: ranks of a save may be on other nodes. `storage` says what a save waits for that is being written."""
        self._jointly, self._storage = jointly, storage
        self.lock = threading.Condition()
        self.connected = ConnectedRanks(self.lock)
        self.open: dict[RoundKey, SaveRound] = {}
        self.pending: dict[RoundKey, SaveRound] = {}  # complete, being saved
        self.queued: list[SaveRound] = []  # of these, those of several nodes whose share this node does not write yet
        self.given_up = GivenUp()
        self._apart = float("-inf")  # when the other nodes could last not be met (monotonic)

    @property
    def staging(self) -> bool:
        """Whether a rank fills a slot."""
        with self.lock:
            return any(current.leases for current in self.open.values())

    def complete(self, current: SaveRound) -> None:
        """All ranks have sealed: the write begins. Called with the lock."""
        current.end_staging()
        self.pending[current.key] = self.open.pop(current.key)

    def has(self, current: SaveRound) -> bool:
        """Whether it has not ended. Called with the lock."""
        return current in (self.open.get(current.key), self.pending.get(current.key))

    def is_open(self, current: SaveRound) -> bool:
        with self.lock:
            return self.open.get(current.key) is current

    def may_give_way(self, current: SaveRound) -> bool:
        """Whether nothing of it is being written here, and it has not ended. Called with the lock."""
        return self.open.get(current.key) is current or current in self.queued

    def parts(self) -> list[SaveRound]:
        """Saves whose ranks here have all sealed, with other ranks on other nodes."""
        with self.lock:
            return [current for current in self.open.values() if self.is_part(current)]

    def is_part(self, current: SaveRound) -> bool:
        """Whether all ranks here have sealed, and others are on other nodes. Called with the lock."""
        if not self._jointly or not current.sealed or current.leases:
            return False
        return self._here(current) <= current.sealed.keys() and not current.complete

    def without_a_part(self, current: SaveRound) -> set[int]:
        """Ranks that are gone without their part, so that the round can never complete. Called with the lock."""
        return self.connected.gone(current.key.run, current.key.attempt) - set(current.sealed)

    def spans(self, current: SaveRound) -> bool:
        """Whether ranks of this save may be on other nodes. Called with the lock."""
        return self._jointly and len(self._here(current) | current.sealed.keys()) < current.world

    def spanning(self) -> set[LaunchKey]:
        """Launches with ranks here that may have others on other nodes."""
        with self.lock:
            return {LaunchKey(run, count[0]) for run, count in self.connected.counts().items() if count[2] < count[1]}

    def saves(self, key: LaunchKey) -> OpenSaves:
        """The open saves of a launch, and the waits of its ranks here. Called with the lock."""
        rounds = [current for of, current in self.open.items() if (of.run, of.attempt) == key]
        return OpenSaves.of(rounds, [who for who in self.connected.of(key.run) if who.attempt == key.attempt])

    def renew(self) -> None:
        """Extend deadlines while other nodes cannot be reached: sealed saves wait."""
        with self.lock:
            self._apart = time.monotonic()
            for current in self.parts():
                current.extend()

    def awaited(self, segment: ArenaSegment) -> Awaited:
        """What the oldest save that holds a slot of this segment waits for. Called with the lock."""
        held = [one for one in (*self.open.values(), *self.pending.values()) if one.holds(segment)]
        oldest = min(held, key=lambda one: one.key.step, default=None)
        if oldest is None:
            return self._storage()
        step, jointly = oldest.key.step, self._jointly and not self._here(oldest) >= set(range(oldest.world))
        if jointly and time.monotonic() - self._apart < APART_S:
            return Awaited(
                f"step {step} is waiting for the catalog, through which nodes coordinate",
                "check whether PostgreSQL answers (`holdfast doctor`); sealed steps are then saved",
            )
        if oldest.key in self.pending and not jointly:
            return self._storage()
        if jointly and (oldest.key in self.pending or self.is_part(oldest)):
            return Awaited(
                f"step {step} is waiting for other nodes: for their data, or for their shares of the files",
                "see the run's saves and `holdfast nodes`: a slow, frozen or lost node delays all others",
            )
        missing = sorted(self._here(oldest) - oldest.sealed.keys())
        return Awaited(
            f"step {step} is waiting for {_ranks(missing)}, not sealed yet",
            "check why these ranks reach the step later than others, or give the checkpointer more slots",
        )

    def is_elsewhere(self, who: Participant) -> bool:
        """Whether ranks of this rank's launch may be on other nodes."""
        if not self._jointly:
            return False
        with self.lock:
            return len(self.connected.ranks(who.run, who.attempt)) < who.world

    def is_reported_elsewhere(self, who: Participant) -> bool:
        """Whether another node, that of the launch's first rank, records the progress of its saves."""
        if who.rank == 0 or not self.is_elsewhere(who):
            return False
        with self.lock:
            return 0 not in self.connected.ranks(who.run, who.attempt)

    def _here(self, current: SaveRound) -> set[int]:
        return self.connected.ranks(current.key.run, current.key.attempt)


def _ranks(which: list[int]) -> str:
    named = ", ".join(map(str, which[:NAMED_MAX])) + (", …" if len(which) > NAMED_MAX else "")
    return f"the part of rank {named}" if len(which) == 1 else f"the parts of ranks {named}" if which else "its parts"
