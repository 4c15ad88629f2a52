"""A node's share of a checkpoint that several nodes write: whole blocks of files, out of its own slots and those of others.

While one share is written, the bytes of the next are fetched from the nodes that hold them.
"""

from __future__ import annotations

import mmap
import os
import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from itertools import groupby
from typing import NamedTuple

from holdfast_formats.digest import digest
from holdfast_formats.disk.manifests import Extent, FileEntry
from holdfast_formats.errors import RoundAborted
from holdfast_formats.staging.blocks import Share
from holdfast_formats.staging.plan import PlannedAsset, PlannedTensor, Receipt, WritePlan
from holdfast_formats.staging.slot_ranges import SlotRange, slot_ranges
from holdfast_service.daemon.writing.gathering import FileBytes, FilePart, Slots, tensors_in
from holdfast_service.daemon.writing.write_threads import Schedule, WriteThreads
from holdfast_service.daemon.writing.writer import CORES_A_DIGEST, Sink, announced, submit
from holdfast_service.storage import StagedCheckpoint

Bring = Callable[[Sequence[SlotRange], Mapping[int, memoryview]], None]

_Written = list[tuple[PlannedTensor, Extent]]


class NodeShare(NamedTuple):
    """What a node writes: shares in file order, and the assets of its `ranks`. `block_bytes` is the grid's."""

    shares: Sequence[Share]
    block_bytes: int
    ranks: Collection[int]


class SlotSources(NamedTuple):
    """The slots of this node's ranks, and a function that fetches bytes of others to the same places of given memory.
    `is_over` returns whether the result is no longer needed.
    """

    slots: Slots
    bring: Bring
    is_over: Callable[[], bool] = lambda: False


def write_share(
    staged: StagedCheckpoint,
    plan: WritePlan,
    sources: SlotSources,
    share: NodeShare,
    node: str,
    schedule: Schedule | None = None,
) -> Receipt:
    """Stage a node's share and the assets of its ranks, and make their bytes durable; their names become durable with the
    commit. It may be another node's share. When this raises, nothing of it is written any more.

    The receipt lists the extents of this share, but only assets as files: the plan has the rest. Raises what `write` and
    `bring` raise.
    """
    with announced(staged.place):
        assets = [asset for asset in plan.assets if asset.rank in share.ranks]
        slots = _with_assets(sources, assets)
        files = [_put_asset(staged, asset, slots) for asset in assets]
        schedule = schedule or Schedule(sum(one.end - one.begin for one in share.shares))
        extents: dict[str, dict[str, list[Extent]]] = {}
        for tensor, extent in _write_shares(staged, plan, sources, share, schedule):
            extents.setdefault(tensor.spec.group, {}).setdefault(tensor.spec.name, []).append(extent)
    proven = {group: {name: tuple(listed) for name, listed in names.items()} for group, names in extents.items()}
    return Receipt(node, plan.run, plan.step, plan.attempt, tuple(files), proven)


def _with_assets(sources: SlotSources, assets: Sequence[PlannedAsset]) -> Slots:
    """The slots, with the assets of other nodes' slots."""
    away = [asset for asset in assets if asset.rank not in sources.slots]
    if not away:
        return sources.slots
    ends = {asset.rank: 1 for asset in away}
    for rank, blob in away:
        ends[rank] = max(ends[rank], blob.slot_offset + blob.length)
    wanted = [SlotRange(rank, blob.slot_offset, blob.slot_offset + blob.length) for rank, blob in away if blob.length]
    return {**sources.slots, **_brought(sources, wanted, ends)}


def _brought(sources: SlotSources, wanted: Sequence[SlotRange], ends: Mapping[int, int]) -> dict[int, memoryview]:
    """Ranges of other nodes' slots, at their places in separate memory, as long as each rank's `ends`."""
    # Long enough that offsets are those of the slots; pages that nothing is brought to are never made.
    into = {rank: memoryview(mmap.mmap(-1, end, flags=_PRIVATE)) for rank, end in ends.items()}
    if wanted:
        sources.bring(wanted, into)
    return into


def _put_asset(staged: StagedCheckpoint, asset: PlannedAsset, slots: Slots) -> FileEntry:
    blob = asset.blob
    data = bytes(slots[asset.rank][blob.slot_offset : blob.slot_offset + blob.length])
    staged.put(blob.name, data)
    return FileEntry(blob.name, len(data), 0, digest(data))


def _write_shares(
    staged: StagedCheckpoint, plan: WritePlan, sources: SlotSources, share: NodeShare, schedule: Schedule
) -> Iterator[tuple[PlannedTensor, Extent]]:
    digesting = threading.BoundedSemaphore(max(len(os.sched_getaffinity(0)) // CORES_A_DIGEST, 1))
    with ExitStack() as stack:
        threads = stack.enter_context(WriteThreads(schedule))
        ahead = stack.enter_context(_Ahead(plan, sources, share))
        for file_number, of_file in groupby(share.shares, key=lambda one: one.file):
            file = plan.files[file_number]
            writer = staged.create(file.layout.name, file.layout.bytes)
            stack.callback(writer.discard)
            for one in of_file:
                if sources.is_over():
                    raise RoundAborted("the round has ended on another node")
                with ahead.next(one) as slots:
                    content = FileBytes(file, slots, plan.extent_bytes, FilePart(one.begin, one.end, share.block_bytes))
                    yield from _write_all(Sink(writer, digesting), content, threads)
            writer.finish()


def _write_all(sink: Sink, content: FileBytes, threads: WriteThreads) -> _Written:
    jobs = submit(sink, content, threads)
    try:
        return [pair for job in jobs for pair in job.result()]
    finally:
        for job in jobs:
            job.cancel()
        _settle(jobs)


def _settle(jobs: Sequence[Future[_Written]]) -> None:
    """After a failure, wait until no thread reads slots or writes, before the error is raised."""
    for job in jobs:
        if not job.cancelled():
            job.exception()


class _Ahead:
    """Fetches the next share's bytes from other nodes while one is written."""

    def __init__(self, plan: WritePlan, sources: SlotSources, share: NodeShare) -> None:
        self._plan, self._sources, self._block_bytes = plan, sources, share.block_bytes
        self._left = iter(share.shares)
        self._pool = ThreadPoolExecutor(1, "holdfast-bring")
        self._coming: Future[dict[int, memoryview]] | None = None

    def __enter__(self) -> _Ahead:
        self._begin()
        return self

    def __exit__(self, *raised: object) -> None:
        self._pool.shutdown(wait=True, cancel_futures=True)

    @contextmanager
    def next(self, one: Share) -> Iterator[Slots]:
        """The slots of all ranks for this share; those of other nodes have only its bytes."""
        assert self._coming is not None
        brought = self._coming.result()
        self._begin()
        yield {**self._sources.slots, **brought}

    def _begin(self) -> None:
        one = next(self._left, None)
        self._coming = None if one is None else self._pool.submit(self._bring, one)

    def _bring(self, one: Share) -> dict[int, memoryview]:
        file = self._plan.files[one.file]
        planned_tensors = tensors_in(file, FilePart(one.begin, one.end, self._block_bytes))
        wanted = slot_ranges(planned_tensors, one.begin, one.end, without=self._sources.slots.keys())
        return _brought(self._sources, wanted, _ends(planned_tensors, wanted))


_PRIVATE = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0)


def _ends(tensors: Sequence[PlannedTensor], ranges: Sequence[SlotRange]) -> dict[int, int]:
    """For each rank with a range, the end of the last of its boxes."""
    ends = {one.rank: 0 for one in ranges}
    for tensor in tensors:
        for origin in tensor.origins:
            if origin.rank in ends:
                ends[origin.rank] = max(ends[origin.rank], origin.slot_offset + origin.nbytes(tensor.spec))
    return ends
