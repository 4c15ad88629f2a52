"""The memory budget of the arena: limits of the machine, of the daemon's control groups and of each rank's; free memory.

Segments are memfds, which are charged like other memory. The size of /dev/shm limits only its own mount, so it is ignored. A
page is charged to the control group that touches it first, usually the rank's, which reports its limits when it reserves: a
daemon in its own container sees only the machine's and its own.
"""

from __future__ import annotations

import resource
from collections.abc import Callable, Iterator, Sequence

from holdfast_formats import memory_bounds
from holdfast_formats.errors import LimitExceeded
from holdfast_formats.memory_bounds import Bound
from holdfast_formats.staging.room import FILE_SIZE_HINT, SegmentRoom
from holdfast_service.daemon.arena.shares import OwnLimit

SHARE_PERCENT = 94  # of the narrowest limit, for the arena, where no budget is declared; a run alone may have 96 % of that


class Budget:
    """The arena's limit: as configured, or most of the narrowest limit found; never more than what is free."""

    def __init__(self, declared: int | None = None, find: Callable[[], list[Bound]] | None = None) -> None:
        """`LimitExceeded`, with the numbers, for a configured limit beyond what there is."""
        self._find = find or find_bounds
        narrowest = min(self._find(), key=lambda bound: bound.bytes_max)
        if declared is not None and declared > narrowest.bytes_max:
            raise LimitExceeded(
                f"--arena-bytes-max is {declared}, but {narrowest.name} allows {narrowest.bytes_max} bytes in "
                f"all, of which {narrowest.free} are free now",
                hint=f"set at most {narrowest.bytes_max * SHARE_PERCENT // 100}, or leave it out to get that value",
            )
        self.name = "--arena-bytes-max" if declared is not None else f"{SHARE_PERCENT} % of {narrowest.name}"
        self.bytes_max = declared if declared is not None else narrowest.bytes_max * SHARE_PERCENT // 100

    def room(self, taken: int, touched: int) -> SegmentRoom:
        """How much more may be reserved, given the bytes reserved and touched so far."""
        promised = taken - touched  # not missing from what is free yet, and spoken for
        rooms = [SegmentRoom(self.bytes_max - taken, f"{self.name}, {self.bytes_max} bytes")]
        for bound in self._find():
            rooms.append(SegmentRoom(bound.usable - promised, f"{bound.name}, {bound.bytes_max} bytes"))
        narrowest = min(rooms)
        return narrowest._replace(bytes=max(narrowest.bytes, 0))

    def covers(self, promised: int) -> bool:
        """Whether so many bytes, reserved and not touched yet, are still free."""
        return all(bound.usable >= promised for bound in self._find())


def find_bounds() -> list[Bound]:
    """All limits of this process's memory, the machine first."""
    return [memory_bounds.of_machine(), *memory_bounds.of_process()]


def own_limits(bounds: Sequence[Bound], whose: str, touched: Callable[[str], int]) -> tuple[OwnLimit, ...]:
    """What a rank's own limits leave for its segments, given how much those of each control group have touched."""
    return tuple(
        OwnLimit(
            of.group,
            of.usable + (touched(of.group) if of.group else 0),
            f"{whose} own limit, {of.name}, {of.bytes_max} bytes",
        )
        for of in bounds
    )


def largest_segment() -> Iterator[SegmentRoom]:
    """What a limit on file sizes leaves for one segment, which is a file to the kernel."""
    limit, _ = resource.getrlimit(resource.RLIMIT_FSIZE)
    if limit != resource.RLIM_INFINITY:
        yield SegmentRoom(limit, f"RLIMIT_FSIZE, {limit} bytes", FILE_SIZE_HINT.format("the daemon"))
