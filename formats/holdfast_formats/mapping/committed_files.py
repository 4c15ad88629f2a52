"""The files of a committed checkpoint, read with verification."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from threading import Lock
from typing import Any

import numpy as np
from numpy.typing import NDArray

from holdfast_formats import dtypes
from holdfast_formats.digest import digest
from holdfast_formats.disk import verification
from holdfast_formats.disk.manifests import Manifest, TensorEntry
from holdfast_formats.disk.verification import Piece
from holdfast_formats.errors import NoSuchResource, StateMismatch
from holdfast_formats.files import Files
from holdfast_formats.mapping.listing import ForeignTensor

KEPT_BYTES_MAX = 64 * 2**20  # verified extents that are kept: rows of a transposed tensor are in the same ones


class CommittedFiles:
    """The files of a committed checkpoint in `directory` of `files`. Thread-safe.

    Bytes are copied out of memory whose digest was checked first (I7). A piece requested as a whole is read directly into
    the caller's memory and checked there. Raises `Damaged` with file, tensor and range for other bytes.
    """

    def __init__(self, files: Files, manifest: Manifest, directory: str = "", kept_bytes_max: int = KEPT_BYTES_MAX) -> None:
        self._files, self._made, self._directory = files, manifest, directory
        self._pieces = verification.pieces(manifest)
        self._starts: dict[str, list[int]] = {file: some.rows["start"].tolist() for file, some in self._pieces.items()}
        self._kept: OrderedDict[tuple[str, int], NDArray[np.uint8]] = OrderedDict()
        self._kept_bytes, self._kept_bytes_max = 0, kept_bytes_max
        self._lock = Lock()

    @property
    def label(self) -> str:
        return self._directory or self._files.label

    def read(self, path: str, offset: int = 0, length: int | None = None) -> bytes:
        """Verified bytes of a file; fewer than `length` only at its end."""
        left = max(self._size(path) - offset, 0)
        octets = np.empty(left if length is None else min(left, length), np.uint8)
        self.read_into(path, offset, octets)
        return octets.tobytes()

    def read_into(self, path: str, offset: int, buffer: Any) -> int:
        """Fill a contiguous `buffer` with verified bytes; returns their number."""
        into = np.frombuffer(buffer, np.uint8) if not isinstance(buffer, np.ndarray) else buffer.reshape(-1).view(np.uint8)
        stop = min(offset + into.nbytes, self._size(path))
        listed = self._pieces[path]
        starts = self._starts[path]
        touched = listed[max(bisect_right(starts, offset) - 1, 0) : bisect_left(starts, stop)]
        whole = [piece for piece in touched if offset <= piece.start and piece.stop <= stop]
        if whole:
            self._verified_into(whole, into[whole[0].start - offset : whole[-1].stop - offset])
        for piece in touched:
            begin, end = max(piece.start, offset), min(piece.stop, stop)
            if begin < end < begin + piece.length:
                into[begin - offset : end - offset] = self._verified(piece)[begin - piece.start : end - piece.start]
        return max(stop - offset, 0)

    def read_stored(self, path: str, offset: int, buffer: Any) -> int:
        """As `read_into`: verified bytes may come from a cache."""
        return self.read_into(path, offset, buffer)

    def stamp(self, path: str) -> str:
        """Identifies a file's content by its size and the digests of its pieces. It never changes."""
        size = self._size(path)
        return f"{size:x}.{digest(''.join(piece.digest for piece in self._pieces[path]).encode())}"

    def size(self, path: str) -> int | None:
        """Bytes of a file; None if it is not part of the checkpoint. `CorruptManifest` if its size is wrong."""
        entry = self._made.file(path)
        if entry is not None:
            verification.check_size(self._made, path, self._files.size(self._at(path)))
        return None if entry is None else entry.bytes

    def list(self, path: str) -> list[str]:
        """Sorted names of the manifest's files."""
        return sorted(self._pieces) if path == "" else []

    def _size(self, path: str) -> int:
        listed = self._pieces.get(path)
        if listed is None:
            raise NoSuchResource(f"the checkpoint has no file {path!r}", hint="see its manifest for its files")
        return listed[-1].stop

    def _verified(self, piece: Piece) -> NDArray[np.uint8]:
        key = (piece.file, piece.start)
        with self._lock:
            kept = self._kept.get(key)
            if kept is not None:
                self._kept.move_to_end(key)
                return kept
        octets = np.empty(piece.length, np.uint8)
        self._verified_into([piece], octets)
        with self._lock:
            if key not in self._kept:
                self._kept[key] = octets
                self._kept_bytes += octets.nbytes
            while self._kept_bytes > self._kept_bytes_max and self._kept:
                _, dropped = self._kept.popitem(last=False)
                self._kept_bytes -= dropped.nbytes
        return octets

    def _verified_into(self, pieces: Sequence[Piece], into: NDArray[np.uint8]) -> None:
        """Read consecutive pieces at once into the caller's memory, and check each there."""
        first = pieces[0].start
        read = self._files.read_into(self._at(pieces[0].file), first, into)
        try:
            for piece in pieces:
                verification.check(piece, into[min(piece.start - first, read) : min(piece.stop - first, read)])
        except BaseException:
            into[...] = 0  # leave no unverified bytes in the caller's memory
            raise

    def _at(self, path: str) -> str:
        return f"{self._directory}/{path}" if self._directory else path


def same_bytes(one: TensorEntry, other: TensorEntry) -> bool:
    """Whether two tensors of one checkpoint have equal bytes, by the digests of their extents."""
    mine, theirs = ([(e.offset, e.length, e.digest) for e in entry.extents] for entry in (one, other))
    return (one.dtype, one.shape) == (other.dtype, other.shape) and mine == theirs


def refuse_sub_byte(tensors: Mapping[str, ForeignTensor]) -> None:
    """`StateMismatch` for elements of less than a byte, which can be copied but not moved."""
    for name, tensor in tensors.items():
        if dtypes.bits(tensor.spec.dtype) % 8:
            raise StateMismatch(
                f"tensor {name!r} is {tensor.spec.dtype}, whose elements are shorter than a byte",
                hint="`holdfast export --model-only` copies such files as they are",
                tensor=name,
            )
