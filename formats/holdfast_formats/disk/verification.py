"""Verifies a checkpoint's files: every byte of every file is in exactly one piece, and every piece has a digest.

A piece is a header, an extent of a tensor, or a whole small file. Code that hands bytes over reads whole pieces and
checks them first (I7). This module works on values only, so client and service share the rule.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec

from holdfast_formats import decoding, naming
from holdfast_formats.digest import digest
from holdfast_formats.disk import safetensors
from holdfast_formats.disk.manifests import EXTENT_BYTES_MAX, Extent, FileEntry, Manifest, TensorEntry
from holdfast_formats.errors import CorruptExtent, CorruptManifest

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


def pieces(manifest: Manifest) -> dict[str, tuple[Piece, ...]]:
    """Every file's pieces in file order; together they tile the file exactly, as `manifest.validate` has checked."""
    by_file = {file.name: [Piece(file.name, 0, file.header_bytes or file.bytes, file.digest)] for file in manifest.files}
    for group, tensors in manifest.tensors.items():
        for name, entry in tensors.items():
            by_file[entry.file] += [tensor_piece(group, name, entry, extent) for extent in entry.extents]
    return {name: tuple(sorted(listed, key=lambda piece: piece.start)) for name, listed in by_file.items()}


def check(piece: Piece, data: Any) -> None:
    """Raise `CorruptExtent`, with file, tensor and byte range, unless `data` has the piece's length and digest (I7)."""
    check_found(piece, memoryview(data).nbytes, digest(data))


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
    hurt = [piece for piece in pieces(manifest)[name] if piece.tensor is not None and piece.stop > have]
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


def overlapping(listed: Sequence[Piece], start: int, stop: int) -> tuple[Piece, ...]:
    """The pieces of a file that contain any of its bytes [start, stop)."""
    return tuple(piece for piece in listed if max(piece.start, start) < min(piece.stop, stop))


def batches(listed: Iterable[Piece], bytes_max: int = EXTENT_BYTES_MAX) -> Iterator[tuple[Piece, ...]]:
    """The pieces by file and position, adjacent ones together, so that small ones cost one read."""
    batch: list[Piece] = []
    for piece in sorted(listed, key=lambda piece: (piece.file, piece.start)):
        follows = batch and piece.file == batch[0].file and piece.start == batch[-1].stop
        if batch and not (follows and piece.stop - batch[0].start <= bytes_max):
            yield tuple(batch)
            batch = []
        batch.append(piece)
    if batch:
        yield tuple(batch)
