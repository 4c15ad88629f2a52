"""A round as the saver keeps it: one attempt to save one step, the ranks that take part in it, and the slots they hold."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

from holdfast_formats.errors import CheckpointError, RoundAborted, StateMismatch, from_problem
from holdfast_formats.staging.arena import SegmentOwner
from holdfast_formats.staging.wire import Outcome
from holdfast_service.daemon.arena.segment import ArenaSegment, SealedSlot

ENDED_ROUNDS_MAX = 256


class RoundKey(NamedTuple):
    run: str
    step: int
    attempt: int


class Participant:
    """A rank as the saver knows it: who it is, and how to tell it what became of a save."""

    process = ""  # which process speaks, as it names itself; "" for one that does not
    remote = False
    parted = False  # it has said goodbye

    def __init__(self, run: str, rank: int, world: int, attempt: int, notify: Callable[[Outcome], None]) -> None:
        self.run, self.rank, self.world, self.attempt = run, rank, world, attempt
        self.notify = notify

    def is_gone(self) -> bool:
        """Whether its process has ended for sure, though its connection may not have."""
        return False

    def silent_s(self) -> float:
        """Since when nothing was heard of it, in seconds; 0 for one whose connection the kernel holds."""
        return 0.0

    @property
    def owner(self) -> SegmentOwner:
        """Whose segments are this rank's."""
        return SegmentOwner(self.run, self.rank, self.world, self.attempt)


class SlotLease(NamedTuple):
    segment: ArenaSegment
    slot: int
    deadline: float  # time.monotonic()


class SaveRound:
    """Guarded by the saver's lock until it is being written."""

    def __init__(self, key: RoundKey, round_id: int, world: int, deadline: float) -> None:
        self.key, self.id, self.world, self.deadline = key, round_id, world, deadline
        self.leases: dict[int, SlotLease] = {}
        self.sealed: dict[int, SealedSlot] = {}
        self.participants: dict[int, Participant] = {}
        self.began: float | None = time.monotonic()  # None when an earlier daemon began it
        self.completed = 0.0

    @property
    def complete(self) -> bool:
        return len(self.sealed) == self.world

    @property
    def staged(self) -> dict[str, float]:
        """Seconds from the first lease to the last seal, where both were seen."""
        seen = self.began is not None and self.completed > 0
        return {"stage_s": self.completed - self.began} if self.began is not None and seen else {}

    def holds(self, segment: ArenaSegment) -> bool:
        """Whether a slot of this segment is taken by this round."""
        held = [*(lease.segment for lease in self.leases.values()), *(sealed.segment for sealed in self.sealed.values())]
        return segment in held

    def has_taken(self, rank: int, slot: int) -> bool:
        """Whether this slot is the part that a rank has sealed."""
        sealed = self.sealed.get(rank)
        return sealed is not None and sealed.slot == slot

    def refuse(self, who: Participant) -> None:
        """`StateMismatch` for a rank that does not belong here, or takes part already."""
        if self.world != who.world:
            raise StateMismatch(f"rank {who.rank} says the world has {who.world} ranks, not {self.world}")
        if who.rank in self.participants:
            raise StateMismatch(f"rank {who.rank} saves step {self.key.step} twice", hint="wait for its ticket first")

    def release(self) -> None:
        for sealed in self.sealed.values():
            sealed.release()
        for lease in self.leases.values():
            lease.segment.release(lease.slot)
        self.sealed.clear()
        self.leases.clear()


def outcome_of(key: RoundKey, error: CheckpointError | None) -> Outcome:
    """What ranks are told of a round that has ended."""
    state: Literal["committed", "aborted"] = "committed" if error is None else "aborted"
    return Outcome(step=key.step, attempt=key.attempt, state=state, problem=error.problem() if error else None)


class GivenUp:
    """Why rounds ended without a checkpoint, and which of their ranks know. The oldest are forgotten.

    Of an error is kept what it says: its traceback leads to whoever met it, and to all memory that was at hand there.
    """

    def __init__(self) -> None:
        self._ended: dict[RoundKey, tuple[set[int], dict[str, Any]]] = {}

    def add(self, key: RoundKey, knowing: set[int], error: CheckpointError) -> None:
        self._ended[key] = (knowing, error.problem())
        while len(self._ended) > ENDED_ROUNDS_MAX:
            del self._ended[next(iter(self._ended))]

    def know(self, key: RoundKey, rank: int, error: CheckpointError) -> None:
        """A rank has given up its part of a round, whether or not others have."""
        if key in self._ended:
            self._ended[key][0].add(rank)
        else:
            self.add(key, {rank}, error)

    def refuse(self, key: RoundKey, rank: int) -> None:
        """A rank that comes late to a round the others have lost is told so once; after that the step may be tried anew."""
        known, problem = self._ended.get(key, (set(), None))
        if problem is not None and rank not in known:
            known.add(rank)
            raise from_problem(problem)

    def why(self, key: RoundKey, otherwise: str) -> CheckpointError:
        """What ended this round; `otherwise` where it is not known."""
        _, problem = self._ended.get(key, (set(), None))
        return from_problem(problem) if problem is not None else RoundAborted(otherwise)
