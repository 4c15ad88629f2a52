"""The node's shared memory. The daemon creates it, passes it to ranks as a memfd, and keeps it when they die."""

from __future__ import annotations

import logging
import os
import threading
import uuid
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from holdfast_formats.errors import CheckpointError, InvalidRequest, LimitExceeded, StorageFailed
from holdfast_formats.memory_bounds import Bound
from holdfast_formats.staging.arena import Geometry, SegmentOwner
from holdfast_formats.staging.room import SegmentRoom, fewer_notice, fitting
from holdfast_service.daemon.arena.average_segment import PREFIX, AverageSegment
from holdfast_service.daemon.arena.budget import Budget, largest_segment, own_limits
from holdfast_service.daemon.arena.fd_keeper import DescriptorKeeper
from holdfast_service.daemon.arena.segment import ArenaSegment, memfd
from holdfast_service.daemon.arena.shares import OwnLimit, ShareHolder, Shares, left
from holdfast_service.daemon.arena.spill import NO_FILE, Spill, refusal

log = logging.getLogger(__name__)

RETURN_WAIT_S = 30.0  # how long a rank's new segment waits for its old one where memory has no room for both
RAISE_OWN = "raise the memory limit of the trainer's container or control group, or save a smaller state with fewer slots"
NAMED_MAX = 10  # runs that a refusal names in the log


class Arena:
    """All segments of a node, within its budget. With a `spill`, a state that does not fit memory is staged on disk.

    `make_room` is called before a rank gets less memory than requested. `shares` are the percentages of memory and disk, of
    what others have not reserved, that one run and one tenant may reserve.
    """

    def __init__(
        self,
        budget: Budget,
        keeper: DescriptorKeeper | None = None,
        spill: Spill | None = None,
        make_room: Callable[[], None] = lambda: None,
        shares: Shares = Shares(),  # noqa: B008 - a value
    ) -> None:
        self._budget, self._keeper, self._spill, self._make_room = budget, keeper, spill, make_room
        self.shares = shares
        self._lock = threading.Condition()
        self._segments: set[ArenaSegment] = set()
        self._averages: set[AverageSegment] = set()
        self._expected: dict[tuple[str, int], tuple[ShareHolder, int]] = {}  # averages to come, by run and rank
        self._reserving: Counter[str] = Counter()  # how many ranks of each run reserve slots, and expect averages

    @property
    def bytes(self) -> int:
        """Memory reserved by segments; those on disk count zero."""
        with self._lock:
            return self._taken()

    @property
    def bytes_max(self) -> int:
        return self._budget.bytes_max

    @property
    def spare_bytes(self) -> int:
        with self._lock:
            return self._budget.room(self._taken(), self._touched()).bytes

    @property
    def slots(self) -> dict[str, int]:
        """The slots of all segments: free, held (free, with an in-memory checkpoint) and taken (leased or sealed)."""
        with self._lock:
            segments = list(self._segments)
        free, held, taken = (sum(counts) for counts in zip((0, 0, 0), *(segment.uses for segment in segments), strict=True))
        return {"free": free, "held": held, "taken": taken}

    @property
    def holders(self) -> dict[str, int]:
        with self._lock:
            return dict(self._by_run().most_common())

    def has(self, run: str) -> bool:
        """Whether this run has a segment, in memory or on disk, of any attempt."""
        with self._lock:
            return any(one.holder.run == run for one in self._all())

    def limits(self, bounds: Sequence[Bound], whose: str) -> tuple[OwnLimit, ...]:
        """What a rank's own current limits leave for its segments; to be called before it frees any."""

        def touched(group: str) -> int:
            return sum(one.touched_bytes for one in self._all() if not one.spilled and one.holder.is_in(group))

        with self._lock:
            return own_limits(bounds, whose, touched)

    def reserve(
        self,
        asked: Geometry,
        label: str,
        owner: SegmentOwner | None = None,
        holder: ShareHolder | None = None,
        on_disk: bool = True,
    ) -> ArenaSegment:
        """Create a segment with as many of the requested slots as memory has room for, or with one slot on disk; `notice`
        explains a smaller one.

        Waits if the owner's old segment is in the way. Raises `LimitExceeded`, with the numbers, if neither memory nor disk
        has room for one slot. With an owner, the descriptor outlives this daemon. The memory counts for the share of
        `holder`, by default the owner's run. `on_disk`: whether it may be a file, which any process with its descriptor can
        truncate, which kills a process that has mapped it.
        """
        holder = holder or ShareHolder(label if owner is None else owner.run)
        with self._lock:
            short = self._fitting(asked, holder) < asked.slots
        if short:
            self._make_room()
        with self._lock:
            if self._fitting(asked, holder) < asked.slots:
                self._lock.wait_for(
                    lambda: self._fitting(asked, holder) == asked.slots or not self._leaving(owner), RETURN_WAIT_S
                )
            segment = self._make(asked, label, owner, holder, on_disk)
            self._segments.add(segment)
        if segment.notice:
            log.warning("%s: %s", label, segment.notice)
        self._keep(segment)
        return segment

    @contextmanager
    def leaving(self, size: int, owner: SegmentOwner, holder: ShareHolder, ranks: int = 1) -> Iterator[None]:
        """Within the block, all reservations leave `size` bytes free for an average of this rank, and of each of the `ranks`
        started here with it. Later ones do too, until these are reserved or the run has no segment any more.
        """
        first = owner.rank - owner.rank % ranks
        with self._lock:
            for rank in range(first, first + ranks):
                self._expected.setdefault((owner.run, rank), (holder, size))
            self._expected[owner.run, owner.rank] = holder, size
            self._reserving[owner.run] += 1
        try:
            yield
        finally:
            with self._lock:
                self._reserving -= Counter((owner.run,))
            self._forget_expected(owner.run)

    def _forget_expected(self, run: str) -> None:
        """Release what is kept free for averages of a run without a segment, and without a running reservation."""
        with self._lock:
            if not self._reserving[run] and not any(
                one.owner is not None and one.owner.run == run for one in self._segments
            ):
                self._expected = {rank: held for rank, held in self._expected.items() if rank[0] != run}

    def take_over(self, geometry: Geometry, owner: SegmentOwner) -> ArenaSegment | None:
        """Reuse the segment of this rank from an earlier attempt, if it fits and its process is gone; otherwise None.

        It now belongs to the owner, with all pages in place and with its in-memory checkpoint.
        """
        with self._lock:
            return next((segment for segment in self._segments if segment.pass_on(owner, geometry)), None)

    def recover(self) -> list[ArenaSegment]:
        """The segments that an earlier daemon left with the keeper; others are released."""
        if self._keeper is None:
            return []
        segments = []
        try:
            for name, fd in self._keeper.take():
                try:
                    if name.startswith(PREFIX):
                        self._averages.add(AverageSegment.adopt(fd, name))
                    else:
                        segments.append(ArenaSegment.adopt(fd, name))
                except (CheckpointError, OSError, ValueError) as error:
                    log.warning("cannot adopt the shared memory %s: %s", name, error)
                    os.close(fd)
                    self._keeper.drop(name)
        except OSError as error:
            log.error("shared memory of an earlier daemon may be lost: %s", error)
        with self._lock:
            self._segments |= set(segments)
        return segments

    def averages(self) -> list[AverageSegment]:
        """All averages: those of an earlier daemon, after `recover`."""
        with self._lock:
            return list(self._averages)

    def admit(
        self, owner: SegmentOwner, size: int, holder: ShareHolder, make: Callable[[], AverageSegment]
    ) -> AverageSegment:
        """Make an average of `size` bytes, which count as slots do. `LimitExceeded`, with the numbers, without room.

        Its room stays reserved meanwhile: its rank may be reserving slots at the same moment.
        """
        with self._lock:
            short = self._room_for_average(owner, holder).bytes < size
        if short:
            self._make_room()
        with self._lock:
            room = self._room_for_average(owner, holder)
            self._expected.pop((owner.run, owner.rank), None)
            if room.bytes < size:
                raise LimitExceeded(
                    f"rank {owner.rank} of {owner.run} needs {size} bytes of memory for the average; {self._taken()} are "
                    f"reserved, and {room.bytes} are left of {room.name}",
                    hint=room.remedy
                    or "free memory, start the daemon with a larger --arena-bytes-max, or train without ema=",
                    needed=size,
                    left=room.bytes,
                )
            segment = make()
            segment.count_for(holder)
            self._averages.add(segment)
        self._keep(segment)
        return segment

    def take_in(self, segment: AverageSegment, holder: ShareHolder) -> None:
        """Accept an average that its rank has brought. A tenant's counts for its share, as in `attach`."""
        with self._lock:
            self._check_brought(segment.bytes, holder)
            segment.count_for(holder)
            self._averages.add(segment)
        self._keep(segment)

    def let_go(self, segment: AverageSegment) -> None:
        with self._lock:
            if segment not in self._averages:
                return
            self._averages.discard(segment)
            self._lock.notify_all()
        self._forget(segment)
        segment.close()

    def attach(self, fd: int, owner: SegmentOwner, tenant: str = "") -> tuple[ArenaSegment, list[int]]:
        """The owner's segment at a descriptor, which stays the caller's, and the slots that the rank leased without us.

        A tenant brings no file, which could be truncated under us, and no more memory than its share of an empty arena.
        """
        with self._lock:
            holder = ShareHolder(owner.run, tenant)
            for segment in self._segments:
                if segment.owner == owner and segment.is_at(fd):
                    segment.count_for(holder)
                    segment.revive()
                    return segment, segment.find_taken()
            ours = os.dup(fd)
            try:
                segment = ArenaSegment.adopt(ours, uuid.uuid4().hex, on_disk=not tenant)
            except (CheckpointError, OSError, ValueError) as error:
                os.close(ours)
                raise InvalidRequest(f"the descriptor is not a staging arena: {error}") from error
            if segment.owner != owner:
                segment.close()
                raise InvalidRequest(f"{owner} brings a segment of {segment.owner}")
            segment.count_for(holder)
            try:
                self._check_brought(segment.geometry.segment_bytes, holder)
            except LimitExceeded:
                segment.close()
                raise
            self._segments.add(segment)
        self._keep(segment)
        return segment, segment.taken

    def drop(self, segment: ArenaSegment, outgrown: bool = False) -> None:
        """The segment is no longer needed: free its memory once its saves are written.

        Its pages are freed even if a rank still maps it.
        """
        segment.retire(lambda: self._remove(segment), outgrown)

    def _remove(self, segment: ArenaSegment) -> None:
        with self._lock:
            if segment not in self._segments or not segment.retired:
                return
            self._segments.discard(segment)
            if segment.outgrown:
                segment.give_back()
            self._lock.notify_all()
        if segment.owner is not None:
            self._forget_expected(segment.owner.run)
        self._forget(segment)
        segment.close()

    def _forget(self, segment: ArenaSegment | AverageSegment) -> None:
        if self._keeper is not None and segment.owner is not None:
            try:
                self._keeper.drop(segment.name)
            except OSError as error:
                log.warning("could not tell the holder process to drop %s: %s", segment.name, error)

    def _check_brought(self, size: int, holder: ShareHolder) -> None:
        """`LimitExceeded` for memory that this holder's ranks cannot have got from any daemon of this node."""
        others = [(whose, held) for whose, held in self._held() if whose.tenant == holder.tenant]
        share = left(self.shares, self._budget.bytes_max, others, holder)
        if holder.tenant and size > share.bytes_left:
            raise LimitExceeded(
                f"a rank of {holder.run} brings {size} bytes of memory; {share.bytes_left} are left of "
                f"{self._budget.bytes_max} "
                f"bytes, {share.name}",
                hint="restart the trainer, or start the daemon with a larger --arena-bytes-max or --run-share",
            )

    def _make(
        self, asked: Geometry, label: str, owner: SegmentOwner | None, holder: ShareHolder, on_disk: bool
    ) -> ArenaSegment:
        room = self._room(holder)
        slots, memory = fitting(asked, room), None
        if slots:
            try:
                memory = memfd(label, asked._replace(slots=slots).segment_bytes)
            except StorageFailed as error:
                room = SegmentRoom(0, error.detail, error.hint)
        if memory is not None:
            notice = fewer_notice(asked, slots, room) if slots < asked.slots else ""
            segment = ArenaSegment.make(memory, asked._replace(slots=slots), owner, notice=notice)
        elif not on_disk:
            raise refusal(label, asked, self._taken(), room, NO_FILE)
        else:
            segment = self._make_on_disk(asked, label, owner, holder, room)
        segment.count_for(holder)
        return segment

    def _make_on_disk(
        self, asked: Geometry, label: str, owner: SegmentOwner | None, holder: ShareHolder, room: SegmentRoom
    ) -> ArenaSegment:
        try:
            if self._spill is None:
                raise refusal(label, asked, self._taken(), room, "")
            try:
                fd, given, notice = self._spill.make(asked, room, self._room_on_disk(holder, self._spill))
            except CheckpointError as error:
                why = f"; nor can it be staged on disk: {error.detail}"
                raise refusal(label, asked, self._taken(), room, why) from error
        except CheckpointError:
            held = ", ".join(f"{run} {size}" for run, size in self._by_run().most_common(NAMED_MAX))
            log.warning("no memory for %s; bytes reserved: %s", label, held or "none")
            raise
        return ArenaSegment.make(fd, given, owner, spilled=True, notice=notice)

    def _held(self) -> Iterator[tuple[ShareHolder, int]]:
        """All reserved memory with its holders."""
        for segment in self._segments:
            if not segment.spilled:
                yield segment.holder, segment.geometry.segment_bytes
        for average in self._averages:
            yield average.holder, average.bytes
        with_average = {(average.owner.run, average.owner.rank) for average in self._averages}
        yield from (held for rank, held in self._expected.items() if rank not in with_average)

    def _by_run(self) -> Counter[str]:
        sizes: Counter[str] = Counter()
        for holder, size in self._held():
            sizes[holder.run] += size
        return sizes

    def _taken(self) -> int:
        return sum(size for _, size in self._held())

    def _touched(self) -> int:
        return sum(one.touched_bytes for one in self._all() if not one.spilled)

    def _all(self) -> Iterator[ArenaSegment | AverageSegment]:
        yield from self._segments
        yield from self._averages

    def _room(self, holder: ShareHolder) -> SegmentRoom:
        """What this holder may have now, by free memory, its share, and its own limits."""
        room = self._budget.room(self._taken(), self._touched())
        share = left(self.shares, self._budget.bytes_max, self._held(), holder)
        shared = SegmentRoom(share.bytes_left, f"{self._budget.name}, {self._budget.bytes_max} bytes, {share.name}")
        own = [SegmentRoom(max(of.bytes - self._charged(of.group), 0), of.name, RAISE_OWN) for of in holder.limits]
        return min(room, shared, *own, *largest_segment())

    def _room_for_average(self, owner: SegmentOwner, holder: ShareHolder) -> SegmentRoom:
        """What the average of this rank may have, including what is kept free for it."""
        rank = owner.run, owner.rank
        left_for_it = self._expected.pop(rank, None)
        room = self._room(holder)
        if left_for_it is not None:
            self._expected[rank] = left_for_it
        return room

    def _charged(self, group: str) -> int:
        """What segments may take of a control group."""
        return sum(size for holder, size in self._held() if holder.is_in(group))

    def _room_on_disk(self, holder: ShareHolder, disk: Spill) -> SegmentRoom:
        spilled = [(s.holder, s.geometry.segment_bytes) for s in self._segments if s.spilled]
        total = disk.free_bytes() + sum(size for _, size in spilled)
        share = left(self.shares, total, spilled, holder)
        rooms = [SegmentRoom(share.bytes_left, f"the disk's {total} bytes, {share.name}")]
        for quota in disk.quotas(holder.run):
            held = sum(size for whose, size in spilled if quota.covers(whose.run))
            name = f"{quota.name}, {quota.bytes} bytes, of which {held} are staged"
            rooms.append(SegmentRoom(max(quota.bytes - held, 0), name))
        return min(rooms)

    def _fitting(self, asked: Geometry, holder: ShareHolder) -> int:
        return fitting(asked, self._room(holder))

    def _leaving(self, owner: SegmentOwner | None) -> bool:
        """Whether a segment of this rank, of any attempt, is freed after its save."""
        who = owner and owner._replace(attempt=0)
        return any(s.retired and s.owner is not None and s.owner._replace(attempt=0) == who for s in self._segments)

    def _keep(self, segment: ArenaSegment | AverageSegment) -> None:
        if self._keeper is None or segment.owner is None:
            return
        try:
            self._keeper.keep(segment.name, segment.fd)
        except OSError as error:
            log.warning("while no daemon runs, only the ranks keep shared memory: %s", error)
