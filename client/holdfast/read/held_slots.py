"""The slots from which a step was committed, if a daemon still keeps them: requested from it, and locked."""

from __future__ import annotations

import bisect
import fcntl
import logging
import os
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import ExitStack

import numpy as np

from holdfast.memory.mapping import Mapping
from holdfast.threads import own_threads
from holdfast.transport import Transport
from holdfast_formats.digest import digest
from holdfast_formats.disk.manifests import Manifest
from holdfast_formats.errors import CheckpointError, DaemonGone
from holdfast_formats.staging import arena, slot_table, wire
from holdfast_formats.staging.arena import SlotState
from holdfast_formats.staging.holdings import Bytes
from holdfast_formats.staging.slot_ranges import SlotRange
from holdfast_formats.staging.slot_table import SlotTable

TAKE_WAIT_S = 60.0


class HeldSlot:
    """A locked slot of a committed save, which is not leased until `close`.

    `elsewhere`: its data is there only as far as it was fetched from another node.
    """

    def __init__(self, fd: int, part: wire.HeldPart, step: int, elsewhere: bool = False) -> None:
        """`DaemonGone` if the slot has been leased since, or cannot be locked. The descriptor stays the caller's."""
        self.elsewhere = elsewhere
        self.data: Bytes
        self.table: SlotTable
        self._locked: bytes | None = None  # what unlocks it
        try:
            # Opened again, for nothing but the lock, which belongs to the open file and goes with it.
            self._fd = os.open(f"/proc/self/fd/{fd}", os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise DaemonGone(f"cannot open the slot: {error.strerror}") from error
        try:
            self._open(fd, part, step)
        except OSError as error:
            self.close()
            raise DaemonGone(f"cannot read the slot any more: {error.strerror}") from error
        except BaseException:
            self.close()
            raise

    def _open(self, fd: int, part: wire.HeldPart, step: int) -> None:
        memory = Mapping(fd, write=False).memory
        superblock = arena.read_superblock(memory)
        fcntl.fcntl(self._fd, fcntl.F_OFD_SETLK, arena.slot_lock(superblock, part.slot, fcntl.F_RDLCK))
        self._locked = arena.slot_lock(superblock, part.slot, fcntl.F_UNLCK)
        header = arena.read_header(memory, superblock, part.slot)  # a lease locks the slot, writes this, and unlocks it
        start = superblock.table_offset(part.slot)
        encoded = memory[start : start + header.table_bytes]
        stated = (header.step, f"{header.seal:016x}", digest(encoded))
        if header.state is SlotState.LEASED or stated != (step, part.table_digest, part.table_digest):
            raise DaemonGone(f"slot {part.slot} of rank {part.rank} has been used for something else")
        self.table = slot_table.decode(encoded, header.data_bytes)
        data = superblock.data_offset(part.slot)
        self.data = np.frombuffer(memory[data : data + header.data_bytes], np.uint8)

    def _unlock(self) -> None:
        """Closing is not enough: a process that was forked meanwhile has the file open too."""
        if self._locked is not None:
            fcntl.fcntl(self._fd, fcntl.F_OFD_SETLK, self._locked)

    def close(self) -> None:
        """Unlock the slot. Views of it stay readable, but their content may change."""
        if self._fd >= 0:
            self._unlock()
            os.close(self._fd)
            self._fd = -1


def take_held(link: Transport, step: int) -> list[HeldSlot]:
    """Request this step's slots from the daemon and lock them; empty if it no longer keeps them. The caller closes them."""
    return take(link, wire.Held(id=link.next_id(), step=step), step)


def take(link: Transport, request: wire.Held | wire.HeldElsewhere, step: int, wait_s: float = TAKE_WAIT_S) -> list[HeldSlot]:
    """The slots in the daemon's reply to a request, locked. The caller closes them."""
    with ExitStack() as undo:
        with link.receiving:
            reply = link.request(request, wire.HeldSlots, wait_s)
            fds = link.take_fds(len(reply.parts))
        for fd in fds:
            undo.callback(os.close, fd)
        with ExitStack() as on_failure:
            held = []
            for fd, part in zip(fds, reply.parts, strict=True):
                held.append(HeldSlot(fd, part, step, elsewhere=isinstance(request, wire.HeldElsewhere)))
                on_failure.callback(held[-1].close)
            on_failure.pop_all()
    return held


log = logging.getLogger(__name__)

FETCH_BYTES = 2**25  # in one request
FETCH_WAIT_S = 60.0  # the daemon has less patience than this
LOOK_WAIT_S = 30.0

Fetch = Callable[[Sequence[SlotRange]], Collection[int]]  # returns the ranks of which something is lost


class PeerSlots:
    """The slots of other nodes' ranks. Ranges passed to `want` are fetched; the reader waits for them. `close` it after the
    last read.
    """

    def __init__(self, slots: Sequence[HeldSlot], fetch: Fetch) -> None:
        self.slots, self._fetch = list(slots), fetch
        self._batches: list[Sequence[SlotRange]] = []
        self._wanted: dict[int, list[tuple[int, int, int]]] = {}  # by rank: begin, end, number of the batch; in order
        self._changed = threading.Condition()
        self._lost: list[Collection[int]] = []  # of each batch that was answered
        self._closed = False
        self._thread: threading.Thread | None = None
        self.bytes_wanted = 0

    @classmethod
    def none(cls) -> PeerSlots:
        """No other node has slots."""
        return cls((), lambda ranges: ())

    def want(self, ranges: Iterable[SlotRange]) -> None:
        """Fetch these ranges in this order. Called once."""
        self._batches = list(_batches(ranges))
        for number, batch in enumerate(self._batches):
            for one in batch:
                self.bytes_wanted += one.length
                self._wanted.setdefault(one.rank, []).append((one.begin, one.end, number))
        for known in self._wanted.values():
            known.sort()
        if self._batches:
            self._thread = own_threads.begin(self._run, "holdfast-peers", self._end_waits)

    def has(self, one: SlotRange) -> bool:
        """Whether a range was fetched; waits for it. False for one that was not wanted, or is lost."""
        known = self._wanted.get(one.rank, [])
        at = max(bisect.bisect_right(known, (one.begin, float("inf"), 0)) - 1, 0)
        reached, needed = one.begin, -1
        batches = set()
        for begin, end, number in known[at:]:
            if begin > reached or reached >= one.end:
                break
            if end > reached:
                reached, needed = end, max(needed, number)
                batches.add(number)
        if reached < one.end:
            return False
        with self._changed:
            self._changed.wait_for(lambda: len(self._lost) > needed or self._closed)
            return len(self._lost) > needed and all(one.rank not in self._lost[number] for number in batches)

    def close(self) -> None:
        self._end_waits()
        if self._thread is not None:
            self._thread.join()
        for slot in self.slots:
            slot.close()

    def _end_waits(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def _run(self) -> None:
        for batch in self._batches:
            if self._closed:
                return
            try:
                lost = self._fetch(batch)
            except CheckpointError as error:
                log.info("the memory of other nodes is not read any more: %s", error.detail)
                self._all_lost()
                return
            except BaseException:
                self._all_lost()  # wake up readers: nothing more comes
                raise
            with self._changed:
                self._lost.append(lost)
                self._changed.notify_all()

    def _all_lost(self) -> None:
        with self._changed:
            self._lost += [frozenset(one.rank for one in batch) for batch in self._batches[len(self._lost) :]]
            self._changed.notify_all()


def take_peers(link: Transport, manifest: Manifest) -> PeerSlots:
    """Other nodes' slots of a checkpoint, as found by this node's daemon."""
    step, attempt, turn, world = manifest.step, manifest.attempt, manifest.turn, manifest.world
    with ExitStack() as on_failure:
        slots: list[HeldSlot] = []
        more = True
        while more:
            after = max((slot.table.rank for slot in slots), default=-1)
            number = link.next_id()
            asked = wire.HeldElsewhere(id=number, step=step, attempt=attempt, turn=turn, world=world, after=after)
            taken = take(link, asked, step, LOOK_WAIT_S)
            for slot in taken:
                on_failure.callback(slot.close)
            slots += taken
            more = len(taken) == wire.HELD_RANKS_MAX
        on_failure.pop_all()

    def fetch(ranges: Sequence[SlotRange]) -> Collection[int]:
        places = tuple((one.rank, one.begin, one.end) for one in ranges)
        message = wire.Fetch(id=link.next_id(), step=step, attempt=attempt, turn=turn, world=world, ranges=places)
        return link.request(message, wire.Fetched, FETCH_WAIT_S).lost

    return PeerSlots(slots, fetch)


def _batches(ranges: Iterable[SlotRange]) -> Iterator[Sequence[SlotRange]]:
    """The same ranges in batches, large enough for a request, and small enough for a quick first reply."""
    batch: list[SlotRange] = []
    size = 0
    for one in ranges:
        for begin in range(one.begin, one.end, FETCH_BYTES):
            end = min(one.end, begin + FETCH_BYTES)
            if batch and (size + end - begin > FETCH_BYTES or len(batch) >= wire.RANGES_MAX):
                yield batch
                batch, size = [], 0
            batch.append(one._replace(begin=begin, end=end))
            size += end - begin
    if batch:
        yield batch
