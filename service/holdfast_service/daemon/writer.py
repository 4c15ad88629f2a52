"""The writer: from the slots of all local ranks to durable files and a receipt. One pass: gather, digest, write.

Consecutive extents of a file are batched, so that thousands of small tensors cost a few large `pwritev` calls. An extent
whose bytes lie contiguously in slots is written from there; one that is strided over ranks (column shards) is put together
in a bounce buffer first, since many short writes run at a fraction of the speed of one long one.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any, NamedTuple

import numpy as np
import xxhash
from numpy.typing import NDArray

from holdfast_formats import naming
from holdfast_formats.digest import digest
from holdfast_formats.manifest import EXTENT_BYTES_MAX, Extent, FileEntry
from holdfast_formats.plan import Origin, Plan, PlannedFile, PlannedTensor, Receipt, encode_receipt
from holdfast_formats.region import byte_box, byte_span, byte_view
from holdfast_formats.transfer import Direction, element_dtype, move
from holdfast_service.storage import FileWriter, Tier

BATCH_BYTES_MAX = EXTENT_BYTES_MAX
BATCH_EXTENTS_MAX = 256
WORKERS = 2

Slots = Mapping[int, memoryview]  # rank -> the data of its sealed slot
Bytes = NDArray[np.uint8]


class _Cut(NamedTuple):
    """An extent to be written: a tensor's bytes [offset, offset + length)."""

    tensor: PlannedTensor
    offset: int
    length: int


_Written = tuple[_Cut, Extent]


class _Held(NamedTuple):
    """An origin in byte-view coordinates, with its bytes: an array of the box's shape, and [start, stop) if contiguous."""

    origin: Origin
    elements: NDArray[Any]
    span: tuple[int, int] | None


def write(tier: Tier, plan: Plan, staging: str, slots: Slots, node: str) -> Receipt:
    """Write all files and assets of `plan` under `staging`, fsync them, then the receipt (I3), and return it.

    Raises `StorageFailed` or `NoSpace`; what was written by then is garbage for the caller to remove. A failed fsync is
    never tried again (I9).
    """
    files: list[FileEntry] = []
    extents: dict[str, dict[str, list[Extent]]] = {}
    for asset in plan.assets:
        blob = asset.blob
        data = bytes(slots[asset.rank][blob.slot_offset : blob.slot_offset + blob.length])
        tier.put(f"{staging}/{blob.name}", data)
        files.append(FileEntry(blob.name, len(data), 0, digest(data)))
    with ThreadPoolExecutor(WORKERS, thread_name_prefix="holdfast-write") as pool:
        bounce = _Bounce()
        for file in plan.files:
            entry, cuts = _write_file(tier, f"{staging}/{file.layout.name}", file, slots, (pool, bounce))
            files.append(entry)
            for cut, extent in cuts:
                extents.setdefault(cut.tensor.spec.group, {}).setdefault(cut.tensor.spec.name, []).append(extent)
    proven = {group: {name: tuple(listed) for name, listed in names.items()} for group, names in extents.items()}
    receipt = Receipt(node, plan.run, plan.step, plan.attempt, tuple(files), proven)
    tier.put(f"{staging}/{naming.RECEIPTS}/{node}.json", encode_receipt(receipt))
    return receipt


class _Bounce:
    """A buffer of one batch for each thread of the pool, made once."""

    def __init__(self) -> None:
        self._local = threading.local()

    def take(self) -> Bytes:
        if not hasattr(self._local, "buffer"):
            self._local.buffer = np.empty(BATCH_BYTES_MAX, np.uint8)
        buffer: Bytes = self._local.buffer
        return buffer


def _write_file(
    tier: Tier, path: str, file: PlannedFile, slots: Slots, tools: tuple[ThreadPoolExecutor, _Bounce]
) -> tuple[FileEntry, list[_Written]]:
    pool, bounce = tools
    layout = file.layout
    writer = tier.create(path, layout.bytes)
    try:
        writer.write(0, [layout.header])
        held = {id(tensor): [_hold(tensor, origin, slots) for origin in tensor.origins] for tensor in file.tensors}
        written = _run_all([pool.submit(_write_batch, writer, batch, held, bounce) for batch in _batches(file)])
        writer.finish()
    finally:
        writer.discard()
    return FileEntry(layout.name, layout.bytes, len(layout.header), digest(layout.header)), written


def _run_all(jobs: Sequence[Future[list[_Written]]]) -> list[_Written]:
    """All results in order; if one failed, no other still writes when its error is raised: the file is closed next."""
    try:
        return [pair for job in jobs for pair in job.result()]
    finally:
        for job in jobs:
            job.cancel()
        wait(jobs)


def _batches(file: PlannedFile) -> Iterator[list[_Cut]]:
    batch: list[_Cut] = []
    room = BATCH_BYTES_MAX
    for tensor in file.tensors:
        size = tensor.spec.nbytes
        for offset in range(0, size, EXTENT_BYTES_MAX):
            cut = _Cut(tensor, offset, min(EXTENT_BYTES_MAX, size - offset))
            if batch and (cut.length > room or len(batch) == BATCH_EXTENTS_MAX):
                yield batch
                batch, room = [], BATCH_BYTES_MAX
            batch.append(cut)
            room -= cut.length
    if batch:
        yield batch


def _hold(tensor: PlannedTensor, origin: Origin, slots: Slots) -> _Held:
    spec = tensor.spec
    view = byte_view(spec.dtype, spec.shape, spec.name)
    box = byte_box(spec.dtype, origin.box, spec.shape, spec.name)
    length = box.volume * view.itemsize
    data = slots[origin.rank][origin.slot_offset : origin.slot_offset + length]
    elements = np.frombuffer(data, element_dtype(view.itemsize)).reshape(box.shape)
    span = byte_span(box, view.shape, view.itemsize)
    return _Held(origin._replace(box=box), elements, span if span[1] - span[0] == length else None)


def _write_batch(
    writer: FileWriter, batch: Sequence[_Cut], held: Mapping[int, Sequence[_Held]], bounce: _Bounce
) -> list[_Written]:
    buffers: list[Any] = []
    written: list[_Written] = []
    used = 0
    for cut in batch:
        parts = _contiguous(cut, held[id(cut.tensor)])
        if parts is None:
            target = bounce.take()[used : used + cut.length]
            _gather(cut, held[id(cut.tensor)], target)
            used += cut.length
            parts = [target]
        written.append((cut, Extent(cut.offset, cut.length, _digest_of(parts))))
        buffers += parts
    first = batch[0]
    writer.write(first.tensor.start + first.offset, buffers)
    return written


def _contiguous(cut: _Cut, holders: Sequence[_Held]) -> list[Bytes] | None:
    """The extent's bytes as they stand in slots, in order, or None when some of them are strided."""
    stop = cut.offset + cut.length
    parts: list[tuple[int, Bytes]] = []
    for holder in holders:
        if holder.span is None:
            return None
        low, high = max(holder.span[0], cut.offset), min(holder.span[1], stop)
        if low < high:
            flat = holder.elements.reshape(-1).view(np.uint8)
            parts.append((low, flat[low - holder.span[0] : high - holder.span[0]]))
    return [part for _, part in sorted(parts, key=lambda p: p[0])]


def _gather(cut: _Cut, holders: Sequence[_Held], target: Bytes) -> None:
    spec = cut.tensor.spec
    view = byte_view(spec.dtype, spec.shape, spec.name)
    extent = target.view(element_dtype(view.itemsize))
    start = cut.offset // view.itemsize
    moved = sum(move(Direction.GATHER, extent, start, h.elements, h.origin.box, view.shape) for h in holders)
    assert moved == extent.size, f"{spec.name}: {moved} of {extent.size} elements gathered"


def _digest_of(parts: Sequence[Bytes]) -> str:
    if len(parts) == 1:
        return digest(parts[0])
    state = xxhash.xxh3_64()
    for part in parts:
        state.update(part.data)
    return state.hexdigest()
