"""Fills wanted tensors from memory: slots of this node, then slots of other nodes; the rest from the files."""

from __future__ import annotations

import bisect
import logging
import threading
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import Literal, NamedTuple

import numpy as np

from holdfast.read.held_slots import HeldSlot, PeerSlots, take_held, take_peers
from holdfast.read.overwrite_guard import Overwriting
from holdfast.read.reader import CheckpointReader
from holdfast.read.requests import ExtentRun, Want, runs
from holdfast.read.sources import Source
from holdfast.transport import Transport
from holdfast_formats import rounding
from holdfast_formats.disk.manifests import Manifest, TensorEntry
from holdfast_formats.errors import CheckpointError, StateMismatch
from holdfast_formats.region import Box
from holdfast_formats.staging import holdings, replica_claims
from holdfast_formats.staging.holdings import Bytes, Holding
from holdfast_formats.staging.plan import BoxOrigin
from holdfast_formats.staging.slot_ranges import SlotRange, in_slot
from holdfast_formats.staging.slot_table import SlotTable
from holdfast_formats.tensors import StagedFragment, TensorSpec, box_bytes

CHUNK_BYTES = 2**22  # proven and copied by one call, an extent at a time; with a quarter of it a load takes a fifth longer

_Placed = tuple[int, str, str, TensorEntry]  # first byte in its file, group, name, entry


class HeldPiece(NamedTuple):
    """A box of a tensor in a slot."""

    holding: Holding
    slot: HeldSlot
    origin: BoxOrigin


class HeldSlotsSource(Source):
    """The files of a checkpoint: tensors from their slots, everything else from the files.

    The slots belong to the caller and stay locked while this is used. `peers` have only fetched data; the rest comes from
    the files.
    """

    chunk_bytes = CHUNK_BYTES

    def __init__(
        self, base: Source, manifest: Manifest, slots: Sequence[HeldSlot], rank: int, peers: PeerSlots | None = None
    ) -> None:
        """`StateMismatch` if these are not the slots of the manifest's save. The slot of `rank` itself comes first."""
        self._base, self._peers = base, peers or PeerSlots.none()
        self._slots = sorted(slots, key=lambda slot: slot.table.rank != rank)
        for slot in slots:
            of = slot.table
            if not is_of(of, manifest):
                raise StateMismatch(
                    f"the in-memory checkpoint of rank {of.rank} belongs to attempt {of.attempt}, not to this checkpoint"
                )
        self._whole = len({slot.table.rank for slot in slots}) == manifest.world
        self._fragments: dict[tuple[str, str], list[tuple[HeldSlot, StagedFragment]]] = {}
        for slot in (*self._slots, *self._peers.slots):
            for fragment in slot.table.fragments:
                self._fragments.setdefault((fragment.spec.group, fragment.spec.name), []).append((slot, fragment))
        self._apart: set[tuple[int, str, str]] = {
            apart
            for name in manifest.tensors.get(replica_claims.HOME, {})
            if (apart := replica_claims.parse_apart(replica_claims.HOME, name))
        }
        self._files: dict[str, list[_Placed]] = {}
        for group, tensors in manifest.tensors.items():
            for name, entry in tensors.items():
                self._files.setdefault(entry.file, []).append((entry.start, group, name, entry))
        for placed in self._files.values():
            placed.sort(key=_start)
        self._held: dict[tuple[str, str], tuple[HeldPiece, ...]] = {}
        self._counting = threading.Lock()
        self.bytes_beside = 0  # of tensors that came from the files after all

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
                if not self._gather(group, tensor, entry, at - start, octets[at - offset : end - offset]):
                    into = self._base.read_into(name, at, buffer[at - offset : end - offset])
                    with self._counting:
                        self.bytes_beside += into
                    if into < end - at:
                        return at - offset + into
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
        for piece in self._pieces(group, tensor, entry):
            seen = holdings.view((piece.holding,), start - first, stop - first)
            if seen is not None:
                if not piece.slot.elsewhere:
                    return seen.data
                spec = TensorSpec(group, tensor, entry.dtype, entry.shape)
                return seen.data if self._is_there(spec, (piece,), start - first, stop - first) else None
        return None

    def waits(self, name: str, offset: int) -> bool:
        return False

    def close(self) -> None:
        """Slots and files belong to their owners."""

    def ranges(self, run: ExtentRun) -> list[SlotRange] | None:
        """The ranges to fetch from peers for these extents; None unless all of them are in memory."""
        spec = TensorSpec(run.group, run.name, run.entry.dtype, run.entry.shape)
        stop = run.offset + run.length
        slot_ranges: list[SlotRange] = []
        size = 0
        for piece in self._pieces(run.group, run.name, run.entry):
            for low, high in in_slot(spec, piece.origin, run.offset, stop):
                size += piece.origin.of_tensor(spec, high - low)
                if piece.slot.elsewhere:
                    slot_ranges.append(SlotRange(piece.origin.rank, low, high))
        return slot_ranges if size >= run.length else None

    def _gather(self, group: str, name: str, entry: TensorEntry, offset: int, target: Bytes) -> bool:
        """False if it has to be read from the file."""
        pieces = self._pieces(group, name, entry)
        spec = TensorSpec(group, name, entry.dtype, entry.shape)
        if not self._is_there(spec, pieces, offset, offset + target.nbytes):
            return False
        if holdings.gather(spec, [piece.holding for piece in pieces], offset, target) == target.nbytes:
            return True
        if self._whole:
            raise StateMismatch(f"the in-memory checkpoint does not have all of tensor {name!r} of group {group!r}")
        return False

    def _is_there(self, spec: TensorSpec, pieces: Sequence[HeldPiece], begin: int, end: int) -> bool:
        """Whether peers' data of these bytes of a tensor was fetched; waits for it."""
        for piece in pieces:
            if not piece.slot.elsewhere:
                continue
            for low, high in in_slot(spec, piece.origin, begin, end):
                if not self._peers.has(SlotRange(piece.origin.rank, low, high)):
                    return False
        return True

    def _pieces(self, group: str, name: str, entry: TensorEntry) -> tuple[HeldPiece, ...]:
        """The boxes that tile a tensor, each from one of the slots; computed at the first use."""
        known = self._held.get((group, name))
        if known is None:
            known = self._held[group, name] = self._find(TensorSpec(group, name, entry.dtype, entry.shape))
        return known

    def _find(self, spec: TensorSpec) -> tuple[HeldPiece, ...]:
        held_pieces: dict[Box, HeldPiece] = {}
        of_one = replica_claims.parse_apart(spec.group, spec.name)
        group, name = (spec.group, spec.name) if of_one is None else of_one[1:]
        fragments = self._fragments.get((group, name), [])
        held_as = ""
        if master := next((fragment.rounded_from for _, fragment in fragments if fragment.rounded_from), ""):
            fragments, held_as = self._fragments.get((master, name), []), rounding.HELD_AS
        stored = spec if not held_as else TensorSpec(master, name, held_as, spec.shape)
        for slot, fragment in fragments:
            rank = slot.table.rank
            if rank != of_one[0] if of_one is not None else (rank, group, name) in self._apart:
                continue  # its own is another one
            if (fragment.spec.dtype, fragment.spec.shape) != (stored.dtype, stored.shape):
                raise StateMismatch(
                    f"tensor {spec.name!r} of group {spec.group!r} has another dtype or shape in the in-memory checkpoint"
                )
            offset = fragment.slot_offset
            for box in fragment.boxes:
                size = box_bytes(stored, box)
                if size and box not in held_pieces:
                    holding = holdings.hold(spec, box, slot.data[offset : offset + size], held_as)
                    held_pieces[box] = HeldPiece(holding, slot, BoxOrigin(rank, box, offset, held_as))
                offset += size
        return tuple(held_pieces.values())

    def stamp(self, name: str) -> str:
        return self._base.stamp(name)

    def list(self, path: str) -> list[str]:
        return self._base.list(path)


def is_of(table: SlotTable, manifest: Manifest) -> bool:
    """Whether a slot's table belongs to the save of this manifest."""
    identity = (table.run, table.step, table.attempt, table.turn, table.world)
    return identity == (manifest.run, manifest.step, manifest.attempt, manifest.turn, manifest.world)


def _start(placed: _Placed) -> int:
    return placed[0]


log = logging.getLogger(__name__)

Origin = Literal["slot", "peers", "files"]


class Filled(NamedTuple):
    """Whether nothing came from files, notes on memory that could not be used, bytes of extents read, and the same by
    source.
    """

    from_slots: bool
    notes: tuple[str, ...]
    bytes_read: int
    bytes_by: Mapping[Origin, int]


def fill(reader: CheckpointReader, wants: Sequence[Want], link: Transport | None, rank: int, into: Overwriting) -> Filled:
    """Fill all wanted tensors: from the in-memory checkpoint as far as the daemon has it, otherwise from the reader's own
    source.

    Problems with memory are not errors: the reader's own source is then read instead. Each extent is verified before it is
    used; with `into.prove_first` all of them before the first one.
    """
    notes: tuple[str, ...] = ()
    try:
        with ExitStack() as stack:
            if link is not None and reader.manifest.compacted is None:  # else what slots hold is not what is stored
                slots = take_held(link, reader.manifest.step)
                for slot in slots:
                    stack.callback(slot.close)
                filled = _Memory(reader, slots, rank, link, stack).fill(wants, into)
                if filled is not None:
                    return filled
    except CheckpointError as error:
        notes = (f"the in-memory checkpoint could not be used, restored from files instead: {error.detail}",)
    if into.prove_first:
        reader.prove(wants)
    else:
        reader.check_headers(wants)
    into.begins()
    size = reader.load(wants, into.moved)
    return Filled(False, notes, size, {"files": size})


class _Memory:
    """Locked slots of this node, so that verified bytes stay valid; and other nodes' slots for the rest."""

    def __init__(
        self, reader: CheckpointReader, slots: Sequence[HeldSlot], rank: int, link: Transport, stack: ExitStack
    ) -> None:
        manifest = reader.manifest
        self._reader, self._slots, self._rank = reader, slots, rank
        self._complete = len({slot.table.rank for slot in slots}) == manifest.world
        self._peers = PeerSlots.none()
        if not self._complete:
            try:
                peer_slots = take_peers(link, manifest)
            except CheckpointError as error:  # what this node holds is read all the same
                log.info("other nodes' memory is not read: %s", error.detail)
                peer_slots = PeerSlots.none()
            stack.callback(peer_slots.close)
            here = {slot.table.rank for slot in slots}
            peer_slots.slots = [one for one in peer_slots.slots if _fits(one, manifest) and one.table.rank not in here]
            self._peers = peer_slots

    def fill(self, wants: Sequence[Want], into: Overwriting) -> Filled | None:
        """None if nothing of it is in memory."""
        reader = self._reader
        if not self._slots and not self._peers.slots:
            return None
        source = HeldSlotsSource(reader.source, reader.manifest, self._slots, self._rank, self._peers)
        held = CheckpointReader(source, reader.manifest, reader.manifest_bytes, reader.commit_bytes)
        held.cores = reader.cores
        inside, outside = (wants, []) if self._complete else self._split(source, wants)
        if not inside:
            return None
        if into.prove_first:
            held.prove(inside)
            reader.prove(outside)
        elif outside:
            reader.check_headers(outside)
        into.begins()
        size, beside = held.load(inside, into.moved), source.bytes_beside
        files = beside + (reader.load(outside, into.moved) if outside else 0)
        peers = min(max(self._peers.bytes_wanted - beside, 0), size - beside)
        notes = (f"{beside} bytes could not be read from other nodes' memory, and came from files",) if beside else ()
        by: dict[Origin, int] = {"slot": size - beside - peers, "peers": peers, "files": files}
        return Filled(not files, notes, sum(by.values()), by)

    def _split(self, source: HeldSlotsSource, wants: Sequence[Want]) -> tuple[list[Want], list[Want]]:
        """Those whose extents are all in memory, and the others; starts fetching from peers."""
        inside: list[Want] = []
        outside: list[Want] = []
        ranges: list[SlotRange] = []
        for want in wants:
            found = [source.ranges(run) for run in runs(self._reader.manifest, [want], self._reader.source.label)]
            (outside if None in found else inside).append(want)
            if None not in found:
                ranges += [one for some in found for one in some or ()]
        self._peers.want(ranges)
        return inside, outside


def _fits(slot: HeldSlot, manifest: Manifest) -> bool:
    """Whether a slot of another node is of this save: its node's own statement is not trusted."""
    specs = ((fragment.spec, manifest.tensors.get(fragment.spec.group, {})) for fragment in slot.table.fragments)
    return is_of(slot.table, manifest) and all(
        spec.name not in tensors or (tensors[spec.name].dtype, tensors[spec.name].shape) == (spec.dtype, spec.shape)
        for spec, tensors in specs
    )
