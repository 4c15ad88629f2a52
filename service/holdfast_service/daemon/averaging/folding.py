"""Folds an update into an accumulator, chunk by chunk, so that a kill at any instruction is resumed exactly.

Each chunk is computed into the journal, its number is recorded, it is copied to the accumulator, and its number is recorded
again. The same bytes result wherever a daemon dies. An element is rounded as torch's `lerp_` rounds it on a CPU: weight and
difference in F32, product and sum as one operation.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from holdfast_formats.staging import average
from holdfast_formats.staging.average import AverageRecord, AverageStretch, AverageUpdate
from holdfast_formats.staging.average_history import history_after
from holdfast_service.daemon.arena.average_segment import AverageSegment
from holdfast_service.daemon.averaging import native_lerp

GAP_BYTES_MAX = 64  # between F32 stretches that are folded as one: the gap is never read
BLOCK = 2**16  # elements
_LOW_BITS = np.uint64(2**29 - 1)  # of a float64's fraction: those that a float32 has not
_HALF = np.uint64(2**28)


class FoldChunk(NamedTuple):
    """A unit of computation: `length` elements from `offset` on in the accumulator, `source` in the update."""

    offset: int
    source: int
    length: int
    dtype: str

    @property
    def kept_bytes(self) -> int:
        return self.length if self.dtype == "U8" else 4 * self.length


@lru_cache(maxsize=16)
def chunks(stretches: Sequence[AverageStretch], chunk_bytes: int) -> tuple[FoldChunk, ...]:
    return tuple(_cut(_joined(stretches), chunk_bytes))


def _joined(stretches: Sequence[AverageStretch]) -> Iterator[AverageStretch]:
    """Join neighbours of F32: with many small tensors, Python's overhead would exceed their cost."""
    current: AverageStretch | None = None
    for stretch in stretches:
        end = -1 if current is None else current.offset + current.kept_bytes
        gap = stretch.offset - end
        if current is not None and current.dtype == stretch.dtype == "F32" and gap <= GAP_BYTES_MAX and gap % 4 == 0:
            current = AverageStretch(current.offset, (stretch.offset + stretch.kept_bytes - current.offset) // 4, "F32")
            continue
        if current is not None:
            yield current
        current = stretch
    if current is not None:
        yield current


def _cut(stretches: Iterator[AverageStretch], chunk_bytes: int) -> Iterator[FoldChunk]:
    for stretch in stretches:
        if not stretch.count:
            continue
        kept, brought = stretch.kept_bytes // stretch.count, stretch.brought_bytes // stretch.count
        step = chunk_bytes // kept
        for first in range(0, stretch.count, step):
            count = min(step, stretch.count - first)
            yield FoldChunk(stretch.offset + first * kept, stretch.offset + first * brought, count, stretch.dtype)


def fold(segment: AverageSegment, update: AverageUpdate) -> None:
    """Fold the sealed update in, from where an earlier daemon may have stopped, and free its place."""
    record = segment.record
    seed = update.seed
    weight = update.rule.weight(record.n + 1)
    step = None if seed is not None or record.n == 0 else Lerp(weight)  # None: as it is, whatever stood there
    parts = chunks(update.stretches, segment.geometry.chunk_bytes)
    progress = average.read_progress(segment.memory, update.number)
    copied = progress.copied
    if progress.journaled > copied:  # computed, and perhaps copied in part
        _copy(segment, parts[copied], update.number, copied)
        copied += 1
    for index in range(copied, len(parts)):
        _compute(segment, parts[index], step)
        average.note_journaled(segment.memory, update.number, index + 1)
        _copy(segment, parts[index], update.number, index)
    segment.write(_after(record, update))
    segment.free()


def _after(record: AverageRecord, update: AverageUpdate) -> AverageRecord:
    number, seed = update.number, update.seed
    history = history_after(record.history, update)
    if seed is None:
        return AverageRecord(
            *(number, number, record.seeded, record.n + 1, record.own + 1, update.step),
            *(record.dropped, record.skipped, record.lost, update.layout, update.rule, history),
        )
    counts = seed.dropped, seed.skipped, seed.lost
    return AverageRecord(number, number, number, seed.n, 0, seed.step, *counts, update.layout, update.rule, history)


def _compute(segment: AverageSegment, chunk: FoldChunk, step: Lerp | None) -> None:
    """Compute the chunk's result into the journal."""
    result = segment.journal(chunk.kept_bytes)
    if chunk.dtype == "U8":
        result[:] = segment.brought(chunk.source, chunk.length)
        return
    brought = widened(segment.brought(chunk.source, _size(chunk)), chunk.dtype)
    if step is None:
        result.view(np.float32)[:] = brought
    else:
        step(segment.kept(chunk.offset, chunk.kept_bytes).view(np.float32), brought, result.view(np.float32))


def _size(chunk: FoldChunk) -> int:
    return AverageStretch(0, chunk.length, chunk.dtype).brought_bytes


def _copy(segment: AverageSegment, chunk: FoldChunk, number: int, index: int) -> None:
    segment.kept(chunk.offset, chunk.kept_bytes)[:] = segment.journal(chunk.kept_bytes)
    average.note_copied(segment.memory, number, index + 1)


def widened(octets: NDArray[np.uint8], dtype: str) -> NDArray[np.float32]:
    if dtype == "F32":
        return octets.view(np.float32)
    if dtype == "F16":
        return octets.view(np.float16).astype(np.float32)
    return (octets.view(np.uint16).astype(np.uint32) << np.uint32(16)).view(np.float32)


class Lerp:
    """kept + weight·(brought − kept), rounded as `torch.lerp` on a CPU; from a weight of 1/2 on, from the other end.

    Without `native_lerp` it computes in F64, in reused memory that stays in a core's cache: fresh memory for each step would
    cost more than the sums. Both give the same bits.
    """

    def __init__(self, weight: float) -> None:
        self._weight = np.float32(weight)
        self._difference = np.empty(BLOCK, np.float32)
        self._product, self._total = np.empty(BLOCK, np.float64), np.empty(BLOCK, np.float64)
        self._bits, self._tied = np.empty(BLOCK, np.uint64), np.empty(BLOCK, np.bool_)

    def __call__(self, kept: NDArray[np.float32], brought: NDArray[np.float32], into: NDArray[np.float32]) -> None:
        """Write the result into memory that overlaps neither input."""
        if native_lerp.lerp(kept, brought, into, self._weight):
            return
        with np.errstate(all="ignore"):  # infinities and NaN go where they go in torch
            for at in range(0, len(kept), BLOCK):
                self._block(kept[at : at + BLOCK], brought[at : at + BLOCK], into[at : at + BLOCK])

    def _block(self, kept: NDArray[np.float32], brought: NDArray[np.float32], into: NDArray[np.float32]) -> None:
        size, near = len(kept), bool(abs(self._weight) < 0.5)
        product, total = self._product[:size], self._total[:size]
        np.subtract(brought, kept, out=self._difference[:size])
        np.copyto(product, self._difference[:size])
        factor = np.float64(self._weight) if near else -np.float64(np.float32(1.0) - self._weight)
        np.multiply(product, factor, out=product)  # exact: of two F32
        np.copyto(total, kept if near else brought)
        np.add(total, product, out=total)
        bits, tied = self._bits[:size], self._tied[:size]
        np.bitwise_and(total.view(np.uint64), _LOW_BITS, out=bits)
        np.equal(bits, _HALF, out=tied)
        if tied.any():
            where = np.flatnonzero(tied)
            addend = (kept if near else brought)[where].astype(np.float64)
            total[where] = _untied(product[where], addend, total[where])
        into[:] = total


def _untied(product: NDArray[Any], addend: NDArray[Any], total: NDArray[Any]) -> NDArray[Any]:
    """Sums half-way between two F32, moved to the side of the exact ones: the sum was rounded to get there, and would be
    rounded again. The product of two F32 is exact in float64.
    """
    shadow = total - product
    error = (product - (total - shadow)) + (addend - shadow)
    toward = np.where(error > 0, np.inf, -np.inf)
    moved: NDArray[Any] = np.where(error == 0, total, np.nextafter(total, toward))
    return moved
