"""Compares two checkpoints tensor by tensor: by their manifests for equal, missing or reshaped ones, and by bytes for the
rest.

Digests prove equality only if both were cut into the same extents. Distances of changed tensors are computed from their
bytes, in blocks. Norms are L2, over float64 sums, as `torch.linalg.vector_norm(b.double() - a.double())`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from math import prod, sqrt
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from holdfast_formats import dtypes
from holdfast_formats.disk.manifests import Manifest, TensorEntry
from holdfast_formats.disk.packing import natural_key
from holdfast_formats.errors import NoSuchResource
from holdfast_formats.rest.measurements import Difference, DifferenceState

BLOCK_ELEMENTS = 2**16  # as float64 they fit a core's cache

_OTHER_KIND = ("missing-in-a", "missing-in-b", "reshaped", "retyped")
_MISSING = _OTHER_KIND[:2]
_OF_PROCESSES = "extra"  # the group of random generators and data loaders, which differ at every step
Octets = NDArray[np.uint8]


class Pair(NamedTuple):
    """A tensor of two checkpoints; None for a checkpoint without a tensor of this name."""

    group: str
    name: str
    a: TensorEntry | None
    b: TensorEntry | None

    @property
    def entry(self) -> TensorEntry:
        entry = self.b or self.a
        assert entry is not None
        return entry

    @property
    def state(self) -> DifferenceState:
        """The result by the manifests; "unknown" if they are cut into different extents, so that the bytes must be
        compared.
        """
        a, b = self.a, self.b
        if a is None or b is None:
            return "missing-in-a" if a is None else "missing-in-b"
        if a.shape != b.shape:
            return "reshaped"
        if a.dtype != b.dtype:
            return "retyped"
        if a.extents == b.extents:
            return "equal"
        same_cuts = [(e.offset, e.length) for e in a.extents] == [(e.offset, e.length) for e in b.extents]
        return "changed" if same_cuts else "unknown"


def pairs(a: Manifest, b: Manifest, group: str | None = None) -> list[Pair]:
    """The tensors of both, of one group or of all, by group and in natural order; `NoSuchResource` for an unknown group."""
    groups = sorted({*a.tensors, *b.tensors})
    if group is not None and group not in groups:
        raise NoSuchResource(f"neither checkpoint has a group {group!r}", hint=f"groups: {', '.join(groups)}")
    listed = []
    for held in groups if group is None else [group]:
        left, right = a.tensors.get(held, {}), b.tensors.get(held, {})
        names = sorted({**left, **right}, key=natural_key)  # a set would lose the manifests' order, which is nearly this one
        listed += [Pair(held, name, left.get(name), right.get(name)) for name in names]
    return listed


def difference(pair: Pair, distance: Distance | None = None) -> Difference:
    """The result for a pair: by the manifests, and by its bytes if these were compared."""
    entry = pair.entry
    made = Difference(
        group=pair.group,
        name=pair.name,
        state=pair.state,
        dtype=entry.dtype,
        shape=list(entry.shape),
        bytes=entry.nbytes,
    )
    if pair.state in ("reshaped", "retyped"):
        assert pair.a is not None
        made.detail = {"dtype_a": pair.a.dtype, "shape_a": list(pair.a.shape)}
    if pair.state == "equal":
        made.change = made.relative = 0.0
    if distance is None:
        return made
    made.state = "changed" if distance.differing else "equal"
    made.detail = {
        "differing": distance.differing,
        "nonfinite": distance.nonfinite,
        "nonfinite_a": distance.nonfinite_a,
        "nonfinite_b": distance.nonfinite_b,
    }
    if dtypes.bits(entry.dtype) >= 8:
        made.norm_a = None if distance.nonfinite_a else distance.norm_a
        made.norm_b = None if distance.nonfinite_b else distance.norm_b
        if not distance.nonfinite:
            made.change = distance.change
            made.detail["largest"] = distance.largest
            if made.norm_a is not None:
                made.relative = distance.change / made.norm_a if made.norm_a else (None if distance.change else 0.0)
    return made


def has_nonfinite(one: Difference) -> bool:
    """Whether a tensor whose bytes were compared has NaN or infinity on either side."""
    return bool(one.detail.get("nonfinite_a") or one.detail.get("nonfinite_b"))


def largest_first(one: Pair | Difference, value: float | None, nonfinite: bool) -> tuple[int, int, float]:
    """The key that sorts tensors of both checkpoints by descending value, those with NaN or infinity before them, those
    that did not change behind them; then reshaped ones, then missing ones. Random generators and data loaders come last.
    """
    state = one.state
    apart = 2 if state in _MISSING else 1 if state in _OTHER_KIND else 0
    rank = 0 if nonfinite else 1 if state in ("changed", "unknown") and value != 0 else 2
    return 3 if one.group == _OF_PROCESSES else apart, rank, -(value or 0.0)


class Distance:
    """The distance of two tensors of one dtype and shape, block by block.

    `differing` counts elements (bytes, for types below one byte) whose bits differ. The change is over elements that are
    finite in both, and `nonfinite` counts the other differing ones. Norms are over the finite elements of a tensor;
    `nonfinite_a` and `nonfinite_b` count the others.
    """

    def __init__(self, dtype: str) -> None:
        self._bits = dtypes.bits(dtype)
        self._dtype = np.dtype(np.uint8) if self._bits < 8 else dtypes.to_numpy(dtype)
        self.elements = self.differing = self.nonfinite = self.nonfinite_a = self.nonfinite_b = 0
        self.largest = 0.0
        self._a = self._b = self._change = 0.0

    def add(self, a: Octets, b: Octets) -> None:
        """Count two pieces of equal length, the same bytes of both tensors, in whole elements."""
        step = BLOCK_ELEMENTS * self._dtype.itemsize
        for start in range(0, len(a), step):
            self._add(a[start : start + step], b[start : start + step])

    def _add(self, a: Octets, b: Octets) -> None:
        width = self._dtype.itemsize
        differs = (a.reshape(-1, width) != b.reshape(-1, width)).any(axis=1)
        self.elements += len(differs)
        self.differing += int(np.count_nonzero(differs))
        if self._bits < 8:
            return
        left, right = as_float(a, self._dtype), as_float(b, self._dtype)
        finite_a, finite_b = np.isfinite(left), np.isfinite(right)
        finite = finite_a & finite_b
        own_a, own_b = left, right
        if not finite.all():
            whole_a, whole_b = (one.reshape(len(differs), -1).all(axis=1) for one in (finite_a, finite_b))
            self.nonfinite += int(np.count_nonzero(differs & ~(whole_a & whole_b)))
            self.nonfinite_a += int(np.count_nonzero(~whole_a))
            self.nonfinite_b += int(np.count_nonzero(~whole_b))
            own_a, own_b = left[finite_a], right[finite_b]
            left, right = left[finite], right[finite]
        change = right - left
        self._a += float(own_a @ own_a)
        self._b += float(own_b @ own_b)
        self._change += float(change @ change)
        self.largest = max(self.largest, float(np.abs(change).max(initial=0.0)))

    @property
    def norm_a(self) -> float:
        return sqrt(self._a)

    @property
    def norm_b(self) -> float:
        return sqrt(self._b)

    @property
    def change(self) -> float:
        return sqrt(self._change)


def as_float(octets: Octets, dtype: np.dtype[Any]) -> NDArray[np.float64]:
    """The elements as float64; a complex one as its two parts."""
    values = octets.view(np.float32) if dtype.kind == "c" else octets.view(dtype)
    return values.astype(np.float64)


def blocks(a: Iterable[Octets], b: Iterable[Octets]) -> Iterator[tuple[Octets, Octets]]:
    """The same bytes of two tensors side by side, however each is cut; both have the same number of bytes."""
    left, right = (iter(part for part in cut if len(part)) for cut in (a, b))
    held_a = held_b = np.empty(0, np.uint8)
    while True:
        held_a = held_a if len(held_a) else next(left, held_a)
        held_b = held_b if len(held_b) else next(right, held_b)
        length = min(len(held_a), len(held_b))
        if length == 0:
            return
        yield held_a[:length], held_b[:length]
        held_a, held_b = held_a[length:], held_b[length:]


class Summary(NamedTuple):
    """Numbers of tensors by state, their elements, and the bytes of those that differ. `nonfinite` counts compared tensors
    with NaN or infinity.
    """

    tensors: dict[str, int]
    elements: int
    bytes_changed: int
    relative: float | None
    nonfinite: int


def summarise(differences: Iterable[Difference]) -> Summary:
    """All tensors together; `relative` is the norm of the change over the norm of a, for compared tensors with finite values
    only.
    """
    states: dict[str, int] = {}
    elements = changed = nonfinite = 0
    change = norm = 0.0
    for one in differences:
        states[one.state] = states.get(one.state, 0) + 1
        elements += prod(one.shape)
        changed += one.bytes if one.state != "equal" else 0
        nonfinite += has_nonfinite(one)
        if not has_nonfinite(one):
            change += (one.change or 0.0) ** 2
            norm += (one.norm_a or 0.0) ** 2
    return Summary(states, elements, changed, sqrt(change / norm) if norm else None, nonfinite)
