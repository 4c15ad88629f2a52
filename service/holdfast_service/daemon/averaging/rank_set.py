"""The ranks of one attempt whose averages are here, and their saves that need them."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import NamedTuple

from holdfast_formats.errors import CheckpointError
from holdfast_service.daemon.arena.average_segment import AverageSegment
from holdfast_service.daemon.arena.segment import SealedSlot

RETURN_S = 60.0  # how long an average waits for its rank, and a save for its averages

Filled = Callable[[CheckpointError | None], None]


class RankSetKey(NamedTuple):
    run: str
    attempt: int
    world: int


class PendingFill:
    """A save that waits for the average: its slots here, and the callback once they have it."""

    def __init__(self, parts: Mapping[int, SealedSlot], then: Filled) -> None:
        self.parts, self.then = dict(parts), then
        self.deadline = time.monotonic() + RETURN_S
        table = next(iter(self.parts.values())).table
        self.step = table.step
        self.after = 0 if table.average is None else table.average.after  # updates that came before the save

    @property
    def is_late(self) -> bool:
        return time.monotonic() >= self.deadline

    def renew(self) -> None:
        """Extend the wait while other nodes cannot be reached."""
        self.deadline = time.monotonic() + RETURN_S


class AveragingRanks:
    """The averages of one attempt's ranks here, and the saves that need them, oldest first. Guarded by the lock of
    `Averages`.
    """

    def __init__(self) -> None:
        self.segments: dict[int, AverageSegment] = {}
        self.users: dict[int, object] = {}
        self.fills: list[PendingFill] = []
        self.filling: PendingFill | None = None  # which is being put into its slots at this moment
        self.left_at = time.monotonic()  # when the last user went

    def unused(self, now: float) -> bool:
        return not self.users and not self.fills and now - self.left_at > RETURN_S

    def leave(self, rank: int, user: object, parted: bool) -> bool:
        """The connection `user` of a rank has ended; `parted`: regularly. False if the rank has another one now."""
        if self.users.get(rank) is not user:
            return False
        del self.users[rank]
        self.left_at = time.monotonic() - (RETURN_S if parted else 0.0)
        return True

    def begin_fill(self) -> PendingFill | None:
        """The oldest save: its slots are filled from now on."""
        self.filling = self.fills[0] if self.fills else None
        return self.filling

    def end_fill(self, fill: PendingFill, done: bool) -> None:
        """Its slots are filled, or it waits again."""
        self.filling = None
        if done:
            self.fills.remove(fill)

    def give_up(self) -> list[PendingFill]:
        """The saves, none of which waits any more."""
        fills, self.fills = self.fills, []
        return fills

    def add(self, fill: PendingFill) -> None:
        self.fills.append(fill)
        self.fills.sort(key=lambda one: one.after)

    def withdraw(self, step: int) -> bool:
        """Stop a save's wait for the average. False if it does not wait: its slots are being filled, or are filled."""
        fill = next((one for one in self.fills if one.step == step and one is not self.filling), None)
        if fill is not None:
            self.fills.remove(fill)
        return fill is not None
