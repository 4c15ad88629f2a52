"""Sources for damaged pieces of a checkpoint: each returns verified bytes, or nothing."""

from __future__ import annotations

import logging
import mmap
import os
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Protocol

import numpy as np

from holdfast_formats.digest import digest
from holdfast_formats.disk import index, safetensors
from holdfast_formats.disk.manifests import Manifest
from holdfast_formats.disk.packing import FORMAT_METADATA, FilePlan
from holdfast_formats.disk.safetensors import FileTensor
from holdfast_formats.disk.verification import Piece
from holdfast_formats.errors import CheckpointError
from holdfast_formats.files import Files
from holdfast_formats.naming import STATE, index_file_name
from holdfast_formats.staging import arena, slot_table
from holdfast_formats.staging.holdings import gather
from holdfast_formats.staging.plan import WritePlan
from holdfast_formats.staging.slot_table import SlotTable
from holdfast_formats.staging.wire import HeldPart
from holdfast_formats.tensors import TensorSpec
from holdfast_service.control.checkpoints import planner
from holdfast_service.control.control import Control
from holdfast_service.daemon.writing.gathering import ExtentSlice, FileBytes

log = logging.getLogger(__name__)


class RepairSource(Protocol):
    """`label` names the source of the bytes in messages."""

    @property
    def label(self) -> str: ...
    def piece(self, piece: Piece) -> bytes | bytearray | None: ...  # proven, or None


def proves(piece: Piece, data: bytes | bytearray) -> bool:
    """Whether these are the written bytes, by digest (I7)."""
    return len(data) == piece.length and digest(data) == piece.digest


class Directory:
    """A checkpoint's stored files: the damaged one itself, whose other pieces are sound, or a replica."""

    def __init__(self, label: str, files: Files, directory: str) -> None:
        self.label, self._files, self._directory = label, files, directory

    def piece(self, piece: Piece) -> bytearray | None:
        data = bytearray(piece.length)
        try:
            got = self._files.read_into(f"{self._directory}/{piece.file}", piece.start, data)
        except CheckpointError as error:
            log.debug("%s has no intact copy of %s at %d: %s", self.label, piece.file, piece.start, error.detail)
            return None
        return data if got == piece.length and proves(piece, data) else None


class DerivedPieces:
    """Bytes that follow from the manifest alone: headers of shard files, indexes, and empty files."""

    label = "manifest"

    def __init__(self, manifest: Manifest) -> None:
        self._made = manifest

    def piece(self, piece: Piece) -> bytes | None:
        if piece.tensor is not None or piece.start:
            return None
        if not piece.length:
            return b""
        entry = self._made.file(piece.file)
        if entry is not None and entry.header_bytes:
            data = self._header(piece.file)
        else:
            data = next((self._index(group) for group in self._made.groups if index_file_name(group) == piece.file), b"")
        return data if proves(piece, data) else None

    def _header(self, file: str) -> bytes:
        inside = [
            (entry.start, entry.nbytes, name, entry)
            for tensors in self._made.tensors.values()
            for name, entry in tensors.items()
            if entry.file == file
        ]
        first = min(start for start, *_ in inside) if inside else 0
        order = sorted(inside, key=lambda held: held[:2])
        stored = [FileTensor(name, e.dtype, e.shape, start - first, start - first + size) for start, size, name, e in order]
        try:
            return safetensors.encode(stored, FORMAT_METADATA)
        except CheckpointError:
            return b""

    def _index(self, group: str) -> bytes:
        files: dict[str, list[tuple[TensorSpec, int]]] = {}
        for name, entry in self._made.tensors[group].items():
            files.setdefault(entry.file, []).append((TensorSpec(group, name, entry.dtype, entry.shape), entry.start))
        return index.encode(FilePlan(file, group, b"", tuple(held), 0) for file, held in files.items())


class HeldSlotSource:
    """The slots that the checkpoint was committed from, if they are still kept; their bytes are verified before use."""

    label = "slot"

    def __init__(self, plan: WritePlan, slots: Mapping[int, memoryview]) -> None:
        self._plan, self._slots = plan, slots
        self._cuts: dict[tuple[str, str], ExtentSlice] = {}
        for file in plan.files:
            for cut in FileBytes(file, slots, plan.extent_bytes).cuts:
                if cut.tensor is not None:
                    self._cuts.setdefault((cut.tensor.spec.group, cut.tensor.spec.name), cut)

    def piece(self, piece: Piece) -> bytes | bytearray | None:
        data: bytes | bytearray = self._small(piece.file)
        if piece.tensor is not None and piece.group is not None:
            cut = self._cuts.get((piece.group, piece.tensor))
            if cut is None or cut.tensor is None:
                return None
            data = bytearray(piece.length)
            if gather(cut.tensor.spec, cut.held, piece.offset, np.frombuffer(data, np.uint8)) != piece.length:
                return None
        return data if proves(piece, data) else None

    def _small(self, file: str) -> bytes:
        if file == STATE:
            return self._plan.state
        for asset in self._plan.assets:
            if asset.blob.name == file:
                return bytes(self._slots[asset.rank][asset.blob.slot_offset :][: asset.blob.length])
        return b""


@contextmanager
def held_slots(
    parts: tuple[HeldPart, ...], fds: tuple[int, ...], manifest: Manifest, control: Control
) -> Iterator[HeldSlotSource | None]:
    """The held slots of this very checkpoint, mapped within the block; None if they are no longer complete.

    Closes the descriptors. The slots are not locked: a rank may reuse one meanwhile, which the verification before use
    detects.
    """
    with ExitStack() as stack:
        for fd in fds:
            stack.callback(os.close, fd)
        yield _opened(parts, fds, manifest, control) if parts else None


def _opened(
    parts: tuple[HeldPart, ...], fds: tuple[int, ...], manifest: Manifest, control: Control
) -> HeldSlotSource | None:
    tables: list[SlotTable] = []
    slots: dict[int, memoryview] = {}
    try:
        for part, fd in zip(parts, fds, strict=True):
            memory = memoryview(mmap.mmap(fd, os.fstat(fd).st_size, prot=mmap.PROT_READ))
            geometry = arena.read_superblock(memory)
            header = arena.read_header(memory, geometry, part.slot)
            start = geometry.table_offset(part.slot)
            tables.append(slot_table.decode(bytes(memory[start : start + header.table_bytes]), header.data_bytes))
            data = geometry.data_offset(part.slot)
            slots[part.rank] = memory[data : data + header.data_bytes]
        plan = planner.plan(tables)
    except (CheckpointError, OSError, ValueError) as error:
        log.info("cannot read the in-memory checkpoint: %s", error)
        return None
    if (plan.run, plan.step, plan.attempt) != (manifest.run, manifest.step, manifest.attempt):
        return None
    return HeldSlotSource(plan, slots)
