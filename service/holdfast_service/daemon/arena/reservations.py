"""What is reserved of a node's memory, and of its disk for staging: for which runs, and what is left."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from holdfast_formats.errors import LimitExceeded
from holdfast_formats.staging.arena import Geometry, SegmentOwner
from holdfast_formats.staging.room import SegmentRoom, fitting
from holdfast_service.daemon.arena.average_segment import AverageSegment
from holdfast_service.daemon.arena.budget import Budget, largest_segment
from holdfast_service.daemon.arena.segment import ArenaSegment
from holdfast_service.daemon.arena.shares import ShareHolder, Shares, left
from holdfast_service.daemon.arena.spill import Spill

RAISE_OWN = "raise the memory limit of the trainer's container or control group, or save a smaller state with fewer slots"


class Reservations:
    """The segments of a node, and the averages to come. Not thread-safe: guarded by the arena's lock."""

    def __init__(self, budget: Budget, shares: Shares) -> None:
        self._budget, self._shares = budget, shares
        self.segments: set[ArenaSegment] = set()
        self.averages: set[AverageSegment] = set()
        self._expected: dict[tuple[str, int], tuple[ShareHolder, int]] = {}  # averages to come, by run and rank
        self._reserving: Counter[str] = Counter()  # how many ranks of each run reserve slots, and expect averages

    def expect(self, size: int, owner: SegmentOwner, holder: ShareHolder, ranks: int) -> None:
        """A rank reserves slots: leave `size` bytes free for its average, and for those of the `ranks` started with it."""
        first = owner.rank - owner.rank % ranks
        for rank in range(first, first + ranks):
            self._expected.setdefault((owner.run, rank), (holder, size))
        self._expected[owner.run, owner.rank] = holder, size
        self._reserving[owner.run] += 1

    def has_reserved(self, run: str) -> None:
        """A rank of a run has reserved its slots, or failed to."""
        self._reserving -= Counter((run,))

    def forget_expected(self, run: str) -> None:
        """Release what is kept free for averages of a run without a segment, and without a running reservation."""
        if not self._reserving[run] and not any(one.owner is not None and one.owner.run == run for one in self.segments):
            self._expected = {rank: held for rank, held in self._expected.items() if rank[0] != run}

    def expect_no_more(self, owner: SegmentOwner) -> None:
        """The average of this rank is made now, or never."""
        self._expected.pop((owner.run, owner.rank), None)

    def check_brought(self, size: int, holder: ShareHolder) -> None:
        """`LimitExceeded` for memory that this holder's ranks cannot have got from any daemon of this node."""
        others = [(whose, held) for whose, held in self.held() if whose.tenant == holder.tenant]
        share = left(self._shares, self._budget.bytes_max, others, holder)
        if holder.tenant and size > share.bytes_left:
            raise LimitExceeded(
                f"a rank of {holder.run} brings {size} bytes of memory; {share.bytes_left} are left of "
                f"{self._budget.bytes_max} "
                f"bytes, {share.name}",
                hint="restart the trainer, or start the daemon with a larger --arena-bytes-max or --run-share",
            )

    def held(self) -> Iterator[tuple[ShareHolder, int]]:
        """All reserved memory with its holders."""
        for segment in self.segments:
            if not segment.spilled:
                yield segment.holder, segment.geometry.segment_bytes
        for average in self.averages:
            yield average.holder, average.bytes
        with_average = {(average.owner.run, average.owner.rank) for average in self.averages}
        yield from (held for rank, held in self._expected.items() if rank not in with_average)

    def by_run(self) -> Counter[str]:
        sizes: Counter[str] = Counter()
        for holder, size in self.held():
            sizes[holder.run] += size
        return sizes

    @property
    def bytes(self) -> int:
        """Memory reserved by segments; those on disk count zero."""
        return sum(size for _, size in self.held())

    @property
    def touched_bytes(self) -> int:
        return sum(one.touched_bytes for one in self.all() if not one.spilled)

    def all(self) -> Iterator[ArenaSegment | AverageSegment]:
        yield from self.segments
        yield from self.averages

    def room(self, holder: ShareHolder) -> SegmentRoom:
        """What this holder may have now, by free memory, its share, and its own limits."""
        room = self._budget.room(self.bytes, self.touched_bytes)
        share = left(self._shares, self._budget.bytes_max, self.held(), holder)
        shared = SegmentRoom(share.bytes_left, f"{self._budget.name}, {self._budget.bytes_max} bytes, {share.name}")
        own = [SegmentRoom(max(of.bytes - self._charged(of.group), 0), of.name, RAISE_OWN) for of in holder.limits]
        return min(room, shared, *own, *largest_segment())

    def covers(self, holder: ShareHolder) -> bool:
        """Whether all that is reserved and not used yet could be used now, also by this holder's limits."""
        own = all(of.bytes >= self._charged(of.group) for of in holder.limits if of.group)
        return own and self._budget.covers(self.bytes - self.touched_bytes)

    def room_for_average(self, owner: SegmentOwner, holder: ShareHolder) -> SegmentRoom:
        """What the average of this rank may have, including what is kept free for it."""
        rank = owner.run, owner.rank
        left_for_it = self._expected.pop(rank, None)
        room = self.room(holder)
        if left_for_it is not None:
            self._expected[rank] = left_for_it
        return room

    def _charged(self, group: str) -> int:
        """What segments may take of a control group."""
        return sum(size for holder, size in self.held() if holder.is_in(group))

    def room_on_disk(self, holder: ShareHolder, disk: Spill) -> SegmentRoom:
        spilled = [(s.holder, s.geometry.segment_bytes) for s in self.segments if s.spilled]
        total = disk.free_bytes() + sum(size for _, size in spilled)
        share = left(self._shares, total, spilled, holder)
        rooms = [SegmentRoom(share.bytes_left, f"the disk's {total} bytes, {share.name}")]
        for quota in disk.quotas(holder.run):
            held = sum(size for whose, size in spilled if quota.covers(whose.run))
            name = f"{quota.name}, {quota.bytes} bytes, of which {held} are staged"
            rooms.append(SegmentRoom(max(quota.bytes - held, 0), name))
        return min(rooms)

    def fitting(self, asked: Geometry, holder: ShareHolder) -> int:
        return fitting(asked, self.room(holder))

    def has_retired(self, owner: SegmentOwner | None) -> bool:
        """Whether a segment of this rank, of any attempt, is freed after its save."""
        who = owner and owner._replace(attempt=0)
        return any(s.retired and s.owner is not None and s.owner._replace(attempt=0) == who for s in self.segments)
