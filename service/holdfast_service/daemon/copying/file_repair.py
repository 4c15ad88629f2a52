"""Rebuilds a damaged file from verified pieces, and replaces the damaged one (I4).

Committed files are never modified: the new file is staged, made durable, verified there, and put in the damaged one's place
by the store. Readers see the damaged file or the sound one, nothing in between.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from holdfast_files.opened import CommittedManifest
from holdfast_formats import naming
from holdfast_formats.disk import verification
from holdfast_formats.disk.verification import Piece
from holdfast_formats.errors import CorruptExtent, CorruptManifest
from holdfast_formats.files import Files
from holdfast_formats.naming import Place
from holdfast_service.daemon.copying.hard_links import neighbours
from holdfast_service.daemon.copying.repair_sources import Directory, RepairSource
from holdfast_service.storage import Store


class FileRepair(NamedTuple):
    """A repaired file: the damaged pieces, and their sources."""

    file: str
    pieces: tuple[Piece, ...]
    labels: tuple[str, ...]


def mend_file(store: Store, pair: CommittedManifest, file: str, sources: Sequence[RepairSource]) -> FileRepair:
    """Repair one file of the checkpoint that was committed with `pair`, from `sources`, or its neighbours.

    Raises `CorruptExtent` for the first damaged piece that no source has, and then changes nothing; and errors of
    the store, after which the old file or the new one exists.
    """
    manifest, place = pair.manifest, _place(pair)
    directory = naming.checkpoint_path(place.run, place.step)
    entry = manifest.file(file)
    if entry is None:
        raise CorruptManifest(f"{directory} has no file {file!r}", file=file)
    itself = Directory("itself", store.files, directory)
    listed = verification.pieces(manifest)[file]
    damaged: list[Piece] = []
    labels: list[str] = []
    near: list[Directory] | None = None
    staged = store.begin(place)
    writer = staged.create(file, entry.bytes)
    try:
        for piece in listed:
            data = itself.piece(piece)
            if data is None:
                near = neighbours(store, manifest, file) if near is None else near
                label, found = _have(piece, [*sources, *near])
                damaged.append(piece)
                labels.append(label)
                writer.write(piece.start, [found])
            else:
                writer.write(piece.start, [data])
        writer.finish()
        _prove_again(store.files, f"{staged.path}/{file}", listed)
        store.mend(place, pair.encoded, pair.commit)
    finally:
        writer.discard()
        store.discard(place)
    return FileRepair(file, tuple(damaged), tuple(dict.fromkeys(labels)))


def mend_pair(store: Store, pair: CommittedManifest) -> None:
    """Make the checkpoint's manifest and COMMIT these, which the caller has verified."""
    place = _place(pair)
    store.begin(place)
    try:
        store.mend(place, pair.encoded, pair.commit)
    finally:
        store.discard(place)


def _place(pair: CommittedManifest) -> Place:
    return Place(pair.manifest.run, pair.manifest.step, naming.NO_ATTEMPT)


def _have(piece: Piece, sources: Sequence[RepairSource]) -> tuple[str, bytes | bytearray]:
    for source in sources:
        data = source.piece(piece)
        if data is not None:
            return source.label, data
    what = f"tensor {piece.tensor!r}, " if piece.tensor is not None else ""
    raise CorruptExtent(
        f"{piece.file}: {what}bytes [{piece.start}, {piece.stop}) are damaged, and there is no other copy",
        hint="restore another step; a replica would allow repairs",
        file=piece.file,
        tensor=piece.tensor,
        offset=piece.start,
        length=piece.length,
    )


def _prove_again(files: Files, path: str, listed: Sequence[Piece]) -> None:
    """Verify the stored new file before it replaces anything."""
    for piece in listed:
        verification.check(piece, files.read(path, piece.start, piece.length))
