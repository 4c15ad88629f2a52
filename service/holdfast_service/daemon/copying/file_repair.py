"""Rebuilds a damaged file from verified pieces, and replaces the damaged one (I4).

Files under checkpoints/ are never modified: the new file is written in staging, made durable, verified there, and renamed
over the damaged one. Readers see the damaged file or the sound one, nothing in between.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from holdfast_formats import naming
from holdfast_formats.disk import verification
from holdfast_formats.disk.manifests import Manifest
from holdfast_formats.disk.verification import Piece
from holdfast_formats.errors import CorruptExtent, CorruptManifest
from holdfast_service.daemon.copying.repair_sources import Directory, RepairSource
from holdfast_service.storage import Tier


class FileRepair(NamedTuple):
    """A repaired file: the damaged pieces, and their sources."""

    file: str
    pieces: tuple[Piece, ...]
    labels: tuple[str, ...]


def mend_file(tier: Tier, manifest: Manifest, file: str, sources: Sequence[RepairSource]) -> FileRepair:
    """Repair one file of a checkpoint; the manifest must be trusted.

    Raises `CorruptExtent` for the first damaged piece that no source has, and then changes nothing; and errors of
    the tier, after which the old file or the new one exists.
    """
    directory, staging = _places(manifest)
    entry = manifest.file(file)
    if entry is None:
        raise CorruptManifest(f"{directory} has no file {file!r}", file=file)
    itself = Directory("itself", tier, directory)
    listed = verification.pieces(manifest)[file]
    damaged: list[Piece] = []
    labels: list[str] = []
    tier.remove_tree(staging)
    writer = tier.create(f"{staging}/{file}", entry.bytes)
    try:
        for piece in listed:
            data = itself.piece(piece)
            if data is None:
                label, found = _have(piece, sources)
                damaged.append(piece)
                labels.append(label)
                writer.write(piece.start, [found])
            else:
                writer.write(piece.start, [data])
        writer.finish()
        _prove_again(tier, f"{staging}/{file}", listed)
        tier.supplant(f"{staging}/{file}", f"{directory}/{file}")
    finally:
        writer.discard()
        tier.remove_tree(staging)
    return FileRepair(file, tuple(damaged), tuple(dict.fromkeys(labels)))


def mend_small(tier: Tier, manifest: Manifest, file: str, data: bytes, label: str) -> FileRepair:
    """Replace the manifest or COMMIT by these bytes, which the caller has verified."""
    directory, staging = _places(manifest)
    tier.remove_tree(staging)
    try:
        tier.put(f"{staging}/{file}", data)
        if tier.read(f"{staging}/{file}") != data:
            raise CorruptManifest(
                f"{staging}/{file} reads back differently from what was just written", hint="check the disk", file=file
            )
        tier.supplant(f"{staging}/{file}", f"{directory}/{file}")
    finally:
        tier.remove_tree(staging)
    return FileRepair(file, (), (label,))


def _places(manifest: Manifest) -> tuple[str, str]:
    return naming.checkpoint_path(manifest.run, manifest.step), naming.staging_path(
        manifest.run, manifest.step, naming.NO_ATTEMPT
    )


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


def _prove_again(tier: Tier, path: str, listed: Sequence[Piece]) -> None:
    """Verify the stored new file before it replaces anything."""
    for piece in listed:
        verification.check(piece, tier.read(path, piece.start, piece.length))
