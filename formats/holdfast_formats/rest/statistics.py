"""Statistics of every tensor of a checkpoint: merged from parts, stored as columns of numbers, grouped by layer for plots.

Columns follow the order of the manifest and have no names: a reader needs the manifest too.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import zstandard
from numpy.typing import NDArray

from holdfast_formats.disk.manifests import Manifest, TensorEntry
from holdfast_formats.disk.packing import natural_key
from holdfast_formats.errors import CorruptStatistics
from holdfast_formats.rest.measurements import TensorStatistics

LAYERS_MAX = 512  # of a group; the layers after them in natural order are taken together
OTHERS = "(others)"
_MAGIC = b"HFST"
_VERSION = 1
_HEAD = struct.Struct("<4sHHQ")  # magic, version, columns, tensors
_COLUMNS: dict[str, str] = {
    "nan": "<i8",
    "inf": "<i8",
    "zeros": "<i8",
    "minimum": "<f8",
    "maximum": "<f8",
    "mean": "<f8",
    "rms": "<f8",
    "change": "<f8",
    "changed_from": "<i8",
}
_COUNTS = ("nan", "inf", "zeros")
NOWHERE = -1  # `changed_from` of a tensor without a predecessor
_HINT = "the checkpoint itself is not affected; only its statistics are lost"


class PartStatistics(NamedTuple):
    """Statistics of some elements of one tensor. Moments are over the `finite` ones; `change` is the norm
    of their change.
    """

    finite: int = 0
    nan: int = 0
    inf: int = 0
    zeros: int = 0
    minimum: float = math.inf
    maximum: float = -math.inf
    mean: float = 0.0
    norm: float = 0.0
    change: float | None = 0.0  # None: not known for all of them


def merge(parts: Sequence[PartStatistics]) -> PartStatistics:
    """Merge the parts of a tensor. Counts are exact; sums are rounded once, whatever the parts' order."""
    if len(parts) == 1:
        return parts[0]
    finite = sum(part.finite for part in parts)
    changes = [part.change for part in parts]
    known = [change for change in changes if change is not None]
    return PartStatistics(
        finite,
        sum(part.nan for part in parts),
        sum(part.inf for part in parts),
        sum(part.zeros for part in parts),
        min((part.minimum for part in parts), default=math.inf),
        max((part.maximum for part in parts), default=-math.inf),
        math.fsum(part.mean * (part.finite / finite) for part in parts if part.finite),
        math.hypot(*(part.norm for part in parts)),
        math.hypot(*known) if len(known) == len(changes) else None,
    )


Table = NDArray[np.float64]  # a row for each part: the fields of `PartStatistics`, and NaN for a change that is not known
CHANGE = PartStatistics._fields.index("change")


def tabulate(parts: Sequence[PartStatistics]) -> Table:
    rows = [(*part[:-1], math.nan if part.change is None else part.change) for part in parts]
    return np.array(rows, np.float64).reshape(-1, len(PartStatistics._fields))


def listed(table: Table) -> list[PartStatistics]:
    """The rows of a table as parts."""
    counts, moments = table[:, :4].astype(np.int64).tolist(), table[:, 4:].tolist()
    parts = [PartStatistics(*count, *numbers) for count, numbers in zip(counts, moments, strict=True)]
    return [part._replace(change=None) if part.change is not None and math.isnan(part.change) else part for part in parts]


def merge_each(table: Table, edges: NDArray[np.int64]) -> Table:
    """`merge` of the rows from each edge to the next. Most tensors of a checkpoint with many have one part."""
    counts = np.diff(edges)
    merged: Table = np.empty((len(counts), table.shape[1]))
    single = counts == 1
    merged[single] = table[edges[:-1][single]]
    for number in np.flatnonzero(~single).tolist():
        merged[number] = tabulate([merge(listed(table[edges[number] : edges[number + 1]]))])[0]
    return merged


class Statistics:
    """The columns, one entry per tensor, in the order of the manifest. In float columns, NaN means "none"."""

    def __init__(self, columns: Mapping[str, NDArray[Any]]) -> None:
        self.columns = dict(columns)

    def __len__(self) -> int:
        return len(self.columns["nan"])

    def __getitem__(self, column: str) -> NDArray[Any]:
        return self.columns[column]

    @property
    def nonfinite(self) -> NDArray[np.int64]:
        """NaN and infinite elements of every tensor."""
        array: NDArray[np.int64] = self["nan"] + self["inf"]
        return array


def collect(tensors: Table, before: NDArray[np.int64]) -> Statistics:
    """The statistics of tensors, each with the step from which its change is measured; `NOWHERE` without one."""
    finite, nan, inf, zeros, low, high, mean, norm, change = tensors.T
    known = finite > 0
    with np.errstate(all="ignore"):
        rms = np.where(known & np.isfinite(norm), norm / np.sqrt(finite), math.nan)
    moments = {name: np.where(known, of, math.nan) for name, of in (("minimum", low), ("maximum", high), ("mean", mean))}
    change = np.where((before != NOWHERE) & np.isfinite(change), change, math.nan)
    found = {"nan": nan, "inf": inf, "zeros": zeros, **moments, "rms": rms, "change": change}
    found["changed_from"] = np.where(np.isnan(change), NOWHERE, before)
    return Statistics({name: found[name].astype(kind) for name, kind in _COLUMNS.items()})


def encode(statistics: Statistics) -> bytes:
    """The columns as bytes, compressed, with a checksum."""
    columns = b"".join(statistics[name].astype(kind).tobytes() for name, kind in _COLUMNS.items())
    head = _HEAD.pack(_MAGIC, _VERSION, len(_COLUMNS), len(statistics))
    return zstandard.ZstdCompressor(level=3, write_checksum=True).compress(head + columns)


def decode(encoded: bytes, tensors: int) -> Statistics:
    """Decode the statistics of a checkpoint of so many tensors; `CorruptStatistics` if the bytes are not valid."""
    size = _HEAD.size + 8 * len(_COLUMNS) * tensors
    try:
        if zstandard.frame_content_size(encoded) != size:
            raise CorruptStatistics(f"the statistics do not match {tensors} tensors", hint=_HINT)
        plain = zstandard.ZstdDecompressor().decompress(encoded, max_output_size=size)
    except zstandard.ZstdError as error:
        raise CorruptStatistics(f"cannot read the statistics: {error}", hint=_HINT) from error
    if _HEAD.unpack_from(plain) != (_MAGIC, _VERSION, len(_COLUMNS), tensors):
        raise CorruptStatistics("the statistics have an unknown format", hint=_HINT)
    at, columns = _HEAD.size, {}
    for name, kind in _COLUMNS.items():
        columns[name] = np.frombuffer(plain, kind, tensors, at)
        at += 8 * tensors
    statistics = Statistics(columns)
    _check(statistics)
    return statistics


def _check(statistics: Statistics) -> None:
    floats = [statistics[name] for name, kind in _COLUMNS.items() if kind == "<f8"]
    possible = (
        all((statistics[name] >= 0).all() for name in _COUNTS)
        and not any(np.isinf(column).any() for column in floats)
        and not (statistics["minimum"] > statistics["maximum"]).any()
        and not ((statistics["rms"] < 0) | (statistics["change"] < 0) | (statistics["changed_from"] < NOWHERE)).any()
    )
    if not possible:
        raise CorruptStatistics("the statistics contain impossible values", hint=_HINT)


def tensors_of(manifest: Manifest) -> list[tuple[str, str, TensorEntry]]:
    """(group, name, entry) of every tensor, in the order of the columns."""
    return [(group, name, entry) for group, held in manifest.tensors.items() for name, entry in held.items()]


def describe(statistics: Statistics, position: int, group: str, name: str, entry: TensorEntry) -> TensorStatistics:
    """One tensor's statistics, for people and programs."""
    elements = math.prod(entry.shape)
    before = int(statistics["changed_from"][position])

    def number(column: str) -> float | None:
        value = float(statistics[column][position])
        return None if math.isnan(value) else value

    return TensorStatistics(
        group=group,
        name=name,
        dtype=entry.dtype,
        shape=list(entry.shape),
        elements=elements,
        nan=int(statistics["nan"][position]),
        inf=int(statistics["inf"][position]),
        minimum=number("minimum"),
        maximum=number("maximum"),
        mean=number("mean"),
        rms=number("rms"),
        zeros=int(statistics["zeros"][position]) / elements if elements else 0.0,
        change=number("change"),
        changed_from=None if before == NOWHERE else before,
    )


def layer_of(name: str) -> str:
    """model.layers.11.mlp.weight/exp_avg -> model.layers.11: a name up to its first number, else without its last part."""
    parts = name.partition("/")[0].split(".")
    number = next((i for i, part in enumerate(parts) if part.isdigit()), None)
    if number is not None:
        return ".".join(parts[: number + 1])
    return ".".join(parts[:-1][:2]) or parts[0]


def layers_of(names: Iterable[str]) -> Iterator[str]:
    """`layer_of` each name. The tensors of a layer mostly follow each other."""
    layer, inside = "", ""
    for name in names:
        if not (inside and name.startswith(inside)):
            layer = layer_of(name)
            inside = f"{layer}." if layer.rpartition(".")[2].isdigit() else ""
        yield layer


def sum_up(manifest: Manifest, statistics: Statistics) -> dict[str, Any]:
    """Data for plots and verdicts, as JSON: (non-finite, rms, relative change) of every layer of every group, and the NaN
    and infinities of each tensor that has any.

    Tensors without dimensions, which are counters, are left out of norms.
    """
    listed = tensors_of(manifest)
    held: dict[str, dict[str, list[int]]] = {}
    named = layers_of(name for _, name, _ in listed)
    for position, ((group, _, _), layer) in enumerate(zip(listed, named, strict=True)):
        held.setdefault(group, {}).setdefault(layer, []).append(position)
    elements = np.array([math.prod(entry.shape) if entry.shape else 0 for _, _, entry in listed], np.float64)
    groups = {}
    for group, layers in held.items():
        cells = {}
        for layer, positions in _bounded(layers).items():
            cells[layer] = _cell(statistics, elements, np.array(positions))
        groups[group] = cells
    broken: dict[str, dict[str, list[int]]] = {}
    for position in np.flatnonzero(statistics.nonfinite).tolist():
        group, name, _ = listed[position]
        broken.setdefault(group, {})[name] = [int(statistics["nan"][position]), int(statistics["inf"][position])]
    return {"groups": groups, "nonfinite": broken}


def _bounded(layers: dict[str, list[int]]) -> dict[str, list[int]]:
    names = sorted(layers, key=natural_key)
    shown = {name: layers[name] for name in names[:LAYERS_MAX]}
    rest = [position for name in names[LAYERS_MAX:] for position in layers[name]]
    return shown | ({OTHERS: rest} if rest else {})


def _cell(statistics: Statistics, elements: NDArray[np.float64], at: NDArray[Any]) -> list[float | None]:
    nonfinite = statistics.nonfinite[at]
    counted = np.where(np.isnan(statistics["rms"][at]), 0, np.maximum(elements[at] - nonfinite, 0))
    roots = np.sqrt(counted)
    norm = math.hypot(*(np.nan_to_num(statistics["rms"][at]) * roots).tolist())
    change = math.hypot(*statistics["change"][at][counted > 0].tolist())
    total = float(counted.sum())
    rms = norm / math.sqrt(total) if total else None
    relative = change / norm if total and norm and math.isfinite(change) else None
    return [int(nonfinite.sum()), rms, relative]
