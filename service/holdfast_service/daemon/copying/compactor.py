"""Stages a checkpoint in fewer bytes: examines the rule's candidates, writes codes beside what stays, which is not copied,
and decodes the written bytes before they become visible.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from math import prod, sqrt
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from holdfast_files.opened import CommittedManifest
from holdfast_formats import naming
from holdfast_formats.digest import digest
from holdfast_formats.disk import codings, compacting
from holdfast_formats.disk.codings import MODEL, TIES
from holdfast_formats.disk.compacting import CodingCandidate, CompactPlan, Encoded
from holdfast_formats.disk.manifests import FileEntry, Manifest, TensorEntry
from holdfast_formats.errors import CorruptExtent, NoSpace
from holdfast_formats.mapping import box_moves
from holdfast_formats.mapping.coded_tensors import SLAB_ELEMENTS, KnownIntegers, PartEncoder, tensors_of
from holdfast_formats.mapping.committed_files import CommittedFiles
from holdfast_formats.mapping.listing import ForeignTensor, TensorKey
from holdfast_formats.mapping.reading import fetched
from holdfast_formats.mapping.target_files import LiteralBytes, StreamedTensor, TargetFile
from holdfast_formats.naming import CheckpointId, Place
from holdfast_formats.region import Box, whole
from holdfast_formats.tensors import TensorSpec
from holdfast_formats.timestamps import utc_now
from holdfast_service.daemon.copying import hard_links, streaming
from holdfast_service.daemon.copying.copies import CopyControl, CopyStopped, read_back
from holdfast_service.daemon.copying.finished_files import FinishedFile
from holdfast_service.daemon.copying.streaming import StreamTarget
from holdfast_service.daemon.copying.watched_source import WatchedSource
from holdfast_service.storage import StagedCheckpoint, Store

ERROR_MAX = 0.05  # of a tensor's norm; one that would differ by more stays as it was saved
OFF_SHARE = 32  # if more than one value in so many is off by more than half of itself, the coding does not fit this tensor
SPARE_BYTES = 2**20

NOT_FINITE = "it has NaN or infinities"
NEGATIVE = "it has values below zero"
TOO_LARGE = "a value is too large for bfloat16"
NOT_ROUNDED = "its weight is not the rounded master copy"
MANY_TIES = "too many master values lie half-way between two weights"

Stored = Mapping[TensorKey, ForeignTensor]


class _Source(NamedTuple):
    """Verified files of a checkpoint, and their stored and computed tensors."""

    files: CommittedFiles
    tensors: Stored


class _Looked(NamedTuple):
    """An examined candidate, and its masters that lie half-way and were rounded up."""

    encoded: Encoded
    ties: NDArray[np.uint64]


def stage_compact(store: Store, place: Place, pair: CommittedManifest, rule: str, going: CopyControl) -> Manifest:
    """Stage the checkpoint that `pair` describes by a rule, durably; returns its manifest.

    Raises `StateMismatch` if that saves nothing, `NoSpace`, `Damaged` for bytes that fail their digest or were not written
    correctly, `CopyStopped`, and what `hard_links` raises.
    """
    full, directory = pair.manifest, naming.checkpoint_path(place.run, place.step)
    source = CommittedFiles(store.files, full, directory)
    stored = tensors_of(full)
    chosen = list(compacting.candidates(full, rule))
    _refuse_full(store, full, compacting.least_new_bytes(full, chosen))  # before all of it is read
    looked = [_look(full, source, stored, one, going) for one in chosen]
    planned = compacting.plan(full, pair.encoded, rule, compacting.together([one.encoded for one in looked]), utc_now())
    _refuse_full(store, full, sum(file.bytes for file in planned.files))
    which = CheckpointId(place.run, place.step)
    hard_links.prove(store.files, which, planned.proof, going)
    staged = store.begin(place)
    compact = _write(staged, planned, _Source(source, {**stored, **_parts(planned, stored, looked)}), going)
    hard_links.take(staged, which, planned.proof, going)
    read_back(store.files, staged.path, compact, going)
    _prove(staged, compact, planned, _Source(source, stored), going)
    return compact


def _refuse_full(store: Store, full: Manifest, new: int) -> None:
    needed, free = new + SPARE_BYTES, store.free_bytes()
    if free is not None and needed > free:
        raise NoSpace(
            f"{full.run}@{full.step} needs {needed} bytes of temporary space to be compacted, but only {free} are free",
            hint="free space; until then it stays as it is",
            needed=needed,
            free=free,
        )


def _look(full: Manifest, source: CommittedFiles, stored: Stored, one: CodingCandidate, going: CopyControl) -> _Looked:
    """Encode and decode all values of a candidate, to check whether the rule allows that."""
    key = TensorKey(one.group, one.name)
    none = np.empty(0, np.uint64)
    if one.coding == "low16":
        ties = _ties(source, stored[key], stored[TensorKey(MODEL, one.name)], going)
        if isinstance(ties, str):
            return _Looked(Encoded(one, left=ties), none)
        return _Looked(Encoded(one, ties=len(ties)), ties)
    looked = _look_at_moments(source, stored[key], one, going)
    far = looked.left and looked.left not in (NOT_FINITE, NEGATIVE)
    if far and (milder := compacting.milder(full, one)) is not None:
        return _Looked(_look_at_moments(source, stored[key], milder, going), none)
    return _Looked(looked, none)


def _look_at_moments(source: CommittedFiles, tensor: ForeignTensor, one: CodingCandidate, going: CopyControl) -> Encoded:
    apart = _Apart()
    for slab, values in _slabs(source, tensor, going):
        if not np.isfinite(values).all():
            return Encoded(one, left=NOT_FINITE)
        if one.coding == "int8-log" and (values < 0).any():
            return Encoded(one, left=NEGATIVE)
        with np.errstate(over="ignore"):
            parts = codings.encode(one.coding, values)
        decoded = codings.decode(one.coding, slab, one.entry.shape, parts)
        if not np.isfinite(decoded).all():
            return Encoded(one, left=TOO_LARGE)
        apart.add(values, decoded)
    if apart.error > ERROR_MAX:
        return Encoded(one, left=f"it would differ by {apart.error:.2g} of its norm")
    if apart.off * OFF_SHARE > apart.count:
        return Encoded(one, left=f"{apart.off} of its {apart.count} values would be off by more than half")
    return Encoded(one, apart.error)


class _Apart:
    """The relative error of decoded values: the norm of the difference divided by that of the saved values."""

    def __init__(self) -> None:
        self._apart = self._norm = 0.0
        self.count = self.off = 0  # values that are not zero, and those of them that are off by more than half

    def add(self, values: NDArray[np.float32], array: NDArray[np.float32]) -> None:
        exact = values.astype(np.float64)
        self._norm += float(np.square(exact).sum())
        self._apart += float(np.square(array - exact).sum())
        self.count += int(np.count_nonzero(values))
        self.off += int(np.count_nonzero(np.abs(array - exact) > np.abs(exact) / 2))

    @property
    def error(self) -> float:
        return sqrt(self._apart / self._norm) if self._norm else 0.0


def _ties(
    source: CommittedFiles, master: ForeignTensor, weight: ForeignTensor, going: CopyControl
) -> NDArray[np.uint64] | str:
    """The places of masters that lie half-way and were rounded up; or why the masters stay whole."""
    shape, places, count = master.spec.shape, [np.empty(0, np.uint64)], 0
    most = prod(shape) // compacting.TIES_SHARE
    for slab, values in _slabs(source, master, going):
        bits, rounded = values.view(np.uint32), fetched(source, weight, slab).view(np.uint16)
        parted = codings.split(bits, rounded)
        if parted is None:
            return NOT_ROUNDED
        low, ties = parted
        if not np.array_equal(codings.join(low, rounded, ties), bits):
            return NOT_ROUNDED
        at = [axis + first for axis, first in zip(np.nonzero(ties), slab.offset, strict=True)]
        places.append(np.ravel_multi_index(tuple(at), shape).astype(np.uint64))
        count += len(places[-1])
        if count > most:
            return MANY_TIES
    return np.sort(np.concatenate(places))


def _slabs(source: CommittedFiles, tensor: ForeignTensor, going: CopyControl) -> Iterator[tuple[Box, NDArray[np.float32]]]:
    """A tensor's values, some rows or blocks at a time."""
    for slab in codings.slabs(whole(tensor.spec.shape), SLAB_ELEMENTS):
        if going.ended():
            raise CopyStopped
        if going.pace is not None:
            going.pace.take(4 * slab.volume)
        yield slab, fetched(source, tensor, slab)


def _parts(planned: CompactPlan, stored: Stored, looked: list[_Looked]) -> dict[TensorKey, ForeignTensor]:
    """New tensors to write."""
    ties = {(one.encoded.candidate.group, one.encoded.candidate.name): one.ties for one in looked}
    parts = {}
    for file in planned.files:
        for spec, _ in file.tensors:
            part = compacting.part_of(planned, spec)
            if part is None:
                continue
            candidate, role = part[0].candidate, part[1]
            tensor = stored[TensorKey(candidate.group, candidate.name)]
            weight = stored[TensorKey(MODEL, candidate.name)] if candidate.coding == "low16" else None
            decoder = (
                KnownIntegers(ties[candidate.group, candidate.name])
                if role == TIES
                else PartEncoder(tensor, candidate.coding, role, weight)
            )
            parts[TensorKey(spec.group, spec.name)] = ForeignTensor(spec, (), decoder=decoder)
    return parts


def _write(staged: StagedCheckpoint, planned: CompactPlan, source: _Source, going: CopyControl) -> Manifest:
    """Stage the new files; the manifest of them and of those that stay."""
    targets = []
    for file in planned.files:
        streamed = tuple(
            StreamedTensor(box_moves.same(source.tensors[TensorKey(spec.group, spec.name)]), start)
            for spec, start in file.tensors
        )
        targets.append(TargetFile(file.name, file.bytes, (LiteralBytes(0, file.header),), streamed))
    finished = streaming.stream(WatchedSource(source.files), source.tensors, targets, StreamTarget(staged), going)
    entries = [FileEntry(file.name, file.bytes, len(file.header), digest(file.header)) for file in planned.files]
    for name, data in compacting.indexes(planned).items():
        staged.put(name, data)
        entries.append(FileEntry(name, len(data), 0, digest(data)))
    return compacting.finish(planned, entries, _entries(planned, finished))


def _entries(planned: CompactPlan, finished: tuple[FinishedFile, ...]) -> dict[str, dict[str, TensorEntry]]:
    specs = {(spec.group, spec.name): spec for file in planned.files for spec, _ in file.tensors}
    entries: dict[str, dict[str, TensorEntry]] = {group: {} for group in planned.compacted.tensors}
    for file in finished:
        for one in file.tensors:
            spec: TensorSpec = specs[one.group, one.name]
            before = planned.full.tensors[one.group].get(one.name)
            placement = "" if before is None else before.placement
            entries[one.group][one.name] = TensorEntry(spec.dtype, spec.shape, file.name, one.start, one.extents, placement)
    return entries


def _prove(staged: StagedCheckpoint, manifest: Manifest, planned: CompactPlan, source: _Source, going: CopyControl) -> None:
    """Decode what is staged, and compare it with the saved values: masters bit for bit, others by the stated error."""
    files = CommittedFiles(staged.files, manifest, staged.path)
    decoded = tensors_of(manifest)
    for one in planned.coded.values():
        key, apart, same = TensorKey(one.candidate.group, one.candidate.name), _Apart(), True
        for slab, values in _slabs(source.files, source.tensors[key], going):
            array = fetched(files, decoded[key], slab)
            same = same and bool(np.array_equal(array.view(np.uint32), values.view(np.uint32)))
            if one.candidate.coding not in codings.LOSSLESS:
                apart.add(values, array)
        sound = same if one.candidate.coding in codings.LOSSLESS else abs(apart.error - one.error) <= 1e-9 * one.error
        if not sound:
            raise CorruptExtent(
                f"{key.group}/{key.name} of {manifest.run}@{manifest.step} was compacted incorrectly",
                hint="the checkpoint is unchanged; check the machine's memory",
                tensor=key.name,
            )
