"""A committed checkpoint as the source of an export: its tensors as a listing, and its files, out of which only verified
bytes come.
"""

from __future__ import annotations

import json
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Mapping
from threading import Lock
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from holdfast_formats import dtypes, naming
from holdfast_formats.digest import digest
from holdfast_formats.disk import state_json, verification
from holdfast_formats.disk.manifest import Manifest, TensorEntry
from holdfast_formats.disk.verification import Piece
from holdfast_formats.errors import NoSuchResource, StateMismatch
from holdfast_formats.foreign.listing import FileUse, ForeignFiles, ForeignListing, ForeignPiece, ForeignTensor, TensorKey
from holdfast_formats.layout.parts import strides
from holdfast_formats.region import whole
from holdfast_formats.tensors import TensorSpec

KEPT_BYTES_MAX = 64 * 2**20  # verified extents that are kept: rows of a transposed tensor are in the same ones
KIND = "holdfast"


class CommittedFiles:
    """The files of a committed checkpoint in `directory` of `files`. Thread-safe.

    Whatever is handed over was copied out of memory whose digest was checked first (I7). A piece that is asked for as a
    whole is read to where it is wanted and checked there. Raises `Damaged` with file, tensor and range for other bytes.
    """

    def __init__(
        self, files: ForeignFiles, made: Manifest, directory: str = "", kept_bytes_max: int = KEPT_BYTES_MAX
    ) -> None:
        self._files, self._made, self._directory = files, made, directory
        self._pieces = verification.pieces(made)
        self._starts = {file: [piece.start for piece in listed] for file, listed in self._pieces.items()}
        self._kept: OrderedDict[tuple[str, int], NDArray[np.uint8]] = OrderedDict()
        self._kept_bytes, self._kept_bytes_max = 0, kept_bytes_max
        self._lock = Lock()

    def read(self, path: str, offset: int = 0, length: int | None = None) -> bytes:
        """Verified bytes of a file; fewer than `length` only at its end."""
        left = max(self._size(path) - offset, 0)
        made = np.empty(left if length is None else min(left, length), np.uint8)
        self.read_into(path, offset, made)
        return made.tobytes()

    def read_into(self, path: str, offset: int, buffer: Any) -> int:
        """Fill a contiguous `buffer` with verified bytes; the number of them."""
        into = np.frombuffer(buffer, np.uint8) if not isinstance(buffer, np.ndarray) else buffer.reshape(-1).view(np.uint8)
        stop = min(offset + into.nbytes, self._size(path))
        listed = self._pieces[path]
        position = max(bisect_right(self._starts[path], offset) - 1, 0)
        while position < len(listed) and listed[position].start < stop:
            piece = listed[position]
            position += 1
            begin, end = max(piece.start, offset), min(piece.stop, stop)
            if end <= begin:
                continue
            place = into[begin - offset : end - offset]
            if end - begin == piece.length:
                self._verified_into(piece, place)
            else:
                place[...] = self._verified(piece)[begin - piece.start : end - piece.start]
        return max(stop - offset, 0)

    def read_stored(self, path: str, offset: int, buffer: Any) -> int:
        """The same as `read_into`: what is verified may come from a cache."""
        return self.read_into(path, offset, buffer)

    def stamp(self, path: str) -> str:
        """What identifies a file's content: its bytes and the digests of all its pieces. It never changes."""
        size = self._size(path)
        return f"{size}-{digest(''.join(piece.digest for piece in self._pieces[path]).encode())}"

    def size(self, path: str) -> int | None:
        """Bytes of a file; None for one that is not part of the checkpoint. `CorruptManifest` if it has another size."""
        entry = self._made.file(path)
        if entry is not None:
            verification.check_size(self._made, path, self._files.size(self._at(path)))
        return None if entry is None else entry.bytes

    def list(self, path: str) -> list[str]:
        """The names of the files that the manifest lists, sorted."""
        return sorted(self._pieces) if path == "" else []

    def _size(self, path: str) -> int:
        listed = self._pieces.get(path)
        if listed is None:
            raise NoSuchResource(f"the checkpoint has no file {path!r}", hint="its manifest lists its files")
        return listed[-1].stop

    def _verified(self, piece: Piece) -> NDArray[np.uint8]:
        key = (piece.file, piece.start)
        with self._lock:
            found = self._kept.get(key)
            if found is not None:
                self._kept.move_to_end(key)
                return found
        made = np.empty(piece.length, np.uint8)
        self._verified_into(piece, made)
        with self._lock:
            if key not in self._kept:
                self._kept[key] = made
                self._kept_bytes += made.nbytes
            while self._kept_bytes > self._kept_bytes_max and self._kept:
                _, dropped = self._kept.popitem(last=False)
                self._kept_bytes -= dropped.nbytes
        return made

    def _verified_into(self, piece: Piece, into: NDArray[np.uint8]) -> None:
        read = self._files.read_into(self._at(piece.file), piece.start, into)
        try:
            verification.check(piece, into[:read])
        except BaseException:
            into[...] = 0  # nobody is to find bytes there that nothing vouches for
            raise

    def _at(self, path: str) -> str:
        return f"{self._directory}/{path}" if self._directory else path


class ExportSource(NamedTuple):
    """A committed checkpoint to be exported. `ranked` names the values (group/key) that differ between ranks and so are not
    in the listing's documents; `aliases` are in the listing as tensors like others.
    """

    made: Manifest
    files: CommittedFiles
    listing: ForeignListing
    ranked: tuple[str, ...] = ()

    def group(self, group: str) -> dict[str, ForeignTensor]:
        """The stored tensors of a group, by name, without aliases."""
        return {name: self.listing.tensors[TensorKey(group, name)] for name in self.made.tensors.get(group, {})}

    def read_asset(self, name: str) -> bytes:
        """A small file of the checkpoint."""
        return self.files.read(name)


def opened(files: ForeignFiles, made: Manifest, directory: str = "", kept_bytes_max: int = KEPT_BYTES_MAX) -> ExportSource:
    """The checkpoint in `directory` that this manifest describes; of its files only state.json is read."""
    verified = CommittedFiles(files, made, directory, kept_bytes_max)
    documents: dict[str, dict[str, Any]] = {}
    ranked: tuple[str, ...] = ()
    if made.file(naming.STATE) is not None:
        values = state_json.for_rank(verified.read(naming.STATE), 0)
        ranked = values.ranked
        documents = {
            group: {key: json.loads(text) for key, text in held.items() if f"{group}/{key}" not in ranked}
            for group, held in values.values.items()
        }
    uses = tuple(FileUse(file.name, _use(made, file.name)) for file in made.files)
    tensors = {tensor.key: tensor for tensor in _tensors(made)}
    assets = tuple(use.file for use in uses if use.use == "asset")
    listing = ForeignListing(KIND, tensors, uses, documents, assets, step=made.step)
    return ExportSource(made, verified, listing, ranked)


def same_bytes(one: TensorEntry, other: TensorEntry) -> bool:
    """Whether two tensors of one checkpoint have equal bytes, by the digests of their extents."""
    mine, theirs = ([(e.offset, e.length, e.digest) for e in entry.extents] for entry in (one, other))
    return (one.dtype, one.shape) == (other.dtype, other.shape) and mine == theirs


def refuse_sub_byte(tensors: Mapping[str, ForeignTensor]) -> None:
    """`StateMismatch`, by name, for elements of less than a byte, which can be copied but not moved."""
    for name, tensor in tensors.items():
        if dtypes.bits(tensor.spec.dtype) % 8:
            raise StateMismatch(
                f"tensor {name!r} is {tensor.spec.dtype}, whose elements are shorter than a byte",
                hint="`holdfast export --model-only` copies such files as they are",
                tensor=name,
            )


def _use(made: Manifest, file: str) -> Any:
    entry = made.file(file)
    if entry is not None and entry.header_bytes:
        return "tensors"
    ours = {naming.STATE} | {naming.index_file_name(group) for group in made.groups}
    return "state" if file in ours else "asset"


def _tensors(made: Manifest) -> list[ForeignTensor]:
    found = [_tensor(group, name, entry) for group, named in made.tensors.items() for name, entry in named.items()]
    for group, aliases in made.aliases.items():
        found += [_tensor(group, alias, made.tensors[group][target]) for alias, target in aliases.items()]
    return found


def _tensor(group: str, name: str, entry: TensorEntry) -> ForeignTensor:
    piece = ForeignPiece(entry.file, entry.start, whole(entry.shape), strides(entry.shape))
    return ForeignTensor(TensorSpec(group, name, entry.dtype, entry.shape), (piece,))
