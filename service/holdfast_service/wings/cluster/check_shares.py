"""Divides a checkpoint among the nodes that verify it: evenly, and so that a node reads what another one has written."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from holdfast_formats.disk import verification
from holdfast_formats.disk.manifests import Manifest
from holdfast_formats.disk.verification import PieceColumns
from holdfast_formats.staging.shared_check import PortionPlan, Span
from holdfast_service.daemon.checking.node_checks import WrittenSpan

PORTION_BYTES_MIN = 2**18  # as the shortest block that a node writes


class _Stretch(NamedTuple):
    """A span of all files concatenated, and the index of its writer; -1 if unknown."""

    begin: int
    end: int
    writer: int


def divide(manifest: Manifest, readers: Sequence[str], written: Sequence[WrittenSpan] = ()) -> list[PortionPlan]:
    """The portions of a checkpoint, at most one for each reader, of equal length up to a byte.

    What one node has written is contiguous and is read by another one, as far as possible. A single portion has no reader:
    then there is nothing to divide.
    """
    total = sum(file.bytes for file in manifest.files) + 1  # a file without bytes may be after the last byte
    count = max(min(total // PORTION_BYTES_MIN, len(readers)), 1)
    nodes = sorted({one.node for one in written})
    portions = _cut(_stretches(manifest, written, nodes), total, count)
    order = _order(portions, nodes, sorted(readers)) if count > 1 else [None]
    return [PortionPlan(_joined(portion), reader) for portion, reader in zip(portions, order, strict=True)]


def within(manifest: Manifest, spans: Sequence[Span]) -> dict[str, PieceColumns]:
    """The pieces that begin in these spans, by file; in file order. Files without such pieces are left out."""
    begins = dict(zip((file.name for file in manifest.files), _starts(manifest), strict=True))
    begin, end = np.array(sorted(spans), np.int64).reshape(-1, 2).T
    by_file = {}
    for file, some in verification.pieces(manifest).items():
        places = begins[file] + some.rows["start"]
        nearest = np.searchsorted(begin, places, "right") - 1
        by_file[file] = some.where((nearest >= 0) & (places < np.append(end, 0)[nearest]))
    return {file: some for file, some in by_file.items() if len(some)}


def _starts(manifest: Manifest) -> list[int]:
    """The begin of each file in their concatenation."""
    return list(accumulate((file.bytes for file in manifest.files), initial=0))[:-1]


def _stretches(manifest: Manifest, written: Sequence[WrittenSpan], nodes: Sequence[str]) -> list[_Stretch]:
    """All bytes: those of one writer together, the others, such as small files, at the end."""
    starts = dict(zip((file.name for file in manifest.files), _starts(manifest), strict=True))
    sizes = {file.name: file.bytes for file in manifest.files}
    known = []
    for one in written:
        end = min(one.end, sizes.get(one.file, 0))
        if one.begin < end:
            known.append(_Stretch(starts[one.file] + one.begin, starts[one.file] + end, nodes.index(one.node)))
    known.sort()
    stretches, at = [], 0
    for stretch in known:
        if stretch.begin > at:
            stretches.append(_Stretch(at, stretch.begin, -1))
        if stretch.end > at:
            stretches.append(stretch._replace(begin=max(stretch.begin, at)))
            at = stretch.end
    total = sum(sizes.values()) + 1
    if at < total:
        stretches.append(_Stretch(at, total, -1))
    return sorted(stretches, key=lambda stretch: (stretch.writer < 0, stretch.writer, stretch.begin))


def _cut(stretches: Sequence[_Stretch], total: int, count: int) -> list[list[_Stretch]]:
    bounds = [total * number // count for number in range(1, count + 1)]
    parts: list[list[_Stretch]] = [[] for _ in range(count)]
    number = at = 0
    for begin, end, writer in stretches:
        while begin < end:
            while at == bounds[number] and number < count - 1:
                number += 1
            stop = min(end, begin + bounds[number] - at)
            parts[number].append(_Stretch(begin, stop, writer))
            at, begin = at + stop - begin, stop
    return parts


def _order(portions: Sequence[Sequence[_Stretch]], nodes: Sequence[str], readers: Sequence[str]) -> list[str | None]:
    """The reader of each portion: the rotation of the readers in which they read least of their own writes."""
    own: NDArray[np.int64] = np.zeros((len(portions), len(readers)), np.int64)
    column = {name: index for index, name in enumerate(readers)}
    for number, portion in enumerate(portions):
        for begin, end, writer in portion:
            if writer >= 0 and nodes[writer] in column:
                own[number, column[nodes[writer]]] += end - begin
    rows, shifts = np.arange(len(portions)), range(len(readers))
    sums = [int(own[rows, (rows + shift) % len(readers)].sum()) for shift in shifts]
    best = sums.index(min(sums))
    return [readers[(number + best) % len(readers)] for number in range(len(portions))]


def _joined(portion: Sequence[_Stretch]) -> tuple[Span, ...]:
    spans: list[Span] = []
    for begin, end, _ in sorted(portion):
        if spans and spans[-1][1] == begin:
            spans[-1] = (spans[-1][0], end)
        else:
            spans.append((begin, end))
    return tuple(spans)
