"""Verifies a checkpoint's files: every byte of every file is in exactly one piece, and every piece has a digest.

A piece is a header, an extent of a tensor, or a whole small file. Code that hands bytes over reads whole pieces and
checks them first (I7). This module works on values only, so client and service share the rule.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain, pairwise
from operator import attrgetter
from typing import TYPE_CHECKING, Any, NamedTuple, overload

import msgspec
import numpy as np
from numpy.typing import NDArray

from holdfast_formats import decoding, naming
from holdfast_formats.digest import DIGITS, digest, number
from holdfast_formats.disk import safetensors
from holdfast_formats.disk.manifests import EXTENT_BYTES_MAX, Extent, FileEntry, Manifest, TensorEntry
from holdfast_formats.disk.packing import FORMAT_METADATA
from holdfast_formats.disk.safetensors import TensorColumns
from holdfast_formats.errors import CorruptExtent, CorruptManifest

if TYPE_CHECKING:
    from typing_extensions import Self

_HINT = "restore another step; `holdfast verify` lists every damaged range"
_NAMED_TENSORS_MAX = 3


class Piece(NamedTuple):
    """Bytes [start, start + length) of a file and their digest; `offset` counts from the first byte of `tensor`."""

    file: str
    start: int
    length: int
    digest: str
    group: str | None = None
    tensor: str | None = None
    offset: int = 0

    @property
    def stop(self) -> int:
        return self.start + self.length


def tensor_piece(group: str, name: str, entry: TensorEntry, extent: Extent) -> Piece:
    return Piece(entry.file, entry.start + extent.offset, extent.length, extent.digest, group, name, extent.offset)


_NONE = -1
_ROW = np.dtype(
    [
        ("start", np.int64),  # in the file, in bytes
        ("length", np.int64),
        ("digest", np.uint64),
        ("offset", np.int64),  # in the tensor
        ("tensor", np.int64),  # its place in the manifest's order; `_NONE` for a header or a small file
        ("extent", np.int64),  # the same of the extent
    ]
)


class TensorNames:
    """The group and the name of each tensor, in the manifest's order."""

    def __init__(self, groups: Mapping[str, Iterable[str]]) -> None:
        self.names: list[str] = []
        self._groups, self._ends = tuple(groups), list[int]()
        for names in groups.values():
            self.names += names
            self._ends.append(len(self.names))

    def __getitem__(self, number: int) -> tuple[str, str]:
        return self._groups[bisect_right(self._ends, number)], self.names[number]


class PieceColumns(Sequence[Piece]):
    """Pieces of one file in its order, as columns of numbers. A `Piece` is made where one is asked for."""

    __slots__ = ("_names", "columns", "file", "rows")

    def __init__(
        self,
        file: str,
        names: TensorNames | Sequence[tuple[str, str]],
        rows: NDArray[np.void],
        columns: ExtentColumns | None = None,
    ) -> None:
        """`columns` are those of the whole manifest, if the pieces are of one."""
        self.file, self._names, self.rows, self.columns = file, names, rows, columns

    def __len__(self) -> int:
        return len(self.rows)

    @overload
    def __getitem__(self, at: int) -> Piece: ...
    @overload
    def __getitem__(self, at: slice) -> Self: ...
    def __getitem__(self, at: int | slice) -> Piece | Self:
        if isinstance(at, slice):
            return type(self)(self.file, self._names, self.rows[at], self.columns)
        return self._piece(self.rows[at].item())

    def __iter__(self) -> Iterator[Piece]:
        return map(self._piece, self.rows.tolist())

    @property
    def start(self) -> int:
        return int(self.rows["start"][0])

    @property
    def stops(self) -> NDArray[np.int64]:
        stops: NDArray[np.int64] = self.rows["start"] + self.rows["length"]
        return stops

    @property
    def stop(self) -> int:
        return int(self.rows["start"][-1] + self.rows["length"][-1])

    def where(self, mask: NDArray[np.bool_]) -> Self:
        return type(self)(self.file, self._names, self.rows[mask], self.columns)

    def _piece(self, row: tuple[int, ...]) -> Piece:
        start, length, number, offset, tensor, _ = row
        group, name = (None, None) if tensor == _NONE else self._names[tensor]
        return Piece(self.file, start, length, f"{number:0{DIGITS}x}", group, name, offset)


class ExtentColumns(NamedTuple):
    """All tensors and extents of a manifest in its order: of each the number of its file in `manifest.files`."""

    names: TensorNames
    entries: list[TensorEntry]
    edges: NDArray[np.int64]  # the first extent of each tensor, and the end
    tensor_files: NDArray[np.int64]
    starts: NDArray[np.int64]  # the first byte of each tensor in its file
    files: NDArray[np.int64]
    rows: NDArray[np.void]


def extents(manifest: Manifest) -> ExtentColumns:
    """The tensors and extents as columns."""
    entries = list(chain.from_iterable(named.values() for named in manifest.tensors.values()))
    listed = list(map(attrgetter("extents"), entries))
    counts = np.fromiter(map(len, listed), np.int64, len(listed))
    edges = np.concatenate([np.zeros(1, np.int64), np.cumsum(counts)])
    every = list(chain.from_iterable(listed))
    at = {file.name: number for number, file in enumerate(manifest.files)}
    starts = np.fromiter(map(attrgetter("start"), entries), np.int64, len(entries))
    tensor_files = np.fromiter(map(at.__getitem__, map(attrgetter("file"), entries)), np.int64, len(entries))
    rows = np.empty(len(every), _ROW)
    rows["tensor"] = of = np.repeat(np.arange(len(entries)), counts)
    rows["extent"] = np.arange(len(every))
    rows["offset"] = np.fromiter(map(attrgetter("offset"), every), np.int64, len(every))
    rows["length"] = np.fromiter(map(attrgetter("length"), every), np.int64, len(every))
    rows["digest"] = _numbers(map(attrgetter("digest"), every))
    rows["start"] = rows["offset"] + starts[of]
    return ExtentColumns(TensorNames(manifest.tensors), entries, edges, tensor_files, starts, tensor_files[of], rows)


def pieces(manifest: Manifest) -> dict[str, PieceColumns]:
    """Every file's pieces in file order; together they tile the file exactly, as `manifest.validate` has checked."""
    found = extents(manifest)
    firsts = [(0, file.header_bytes or file.bytes, int(file.digest, 16), 0, _NONE, _NONE) for file in manifest.files]
    rows = np.concatenate([np.array(firsts, _ROW), found.rows])
    files = np.concatenate([np.arange(len(firsts)), found.files])
    return dict(zip((file.name for file in manifest.files), _by_file(manifest, found, files, rows), strict=True))


def of_extents(manifest: Manifest, found: ExtentColumns, numbers: NDArray[np.int64]) -> list[PieceColumns]:
    """The pieces of some extents, by file and place."""
    return [some for some in _by_file(manifest, found, found.files[numbers], found.rows[numbers]) if len(some)]


def _by_file(
    manifest: Manifest, columns: ExtentColumns, files: NDArray[np.int64], rows: NDArray[np.void]
) -> Iterator[PieceColumns]:
    order = np.lexsort((rows["start"], files))
    rows, edges = rows[order], np.searchsorted(files[order], np.arange(len(manifest.files) + 1))
    for file, first, end in zip(manifest.files, edges[:-1].tolist(), edges[1:].tolist(), strict=True):
        yield PieceColumns(file.name, columns.names, rows[first:end], columns)


def grouped(listed: Iterable[Piece]) -> list[PieceColumns]:
    """These pieces by file and place."""
    by_file: dict[str, list[Piece]] = {}
    for piece in sorted(listed, key=lambda piece: (piece.file, piece.start)):
        by_file.setdefault(piece.file, []).append(piece)
    return [_columns(file, some) for file, some in by_file.items()]


def _columns(file: str, listed: Sequence[Piece]) -> PieceColumns:
    names = [(str(piece.group), str(piece.tensor)) for piece in listed]
    numbers = _numbers(piece.digest for piece in listed)
    places = [_NONE if piece.tensor is None else number for number, piece in enumerate(listed)]
    rows = [(p.start, p.length, 0, p.offset, place, _NONE) for p, place in zip(listed, places, strict=True)]
    table = np.array(rows, _ROW)
    table["digest"] = numbers
    return PieceColumns(file, names, table)


def _numbers(digests: Iterable[str]) -> NDArray[np.uint64]:
    return np.frombuffer(bytes.fromhex("".join(digests)), ">u8").astype(np.uint64)


def check(piece: Piece, data: Any) -> None:
    """Raise `CorruptExtent`, with file, tensor and byte range, unless `data` has the piece's length and digest (I7)."""
    check_found(piece, memoryview(data).nbytes, digest(data))


def numbers_in(listed: PieceColumns, data: Any) -> NDArray[np.uint64]:
    """The digests, as numbers, of what is at the places of pieces that follow each other; `data` may end too soon."""
    octets, start = memoryview(data), listed.start
    begins, ends = (listed.rows["start"] - start).tolist(), (listed.stops - start).tolist()
    found = [number(octets[begin:end]) for begin, end in zip(begins, ends, strict=True)]
    numbers = np.array(found, np.uint64)
    return np.where(listed.stops - start <= octets.nbytes, numbers, ~listed.rows["digest"])


def check_found(piece: Piece, held: int, text: str, expected: str | None = None) -> None:
    """`check` for bytes that came in parts: their number, and their digest.

    If only a part of the piece was read, `expected` is that part's digest, taken when the whole piece was verified.
    """
    if held == piece.length and text == (expected or piece.digest):
        return
    what = f"tensor {piece.tensor!r} of group {piece.group!r}, " if piece.tensor is not None else ""
    how = "do not match their digest" if held == piece.length else f"are cut off after {held}"
    raise CorruptExtent(
        f"{piece.file}: {what}bytes [{piece.start}, {piece.stop}) {how}",
        hint=_HINT,
        file=piece.file,
        tensor=piece.tensor,
        offset=piece.start,
        length=piece.length,
    )


def check_size(manifest: Manifest, name: str, size: int | None) -> None:
    """Raise `CorruptManifest`, with the file and the affected tensors, unless the file exists and has the stated length."""
    entry = manifest.file(name)
    if entry is None or size == entry.bytes:
        return
    have = size or 0
    hurt = [piece for piece in overlapping(pieces(manifest)[name], have, entry.bytes) if piece.tensor is not None]
    tensors = list(dict.fromkeys(str(piece.tensor) for piece in hurt))
    named = ", ".join(map(repr, tensors[:_NAMED_TENSORS_MAX]))
    more = f" and {len(tensors) - _NAMED_TENSORS_MAX} more" if len(tensors) > _NAMED_TENSORS_MAX else ""
    what = "is missing" if size is None else f"has {have} bytes, not {entry.bytes}"
    raise CorruptManifest(
        f"{name} {what}" + (f"; tensors lost: {named}{more}" if tensors else ""),
        hint=_HINT,
        file=name,
        tensor=tensors[0] if tensors else None,
        offset=min(have, entry.bytes),
        length=abs(entry.bytes - have),
    )


def tensors_by_file(manifest: Manifest) -> dict[str, dict[str, TensorEntry]]:
    by_file: dict[str, dict[str, TensorEntry]] = {file.name: {} for file in manifest.files if file.header_bytes}
    for tensors in manifest.tensors.values():
        for name, entry in tensors.items():
            by_file[entry.file][name] = entry
    return by_file


def check_header(file: FileEntry, tensors: Mapping[str, TensorEntry], head: bytes) -> None:
    """Raise `CorruptManifest` unless a shard file's header has these tensors at the bytes that the manifest states."""
    header = safetensors.decode(head, file.bytes, file.name)
    stated = {t.name: (t.dtype, t.shape, header.header_bytes + t.start) for t in header.tensors}
    listed = {name: (entry.dtype, entry.shape, entry.start) for name, entry in tensors.items()}
    if stated != listed:
        wrong = min(name for name in stated.keys() | listed.keys() if stated.get(name) != listed.get(name))
        raise CorruptManifest(
            f"{file.name}: its header and the manifest disagree about tensor {wrong!r}",
            hint=_HINT,
            file=file.name,
            tensor=wrong,
        )


def is_as_written(columns: ExtentColumns, number: int, file: FileEntry, head: bytes) -> bool:
    """Whether a header is, byte for byte, the one that Holdfast writes for the tensors of this file, which tile it: then
    `check_header` need not decode it. `number` is that of the file.
    """
    inside = np.flatnonzero(columns.tensor_files == number)
    inside = inside[np.argsort(columns.starts[inside], kind="stable")]
    ends = [*(columns.starts[inside] - len(head)).tolist(), file.bytes - len(head)]
    follows = len(inside) > 0 and bool((np.diff(inside) == 1).all())
    at = slice(int(inside[0]), int(inside[-1]) + 1) if follows else None
    places = inside.tolist()
    entries = columns.entries[at] if at is not None else [columns.entries[place] for place in places]
    names = columns.names.names[at] if at is not None else [columns.names.names[place] for place in places]
    kinds, shapes = list(map(attrgetter("dtype"), entries)), list(map(attrgetter("shape"), entries))
    body = safetensors.body_of(TensorColumns(names, kinds, shapes, ends[:-1], ends[1:]), FORMAT_METADATA)
    length = len(head) - safetensors.LENGTH_BYTES
    return head == length.to_bytes(safetensors.LENGTH_BYTES, "little") + body.ljust(length)


def check_index(manifest: Manifest, group: str, encoded: bytes) -> None:
    """Raise `CorruptManifest` unless a group's index maps every tensor to the file that the manifest names."""
    name = naming.index_file_name(group)
    try:
        weight_map = _decode_index(encoded).weight_map
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        raise CorruptManifest(f"cannot read {name}: {error}", hint=_HINT, file=name) from error
    if weight_map != {tensor: entry.file for tensor, entry in manifest.tensors.get(group, {}).items()}:
        raise CorruptManifest(f"{name} and the manifest disagree on which file holds which tensor", hint=_HINT, file=name)


class _Index(msgspec.Struct):
    weight_map: dict[str, str]


_decode_index = decoding.decoder(_Index)


def overlapping(listed: PieceColumns, start: int, stop: int) -> PieceColumns:
    """The pieces of a file that contain any of its bytes [start, stop)."""
    rows = listed.rows
    return listed.where(np.maximum(rows["start"], start) < np.minimum(listed.stops, stop))


def batches(listed: Iterable[PieceColumns], bytes_max: int = EXTENT_BYTES_MAX) -> Iterator[PieceColumns]:
    """The pieces by file and position, adjacent ones together, so that small ones cost one read."""
    for some in sorted(listed, key=lambda some: some.file):
        starts, stops = some.rows["start"], some.stops
        begins = (np.flatnonzero(starts[1:] != stops[:-1]) + 1).tolist()
        for first, end in pairwise([0, *begins, len(some)]):
            while first < end:
                fit = int(np.searchsorted(stops[first:end], starts[first] + bytes_max, "right"))
                yield some[first : first + max(fit, 1)]
                first += max(fit, 1)
