"""Test restores: checks that other layouts get the stored bytes back, in a few places per checkpoint.

Run and step determine the tested layouts, so a check is repeatable, and other steps test other layouts. A rank's parts are
computed as every reader does, assembled from whole verified extents as in a restore, and compared with bytes taken run by
run as they are stored. The places are chosen when the checkpoint begins to be read back, and the extents of these places are
kept as they pass: they are not read twice, which would be a request each in a bucket. Memory is what is kept, one extent and
two windows.
"""

from __future__ import annotations

import json
import random
import threading
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from math import prod
from typing import Any, NamedTuple

import msgspec
import numpy as np

from holdfast_files.verifying import VerifiedBatch
from holdfast_formats import region, transfer
from holdfast_formats.disk import read_planner, verification
from holdfast_formats.disk.manifests import Extent, Manifest, TensorEntry
from holdfast_formats.disk.read_planner import WantedBox
from holdfast_formats.errors import CheckpointError, CorruptManifest, NotFound, Refused
from holdfast_formats.files import Files
from holdfast_formats.layout import language, parts, rank_tensors, shard_file
from holdfast_formats.layout.parts import Part
from holdfast_formats.layout.rank_tensors import HeldTensors, LayoutHoldings
from holdfast_formats.layout.shard_file import ShardFile, Strip
from holdfast_formats.rest.statistics import layers_of
from holdfast_formats.staging.holdings import Bytes
from holdfast_formats.transfer import Direction, Elements

LAYOUTS = (
    "tp=2",
    "tp=4",
    "pp=2",
    "tp=2,pp=2",
    "sharding=3:stage3",
    "sharding=4:stage3:dim0",
    "tp=2,sharding=2:stage3",
)
TRIED = 2  # layouts a checkpoint
WINDOWS = 4  # places a layout
WINDOW_BYTES = 2**18
TENSORS_MAX = 2_000  # of a group with more, some layers are tested
COVERED = 500  # tensors whose parts are combined over all ranks
CONFIG = "config.json"
CONFIG_BYTES_MAX = 2**20
KEPT_BYTES_MAX = 2**26  # of all extents that are kept; the others are read again

Heed = Callable[[int], None]


class LayoutTrial(NamedTuple):
    """The tested layouts, as text with the rank, and the bytes read for them."""

    layouts: tuple[str, ...]
    bytes: int


class _Place(NamedTuple):
    """A window of a rank's file: a part of the test, and where it is."""

    strips: Sequence[Strip]
    where: str


class LayoutTrials:
    """The tests of one checkpoint, while it is read back and afterwards. Safe for threads."""

    def __init__(self, tier: Files, directory: str, heed: Heed | None = None) -> None:
        self._tier, self._directory, self._heed = tier, directory, heed or (lambda size: None)
        self._lock = threading.Lock()
        self._begin(None)

    def passed(self, manifest: Manifest, batch: VerifiedBatch) -> None:
        """These pieces are verified: keep what the tests need."""
        with self._lock:
            self._choose(manifest)
            starts = np.array([start for file, start in self._wanted if file == batch.pieces.file], np.int64)
            for piece in batch.pieces.where(np.isin(batch.pieces.rows["start"], starts)):
                self._kept[piece.file, piece.start] = batch.of(piece).copy()

    def result(self, manifest: Manifest) -> LayoutTrial:
        """Test the layouts of a checkpoint whose bytes are verified; `CorruptManifest`, with layout, rank and tensor, for
        one that would restore wrong bytes. Layouts that do not match the checkpoint's shapes are skipped.
        """
        with self._lock:
            self._choose(manifest)
            if self._failure is not None:
                raise self._failure
            for place in self._places:
                self._compare(place)
            return LayoutTrial(tuple(self._tried), self._read)

    def _begin(self, manifest: Manifest | None) -> None:
        self._manifest = manifest
        self._failure: CorruptManifest | None = None
        self._group, self._entries = "", dict[str, TensorEntry]()
        self._places, self._tried, self._read = list[_Place](), list[str](), 0
        self._wanted = set[tuple[str, int]]()  # extents, by file and first byte
        self._kept: dict[tuple[str, int], Bytes] = {}

    def _choose(self, manifest: Manifest) -> None:
        """Choose the places, once for each manifest: after a repair it may be another."""
        if self._manifest is manifest:
            return
        self._begin(manifest)
        group = next((group for group in ("model", *manifest.groups) if manifest.tensors.get(group)), None)
        if group is None:
            return
        tested = _some_layers(manifest, group)
        self._group, self._entries = group, tested.tensors[group]
        try:
            self._choose_layouts(tested, group)
        except CorruptManifest as error:
            self._failure = error
        left = KEPT_BYTES_MAX
        for place in self._places:
            for strip in place.strips:
                for entry, extent in self._extents(strip):
                    at = (entry.file, entry.start + extent.offset)
                    if at not in self._wanted and extent.length <= left:
                        self._wanted.add(at)
                        left -= extent.length

    def _choose_layouts(self, manifest: Manifest, group: str) -> None:
        chance = random.Random(f"{manifest.run}@{manifest.step}")
        config = _config(self._tier, self._directory, manifest)
        for text in chance.sample(LAYOUTS, len(LAYOUTS)):
            layout = language.parse(text)
            rank = chance.randrange(layout.mesh.world)
            where = f"layout {text}, rank {rank}"
            try:
                held = rank_tensors.of_manifest(manifest, group, layout, config)
                mine = held.of(rank)
                file = shard_file.lay_out(mine.tensors, {name: e.shape for name, e in self._entries.items()}, {})
            except (Refused, NotFound):  # it does not fit; other layouts do
                continue
            _check_coverage(manifest, group, held, rank, mine, where)
            self._choose_places(file, chance, where)
            self._tried.append(f"{text} rank {rank}")
            if len(self._tried) == TRIED:
                break

    def _choose_places(self, file: ShardFile, chance: random.Random, where: str) -> None:
        body = len(file.header)
        for _ in range(WINDOWS if body < file.bytes else 0):
            start = chance.randrange(body, file.bytes)
            low, high = next(shard_file.windows(file, start, min(start + WINDOW_BYTES, file.bytes), WINDOW_BYTES))
            self._places.append(_Place(shard_file.strips(file, low, high), where))

    def _extents(self, strip: Strip) -> Iterator[tuple[TensorEntry, Extent]]:
        """All extents that a strip's parts begin in, end in, or lie between."""
        for part in strip.parts:
            entry = self._entries[part.tensor]
            view = region.byte_view(entry.dtype, entry.shape)
            yield from (
                (entry, extent) for extent in _within(entry, *region.byte_span(part.box, view.shape, strip.itemsize))
            )

    def _compare(self, place: _Place) -> None:
        """Compare one window, put together both ways."""
        for strip in place.strips:
            restored, stored = (np.zeros(strip.units * strip.itemsize, np.uint8) for _ in range(2))
            for part in strip.parts:
                self._assemble(strip, part, restored)
                self._copy(strip, part, stored)
            if not np.array_equal(restored, stored):
                name = strip.parts[0].tensor
                raise CorruptManifest(f"{place.where}: tensor {name!r} would be restored with wrong bytes", tensor=name)

    def _assemble(self, strip: Strip, part: Part, memory: Bytes) -> None:
        """A part as in a restore: from whole extents, verified."""
        entry, view, held = self._parts_of(strip, part, memory)
        for first, stop in read_planner.extents_of(entry.extents, part.box, view):
            for extent in entry.extents[first:stop]:
                data = self._get(entry, extent.offset, extent.offset + extent.length)
                verification.check(verification.tensor_piece(self._group, part.tensor, entry, extent), data)
                units = data.view(held.dtype)
                transfer.move(Direction.SCATTER, units, extent.offset // strip.itemsize, held, part.box, view.shape)

    def _copy(self, strip: Strip, part: Part, memory: Bytes) -> None:
        """The same part, run by run as it is stored."""
        entry, view, held = self._parts_of(strip, part, memory)
        start, stop = region.byte_span(part.box, view.shape, strip.itemsize)
        data = self._get(entry, start, stop)
        flat = np.empty(part.box.volume * strip.itemsize, np.uint8)
        for source_start, here, length in region.byte_runs(part.box, view.shape, strip.itemsize):
            flat[here : here + length] = data[source_start - start : source_start - start + length]
        held[...] = flat.view(held.dtype).reshape(part.box.shape)

    def _parts_of(self, strip: Strip, part: Part, memory: Bytes) -> tuple[TensorEntry, region.ByteView, Elements]:
        entry = self._entries[part.tensor]
        held = parts.view(memory.view(transfer.element_dtype(strip.itemsize)), part)
        return entry, region.byte_view(entry.dtype, entry.shape), held

    def _get(self, entry: TensorEntry, start: int, stop: int) -> Bytes:
        """Bytes [start, stop) of a tensor, out of what was kept, else out of the file."""
        held = []
        for extent in _within(entry, start, stop):
            kept = self._kept.get((entry.file, entry.start + extent.offset))
            if kept is None:
                break
            held.append(kept[max(start - extent.offset, 0) : stop - extent.offset])
        else:
            return held[0] if len(held) == 1 else np.concatenate([*held, np.empty(0, np.uint8)])
        self._heed(stop - start)
        self._read += stop - start
        path = f"{self._directory}/{entry.file}"
        return np.frombuffer(self._tier.read(path, entry.start + start, stop - start), np.uint8)


def _some_layers(manifest: Manifest, group: str) -> Manifest:
    """The manifest with `TENSORS_MAX` tensors of a larger group: those in no layer, and as many layers as there is room
    for. At least one layer is whole, because rules look at its tensors together.
    """
    tensors = manifest.tensors[group]
    if len(tensors) <= TENSORS_MAX:
        return manifest
    layers = list(layers_of(tensors))
    sizes = Counter(layers)
    order = list(sizes)
    random.Random(f"{manifest.run}@{manifest.step}").shuffle(order)
    order.sort(key=lambda layer: layer[-1:].isdigit())
    chosen: set[str] = set()
    count = 0
    for layer in order:
        if not chosen or count + sizes[layer] <= TENSORS_MAX:
            chosen.add(layer)
            count += sizes[layer]
    kept = {name: entry for (name, entry), layer in zip(tensors.items(), layers, strict=True) if layer in chosen}
    aliases = {alias: name for alias, name in manifest.aliases.get(group, {}).items() if name in kept}
    return msgspec.structs.replace(manifest, tensors={group: kept}, aliases={group: aliases})


def _within(entry: TensorEntry, start: int, stop: int) -> Sequence[Extent]:
    """The extents of a tensor that have any of its bytes [start, stop)."""
    first = bisect_right(entry.extents, start, key=lambda extent: extent.offset) - 1
    return entry.extents[max(first, 0) : bisect_left(entry.extents, stop, key=lambda extent: extent.offset)]


def _check_coverage(manifest: Manifest, group: str, held: LayoutHoldings, rank: int, mine: HeldTensors, where: str) -> None:
    """Check that the rank's read plan covers what it holds, and that all ranks together hold every element."""
    wanted = [WantedBox(group, part.tensor, part.box) for local in mine.tensors for part in local.parts]
    plan = read_planner.plan(manifest, wanted)
    brought = {(piece.tensor, piece.offset) for read in plan.reads for piece in read.pieces}
    for one in wanted:
        entry = manifest.tensors[group][one.name]
        view = region.byte_view(entry.dtype, entry.shape, one.name)
        box = region.byte_box(entry.dtype, one.box, entry.shape, one.name)
        for first, stop in read_planner.extents_of(entry.extents, box, view):
            if any((one.name, extent.offset) not in brought for extent in entry.extents[first:stop]):
                raise CorruptManifest(f"{where}: the read plan misses a part of tensor {one.name!r}", tensor=one.name)
    entries = manifest.tensors[group]
    names = set(random.Random(manifest.step).sample(sorted(entries), min(len(entries), COVERED)))
    names = {name for name in names if not name.startswith("ranks/")}  # of one rank alone, whatever the layout
    boxes: dict[str, dict[region.Box, None]] = {name: {} for name in names}
    for other in range(held.layout.mesh.world):
        for local in (mine if other == rank else held.of(other)).tensors:
            for part in local.parts:
                if part.tensor in boxes:
                    boxes[part.tensor][part.box] = None
    for name in sorted(names):
        if region.union_volume(list(boxes[name])) != prod(entries[name].shape):
            raise CorruptManifest(f"{where}: all ranks together do not cover tensor {name!r}", tensor=name)


def identical(manifest: Manifest, before: Manifest) -> bool:
    """Whether two checkpoints have the same tensors by their digests; random states do not count."""
    mine, theirs = dict(_digests(manifest)), dict(_digests(before))
    return bool(mine) and mine == theirs


def _digests(manifest: Manifest) -> Iterator[tuple[tuple[str, str], tuple[Any, ...]]]:
    for group in ("model", "master", "optim", "ema"):
        for name, entry in manifest.tensors.get(group, {}).items():
            if entry.extents and not name.startswith("ranks/"):
                yield (group, name), (entry.dtype, entry.shape, entry.extents)


def _config(tier: Files, directory: str, manifest: Manifest) -> Mapping[str, Any] | None:
    """The checkpoint's config.json, which selects the rules; None without a valid one."""
    entry = manifest.file(CONFIG)
    if entry is None or entry.header_bytes or entry.bytes > CONFIG_BYTES_MAX:
        return None
    try:
        config = json.loads(tier.read(f"{directory}/{CONFIG}", 0, entry.bytes))
    except (ValueError, RecursionError, CheckpointError):  # a file that cannot be read is found by what reads all of them
        return None
    return config if isinstance(config, dict) else None
