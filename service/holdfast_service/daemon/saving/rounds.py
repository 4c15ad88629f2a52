"""State of one save (a round): one attempt to save one step, its ranks and their slots."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple

from holdfast_formats.errors import CheckpointError, RoundAborted, StateMismatch, from_problem
from holdfast_formats.staging.arena import SegmentOwner
from holdfast_formats.staging.average import GROUP as EMA
from holdfast_formats.staging.wire import Outcome
from holdfast_service.daemon.arena.segment import LEASE_DEADLINE_S, ArenaSegment, SealedSlot

ENDED_ROUNDS_MAX = 256


class RoundKey(NamedTuple):
    run: str
    step: int
    attempt: int


class LaunchKey(NamedTuple):
    run: str
    attempt: int


class Participant:
    """A rank from the saver's view: its identity, and how to send it the outcome of a save."""

    process = ""  # which process speaks, as it names itself; "" for one that does not
    parted = False  # it has disconnected regularly
    newest: int | None = None  # the step that it began to save last
    closing = False  # it begins no save any more
    awaits: int | None = None  # it begins no other save before the one of this step has ended
    heard = True  # by this daemon; an earlier one knew all others

    def __init__(self, run: str, rank: int, world: int, attempt: int, notify: Callable[[Outcome], None]) -> None:
        self.run, self.rank, self.world, self.attempt = run, rank, world, attempt
        self.notify = notify

    def begins(self, step: int) -> None:
        """It begins to save a step, so it waits for no other save any more."""
        self.awaits, self.newest = None, step

    def has_begun(self, step: int) -> None:
        """It began to save this step under an earlier daemon."""
        self.newest = step if self.newest is None else max(step, self.newest)

    def waits(self, step: int | None) -> None:
        """It begins no other save before the one of this step has ended; without a step, none any more."""
        self.awaits, self.closing = step, self.closing or step is None

    def part(self) -> None:
        """It disconnects regularly."""
        self.parted = True

    def ask_to_stop(self) -> None:
        """Ask for its progress, because its launch is to stop."""

    def is_gone(self) -> bool:
        """Whether its process has certainly ended, although its connection may not have."""
        return False

    def left_s(self) -> float | None:
        """Seconds until it counts as gone without a sign of life; None for a connection whose end the kernel reports."""
        return None

    @property
    def owner(self) -> SegmentOwner:
        """The owner of this rank's segments."""
        return SegmentOwner(self.run, self.rank, self.world, self.attempt)


class SlotLease(NamedTuple):
    segment: ArenaSegment
    slot: int
    deadline: float  # time.monotonic()


class SaveRound:
    """State of one save; guarded by the saver's lock until it is being written."""

    def __init__(self, key: RoundKey, round_id: int, world: int, deadline: float) -> None:
        self.key, self.id, self.world, self.deadline = key, round_id, world, deadline
        self.leases: dict[int, SlotLease] = {}
        self.sealed: dict[int, SealedSlot] = {}
        self.participants: dict[int, Participant] = {}
        self.began: float | None = time.monotonic()  # None when an earlier daemon began it
        self.completed = 0.0
        self.averaging: set[int] | None = None  # ranks whose slots are to get the average
        self.averaged: set[int] = set()  # those for which that was done
        self.spares: Mapping[int, str] = {}  # what ranks need not stage from now on, as in their outcomes

    @property
    def complete(self) -> bool:
        return len(self.sealed) == self.world

    @property
    def staged(self) -> dict[str, float]:
        return {"stage_s": self.completed - self.began} if self.began is not None and self.completed > 0 else {}

    def add(self, who: Participant, lease: SlotLease) -> None:
        """A rank takes part, and may fill this slot."""
        self.participants[who.rank] = who
        self.leases[who.rank] = lease

    def adopt(self, who: Participant) -> None:
        """An earlier daemon began this save, with a part of this rank. When is not known."""
        self.began = None
        self.participants[who.rank] = who

    def extend(self, rank: int | None = None) -> None:
        """Its deadline begins again; that of a rank's lease too."""
        self.deadline = time.monotonic() + LEASE_DEADLINE_S
        if rank is not None:
            self.leases[rank] = self.leases[rank]._replace(deadline=self.deadline)

    def end_staging(self) -> None:
        """All ranks have sealed."""
        self.completed = time.monotonic()

    def spare(self, spares: Mapping[int, str]) -> None:
        """What each rank need not stage from now on."""
        self.spares = spares

    def begin_averaging(self) -> dict[int, SealedSlot]:
        """The slots that are sealed so far, which are to get the average."""
        self.averaging = set(self.sealed)
        return dict(self.sealed)

    def end_averaging(self, filled: Collection[int] = ()) -> None:
        """No slot is being filled any more; those of the ranks `filled` have the average."""
        self.averaging = None
        self.averaged |= set(filled)

    def holds(self, segment: ArenaSegment) -> bool:
        """Whether a slot of this segment is taken by this round."""
        held = [*(lease.segment for lease in self.leases.values()), *(sealed.segment for sealed in self.sealed.values())]
        return segment in held

    def has_taken(self, rank: int, slot: int) -> bool:
        """Whether a rank has sealed this slot."""
        sealed = self.sealed.get(rank)
        return sealed is not None and sealed.slot == slot

    def refuse(self, who: Participant) -> None:
        """`StateMismatch` for a rank that does not belong here, or takes part already."""
        if self.world != who.world:
            raise StateMismatch(f"rank {who.rank} has a world size of {who.world}, but the save has {self.world}")
        if who.rank in self.participants:
            raise StateMismatch(f"rank {who.rank} is already saving step {self.key.step}", hint="wait for its ticket first")

    def release(self) -> None:
        for sealed in self.sealed.values():
            sealed.release()
        for lease in self.leases.values():
            lease.segment.release(lease.slot)
        self.sealed.clear()
        self.leases.clear()


def outcome_of(key: RoundKey, error: CheckpointError | None, groups: Sequence[str] = ()) -> Outcome:
    """A round's outcome for its ranks: if committed, with the missing ones of their `groups`, if these are known."""
    if error is not None:
        return Outcome(step=key.step, attempt=key.attempt, state="aborted", problem=error.problem())
    left_out = (EMA,) if groups and EMA not in groups else ()
    return Outcome(step=key.step, attempt=key.attempt, state="committed", left_out=left_out)


class GivenUp:
    """Why saves ended without a checkpoint, and which of their ranks have been told. The oldest are dropped.

    Stores only the error's content, because a traceback would keep much memory alive.
    """

    def __init__(self) -> None:
        self._ended: dict[RoundKey, tuple[set[int], dict[str, Any]]] = {}

    def add(self, key: RoundKey, knowing: set[int], error: CheckpointError) -> None:
        self._ended[key] = (knowing, error.problem())
        while len(self._ended) > ENDED_ROUNDS_MAX:
            del self._ended[next(iter(self._ended))]

    def know(self, key: RoundKey, rank: int, error: CheckpointError) -> None:
        """A rank has given up its part of a round."""
        if key in self._ended:
            self._ended[key][0].add(rank)
        else:
            self.add(key, {rank}, error)

    def refuse(self, key: RoundKey, rank: int) -> None:
        """Refuse a late rank once, because the others have lost this save; after that the step may be tried again."""
        known, problem = self._ended.get(key, (set(), None))
        if problem is not None and rank not in known:
            known.add(rank)
            raise from_problem(problem)

    def why(self, key: RoundKey, otherwise: str) -> CheckpointError:
        """What ended this save; `otherwise` if unknown."""
        _, problem = self._ended.get(key, (set(), None))
        return from_problem(problem) if problem is not None else RoundAborted(otherwise)
