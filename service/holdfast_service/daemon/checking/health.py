"""Computes statistics and health of a checkpoint while it is verified after its commit.

The change since the previous checkpoint also needs that one's bytes: extents with equal digests have not changed, and the
others are read from both. While another save is being written they are skipped, because saves come first.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from holdfast_files.buffers import ALIGNMENT_MAX, BufferPool
from holdfast_files.verifying import VerifiedBatch
from holdfast_formats import naming
from holdfast_formats.disk import verification
from holdfast_formats.disk.manifests import Manifest
from holdfast_formats.disk.verification import ExtentColumns, PieceColumns
from holdfast_formats.errors import CheckpointError, InUse
from holdfast_formats.files import Files
from holdfast_formats.rest import portion_statistics
from holdfast_formats.rest.statistics import (
    CHANGE,
    NOWHERE,
    PartStatistics,
    Statistics,
    Table,
    collect,
    merge_each,
)
from holdfast_formats.staging.holdings import Bytes
from holdfast_service.control.control import Control
from holdfast_service.daemon.checking.statistics import Parts, measure_alike
from holdfast_service.daemon.checking.verifier import WORKERS
from holdfast_service.daemon.writing import writer

log = logging.getLogger(__name__)

_windows = BufferPool(WORKERS)  # of what was there before


class _Compared:
    """The extents of a checkpoint, the same ones in the previous checkpoint, and what is measured of them, as columns."""

    def __init__(self, manifest: Manifest, before: Manifest | None, extents: ExtentColumns) -> None:
        self.manifest, self.before, self.extents = manifest, before, extents
        self.twins = _twins(manifest, before)
        self.old = None if before is None else verification.extents(before)
        self.extent_twins = _extent_twins(self.extents, self.old, self.twins)
        self.kinds = list(dict.fromkeys(entry.dtype for entry in self.extents.entries))
        numbers = {kind: number for number, kind in enumerate(self.kinds)}
        self.kind_of = np.array([numbers[entry.dtype] for entry in self.extents.entries], np.int64)
        self.measured: Table = np.empty((len(self.extents.rows), len(PartStatistics._fields)))
        self.known = np.zeros(len(self.extents.rows), np.bool_)


class _Held(NamedTuple):
    """Extents, and where each begins in the bytes."""

    rows: NDArray[np.void]
    begins: NDArray[np.int64]
    data: Bytes

    def where(self, which: NDArray[Any]) -> _Held:
        return _Held(self.rows[which], self.begins[which], self.data)

    def parts(self, length: int) -> Parts:
        """The bytes of extents that all have this length."""
        begin, end = int(self.begins[0]), int(self.begins[-1]) + length
        if end - begin == length * len(self.begins) and (np.diff(self.begins) == length).all():
            return self.data[begin:end].reshape(-1, length)
        return [self.data[at : at + length] for at in self.begins.tolist()]


def _held(batch: VerifiedBatch) -> _Held:
    rows = batch.pieces.rows[batch.pieces.rows["extent"] >= 0]
    return _Held(rows, rows["start"] - batch.pieces.start, batch.data)


class Examination:
    """The statistics of one checkpoint, from verified pieces in any order and on several threads.

    Errors are logged and affect nothing else: then there are no statistics.
    """

    def __init__(self, tier: Files, before: Manifest | None) -> None:
        self._tier, self._before = tier, before
        self._lock = threading.Lock()
        self._of: _Compared | None = None
        self._failed = False

    @property
    def base(self) -> Manifest | None:
        """The checkpoint from which changes are measured."""
        return self._before

    def passed(self, manifest: Manifest, batch: VerifiedBatch) -> None:
        """These pieces, of one file, are verified; their bytes are valid until this returns. Some may come twice."""
        if self._failed:
            return
        try:
            self._take(self._compared(manifest, batch.pieces.columns), _held(batch))
        except Exception:
            self._failed = True
            log.exception("there are no statistics of %s@%s", manifest.run, manifest.step)

    def result(self, manifest: Manifest) -> Statistics | None:
        """The statistics of every tensor, after all pieces; None if some are missing, or something failed."""
        of = self._compared(manifest)
        if self._failed or not of.known.all():
            return None
        return compared(manifest, self._before, merge_each(of.measured, of.extents.edges))

    def portion(self, manifest: Manifest, pieces: Iterable[PieceColumns]) -> bytes:
        """Statistics of these pieces, for the node that combines them; empty if some are missing."""
        of = self._compared(manifest)
        wanted = [some.rows["extent"][some.rows["extent"] >= 0] for some in pieces]
        if self._failed or not all(of.known[numbers].all() for numbers in wanted):
            return b""
        return portion_statistics.encode(of.extents, of.measured, of.known)

    def _compared(self, manifest: Manifest, extents: ExtentColumns | None = None) -> _Compared:
        """What is measured of this manifest: nothing, if it says anything else than the one before of the same bytes."""
        with self._lock:
            of = self._of
            if of is None or (of.manifest is not manifest and of.manifest.tensors != manifest.tensors):
                self._of = of = _Compared(manifest, self._before, extents or verification.extents(manifest))
            return of

    def _take(self, of: _Compared, now: _Held) -> None:
        twins = of.extent_twins[now.rows["extent"]]
        has_twin = np.flatnonzero(twins >= 0)
        if of.old is None or of.before is None or not has_twin.size:
            self._measure(of, now)
            return
        twins = twins[has_twin]
        is_same = of.old.rows["digest"][twins] == now.rows["digest"][has_twin]
        moved = ~is_same & (not writer.under_way())
        others = np.ones(len(now.rows), np.bool_)
        others[has_twin[moved]] = False
        self._measure(of, now.where(others))
        of.measured[now.rows["extent"][has_twin[is_same]], CHANGE] = 0.0
        changed, twins = now.where(has_twin[moved]), twins[moved]
        order = np.argsort(twins)
        for batch in verification.batches(verification.of_extents(of.before, of.old, twins)):
            mine = changed.where(order[np.searchsorted(twins[order], batch.rows["extent"])])
            with _windows.taken() as window:
                there = _held(VerifiedBatch(batch, self._read_before(batch, window)))
                sound = verification.numbers_in(batch, there.data) == batch.rows["digest"]  # the scrub reports the others
                self._measure(of, mine.where(sound), there.where(sound))
                self._measure(of, mine.where(~sound))

    def _measure(self, of: _Compared, now: _Held, before: _Held | None = None) -> None:
        """Measure extents, those of the same dtype and length together, and their changes from the bytes `before`."""
        kinds, lengths = of.kind_of[now.rows["tensor"]], now.rows["length"]
        _, firsts, form_of = np.unique(kinds << 32 | lengths, return_index=True, return_inverse=True)
        for form, first in enumerate(firsts.tolist()):
            which, kind, length = np.flatnonzero(form_of == form), int(kinds[first]), int(lengths[first])
            old = None if before is None else before.where(which).parts(length)
            found = measure_alike(of.kinds[kind], now.where(which).parts(length), old)
            numbers = now.rows["extent"][which]
            of.measured[numbers], of.known[numbers] = found, True

    def _read_before(self, batch: PieceColumns, window: Bytes) -> Bytes:
        """The bytes of these pieces of the previous checkpoint, as far as they can be read."""
        assert self._before is not None
        begin = batch.start - batch.start % ALIGNMENT_MAX
        room = window[: batch.stop - begin + -batch.stop % ALIGNMENT_MAX]
        directory = naming.checkpoint_path(self._before.run, self._before.step)
        try:
            read = self._tier.read_stored(f"{directory}/{batch.file}", begin, room)
        except CheckpointError as error:
            log.warning("cannot compute the change since %s@%s: %s", self._before.run, self._before.step, error.detail)
            read = 0
        return room[batch.start - begin : max(min(batch.stop - begin, read), batch.start - begin)]


def compared(manifest: Manifest, before: Manifest | None, tensors: Table) -> Statistics:
    """The statistics of all tensors, in the manifest's order, and the step from which their changes are measured."""
    step = NOWHERE if before is None else before.step
    return collect(tensors, np.where(_twins(manifest, before) >= 0, step, NOWHERE))


def put_together(manifest: Manifest, before: Manifest | None, portions: Sequence[bytes]) -> Statistics | None:
    """The statistics of a checkpoint from several nodes' portions; None if some are missing."""
    tensors = portion_statistics.put_together(manifest, portions) if all(portions) else None
    return None if tensors is None else compared(manifest, before, tensors)


def _twins(manifest: Manifest, before: Manifest | None) -> NDArray[np.int64]:
    """The place in the previous checkpoint of each tensor's namesake of the same dtype and shape; -1 where it has none."""
    if before is None:
        return np.full(sum(map(len, manifest.tensors.values())), -1)
    twins: list[int] = []
    places: dict[str, dict[str, int]] = {}
    first = 0
    for group, held in before.tensors.items():
        places[group] = {name: number for number, name in enumerate(held, first)}
        first += len(held)
    for group, held in manifest.tensors.items():
        old, there = before.tensors.get(group, {}), places.get(group, {})
        for name, new in held.items():
            twin = old.get(name)
            is_alike = twin is not None and twin.dtype == new.dtype and twin.shape == new.shape
            twins.append(there[name] if is_alike else -1)
    return np.array(twins, np.int64)


def _extent_twins(new: ExtentColumns, old: ExtentColumns | None, twins: NDArray[np.int64]) -> NDArray[np.int64]:
    """The same of each extent; -1 too where the tensor was cut into other ones."""
    if old is None or not len(old.rows):
        return np.full(len(new.rows), -1)
    is_alike = (twins >= 0) & (np.diff(new.edges) == np.diff(old.edges)[twins])
    of = new.rows["tensor"]
    at = np.where(is_alike, old.edges[twins], 0)[of] + np.where(is_alike[of], new.rows["extent"] - new.edges[of], 0)
    is_same = is_alike[of] & (new.rows["offset"] == old.rows["offset"][at]) & (new.rows["length"] == old.rows["length"][at])
    return np.where(is_same, at, -1)


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
