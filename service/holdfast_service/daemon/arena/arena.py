"""The node's shared memory. The daemon creates it, passes it to ranks as a memfd, and keeps it when they die."""

from __future__ import annotations

import logging
import os
import threading
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from holdfast_formats.errors import CheckpointError, InvalidRequest, LimitExceeded, StorageFailed
from holdfast_formats.memory_bounds import Bound
from holdfast_formats.staging.arena import Geometry, SegmentOwner
from holdfast_formats.staging.room import SegmentRoom, fewer_notice, fitting
from holdfast_service.daemon.arena.average_segment import PREFIX, AverageSegment
from holdfast_service.daemon.arena.budget import Budget, own_limits
from holdfast_service.daemon.arena.fd_keeper import DescriptorKeeper
from holdfast_service.daemon.arena.reservations import Reservations
from holdfast_service.daemon.arena.segment import ArenaSegment, memfd
from holdfast_service.daemon.arena.shares import OwnLimit, ShareHolder, Shares
from holdfast_service.daemon.arena.spill import NO_FILE, Spill, refusal

log = logging.getLogger(__name__)

RETURN_WAIT_S = 30.0  # how long a rank's new segment waits for its old one where memory has no room for both
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
        self._reserved = Reservations(budget, shares)
        self._lock = threading.Condition()

    @property
    def bytes(self) -> int:
        """Memory reserved by segments; those on disk count zero."""
        with self._lock:
            return self._reserved.bytes

    @property
    def bytes_max(self) -> int:
        return self._budget.bytes_max

    @property
    def touched_bytes(self) -> int:
        """Memory that segments use of what they have reserved."""
        with self._lock:
            return self._reserved.touched_bytes

    @property
    def spare_bytes(self) -> int:
        with self._lock:
            return self._budget.room(self._reserved.bytes, self._reserved.touched_bytes).bytes

    @property
    def slots(self) -> dict[str, int]:
        """The slots of all segments: free, held (free, with an in-memory checkpoint) and taken (leased or sealed)."""
        with self._lock:
            segments = list(self._reserved.segments)
        free, held, taken = (sum(counts) for counts in zip((0, 0, 0), *(segment.uses for segment in segments), strict=True))
        return {"free": free, "held": held, "taken": taken}

    @property
    def holders(self) -> dict[str, int]:
        with self._lock:
            return dict(self._reserved.by_run().most_common())

    def has(self, run: str) -> bool:
        """Whether this run has a segment, in memory or on disk, of any attempt."""
        with self._lock:
            return any(one.holder.run == run for one in self._reserved.all())

    def limits(self, bounds: Sequence[Bound], whose: str) -> tuple[OwnLimit, ...]:
        """What a rank's own current limits leave for its segments; to be called before it frees any."""

        def touched(group: str) -> int:
            return sum(one.touched_bytes for one in self._reserved.all() if not one.spilled and one.holder.is_in(group))

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
            short = self._reserved.fitting(asked, holder) < asked.slots
        if short:
            self._make_room()
        with self._lock:
            if self._reserved.fitting(asked, holder) < asked.slots:
                self._lock.wait_for(
                    lambda: self._reserved.fitting(asked, holder) == asked.slots or not self._reserved.has_retired(owner),
                    RETURN_WAIT_S,
                )
            segment = self._make(asked, label, owner, holder, on_disk)
            self._reserved.segments.add(segment)
        if segment.notice:
            log.warning("%s: %s", label, segment.notice)
        self._keep(segment)
        return segment

    @contextmanager
    def leaving(self, size: int, owner: SegmentOwner, holder: ShareHolder, ranks: int = 1) -> Iterator[None]:
        """Within the block, all reservations leave `size` bytes free for an average of this rank, and of each of the `ranks`
        started here with it. Later ones do too, until these are reserved or the run has no segment any more.
        """
        with self._lock:
            self._reserved.expect(size, owner, holder, ranks)
        try:
            yield
        finally:
            with self._lock:
                self._reserved.has_reserved(owner.run)
                self._reserved.forget_expected(owner.run)

    def take_over(self, geometry: Geometry, owner: SegmentOwner) -> ArenaSegment | None:
        """Reuse the segment of this rank from an earlier attempt, if it fits and its process is gone; otherwise None.

        It now belongs to the owner, with all pages in place and with its in-memory checkpoint.
        """
        with self._lock:
            return next((segment for segment in self._reserved.segments if segment.pass_on(owner, geometry)), None)

    def recover(self) -> list[ArenaSegment]:
        """The segments that an earlier daemon left with the keeper; others are released."""
        if self._keeper is None:
            return []
        segments = []
        try:
            for name, fd in self._keeper.take():
                try:
                    if name.startswith(PREFIX):
                        self._reserved.averages.add(AverageSegment.adopt(fd, name))
                    else:
                        segments.append(ArenaSegment.adopt(fd, name, may_grow=self._may_grow))
                except (CheckpointError, OSError, ValueError) as error:
                    log.warning("cannot adopt the shared memory %s: %s", name, error)
                    os.close(fd)
                    self._keeper.drop(name)
        except OSError as error:
            log.error("shared memory of an earlier daemon may be lost: %s", error)
        with self._lock:
            self._reserved.segments |= set(segments)
        return segments

    def averages(self) -> list[AverageSegment]:
        """All averages: those of an earlier daemon, after `recover`."""
        with self._lock:
            return list(self._reserved.averages)

    def admit(
        self, owner: SegmentOwner, size: int, holder: ShareHolder, make: Callable[[], AverageSegment]
    ) -> AverageSegment:
        """Make an average of `size` bytes, which count as slots do. `LimitExceeded`, with the numbers, without room.

        Its room stays reserved meanwhile: its rank may be reserving slots at the same moment.
        """
        with self._lock:
            short = self._reserved.room_for_average(owner, holder).bytes < size
        if short:
            self._make_room()
        with self._lock:
            room = self._reserved.room_for_average(owner, holder)
            self._reserved.expect_no_more(owner)
            if room.bytes < size:
                raise LimitExceeded(
                    f"rank {owner.rank} of {owner.run} needs {size} bytes of memory for the average; "
                    f"{self._reserved.bytes} are reserved, and {room.bytes} are left of {room.name}",
                    hint=room.remedy
                    or "free memory, start the daemon with a larger --arena-bytes-max, or train without ema=",
                    needed=size,
                    left=room.bytes,
                )
            segment = make()
            segment.count_for(holder)
            self._reserved.averages.add(segment)
        self._keep(segment)
        return segment

    def take_in(self, segment: AverageSegment, holder: ShareHolder) -> None:
        """Accept an average that its rank has brought. A tenant's counts for its share, as in `attach`."""
        with self._lock:
            self._reserved.check_brought(segment.bytes, holder)
            segment.count_for(holder)
            self._reserved.averages.add(segment)
        self._keep(segment)

    def let_go(self, segment: AverageSegment) -> None:
        with self._lock:
            if segment not in self._reserved.averages:
                return
            self._reserved.averages.discard(segment)
            self._lock.notify_all()
        self._forget(segment)
        segment.close()

    def attach(self, fd: int, owner: SegmentOwner, tenant: str = "") -> tuple[ArenaSegment, list[int]]:
        """The owner's segment at a descriptor, which stays the caller's, and the slots that the rank leased without us.

        A tenant brings no file, which could be truncated under us, and no more memory than its share of an empty arena.
        """
        with self._lock:
            holder = ShareHolder(owner.run, tenant)
            for segment in self._reserved.segments:
                if segment.owner == owner and segment.is_at(fd):
                    segment.count_for(holder)
                    segment.revive()
                    return segment, segment.find_taken()
            ours = os.dup(fd)
            try:
                segment = ArenaSegment.adopt(ours, uuid.uuid4().hex, not tenant, self._may_grow)
            except (CheckpointError, OSError, ValueError) as error:
                os.close(ours)
                raise InvalidRequest(f"the descriptor is not a staging arena: {error}") from error
            if segment.owner != owner:
                segment.close()
                raise InvalidRequest(f"{owner} attached a segment of {segment.owner}")
            segment.count_for(holder)
            try:
                self._reserved.check_brought(segment.geometry.segment_bytes, holder)
            except LimitExceeded:
                segment.close()
                raise
            self._reserved.segments.add(segment)
        self._keep(segment)
        return segment, segment.taken

    def drop(self, segment: ArenaSegment, outgrown: bool = False) -> None:
        """The segment is no longer needed: free its memory once its saves are written.

        Its pages are freed even if a rank still maps it.
        """
        segment.retire(lambda: self._remove(segment), outgrown)

    def give_back_spare(self) -> None:
        """Return the memory of slots that saves no longer need. It stays reserved."""
        with self._lock:
            segments = list(self._reserved.segments)
        for segment in segments:
            segment.give_back_spare()

    def _may_grow(self, holder: ShareHolder) -> bool:
        """Whether there is memory for everything that is reserved and not used yet."""
        with self._lock:
            return self._reserved.covers(holder)

    def _remove(self, segment: ArenaSegment) -> None:
        with self._lock:
            if segment not in self._reserved.segments or not segment.retired:
                return
            self._reserved.segments.discard(segment)
            if segment.outgrown:
                segment.give_back()
            self._lock.notify_all()
        if segment.owner is not None:
            with self._lock:
                self._reserved.forget_expected(segment.owner.run)
        self._forget(segment)
        segment.close()

    def _forget(self, segment: ArenaSegment | AverageSegment) -> None:
        if self._keeper is not None and segment.owner is not None:
            try:
                self._keeper.drop(segment.name)
            except OSError as error:
                log.warning("could not tell the holder process to drop %s: %s", segment.name, error)

    def _make(
        self, asked: Geometry, label: str, owner: SegmentOwner | None, holder: ShareHolder, on_disk: bool
    ) -> ArenaSegment:
        room = self._reserved.room(holder)
        slots, memory = fitting(asked, room), None
        if slots:
            try:
                memory = memfd(label, asked._replace(slots=slots).segment_bytes)
            except StorageFailed as error:
                room = SegmentRoom(0, error.detail, error.hint)
        if memory is not None:
            notice = fewer_notice(asked, slots, room) if slots < asked.slots else ""
            segment = ArenaSegment.make(memory, asked._replace(slots=slots), owner, notice=notice, may_grow=self._may_grow)
        elif not on_disk:
            raise refusal(label, asked, self._reserved.bytes, room, NO_FILE)
        else:
            segment = self._make_on_disk(asked, label, owner, holder, room)
        segment.count_for(holder)
        return segment

    def _make_on_disk(
        self, asked: Geometry, label: str, owner: SegmentOwner | None, holder: ShareHolder, room: SegmentRoom
    ) -> ArenaSegment:
        try:
            if self._spill is None:
                raise refusal(label, asked, self._reserved.bytes, room, "")
            try:
                fd, given, notice = self._spill.make(asked, room, self._reserved.room_on_disk(holder, self._spill))
            except CheckpointError as error:
                why = f"; it cannot be staged on disk either: {error.detail}"
                raise refusal(label, asked, self._reserved.bytes, room, why) from error
        except CheckpointError:
            held = ", ".join(f"{run} {size}" for run, size in self._reserved.by_run().most_common(NAMED_MAX))
            log.warning("no memory for %s; bytes reserved: %s", label, held or "none")
            raise
        return ArenaSegment.make(fd, given, owner, True, notice, self._may_grow)

    def _keep(self, segment: ArenaSegment | AverageSegment) -> None:
        if self._keeper is None or segment.owner is None:
            return
        try:
            self._keeper.keep(segment.name, segment.fd)
        except OSError as error:
            log.warning("while no daemon runs, only the ranks keep shared memory: %s", error)
