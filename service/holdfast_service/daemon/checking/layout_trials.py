"""Test restores: checks that other layouts get the stored bytes back, in a few places per checkpoint.

Run and step determine the tested layouts, so a check is repeatable, and other steps test other layouts. A rank's parts are
computed as every reader does, assembled from whole verified extents as in a restore, and compared with bytes read directly
from the file. Memory is one extent and two windows.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator, Mapping
from math import prod
from typing import Any, NamedTuple

import numpy as np

from holdfast_formats import region, transfer
from holdfast_formats.disk import read_planner, verification
from holdfast_formats.disk.manifests import Manifest, TensorEntry
from holdfast_formats.disk.read_planner import WantedBox
from holdfast_formats.errors import CorruptManifest, NotFound, Refused
from holdfast_formats.files import Files
from holdfast_formats.layout import language, parts, rank_tensors, shard_file
from holdfast_formats.layout.parts import Part
from holdfast_formats.layout.rank_tensors import HeldTensors, LayoutHoldings
from holdfast_formats.layout.shard_file import ShardFile, Strip
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
TENSORS_MAX = 20_000  # of a group, up to which every rank of a layout is computed; with more, one rank alone
COVERED = 500  # tensors whose parts are combined over all ranks
CONFIG = "config.json"
CONFIG_BYTES_MAX = 2**20

Heed = Callable[[int], None]


class LayoutTrial(NamedTuple):
    """The tested layouts, as text with the rank, and the bytes read for them."""

    layouts: tuple[str, ...]
    bytes: int


def try_layouts(tier: Files, directory: str, manifest: Manifest, heed: Heed | None = None) -> LayoutTrial:
    """Test some layouts; `CorruptManifest`, with layout, rank and tensor, for one that would restore wrong bytes.

    Layouts that do not match the checkpoint's shapes are skipped.
    """
    group = next((group for group in ("model", *manifest.groups) if manifest.tensors.get(group)), None)
    if group is None:
        return LayoutTrial((), 0)
    chance = random.Random(f"{manifest.run}@{manifest.step}")
    config = _config(tier, directory, manifest)
    trial = _Trial(tier, directory, manifest.tensors[group], heed or (lambda size: None))
    tried: list[str] = []
    for text in chance.sample(LAYOUTS, len(LAYOUTS)):
        layout = language.parse(text)
        rank = chance.randrange(layout.mesh.world)
        where = f"layout {text}, rank {rank}"
        try:
            held = rank_tensors.of_manifest(manifest, group, layout, config)
            mine = held.of(rank)
            file = shard_file.lay_out(mine.tensors, {name: e.shape for name, e in trial.entries.items()}, {})
        except (Refused, NotFound):  # it does not fit; other layouts do
            continue
        _check_coverage(manifest, group, held, rank, mine, where)
        for _ in range(WINDOWS):
            trial.compare(group, file, chance, where)
        tried.append(f"{text} rank {rank}")
        if len(tried) == TRIED:
            break
    return LayoutTrial(tuple(tried), trial.read)


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
    if len(entries) > TENSORS_MAX:
        return
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


class _Trial:
    """Reads of one checkpoint's group, and their bytes."""

    def __init__(self, tier: Files, directory: str, entries: Mapping[str, TensorEntry], heed: Heed) -> None:
        self.entries = entries
        self.read = 0
        self._tier, self._directory, self._heed = tier, directory, heed

    def compare(self, group: str, file: ShardFile, chance: random.Random, where: str) -> None:
        """Compare one window at a random place of the rank's file, assembled both ways."""
        body = len(file.header)
        if body == file.bytes:
            return
        start = chance.randrange(body, file.bytes)
        low, high = next(shard_file.windows(file, start, min(start + WINDOW_BYTES, file.bytes), WINDOW_BYTES))
        for strip in shard_file.strips(file, low, high):
            restored, stored = (np.zeros(strip.units * strip.itemsize, np.uint8) for _ in range(2))
            for part in strip.parts:
                self._assemble(group, strip, part, restored)
                self._copy(strip, part, stored)
            if not np.array_equal(restored, stored):
                name = strip.parts[0].tensor
                raise CorruptManifest(f"{where}: tensor {name!r} would be restored with wrong bytes", tensor=name)

    def _assemble(self, group: str, strip: Strip, part: Part, memory: Bytes) -> None:
        """A part as in a restore: from whole extents, verified."""
        entry, view, held = self._place(strip, part, memory)
        for first, stop in read_planner.extents_of(entry.extents, part.box, view):
            for extent in entry.extents[first:stop]:
                data = self._get(entry.file, entry.start + extent.offset, extent.length)
                verification.check(verification.tensor_piece(group, part.tensor, entry, extent), data)
                units = np.frombuffer(data, held.dtype)
                transfer.move(Direction.SCATTER, units, extent.offset // strip.itemsize, held, part.box, view.shape)

    def _copy(self, strip: Strip, part: Part, memory: Bytes) -> None:
        """The same part, run by run from the file."""
        entry, view, held = self._place(strip, part, memory)
        start, stop = region.byte_span(part.box, view.shape, strip.itemsize)
        data = np.frombuffer(self._get(entry.file, entry.start + start, stop - start), np.uint8)
        flat = np.empty(part.box.volume * strip.itemsize, np.uint8)
        for source_start, here, length in region.byte_runs(part.box, view.shape, strip.itemsize):
            flat[here : here + length] = data[source_start - start : source_start - start + length]
        held[...] = flat.view(held.dtype).reshape(part.box.shape)

    def _place(self, strip: Strip, part: Part, memory: Bytes) -> tuple[TensorEntry, region.ByteView, Elements]:
        entry = self.entries[part.tensor]
        held = parts.view(memory.view(transfer.element_dtype(strip.itemsize)), part)
        return entry, region.byte_view(entry.dtype, entry.shape), held

    def _get(self, file: str, start: int, length: int) -> bytes:
        self._heed(length)
        self.read += length
        return self._tier.read(f"{self._directory}/{file}", start, length)


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
    except (ValueError, RecursionError):
        return None
    return config if isinstance(config, dict) else None
