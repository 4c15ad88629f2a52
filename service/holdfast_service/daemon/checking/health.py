"""Computes statistics and health of a checkpoint while it is verified after its commit.

The change since the previous checkpoint also needs that one's bytes: extents with equal digests have not changed, and the
others are read from both. While another save is being written they are skipped, because saves come first.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import NamedTuple

from holdfast_files.buffers import ALIGNMENT_MAX, BufferPool
from holdfast_formats import naming
from holdfast_formats.disk import verification
from holdfast_formats.disk.manifests import Manifest, TensorEntry
from holdfast_formats.disk.verification import Piece
from holdfast_formats.errors import CheckpointError, InUse
from holdfast_formats.files import Files
from holdfast_formats.rest import portion_statistics
from holdfast_formats.rest.statistics import PartStatistics, Statistics, collect, merge, tensors_of
from holdfast_formats.staging.holdings import Bytes
from holdfast_service.control.control import Control
from holdfast_service.daemon.checking.statistics import measure_alike
from holdfast_service.daemon.checking.verifier import WORKERS
from holdfast_service.daemon.writing import writer

log = logging.getLogger(__name__)

_windows = BufferPool(WORKERS)  # of what was there before


class _Passed(NamedTuple):
    """A verified piece, its bytes, and the same piece of the previous checkpoint."""

    piece: Piece
    data: Bytes
    before: Piece | None


class Examination:
    """The statistics of one checkpoint, from verified pieces in any order and on several threads.

    Errors are logged and affect nothing else: then there are no statistics.
    """

    def __init__(self, tier: Files, before: Manifest | None) -> None:
        self._tier, self._before = tier, before
        self._lock = threading.Lock()
        self._parts: dict[tuple[str, str], dict[int, PartStatistics]] = {}
        self._failed = False

    @property
    def base(self) -> Manifest | None:
        """The checkpoint from which changes are measured."""
        return self._before

    def passed(self, manifest: Manifest, pieces: Sequence[Piece], data: Sequence[Bytes]) -> None:
        """These pieces, of one file, are verified; their bytes are valid until this returns. Some may come twice."""
        if self._failed:
            return
        try:
            wanted = [(piece, held) for piece, held in zip(pieces, data, strict=True) if piece.tensor is not None]
            self._take(manifest, [_Passed(piece, held, self._piece_before(manifest, piece)) for piece, held in wanted])
        except Exception:
            self._failed = True
            log.exception("there are no statistics of %s@%s", manifest.run, manifest.step)

    def result(self, manifest: Manifest) -> Statistics | None:
        """The statistics of every tensor, after all pieces; None if some are missing, or something failed."""
        if self._failed:
            return None
        merged = []
        for group, name, entry in tensors_of(manifest):
            parts = self._parts.get((group, name), {})
            if len(parts) != len(entry.extents):
                return None
            merged.append(merge([parts[offset] for offset in sorted(parts)]))
        return compared(manifest, self._before, merged)

    def portion(self, manifest: Manifest, pieces: Iterable[Piece]) -> bytes:
        """Statistics of these pieces, for the node that combines them; empty if some are missing."""
        wanted = [(str(piece.group), str(piece.tensor), piece.offset) for piece in pieces if piece.tensor is not None]
        if self._failed or any(offset not in self._parts.get((group, name), {}) for group, name, offset in wanted):
            return b""
        return portion_statistics.encode(manifest, self._parts)

    def _take(self, manifest: Manifest, passed: Sequence[_Passed]) -> None:
        changed: dict[Piece, _Passed] = {}
        others: list[_Passed] = []
        hurried = writer.under_way()
        for one in passed:
            if one.before is None or hurried or one.before.digest == one.piece.digest:
                others.append(one)
            else:
                changed[one.before] = one
        self._measure(manifest, others)
        for batch in verification.batches(changed):
            with _windows.taken() as window:
                held = dict(self._read_before(batch, window))
                there = {piece: old for piece, old in held.items() if old is not None}
                self._measure(manifest, [changed[piece] for piece in there], list(there.values()))
                self._measure(manifest, [changed[piece] for piece in held.keys() - there.keys()])

    def _measure(self, manifest: Manifest, passed: Sequence[_Passed], before: Sequence[Bytes] | None = None) -> None:
        """Measure pieces, those of the same dtype and length together, and their changes from the bytes `before`."""
        alike: dict[tuple[str, int], list[int]] = {}
        for number, one in enumerate(passed):
            dtype = manifest.tensors[str(one.piece.group)][str(one.piece.tensor)].dtype
            alike.setdefault((dtype, one.piece.length), []).append(number)
        for (dtype, _), numbers in alike.items():
            old = None if before is None else [before[number] for number in numbers]
            parts = measure_alike(dtype, [passed[number].data for number in numbers], old)
            with self._lock:
                for number, part in zip(numbers, parts, strict=True):
                    piece, twin = passed[number].piece, passed[number].before
                    is_same = before is None and twin is not None and twin.digest == piece.digest
                    held = self._parts.setdefault((str(piece.group), str(piece.tensor)), {})
                    held[piece.offset] = part._replace(change=0.0) if is_same else part

    def _piece_before(self, manifest: Manifest, piece: Piece) -> Piece | None:
        """The same bytes' piece in the previous checkpoint; None if that was cut into other extents."""
        group, name = str(piece.group), str(piece.tensor)
        twin = _twin(manifest, self._before, group, name)
        if twin is None or not twin.extents:
            return None
        first = twin.extents[0].length  # all but the last are as long
        at = piece.offset // first
        if at >= len(twin.extents) or (twin.extents[at].offset, twin.extents[at].length) != (piece.offset, piece.length):
            return None
        return verification.tensor_piece(group, name, twin, twin.extents[at])

    def _read_before(self, batch: Sequence[Piece], window: Bytes) -> Iterator[tuple[Piece, Bytes | None]]:
        """The pieces of the previous checkpoint, verified; None for the bytes of unavailable ones."""
        assert self._before is not None
        begin = batch[0].start - batch[0].start % ALIGNMENT_MAX
        room = window[: batch[-1].stop - begin + -batch[-1].stop % ALIGNMENT_MAX]
        directory = naming.checkpoint_path(self._before.run, self._before.step)
        try:
            read = self._tier.read_stored(f"{directory}/{batch[0].file}", begin, room)
        except CheckpointError as error:
            log.warning("cannot compute the change since %s@%s: %s", self._before.run, self._before.step, error.detail)
            read = 0
        for piece in batch:
            data = room[piece.start - begin : max(min(piece.stop - begin, read), piece.start - begin)]
            try:
                verification.check(piece, data)
            except CheckpointError:  # the scrub reports that
                yield piece, None
            else:
                yield piece, data


def compared(manifest: Manifest, before: Manifest | None, parts: Sequence[PartStatistics]) -> Statistics:
    """The statistics of all tensors, in the manifest's order, and the step from which their changes are measured."""
    step = None if before is None else before.step
    steps = (step if _twin(manifest, before, group, name) else None for group, name, _ in tensors_of(manifest))
    return collect(zip(parts, steps, strict=True))


def put_together(manifest: Manifest, before: Manifest | None, portions: Sequence[bytes]) -> Statistics | None:
    """The statistics of a checkpoint from several nodes' portions; None if some are missing."""
    parts = portion_statistics.put_together(manifest, portions) if all(portions) else None
    return None if parts is None else compared(manifest, before, parts)


def _twin(manifest: Manifest, before: Manifest | None, group: str, name: str) -> TensorEntry | None:
    """The tensor of this name in the previous checkpoint, if it has the same dtype and shape."""
    if before is None:
        return None
    old, new = before.tensors.get(group, {}).get(name), manifest.tensors[group][name]
    return old if old is not None and (old.dtype, old.shape) == (new.dtype, new.shape) else None


@contextmanager
def examination(tier: Files, control: Control, run: str, step: int) -> Iterator[Examination | None]:
    """The examination of a checkpoint that is about to be verified; None for one that has been examined already.

    Within the block, the previous checkpoint is protected from removal.
    """
    with ExitStack() as held:
        made: Examination | None = Examination(tier, None)
        try:
            examined = control.statistics.has(run, step)
            before = None if examined else control.health.before(run, step)
            if examined:
                made = None
            elif before is not None:
                held.enter_context(control.readers.checking(before.run, before.step))
                made = Examination(tier, before)
        except InUse:  # a save is about to replace it: this check begins again then
            raise
        except CheckpointError as error:
            log.warning("cannot compare %s@%s with an earlier checkpoint: %s", run, step, error.detail)
        yield made


def report(control: Control, manifest: Manifest, result: Callable[[], Statistics | None]) -> None:
    """Pass the findings to control; an error is logged and affects nothing else."""
    try:
        statistics = result()
        if statistics is not None:
            control.health.take(manifest, statistics)
    except Exception:
        log.exception("cannot record the statistics of %s@%s", manifest.run, manifest.step)
