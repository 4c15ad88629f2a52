"""The bytes of one target file: its parts, and how they are read, whole extents at a time.

Bytes in the source's order are read directly into place, neighbours with one call. Any other tensor is computed in bands of
at most `BAND_BYTES`, so that a permuted one is read once a band and not once an extent.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Executor
from itertools import islice
from math import prod
from typing import NamedTuple
from zlib import crc32

import numpy as np

from holdfast_formats import dtypes
from holdfast_formats.digest import digest
from holdfast_formats.disk.manifests import EXTENT_BYTES_MAX, Extent
from holdfast_formats.disk.packing import tensor_extent_bytes
from holdfast_formats.errors import CorruptManifest, StateMismatch
from holdfast_formats.files import Files
from holdfast_formats.mapping import reading
from holdfast_formats.mapping.box_moves import BoxMove, MappedTensor
from holdfast_formats.mapping.listing import ForeignPiece, ForeignTensor, TensorKey
from holdfast_formats.mapping.target_files import LiteralBytes, StreamedTensor, TargetFile
from holdfast_formats.region import Box, byte_runs, intersect
from holdfast_formats.staging.holdings import Bytes
from holdfast_service.daemon.copying.computed_chunks import ComputedChunk, ComputedChunks

BAND_BYTES = 2**27  # a multiple of every extent's length

Tensors = Mapping[TensorKey, ForeignTensor]


class SourceRun(NamedTuple):
    """Bytes [start, start + length) of a target's tensor that are contiguous in a source file."""

    start: int
    length: int
    file: str
    at: int


class TargetCut(NamedTuple):
    """An extent of a tensor, or known bytes; `start` is in the file, `offset` in the tensor."""

    start: int
    length: int
    offset: int = 0
    tensor: int | None = None
    data: bytes = b""

    @property
    def stop(self) -> int:
        return self.start + self.length


class TargetBytes:
    """The contents of a target file. For one thread, which requests its windows in order."""

    def __init__(
        self,
        source: Files,
        tensors: Tensors,
        file: TargetFile,
        extent_bytes: int,
        ahead: Executor | None = None,
    ) -> None:
        """No extent of a tensor is longer than `extent_bytes`. With `ahead`, bands are computed in it while the last one is
        in use, but for those of decoders that state no length; `close` then.
        """
        self._source, self._tensors, self.file = source, tensors, file
        self.extents: list[list[Extent]] = [[] for _ in file.tensors]
        self._runs = [source_runs(one.mapped, tensors) for one in file.tensors]
        self._crcs: list[int] | None = None if file.sealed is None else [0] * len(file.tensors)
        cuts = [*_literal_cuts((*file.literals, *self.sealed())), *_extent_cuts(file.tensors, extent_bytes)]
        self._cuts = sorted(cuts, key=lambda cut: cut.start)
        computed = (self._band(cut) for cut in self._cuts if cut.tensor is not None and self._runs[cut.tensor] is None)
        self._bands = ComputedChunks(list(dict.fromkeys(computed)), self._made, ahead)

    def windows(self) -> Iterator[Sequence[TargetCut]]:
        """The file in order, as many whole cuts at once as fit a window."""
        window: list[TargetCut] = []
        for cut in self._cuts:
            if window and cut.stop - window[0].start > EXTENT_BYTES_MAX:
                yield window
                window = []
            window.append(cut)
        if window:
            yield window

    def sealed(self) -> tuple[LiteralBytes, ...]:
        """The literals that depend on the tensors' bytes; valid once all windows have been filled."""
        if self.file.sealed is None or self._crcs is None:
            return ()
        return self.file.sealed({one.mapped.key: crc for one, crc in zip(self.file.tensors, self._crcs, strict=True)})

    def fill(self, window: Sequence[TargetCut], into: Bytes) -> None:
        """Read a window, and digest its extents. Raises what filling raises, and errors of the source."""
        begin, runs = window[0].start, _Joined(self._source, into)
        for cut in window:
            place = into[cut.start - begin : cut.stop - begin]
            if cut.tensor is None:
                place[:] = np.frombuffer(cut.data, np.uint8)
                continue
            straight = self._runs[cut.tensor]
            if straight is None:
                place[:] = self._computed(cut)
            else:
                for run in _within(straight, cut.offset, cut.offset + cut.length):
                    runs.add(run._replace(start=run.start - cut.offset + cut.start - begin))
        runs.read()
        for cut in window:
            if cut.tensor is not None:
                data = into[cut.start - begin : cut.stop - begin]
                self.extents[cut.tensor].append(Extent(cut.offset, cut.length, digest(data)))
                if self._crcs is not None:
                    self._crcs[cut.tensor] = crc32(data.data, self._crcs[cut.tensor])

    def close(self) -> None:
        self._bands.close()

    def _computed(self, cut: TargetCut) -> Bytes:
        """An extent, cut from its band."""
        band = self._band(cut)
        return self._bands.get(band)[cut.offset - band.start : cut.offset - band.start + cut.length]

    def _band(self, cut: TargetCut) -> ComputedChunk:
        assert cut.tensor is not None
        mapped = self.file.tensors[cut.tensor].mapped
        decoders = [self._tensors[move.source].decoder for move in mapped.moves]
        ahead = all(one is None or hasattr(one, "band_bytes") for one in decoders)  # others may need much memory for a band
        return ComputedChunk(cut.tensor, cut.offset - cut.offset % band_bytes(mapped, self._tensors), ahead)

    def _made(self, band: ComputedChunk) -> Bytes:
        mapped = self.file.tensors[band.tensor].mapped
        width = dtypes.to_numpy(mapped.spec.dtype).itemsize
        stop = min(band.start + band_bytes(mapped, self._tensors), mapped.spec.nbytes)
        return reading.elements(self._source, self._tensors, mapped, band.start // width, stop // width).view(np.uint8)


class _Joined:
    """Reads runs into a window, consecutive ones at once."""

    def __init__(self, source: Files, into: Bytes) -> None:
        self._source, self._into = source, into
        self._last: SourceRun | None = None

    def add(self, run: SourceRun) -> None:
        last = self._last
        if last is not None and (last.file, last.at + last.length, last.start + last.length) == (
            run.file,
            run.at,
            run.start,
        ):
            self._last = last._replace(length=last.length + run.length)
            return
        self.read()
        self._last = run

    def read(self) -> None:
        run, self._last = self._last, None
        if run is None:
            return
        if self._source.read_into(run.file, run.at, self._into[run.start : run.start + run.length]) != run.length:
            raise CorruptManifest(
                f"{run.file} was truncated while being read",
                hint="try again when no other process is writing it",
                file=run.file,
            )


def source_runs(mapped: MappedTensor, tensors: Tensors) -> list[SourceRun] | None:
    """The runs of a tensor's bytes, in order; None if some have to be computed, transposed or converted.

    Raises `StateMismatch` for elements of less than a byte that have to be: numpy has no such type.
    """
    found: list[SourceRun] = []
    for move in mapped.moves:
        runs = _runs_of(move, mapped, tensors[move.source])
        if runs is None:
            found.clear()
            break
        found += runs
    found.sort()
    if _tile(found, mapped.spec.nbytes):
        return found
    if dtypes.bits(mapped.spec.dtype) < 8:
        name = mapped.spec.name
        raise StateMismatch(f"tensor {name!r} of {mapped.spec.dtype} cannot be sliced, transposed or converted", tensor=name)
    return None


def band_bytes(mapped: MappedTensor, tensors: Tensors) -> int:
    """Bytes of a tensor to compute at once: a multiple of every extent's length."""
    asked = (BAND_BYTES if one is None else one for one in _asked(mapped, tensors))
    return max(min(asked, default=BAND_BYTES), EXTENT_BYTES_MAX)


def _asked(mapped: MappedTensor, tensors: Tensors) -> set[int | None]:
    """The band lengths that decoders state; None for one without."""
    return {getattr(tensors[move.source].decoder, "band_bytes", None) for move in mapped.moves}


def _tile(runs: Sequence[SourceRun], size: int) -> bool:
    at = 0
    for run in runs:
        if run.start != at:
            return False
        at += run.length
    return at == size


def _runs_of(move: BoxMove, mapped: MappedTensor, tensor: ForeignTensor) -> list[SourceRun] | None:
    known = [axis for axis in move.axes if axis is not None]
    if move.stepped or tensor.decoder is not None or tensor.spec.dtype != mapped.spec.dtype or known != sorted(known):
        return None
    bits, runs = dtypes.bits(mapped.spec.dtype), []
    for piece in tensor.pieces:
        common = intersect(piece.box, move.box)
        if common is None or not common.volume:
            continue
        spans = list(islice(byte_runs(_placed(move, common), mapped.spec.shape, 1), 2))
        first = sum(i * step for i, step in zip(common.within(piece.box).offset, piece.strides, strict=True))
        if len(spans) != 1 or not _in_a_row(piece, common) or (spans[0][0] * bits) % 8 or (first * bits) % 8:
            return None
        runs.append(
            SourceRun(spans[0][0] * bits // 8, common.volume * bits // 8, piece.file, piece.start + first * bits // 8)
        )
    return runs


def _placed(move: BoxMove, box: Box) -> Box:
    """The box of the target that a part of the move's source box fills."""
    offset, shape = list(move.target.offset), list(move.target.shape)
    for d, axis in enumerate(move.axes):
        if axis is not None:
            offset[d] += box.offset[axis] - move.box.offset[axis]
            shape[d] = box.shape[axis]
    return Box(tuple(offset), tuple(shape))


def _in_a_row(piece: ForeignPiece, box: Box) -> bool:
    """Whether a box is contiguous in the file, in order."""
    steps = enumerate(zip(box.shape, piece.strides, strict=True))
    return all(n == 1 or step == prod(box.shape[d + 1 :]) for d, (n, step) in steps)


def _within(runs: Sequence[SourceRun], start: int, stop: int) -> Iterator[SourceRun]:
    """The parts of runs that are in [start, stop) of the tensor."""
    for run in runs[max(bisect_right(runs, start, key=lambda run: run.start) - 1, 0) :]:
        low, high = max(run.start, start), min(run.start + run.length, stop)
        if run.start >= stop:
            return
        if low < high:
            yield SourceRun(low, high - low, run.file, run.at + low - run.start)


def _literal_cuts(literals: Sequence[LiteralBytes]) -> Iterator[TargetCut]:
    for literal in literals:
        for at in range(0, len(literal.data), EXTENT_BYTES_MAX):
            part = literal.data[at : at + EXTENT_BYTES_MAX]
            yield TargetCut(literal.start + at, len(part), data=part)


def _extent_cuts(tensors: Sequence[StreamedTensor], extent_bytes: int) -> Iterator[TargetCut]:
    for number, tensor in enumerate(tensors):
        size = tensor.mapped.spec.nbytes
        step = tensor_extent_bytes(size, extent_bytes)
        for at in range(0, size, step):
            yield TargetCut(tensor.start + at, min(step, size - at), at, number)
