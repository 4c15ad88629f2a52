"""Statistics of a portion of a checkpoint, from the node that has read it to the one that combines them.

A tensor that lies entirely in one portion is one row. Otherwise each extent is a row: merged in one step, as by one reader,
they give the same numbers, bit for bit.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import zstandard

from holdfast_formats.disk.manifests import Manifest
from holdfast_formats.errors import CorruptStatistics
from holdfast_formats.rest.statistics import PartStatistics, merge, tensors_of

WHOLE = -1  # the offset of a row that is a whole tensor
ROWS_MAX = 2**24
_ROW = np.dtype(
    [
        ("tensor", "<i8"),  # its place in the manifest's order
        ("offset", "<i8"),  # of the extent in the tensor
        *((name, "<i8") for name in ("finite", "nan", "inf", "zeros")),
        *((name, "<f8") for name in ("minimum", "maximum", "mean", "norm", "change")),
    ]
)
_HINT = "the checkpoint itself is not affected; only its statistics are lost"
Parts = Mapping[tuple[str, str], Mapping[int, PartStatistics]]  # of a tensor, by group and name: by offset


class _Row(NamedTuple):
    tensor: int
    offset: int
    part: PartStatistics


def encode(manifest: Manifest, parts: Parts) -> bytes:
    """These parts of a checkpoint's tensors, compressed."""
    rows: list[tuple[float, ...]] = []
    for position, (group, name, entry) in enumerate(tensors_of(manifest)):
        held = parts.get((group, name), {})
        whole = len(held) == len(entry.extents) > 0
        listed = {WHOLE: merge([held[offset] for offset in sorted(held)])} if whole else held
        for offset, part in sorted(listed.items()):
            change = math.nan if part.change is None else part.change
            rows.append((position, offset, *part[:-1], change))
    return zstandard.ZstdCompressor(level=3, write_checksum=True).compress(np.array(rows, _ROW).tobytes())


def decode(encoded: bytes) -> Iterable[_Row]:
    """The rows; `CorruptStatistics` if the bytes are not valid."""
    try:
        plain = zstandard.ZstdDecompressor().decompress(encoded, max_output_size=ROWS_MAX * _ROW.itemsize)
        rows = np.frombuffer(plain, _ROW) if plain else np.empty(0, _ROW)
    except (zstandard.ZstdError, ValueError) as error:
        raise CorruptStatistics(f"cannot read the statistics of a portion: {error}", hint=_HINT) from error
    for tensor, offset, *numbers in rows.tolist():
        part = PartStatistics(*numbers)
        unknown = part.change is None or math.isnan(part.change)
        yield _Row(tensor, offset, part._replace(change=None) if unknown else part)


def put_together(manifest: Manifest, portions: Sequence[bytes]) -> list[PartStatistics] | None:
    """The statistics of every tensor, in the manifest's order, from all portions; None if some are missing. Raises
    `CorruptStatistics`.
    """
    held: dict[int, dict[int, PartStatistics]] = {}
    for encoded in portions:
        for row in decode(encoded):
            held.setdefault(row.tensor, {})[row.offset] = row.part
    merged = []
    for position, (_, _, entry) in enumerate(tensors_of(manifest)):
        parts = held.get(position, {})
        if WHOLE in parts:
            merged.append(parts[WHOLE])
            continue
        if parts.keys() != {extent.offset for extent in entry.extents}:
            return None
        merged.append(merge([parts[offset] for offset in sorted(parts)]))
    return merged
