"""The saves that go on and the ranks that are here: what one lock guards, and which of it concerns other nodes too."""

from __future__ import annotations

import threading
import time

from holdfast_service.daemon.arena.segment import LEASE_DEADLINE_S
from holdfast_service.daemon.saving.connected_ranks import ConnectedRanks
from holdfast_service.daemon.saving.rounds import Participant, RoundKey, SaveRound


class GoingSaves:
    """The saver's state. A method takes the lock itself, unless it says that it is called with it."""

    def __init__(self, jointly: bool) -> None:
        """`jointly`: ranks of a save may be on other nodes as well."""
        self._jointly = jointly
        self.lock = threading.Condition()
        self.connected = ConnectedRanks()
        self.open: dict[RoundKey, SaveRound] = {}
        self.pending: dict[RoundKey, SaveRound] = {}  # complete, being saved

    def complete(self, current: SaveRound) -> None:
        """All ranks have sealed: the save is written from now on. Called with the lock."""
        current.completed = time.monotonic()
        self.pending[current.key] = self.open.pop(current.key)

    def is_open(self, current: SaveRound) -> bool:
        with self.lock:
            return self.open.get(current.key) is current

    def parts(self) -> list[SaveRound]:
        """The saves of which all ranks that are here have sealed, and others are on other nodes."""
        with self.lock:
            return [current for current in self.open.values() if self.is_part(current)]

    def is_part(self, current: SaveRound) -> bool:
        """Whether all ranks that are here have sealed, and others are on other nodes. Called with the lock."""
        if not self._jointly or not current.sealed or current.leases:
            return False
        return self._here(current) <= current.sealed.keys() and not current.complete

    def spans(self, current: SaveRound) -> bool:
        """Whether ranks of this save may be on other nodes. Called with the lock."""
        return self._jointly and len(self._here(current) | current.sealed.keys()) < current.world

    def renew(self) -> None:
        """The other nodes cannot be met: what is sealed waits."""
        with self.lock:
            for current in self.parts():
                current.deadline = time.monotonic() + LEASE_DEADLINE_S

    def is_elsewhere(self, who: Participant) -> bool:
        """Whether ranks of this rank's launch may be on other nodes."""
        with self.lock:
            return len(self.connected.ranks(who.run, who.attempt)) < who.world

    def is_told_elsewhere(self, who: Participant) -> bool:
        """Whether the node of this launch's first rank, which is another one, records how its saves go on."""
        if not self._jointly or who.rank == 0 or not self.is_elsewhere(who):
            return False
        with self.lock:
            return 0 not in self.connected.ranks(who.run, who.attempt)

    def _here(self, current: SaveRound) -> set[int]:
        return self.connected.ranks(current.key.run, current.key.attempt)
