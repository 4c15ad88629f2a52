"""A listing of pieces: how a rank says which it wants, and its daemon where they stand in memory. docs/format.md § 12.

Many thousands of pieces make megabytes, so a listing stands in a memfd of its own, or at the head of the memory that holds
the pieces. It is rows of numbers, so that comparing those of all ranks is arithmetic on arrays.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from holdfast_formats import naming
from holdfast_formats.disk.safetensors import HEADER_BYTES_MAX
from holdfast_formats.disk.verification import Piece
from holdfast_formats.errors import InvalidRequest

MAGIC = b"HFPIECES"
VERSION = 1
LISTING_BYTES_MAX = 512 * 2**20
PIECE_BYTES_MAX = HEADER_BYTES_MAX + 4096  # a header and its length; extents are far smaller
ROW = np.dtype([("file", "<u4"), ("length", "<u4"), ("start", "<u8"), ("digest", "<u8"), ("at", "<u8")])
_HEAD = struct.Struct("<8sIIQ")  # magic, version, bytes of the names, rows
_ALIGNMENT = 8

Rows = NDArray[Any]  # of dtype ROW


class PieceList(NamedTuple):
    """Pieces by file and position. A row's `file` is an index into `files`; `at` is where the piece stands in memory."""

    files: tuple[str, ...]
    rows: Rows

    @property
    def nbytes(self) -> int:
        """Of the pieces."""
        return int(self.rows["length"].sum(dtype=np.uint64))


def of(pieces: Sequence[Piece]) -> PieceList:
    """A listing of pieces of whatever order; `at` is 0."""
    files = tuple(sorted({piece.file for piece in pieces}))
    index = {name: number for number, name in enumerate(files)}
    listed = [(index[p.file], p.length, p.start, int(p.digest, 16), 0) for p in pieces]
    rows = np.array(listed, ROW)
    return PieceList(files, rows[np.lexsort((rows["start"], rows["file"]))])


def encode(listing: PieceList) -> bytes:
    """The bytes of a listing."""
    names = json.dumps(listing.files).encode()
    names += b" " * (-(_HEAD.size + len(names)) % _ALIGNMENT)
    return _HEAD.pack(MAGIC, VERSION, len(names), len(listing.rows)) + names + listing.rows.tobytes()


def decode(memory: bytes | memoryview) -> PieceList:
    """The listing that stands at the beginning of `memory`; what is behind it is not looked at.

    Raises `InvalidRequest` for what is no listing: impossible names, pieces out of order or across one another.
    """
    if len(memory) < _HEAD.size:
        raise InvalidRequest(f"a listing of pieces that is cut off after {len(memory)} bytes")
    magic, version, names_bytes, count = _HEAD.unpack_from(memory, 0)
    if magic != MAGIC or version != VERSION:
        raise InvalidRequest("memory that holds no listing of pieces of this version")
    start = _HEAD.size + names_bytes
    stop = start + count * ROW.itemsize
    if stop > min(len(memory), LISTING_BYTES_MAX):
        raise InvalidRequest(f"a listing of {count} pieces does not fit {len(memory)} bytes")
    listing = PieceList(_names(bytes(memory[_HEAD.size : start])), np.frombuffer(memory[start:stop], ROW))
    _check(listing)
    return listing


def _names(encoded: bytes) -> tuple[str, ...]:
    try:
        names = json.loads(encoded)
    except (ValueError, RecursionError) as error:
        raise InvalidRequest(f"a listing whose names cannot be read: {error}") from error
    if not isinstance(names, list) or not all(isinstance(name, str) and naming.is_file_name(name) for name in names):
        raise InvalidRequest("a listing of files that are no files of a checkpoint")
    if names != sorted(set(names)):
        raise InvalidRequest("a listing whose files are not in order, each once")
    return tuple(names)


def _check(listing: PieceList) -> None:
    rows = listing.rows
    if not len(rows):
        return
    lengths, starts, files = rows["length"], rows["start"], rows["file"]
    if int(files.max()) >= len(listing.files) or int(starts.max()) >= 2**62 or int(rows["at"].max()) >= 2**62:
        raise InvalidRequest("a listing of pieces where no file has any")
    if int(lengths.min()) == 0 or int(lengths.max()) > PIECE_BYTES_MAX:
        raise InvalidRequest(f"a listing of pieces that have not 1 to {PIECE_BYTES_MAX} bytes")
    before, after = rows[:-1], rows[1:]
    follows = (before["file"] < after["file"]) | (
        (before["file"] == after["file"]) & (before["start"] + before["length"] <= after["start"])
    )
    if not follows.all():
        raise InvalidRequest("a listing of pieces that are not in order, or lie across one another")
