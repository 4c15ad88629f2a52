"""The node's shared memory. The daemon makes it, hands it to ranks as a memfd, and keeps it when they die."""

from __future__ import annotations

import logging
import os
import threading
import uuid
from collections.abc import Callable

from holdfast_formats.arena import Geometry, Owner
from holdfast_formats.errors import CheckpointError, InvalidRequest

from .budget import Budget, Room, fitting
from .keeping import Keeper
from .segment import Segment, memfd
from .spill import Spill, fewer_notice, refusal

log = logging.getLogger(__name__)

RETURN_WAIT_S = 30.0  # how long a rank's new segment waits for its old one, or a loan, where memory has no room for both


class Loan:
    """Memory of the arena's budget that is no segment, for a while. `touched` says how much of it is in use by now."""

    def __init__(self, size: int) -> None:
        self.bytes = size
        self.touched: Callable[[], int] = lambda: 0


class Arena:
    """All segments of a node, within its budget. With a `spill`, what memory has no room for is staged on disk.

    `make_room` is called before anybody gets less memory than asked for.
    """

    def __init__(
        self,
        budget: Budget,
        keeper: Keeper | None = None,
        spill: Spill | None = None,
        make_room: Callable[[], None] = lambda: None,
    ) -> None:
        self._budget, self._keeper, self._spill, self._make_room = budget, keeper, spill, make_room
        self._lock = threading.Condition()
        self._segments: set[Segment] = set()
        self._loans: set[Loan] = set()

    @property
    def bytes(self) -> int:
        """Memory that segments and loans take; segments on disk take none."""
        with self._lock:
            return self._taken()

    @property
    def slots(self) -> dict[str, int]:
        """The slots of all segments: free, held (free, with the newest commit in them) and taken (leased or sealed)."""
        with self._lock:
            segments = list(self._segments)
        free, held, taken = (sum(counts) for counts in zip((0, 0, 0), *(segment.uses for segment in segments), strict=True))
        return {"free": free, "held": held, "taken": taken}

    def reserve(self, asked: Geometry, label: str, owner: Owner | None = None) -> Segment:
        """A new segment of as many of the slots as memory has room for, or of one on disk; `notice` says if it is not all.

        Where the owner's outgrown segment is in the way, or memory that is lent, it is waited for. `LimitExceeded`, with
        the numbers, when neither memory nor disk has room for one slot. With an owner, its descriptor is kept beyond this
        daemon's death.
        """
        with self._lock:
            short = self._fitting(asked) < asked.slots
        if short:
            self._make_room()
        with self._lock:
            if self._fitting(asked) < asked.slots:
                self._lock.wait_for(lambda: self._fitting(asked) == asked.slots or not self._leaving(owner), RETURN_WAIT_S)
            segment = self._make(asked, label, owner)
            self._segments.add(segment)
        if segment.notice:
            log.warning("%s: %s", label, segment.notice)
        self._keep(segment)
        return segment

    def lend(self, size: int) -> Loan:
        """Room for so many bytes, or for as many as there are: perhaps none. Who has it calls `take_back`, and soon."""
        with self._lock:
            loan = Loan(min(size, self._room().bytes))
            self._loans.add(loan)
            return loan

    def take_back(self, loan: Loan) -> None:
        """What was lent is free again; doing so twice is harmless."""
        with self._lock:
            self._loans.discard(loan)
            self._lock.notify_all()

    def take_over(self, geometry: Geometry, owner: Owner) -> Segment | None:
        """The segment that this rank had in an earlier attempt, if it fits and its process is gone; else None.

        It is the owner's from here on, with every page in place and with what is held in it.
        """
        with self._lock:
            return next((segment for segment in self._segments if segment.pass_on(owner, geometry)), None)

    def recover(self) -> list[Segment]:
        """The segments that an earlier daemon left with the keeper; what is not one of ours is let go."""
        if self._keeper is None:
            return []
        found = []
        try:
            for name, fd in self._keeper.take():
                try:
                    found.append(Segment.adopt(fd, name))
                except (CheckpointError, OSError, ValueError) as error:
                    log.warning("shared memory %s is not adopted: %s", name, error)
                    os.close(fd)
                    self._keeper.drop(name)
        except OSError as error:
            log.error("shared memory of an earlier daemon may be lost: %s", error)
        with self._lock:
            self._segments |= set(found)
        return found

    def attach(self, fd: int, owner: Owner) -> tuple[Segment, bool]:
        """The owner's segment at a descriptor, which stays the caller's, and whether this daemon did not know it before."""
        with self._lock:
            for segment in self._segments:
                if segment.owner == owner and segment.is_at(fd):
                    segment.revive()
                    return segment, False
            ours = os.dup(fd)
            try:
                segment = Segment.adopt(ours, uuid.uuid4().hex)
            except (CheckpointError, OSError, ValueError) as error:
                os.close(ours)
                raise InvalidRequest(f"the descriptor is of no staging arena: {error}") from error
            if segment.owner != owner:
                segment.close()
                raise InvalidRequest(f"{owner} brings a segment of {segment.owner}")
            self._segments.add(segment)
        self._keep(segment)
        return segment, True

    def drop(self, segment: Segment, outgrown: bool = False) -> None:
        """Nobody needs the segment any more: give its memory back once what it holds is saved.

        A rank that has outgrown it may map it still: then its pages are given back all the same.
        """
        segment.outgrown = outgrown
        segment.retire(lambda: self._remove(segment))

    def _remove(self, segment: Segment) -> None:
        with self._lock:
            if segment not in self._segments or not segment.retired:
                return
            self._segments.discard(segment)
            if segment.outgrown:
                segment.give_back()
            self._lock.notify_all()
        if self._keeper is not None and segment.owner is not None:
            try:
                self._keeper.drop(segment.name)
            except OSError as error:
                log.warning("the holder could not be told to drop %s: %s", segment.name, error)
        segment.close()

    def _make(self, asked: Geometry, label: str, owner: Owner | None) -> Segment:
        room = self._room()
        slots = fitting(asked, room)
        if slots:
            given = asked._replace(slots=slots)
            segment = Segment.make(memfd(label, given.segment_bytes), given, owner)
            segment.notice = fewer_notice(asked, slots, room) if slots < asked.slots else ""
            return segment
        if self._spill is None:
            raise refusal(label, asked, self._taken(), room, "")
        try:
            fd, given, notice = self._spill.make(asked, room)
        except CheckpointError as error:
            raise refusal(label, asked, self._taken(), room, f"; nor can it be staged on disk: {error.detail}") from error
        segment = Segment.make(fd, given, owner, spilled=True)
        segment.notice = notice
        return segment

    def _taken(self) -> int:
        segments = sum(segment.geometry.segment_bytes for segment in self._segments if not segment.spilled)
        return segments + sum(loan.bytes for loan in self._loans)

    def _room(self) -> Room:
        touched = sum(segment.touched_bytes for segment in self._segments if not segment.spilled)
        touched += sum(loan.touched() for loan in self._loans)
        return self._budget.room(self._taken(), touched)

    def _fitting(self, asked: Geometry) -> int:
        return fitting(asked, self._room())

    def _leaving(self, owner: Owner | None) -> bool:
        """Whether memory is lent, or a segment of this rank's, be it of an earlier attempt, goes once it is saved."""
        if self._loans:
            return True
        who = owner and owner._replace(attempt=0)
        return any(s.retired and s.owner is not None and s.owner._replace(attempt=0) == who for s in self._segments)

    def _keep(self, segment: Segment) -> None:
        if self._keeper is None or segment.owner is None:
            return
        try:
            self._keeper.keep(segment.name, segment.fd)
        except OSError as error:
            log.warning("nobody keeps shared memory while no daemon lives, but the ranks themselves: %s", error)
