"""Statistics of a portion of a checkpoint, from the node that has read it to the one that combines them.

A tensor that lies entirely in one portion is one row. Otherwise each extent is a row: merged in one step, as by one reader,
they give the same numbers, bit for bit.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import zstandard
from numpy.typing import NDArray

from holdfast_formats.disk.manifests import Manifest
from holdfast_formats.disk.verification import ExtentColumns
from holdfast_formats.errors import CorruptStatistics
from holdfast_formats.rest.statistics import PartStatistics, Table, listed, merge, merge_each, tabulate, tensors_of

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
_NUMBERS = PartStatistics._fields
_HINT = "the checkpoint itself is not affected; only its statistics are lost"


def encode(extents: ExtentColumns, parts: Table, known: NDArray[np.bool_]) -> bytes:
    """The parts of a checkpoint's tensors that are known, of a table with a row for each extent; compressed."""
    edges, of = extents.edges, extents.rows["tensor"]
    counted = np.concatenate([np.zeros(1, np.int64), np.cumsum(known)])
    missing = np.diff(edges) - np.diff(counted[edges])
    whole = np.flatnonzero((missing == 0) & (np.diff(edges) > 0))
    inside = np.flatnonzero(np.isin(of, whole))
    ends = np.concatenate([np.zeros(1, np.int64), np.cumsum(np.diff(edges)[whole])])
    others = np.flatnonzero(known & (missing[of] > 0))
    tensors, offsets = np.concatenate([whole, of[others]]), extents.rows["offset"][others]
    offsets = np.concatenate([np.full(len(whole), WHOLE), offsets])
    rows = np.empty(len(tensors), _ROW)
    rows["tensor"], rows["offset"] = tensors, offsets
    for name, column in zip(_NUMBERS, np.concatenate([merge_each(parts[inside], ends), parts[others]]).T, strict=True):
        rows[name] = column
    rows = rows[np.lexsort((offsets, tensors))]
    return zstandard.ZstdCompressor(level=3, write_checksum=True).compress(rows.tobytes())


def _decode(encoded: bytes) -> NDArray[np.void]:
    """The rows; `CorruptStatistics` if the bytes are not valid."""
    try:
        plain = zstandard.ZstdDecompressor().decompress(encoded, max_output_size=ROWS_MAX * _ROW.itemsize)
        return np.frombuffer(plain, _ROW) if plain else np.empty(0, _ROW)
    except (zstandard.ZstdError, ValueError) as error:
        raise CorruptStatistics(f"cannot read the statistics of a portion: {error}", hint=_HINT) from error


def put_together(manifest: Manifest, portions: Sequence[bytes]) -> Table | None:
    """The statistics of every tensor, in the manifest's order, from all portions; None if some are missing. Raises
    `CorruptStatistics`.
    """
    tensors = tensors_of(manifest)
    rows = np.concatenate([np.empty(0, _ROW), *map(_decode, portions)])
    rows = rows[(rows["tensor"] >= 0) & (rows["tensor"] < len(tensors))]
    parts, is_whole = np.stack([rows[name].astype(np.float64) for name in _NUMBERS], axis=1), rows["offset"] == WHOLE
    merged: Table = np.empty((len(tensors), len(_NUMBERS)))
    merged[rows["tensor"][is_whole]] = parts[is_whole]
    held: dict[int, dict[int, PartStatistics]] = {}
    others = rows[~is_whole]
    for tensor, offset, part in zip(
        others["tensor"].tolist(), others["offset"].tolist(), listed(parts[~is_whole]), strict=True
    ):
        held.setdefault(tensor, {})[offset] = part
    for position in np.setdiff1d(np.arange(len(tensors)), rows["tensor"][is_whole]).tolist():
        of = held.get(position, {})
        if of.keys() != {extent.offset for extent in tensors[position][2].extents}:
            return None
        merged[position] = tabulate([merge([of[offset] for offset in sorted(of)])])[0]
    return merged
