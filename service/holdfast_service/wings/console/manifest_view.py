"""The contents of a checkpoint, from its manifest and its statistics: requested each time, decoded once.

The manifest's ETag validates the cache; viewers without access are refused by the API as usual.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Iterable
from functools import cached_property
from itertools import pairwise
from math import sqrt
from typing import NamedTuple

import msgspec

from holdfast_formats.decoding import decoder
from holdfast_formats.disk import coded
from holdfast_formats.disk.coded import StoredForm
from holdfast_formats.disk.manifests import Manifest, TensorEntry
from holdfast_formats.disk.packing import natural_key
from holdfast_formats.errors import CheckpointError, CorruptManifest, LimitExceeded
from holdfast_formats.programs.placements import on_ranks
from holdfast_formats.rest.measurements import TensorStatistics
from holdfast_service.wings.console.viewer_api import PagePart, ViewerApi, at

KEPT_MAX = 4  # decoded manifests in the cache; one of 100 000 tensors takes about 100 MB
STATISTICS_MAX = 20_000  # tensors; beyond it, the API returns one sorted page at a time


class MeasuredTensor(NamedTuple):
    norm: float | None
    change: float | None  # L2
    changed_from: int | None
    nan: int
    inf: int
    minimum: float | None
    maximum: float | None
    zeros: float

    @property
    def nonfinite(self) -> int:
        return self.nan + self.inf

    @property
    def relative(self) -> float | None:
        return None if self.change is None or not self.norm else self.change / self.norm


class TensorLine(NamedTuple):
    """A tensor, or another name of one; `stored` says how, if it is stored in fewer bytes."""

    group: str
    name: str
    entry: TensorEntry
    alias_of: str | None
    stored: StoredForm | None = None

    @property
    def digests(self) -> tuple[tuple[int, int, str], ...]:
        """Equal for equal bytes in the same extents."""
        return tuple((extent.offset, extent.length, extent.digest) for extent in self.entry.extents)


class ManifestView:
    """A decoded manifest."""

    def __init__(self, manifest: Manifest, tag: str) -> None:
        self.manifest, self.tag = manifest, tag
        self.shown = coded.contents(manifest)  # every tensor as it was saved
        self.measured: dict[tuple[str, str], MeasuredTensor] | None = None

    @classmethod
    def of(cls, encoded: bytes, tag: str) -> ManifestView:
        return cls(_decode(encoded), tag)

    def measure(self, statistics: Iterable[TensorStatistics]) -> dict[tuple[str, str], MeasuredTensor]:
        """Keep the statistics of each saved tensor, by group and name."""
        self.measured = {(item.group, item.name): measured(item) for item in statistics}
        return self.measured

    @cached_property
    def lines(self) -> list[TensorLine]:
        """Tensors and aliases by group and in natural order of their names."""
        tensors, aliases = self.shown.tensors, self.shown.aliases
        found = [self._line(group, name, entry) for group, named in tensors.items() for name, entry in named.items()]
        found += [
            self._line(group, name, tensors[group][target], target)
            for group, named in aliases.items()
            for name, target in named.items()
        ]
        return sorted(found, key=lambda line: (line.group, natural_key(line.name), line.name))

    @property
    def tensors(self) -> int:
        tensors, aliases = self.shown.tensors, self.shown.aliases
        return sum(len(named) for named in tensors.values()) + sum(len(named) for named in aliases.values())

    def line(self, group: str, name: str) -> TensorLine | None:
        """The tensor, or alias, with this name; or the part of a tensor that is stored in fewer bytes."""
        target = self.shown.aliases.get(group, {}).get(name)
        entry = self.shown.tensors.get(group, {}).get(target or name) or self.manifest.tensors.get(group, {}).get(name)
        return None if entry is None else self._line(group, name, entry, target)

    def of_file(self, name: str) -> list[TensorLine]:
        """A file's stored tensors, in its order."""
        stored = (
            (group, tensor, entry) for group, named in self.manifest.tensors.items() for tensor, entry in named.items()
        )
        inside = [TensorLine(group, tensor, entry, None) for group, tensor, entry in stored if entry.file == name]
        return sorted(inside, key=lambda line: line.entry.start)

    def _line(self, group: str, name: str, entry: TensorEntry, alias_of: str | None = None) -> TensorLine:
        return TensorLine(group, name, entry, alias_of, coded.stored_form(self.manifest, group, name))


class _Kept:
    """The last requested manifests. Only the event loop's thread uses it."""

    def __init__(self) -> None:
        self._held: OrderedDict[str, ManifestView] = OrderedDict()

    def get(self, key: str) -> ManifestView | None:
        return self._held.get(key)

    def put(self, key: str, held: ManifestView) -> None:
        self._held[key] = held
        self._held.move_to_end(key)
        while len(self._held) > KEPT_MAX:
            self._held.popitem(last=False)


_kept = _Kept()
_decode = decoder(Manifest)


async def held(api: ViewerApi, run: str, step: int | str) -> ManifestView:
    """The contents of the checkpoint; raises the API's errors, and `CorruptManifest` for an invalid manifest."""
    path = at(run, step, "manifest")
    known = _kept.get(path)
    headers = {"Accept-Encoding": "identity"} | ({"If-None-Match": known.tag} if known else {})
    answer = await api.request("GET", path, headers=headers)
    if known is not None and answer.status_code == 304:
        return known
    try:
        view = await asyncio.to_thread(ManifestView.of, answer.content, answer.headers.get("etag", ""))
    except msgspec.ValidationError as error:
        raise CorruptManifest(f"cannot read the manifest of {run}@{step}: {error}") from error
    _kept.put(path, view)
    return view


async def statistics(api: ViewerApi, contents: ManifestView) -> PagePart[dict[tuple[str, str], MeasuredTensor]]:
    """The statistics of each saved tensor, or why there are none."""
    if contents.measured is not None:
        return PagePart(contents.measured)
    if contents.tensors > STATISTICS_MAX:
        return PagePart(None, LimitExceeded("there are too many tensors to sort this way: sort by a measured value"))
    path = at(contents.manifest.run, contents.manifest.step, "statistics")
    try:
        items, _ = await api.walk(TensorStatistics, path, STATISTICS_MAX)
    except CheckpointError as error:
        return PagePart(None, error)
    return PagePart(contents.measure(items))


def measured(item: TensorStatistics) -> MeasuredTensor:
    finite = item.elements - item.nan - item.inf
    norm = None if item.rms is None else item.rms * sqrt(finite)
    return MeasuredTensor(norm, item.change, item.changed_from, item.nan, item.inf, item.minimum, item.maximum, item.zeros)


class Stripe(NamedTuple):
    """A piece of a tensor on the map: from and to, as fractions of the file, and the rank that held it."""

    start: float
    width: float
    who: str
    shade: int


def stripes(line: TensorLine, mesh: dict[str, int], file_bytes: int, shades: dict[str, int]) -> list[Stripe]:
    """The tensor's place in its file. Rows that were sharded along one axis of the mesh are one stripe per rank."""
    entry = line.entry
    start, width = entry.start / file_bytes, entry.nbytes / file_bytes
    shade = shades[on_ranks(entry.placement)]
    axis = _shared_rows(entry, mesh)
    if axis is None:
        return [Stripe(start, width, entry.placement, shade)]
    rows = entry.shape[0]
    held_rows = -(-rows // mesh[axis])  # cut as torch does: the first ranks have most
    cuts = [min(rows, rank * held_rows) for rank in range(mesh[axis] + 1)]
    return [
        Stripe(start + width * first / rows, width * (last - first) / rows, f"{axis}={rank}", shade)
        for rank, (first, last) in enumerate(pairwise(cuts))
        if last > first
    ]


def _shared_rows(entry: TensorEntry, mesh: dict[str, int]) -> str | None:
    cut = [part.partition("=") for part in entry.placement.split(", ") if "Shard(" in part]
    if len(cut) == 1 and cut[0][2] == "Shard(dim=0)" and 1 < mesh.get(cut[0][0], 0) <= 64 and entry.shape and entry.shape[0]:
        return cut[0][0]
    return None


def numbered(placements: Iterable[str]) -> dict[str, int]:
    """Numbers of the placements on the ranks, which say nothing of how a mapping program divides each tensor."""
    return {placement: number for number, placement in enumerate(dict.fromkeys(map(on_ranks, placements)))}
