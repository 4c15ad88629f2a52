"""The writer: from the slots of all local ranks to durable files and a receipt. One pass: digest, gather, write.

Files are written in order through a few windows: while the device writes some, the next one is digested and, unless the slot
has it as the file does, gathered. Whole blocks bypass the page cache if the tier can, so a save leaves nothing in it.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, wait
from contextlib import contextmanager
from typing import NamedTuple

from holdfast_files.buffers import BufferPool
from holdfast_formats.digest import digest
from holdfast_formats.disk.manifests import Extent, FileEntry
from holdfast_formats.naming import Place
from holdfast_formats.staging.plan import PlannedFile, PlannedTensor, Receipt, WritePlan, encode_receipt
from holdfast_service.daemon.writing.gathering import FileBytes, Slots, Window
from holdfast_service.daemon.writing.write_threads import WORKERS, Schedule, WriteThreads
from holdfast_service.storage import FileWriter, StagedCheckpoint

CORES_A_DIGEST = 2  # threads that digest at the same time get in each other's way, and in the training's
FILES_MAX = 2  # a file's last windows and its fsync overlap with the next file's first ones

_windows = BufferPool(WORKERS)  # of all saves of the daemon, one after the other

_writing: list[Place] = []  # what is being written now; changed by single operations alone

Extents = list[tuple[PlannedTensor, Extent]]
NOTHING_TAKEN: Mapping[str, Extents] = {}


class Sink(NamedTuple):
    """A new file, and how many threads may digest at the same time."""

    writer: FileWriter
    digesting: threading.Semaphore


class _Running(NamedTuple):
    file: PlannedFile
    writer: FileWriter
    jobs: Sequence[Future[Extents]]


def under_way() -> bool:
    """Whether a save is being written now, so that other work leaves the disk alone."""
    return bool(_writing)


def write(
    staged: StagedCheckpoint,
    plan: WritePlan,
    slots: Slots,
    node: str,
    schedule: Schedule | None = None,
    taken: Mapping[str, Extents] = NOTHING_TAKEN,
) -> Receipt:
    """Stage all files and assets of `plan`, durably, then the receipt (I3), and return it.

    By the `schedule`, which began just now, the priority of its threads rises. The files that are `taken`, by name, are
    staged already; their extents go into the receipt.
    Raises `StorageFailed` or `NoSpace`; the caller removes what was written. A failed fsync is never retried (I9).
    """
    with announced(staged.place):
        files = _put_assets(staged, plan, slots)
        shards = _write_files(staged, plan, slots, schedule or Schedule(plan.bytes), taken)
        receipt = _receipt(plan, node, files, shards)
        staged.put_receipt(node, encode_receipt(receipt))
        return receipt


@contextmanager
def announced(place: Place) -> Iterator[None]:
    """Within the block, a save is being written there."""
    _writing.append(place)
    try:
        yield
    finally:
        _writing.remove(place)


def _put_assets(staged: StagedCheckpoint, plan: WritePlan, slots: Slots) -> list[FileEntry]:
    files: list[FileEntry] = []
    for asset in plan.assets:
        blob = asset.blob
        data = bytes(slots[asset.rank][blob.slot_offset : blob.slot_offset + blob.length])
        staged.put(blob.name, data)
        files.append(FileEntry(blob.name, len(data), 0, digest(data)))
    return files


def _receipt(
    plan: WritePlan, node: str, assets: Sequence[FileEntry], shards: Sequence[tuple[PlannedFile, Extents]]
) -> Receipt:
    files = list(assets)
    extents: dict[str, dict[str, list[Extent]]] = {}
    for file, written in shards:
        header = file.layout.header
        files.append(FileEntry(file.layout.name, file.layout.bytes, len(header), digest(header)))
        for tensor, extent in written:
            extents.setdefault(tensor.spec.group, {}).setdefault(tensor.spec.name, []).append(extent)
    proven = {group: {name: tuple(listed) for name, listed in names.items()} for group, names in extents.items()}
    return Receipt(node, plan.run, plan.step, plan.attempt, tuple(files), proven)


def _write_files(
    staged: StagedCheckpoint, plan: WritePlan, slots: Slots, schedule: Schedule, taken: Mapping[str, Extents]
) -> list[tuple[PlannedFile, Extents]]:
    extent_bytes = plan.extent_bytes
    running: deque[_Running] = deque()
    written = [(file, taken[file.layout.name]) for file in plan.files if file.layout.name in taken]
    digesting = digesting_threads()
    with WriteThreads(schedule) as threads:
        try:
            for file in plan.files:
                if file.layout.name in taken:
                    continue
                content = FileBytes(file, slots, extent_bytes)
                created = staged.create(file.layout.name, file.layout.bytes)
                running.append(_start(Sink(created, digesting), file, content, threads))
                if len(running) == FILES_MAX:
                    written.append(_settle(running))
            while running:
                written.append(_settle(running))
        finally:
            _abandon(running)
    return written


def digesting_threads() -> threading.Semaphore:
    """As many as may digest at the same time."""
    return threading.BoundedSemaphore(max(len(os.sched_getaffinity(0)) // CORES_A_DIGEST, 1))


def _start(sink: Sink, file: PlannedFile, content: FileBytes, threads: WriteThreads) -> _Running:
    return _Running(file, sink.writer, submit(sink, content, threads))


def submit(sink: Sink, content: FileBytes, threads: WriteThreads) -> list[Future[Extents]]:
    """Have all windows written."""
    return [
        threads.submit(content.size(window), write_window, sink, content, window, sink.writer.alignment)
        for window in content.windows()
    ]


def write_window(sink: Sink, content: FileBytes, window: Window, alignment: int) -> Extents:
    """Gather, digest and write one window; the extents that end in it."""
    writer = sink.writer
    with _windows.taken() as buffer:
        with sink.digesting:
            gathered = content.gather(window, alignment, buffer)
        if gathered.blocks:
            writer.write(gathered.start, gathered.blocks)
        if gathered.tail.nbytes:
            writer.write(gathered.start + sum(block.nbytes for block in gathered.blocks), [gathered.tail])
        return gathered.extents


def digest_window(digesting: threading.Semaphore, content: FileBytes, window: Window) -> Extents:
    """The extents that end in one window, as they would be written."""
    with _windows.taken() as buffer, digesting:
        return content.gather(window, 1, buffer).extents


def _settle(running: deque[_Running]) -> tuple[PlannedFile, Extents]:
    file, writer, jobs = running[0]
    extents = [pair for job in jobs for pair in job.result()]
    writer.finish()
    running.popleft()
    return file, extents


def _abandon(running: deque[_Running]) -> None:
    """After a failure, wait until no window is written, before the error is raised."""
    for _, _, jobs in running:
        for job in jobs:
            job.cancel()
    for _, writer, jobs in running:
        wait(jobs)
        writer.discard()
