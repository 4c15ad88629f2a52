"""Read the in-memory checkpoint: the slots from which a step was committed, while the daemon still keeps them.

Bytes are checked against the manifest's digests, as with files.
"""

from __future__ import annotations

import bisect
import fcntl
import os
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import NamedTuple

import numpy as np

from holdfast.memory import direct_io
from holdfast.memory.mapping import Mapping
from holdfast.read.overwrite_guard import Overwriting
from holdfast.read.reader import CheckpointReader
from holdfast.read.requests import Want
from holdfast.read.sources import Source
from holdfast.transport import Transport
from holdfast_formats.digest import digest
from holdfast_formats.disk.manifest import Manifest, TensorEntry
from holdfast_formats.errors import CheckpointError, DaemonGone, StateMismatch
from holdfast_formats.region import Box
from holdfast_formats.staging import arena, holdings, replica_claims, slot_table, wire
from holdfast_formats.staging.arena import SlotState
from holdfast_formats.staging.holdings import Bytes, Holding
from holdfast_formats.staging.slot_table import SlotTable
from holdfast_formats.tensors import StagedFragment, TensorSpec, box_bytes

CHUNK_BYTES = 2**22  # proven and copied by one call, an extent at a time; with a quarter of it a load takes a fifth longer

_Placed = tuple[int, str, str, TensorEntry]  # first byte in its file, group, name, entry


class HeldSlot:
    """A locked slot of a committed save: it is not leased to anybody until `close`."""

    def __init__(self, fd: int, part: wire.HeldPart, step: int) -> None:
        """`DaemonGone` when the slot has been leased since, or cannot be locked. The descriptor stays the caller's."""
        self.data: Bytes
        self.table: SlotTable
        self._locked: bytes | None = None  # what unlocks it
        try:
            # Opened anew, for nothing but the lock, which belongs to the open file and goes with it.
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
        made = arena.read_superblock(memory)
        fcntl.fcntl(self._fd, fcntl.F_OFD_SETLK, arena.slot_lock(made, part.slot, fcntl.F_RDLCK))
        self._locked = arena.slot_lock(made, part.slot, fcntl.F_UNLCK)
        header = arena.read_header(memory, made, part.slot)  # whoever leases a slot locks it, writes this, and unlocks it
        start = made.table_offset(part.slot)
        encoded = memory[start : start + header.table_bytes]
        stated = (header.step, f"{header.seal:016x}", digest(encoded))
        if header.state is SlotState.LEASED or stated != (step, part.table_digest, part.table_digest):
            raise DaemonGone(f"slot {part.slot} of rank {part.rank} has been used for something else")
        self.table = slot_table.decode(encoded, header.data_bytes)
        data = made.data_offset(part.slot)
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
    """Ask the daemon for this step's slots and lock them; empty if it no longer keeps them. The caller closes
    them.
    """
    with ExitStack() as undo:
        reply = link.request(wire.Held(id=link.next_id(), step=step), wire.HeldSlots)
        fds = link.take_fds(len(reply.parts))
        for fd in fds:
            undo.callback(os.close, fd)
        with ExitStack() as on_failure:
            held = []
            for fd, part in zip(fds, reply.parts, strict=True):
                held.append(HeldSlot(fd, part, step))
                on_failure.callback(held[-1].close)
            on_failure.pop_all()
    return held


class Filled(NamedTuple):
    """Where the wanted tensors were read from, notes on unusable slots, and how many bytes of extents were read."""

    from_slots: bool
    notes: tuple[str, ...]
    bytes_read: int


def fill(
    reader: CheckpointReader,
    wants: Sequence[Want],
    take: Callable[[int], Sequence[HeldSlot]],
    rank: int,
    into: Overwriting,
) -> Filled:
    """Fill all wanted tensors: from the in-memory checkpoint if `take` finds one, otherwise from the reader's own
    source.

    Problems with slots are not errors: the reader's own source is then read instead. Each extent is verified
    before it is used; with `into.prove_first` all of them before the first one.
    """
    notes: tuple[str, ...] = ()
    try:
        slots = take(reader.manifest.step)
        if slots:
            return Filled(True, (), _fill_from(slots, reader, wants, rank, into))
    except CheckpointError as error:
        notes = (f"the in-memory checkpoint could not be used, restored from files instead: {error.detail}",)
    if into.prove_first:
        reader.prove(wants)
    else:
        reader.check_headers(wants)
    into.begins()
    return Filled(False, notes, reader.load(wants))


def _fill_from(
    slots: Sequence[HeldSlot], reader: CheckpointReader, wants: Sequence[Want], rank: int, into: Overwriting
) -> int:
    """Fill from locked slots; nobody writes to them, so verified bytes stay valid."""
    with ExitStack() as stack:
        for slot in slots:
            stack.callback(slot.close)
        source = HeldSlotsSource(reader.source, reader.manifest, slots, rank)
        held = CheckpointReader(source, reader.manifest, reader.manifest_bytes, reader.commit_bytes)
        held.cores = reader.cores
        if into.prove_first:
            held.prove(wants)
        into.begins()
        return held.load(wants)


class HeldSlotsSource:
    """The files of a checkpoint: tensors from the slots they were saved from, everything else from the files.

    The slots belong to the caller and stay locked while this is used.
    """

    chunk_bytes = CHUNK_BYTES

    def __init__(self, base: Source, manifest: Manifest, slots: Sequence[HeldSlot], rank: int) -> None:
        """`StateMismatch` when these are not the slots of the manifest's save. What `rank` itself had saved comes first."""
        self._base = base
        self._slots = sorted(slots, key=lambda slot: slot.table.rank != rank)
        for slot in slots:
            of = slot.table
            if (of.run, of.step, of.attempt, of.world) != (manifest.run, manifest.step, manifest.attempt, manifest.world):
                raise StateMismatch(
                    f"the in-memory checkpoint of rank {of.rank} belongs to attempt {of.attempt}, not to this checkpoint"
                )
        self._fragments: dict[tuple[str, str], list[tuple[HeldSlot, StagedFragment]]] = {}
        for slot in self._slots:
            for fragment in slot.table.fragments:
                self._fragments.setdefault((fragment.spec.group, fragment.spec.name), []).append((slot, fragment))
        self._apart: set[tuple[int, str, str]] = {
            found
            for name in manifest.tensors.get(replica_claims.HOME, {})
            if (found := replica_claims.parse_apart(replica_claims.HOME, name))
        }
        self._files: dict[str, list[_Placed]] = {}
        for group, tensors in manifest.tensors.items():
            for name, entry in tensors.items():
                self._files.setdefault(entry.file, []).append((entry.start, group, name, entry))
        for placed in self._files.values():
            placed.sort(key=_start)
        self._held: dict[tuple[str, str], tuple[Holding, ...]] = {}

    @property
    def label(self) -> str:
        return f"{self._base.label}, in-memory checkpoint"

    def size(self, name: str) -> int | None:
        return self._base.size(name)

    def read(self, name: str, offset: int = 0, length: int | None = None) -> bytes:
        """Read a file without tensors, which is small."""
        return self._base.read(name, offset, length)

    def read_into(self, name: str, offset: int, buffer: memoryview) -> int:
        """Gather a range of a file; its header comes from the file itself."""
        octets = np.frombuffer(buffer, np.uint8)
        stop = offset + len(octets)
        placed = self._files.get(name, [])
        head = min(stop, placed[0][0]) if placed else stop
        done = self._base.read_into(name, offset, buffer[: head - offset]) if offset < head else 0
        if done < head - offset:
            return done
        at = max(offset, head)
        for start, group, tensor, entry in placed[max(bisect.bisect_right(placed, at, key=_start) - 1, 0) :]:
            end = min(start + entry.nbytes, stop)
            if at >= stop:
                break
            if at < end:
                self._gather(group, tensor, entry, at - start, octets[at - offset : end - offset])
                at = end
        return at - offset

    def view(self, name: str, start: int, stop: int) -> memoryview | None:
        """A range inside one tensor and one part in a slot; None for any other range."""
        placed = self._files.get(name, [])
        position = bisect.bisect_right(placed, start, key=_start) - 1
        while position > 0 and placed[position][3].nbytes == 0:
            position -= 1
        if position < 0:
            return None
        first, group, tensor, entry = placed[position]
        if stop > first + entry.nbytes:
            return None
        seen = holdings.view(self._holdings(group, tensor, entry), start - first, stop - first)
        return None if seen is None else seen.data

    def file(self, name: str) -> int | None:
        return None

    def waits(self, name: str, offset: int) -> bool:
        return False

    def past_cache(self) -> direct_io.Reader | None:
        return None

    def close(self) -> None:
        """Does nothing: slots and files belong to their owners."""

    def _gather(self, group: str, name: str, entry: TensorEntry, offset: int, target: Bytes) -> None:
        held = self._holdings(group, name, entry)
        spec = TensorSpec(group, name, entry.dtype, entry.shape)
        if holdings.gather(spec, held, offset, target) != target.nbytes:
            raise StateMismatch(f"the in-memory checkpoint does not have all of tensor {name!r} of group {group!r}")

    def _holdings(self, group: str, name: str, entry: TensorEntry) -> tuple[Holding, ...]:
        """The boxes that tile a tensor, each from one of the slots; computed at the first use."""
        known = self._held.get((group, name))
        if known is None:
            known = self._held[group, name] = self._find(TensorSpec(group, name, entry.dtype, entry.shape))
        return known

    def _find(self, spec: TensorSpec) -> tuple[Holding, ...]:
        found: dict[Box, Holding] = {}
        of_one = replica_claims.parse_apart(spec.group, spec.name)
        group, name = (spec.group, spec.name) if of_one is None else of_one[1:]
        for slot, fragment in self._fragments.get((group, name), ()):
            rank = slot.table.rank
            if rank != of_one[0] if of_one is not None else (rank, group, name) in self._apart:
                continue  # its own is another one
            if (fragment.spec.dtype, fragment.spec.shape) != (spec.dtype, spec.shape):
                raise StateMismatch(
                    f"tensor {spec.name!r} of group {spec.group!r} has another dtype or shape in the in-memory checkpoint"
                )
            offset = fragment.slot_offset
            for box in fragment.boxes:
                size = box_bytes(spec, box)
                if size and box not in found:
                    found[box] = holdings.hold(spec, box, slot.data[offset : offset + size])
                offset += size
        return tuple(found.values())


def _start(placed: _Placed) -> int:
    return placed[0]
