"""A round as the saver keeps it: one attempt to save one step, the ranks that take part in it, and the slots they hold."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from holdfast_formats.arena import Owner
from holdfast_formats.errors import CheckpointError, RoundAborted, StateMismatch
from holdfast_formats.wire import Outcome

from .segment import SealedSlot, Segment

ENDED_ROUNDS_MAX = 256


class RoundKey(NamedTuple):
    run: str
    step: int
    attempt: int


class Participant:
    """A rank as the saver knows it: who it is, and how to tell it what became of a save."""

    def __init__(self, run: str, rank: int, world: int, attempt: int, notify: Callable[[Outcome], None]) -> None:
        self.run, self.rank, self.world, self.attempt = run, rank, world, attempt
        self.notify = notify

    @property
    def owner(self) -> Owner:
        """Whose segments are this rank's."""
        return Owner(self.run, self.rank, self.world, self.attempt)


class Lease(NamedTuple):
    segment: Segment
    slot: int
    deadline: float  # time.monotonic()


class Round:
    """Guarded by the saver's lock until it is being written."""

    def __init__(self, key: RoundKey, round_id: int, world: int, deadline: float) -> None:
        self.key, self.id, self.world, self.deadline = key, round_id, world, deadline
        self.leases: dict[int, Lease] = {}
        self.sealed: dict[int, SealedSlot] = {}
        self.participants: dict[int, Participant] = {}

    @property
    def complete(self) -> bool:
        return len(self.sealed) == self.world

    def holds(self, segment: Segment) -> bool:
        """Whether a slot of this segment is taken by this round."""
        held = [*(lease.segment for lease in self.leases.values()), *(sealed.segment for sealed in self.sealed.values())]
        return segment in held

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


class GivenUp:
    """Why rounds ended without a checkpoint, and which of their ranks know. The oldest are forgotten."""

    def __init__(self) -> None:
        self._ended: dict[RoundKey, tuple[set[int], CheckpointError]] = {}

    def add(self, key: RoundKey, knowing: set[int], error: CheckpointError) -> None:
        self._ended[key] = (knowing, error)
        while len(self._ended) > ENDED_ROUNDS_MAX:
            del self._ended[next(iter(self._ended))]

    def refuse(self, key: RoundKey, rank: int) -> None:
        """A rank that comes late to a round the others have lost is told so once; after that the step may be tried anew."""
        known, error = self._ended.get(key, (set(), None))
        if error is not None and rank not in known:
            known.add(rank)
            raise error

    def why(self, key: RoundKey, otherwise: str) -> CheckpointError:
        """What ended this round; `otherwise` where it is not known."""
        _, error = self._ended.get(key, (set(), None))
        return error or RoundAborted(otherwise)
