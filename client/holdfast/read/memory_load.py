"""Fills wanted tensors from memory: slots of this node, then slots of other nodes; the rest from the files."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from typing import Literal, NamedTuple

from holdfast.read.held_slots import HeldSlot
from holdfast.read.held_source import HeldSlotsSource, is_of
from holdfast.read.overwrite_guard import Overwriting
from holdfast.read.peer_slots import PeerSlots
from holdfast.read.reader import CheckpointReader
from holdfast.read.requests import Want, runs
from holdfast_formats.disk.manifests import Manifest
from holdfast_formats.errors import CheckpointError
from holdfast_formats.staging.slot_ranges import SlotRange

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


Ask = Callable[[Manifest], PeerSlots]


def no_peers(manifest: Manifest) -> PeerSlots:
    """For a daemon without other nodes."""
    return PeerSlots.none()


def fill(
    reader: CheckpointReader,
    wants: Sequence[Want],
    take: Callable[[int], Sequence[HeldSlot]],
    rank: int,
    into: Overwriting,
    ask: Ask = no_peers,
) -> Filled:
    """Fill all wanted tensors: from the in-memory checkpoint as far as `take` and `ask` find it, otherwise from the reader's
    own source.

    Problems with memory are not errors: the reader's own source is then read instead. Each extent is verified before it is
    used; with `into.prove_first` all of them before the first one.
    """
    notes: tuple[str, ...] = ()
    try:
        with ExitStack() as stack:
            if reader.manifest.compacted is None:  # else what slots hold is not what is stored
                slots = take(reader.manifest.step)
                for slot in slots:
                    stack.callback(slot.close)
                filled = _Memory(reader, slots, rank, ask, stack).fill(wants, into)
                if filled is not None:
                    return filled
    except CheckpointError as error:
        notes = (f"the in-memory checkpoint could not be used, restored from files instead: {error.detail}",)
    if into.prove_first:
        reader.prove(wants)
    else:
        reader.check_headers(wants)
    into.begins()
    size = reader.load(wants)
    return Filled(False, notes, size, {"files": size})


class _Memory:
    """Locked slots of this node, so that verified bytes stay valid; and other nodes' slots for the rest."""

    def __init__(self, reader: CheckpointReader, slots: Sequence[HeldSlot], rank: int, ask: Ask, stack: ExitStack) -> None:
        manifest = reader.manifest
        self._reader, self._slots, self._rank = reader, slots, rank
        self._complete = len({slot.table.rank for slot in slots}) == manifest.world
        self._peers = PeerSlots.none()
        if not self._complete:
            try:
                peer_slots = ask(manifest)
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
        size, beside = held.load(inside), source.bytes_beside
        files = beside + (reader.load(outside) if outside else 0)
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
