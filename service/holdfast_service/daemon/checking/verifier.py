"""Reads a checkpoint back and checks every byte against its manifest (I7), with bounded memory.

It reads what is stored, not a cache, if the storage tier can distinguish the two.
"""

from __future__ import annotations

import errno
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from typing import NamedTuple

from holdfast_files.buffers import ALIGNMENT_MAX, BufferPool
from holdfast_files.opened import open_checkpoint, read_commit
from holdfast_files.verifying import ReadControl, StoredCheckpoint, VerifiedBatch, read_verified
from holdfast_formats.disk import verification
from holdfast_formats.disk.manifests import Manifest
from holdfast_formats.disk.verification import Piece, PieceColumns
from holdfast_formats.errors import CheckpointError, CorruptExtent, CorruptManifest, Damaged, NoSuchResource, NotCommitted
from holdfast_formats.files import Files
from holdfast_service.daemon.writing.priority import give_way

WORKERS = 2
DAMAGES_MAX = 100  # that are named of one checkpoint: from there on it is no news

_windows = BufferPool(WORKERS)

Heed = Callable[[int], None]  # called with the number of bytes about to be read; it may wait, and raise to stop
Passed = Callable[[Manifest, VerifiedBatch], None]  # is lent what was proven of a file, by several threads


class VerificationResult(NamedTuple):
    """The result of reading back: the manifest, None if it is damaged itself, and the damages in order."""

    manifest: Manifest | None
    damages: tuple[Damaged, ...]


def verify(tier: Files, directory: str, passed: Passed | None = None) -> Manifest:
    """Check COMMIT, manifest, every header, every extent and every small file under `directory`; return the manifest.

    `passed` gets the verified bytes. Raises `NotCommitted`, `CorruptManifest` or `CorruptExtent` with file, tensor and byte
    range of the first damage.
    """
    manifest, damages = examine(tier, directory, passed=passed)
    if damages or manifest is None:
        raise damages[0]
    return manifest


def examine(
    tier: Files,
    directory: str,
    heed: Heed | None = None,
    only: Collection[str] | None = None,
    passed: Passed | None = None,
    opened: Manifest | None = None,
) -> VerificationResult:
    """Like `verify`, but collects all damages, up to a limit. `only` checks some files, besides COMMIT and manifest.
    `opened` is the manifest if it was read just now, and all files were found to have their lengths.

    Raises errors that prevent reading, such as `StorageFailed`; a place that the disk cannot read counts as damaged.
    """
    try:
        manifest = open_checkpoint(tier, directory).manifest if opened is None else opened
    except Damaged as error:
        return VerificationResult(None, (error,))
    listed = verification.pieces(manifest)
    wanted = {file.name: listed[file.name] for file in manifest.files if only is None or file.name in only}
    stored = StoredCheckpoint(tier, directory, manifest)
    return VerificationResult(manifest, tuple(prove(stored, wanted, heed, passed, sized=opened is not None)))


def prove(
    source: StoredCheckpoint,
    pieces: Mapping[str, PieceColumns],
    heed: Heed | None = None,
    passed: Passed | None = None,
    sized: bool = False,
) -> list[Damaged]:
    """Check these pieces, by file, and the length of those files unless they were `sized`; returns damages, up to a limit.

    Raises what `examine` raises, and what `heed` raises to stop.
    """
    tier, directory, manifest = source
    assert manifest is not None
    damages: list[Damaged] = []
    whole: list[PieceColumns] = []
    for name, listed in pieces.items():
        try:
            if not sized:
                verification.check_size(manifest, name, tier.size(f"{directory}/{name}"))
            whole.append(listed)
        except Damaged as error:
            damages.append(error)

    def note(piece: Piece, error: CheckpointError) -> None:
        damages.append(_damage(source, piece, error))
        if len(damages) >= DAMAGES_MAX:
            raise _Enough

    def lend(batch: VerifiedBatch) -> None:
        if passed is not None:
            passed(manifest, batch)

    control = ReadControl(WORKERS, windows=_windows, alignment=ALIGNMENT_MAX, begin=give_way)
    with suppress(_Enough):
        read_verified(source, whole, lend, note, control if heed is None else control._replace(heed=heed))
    return damages[:DAMAGES_MAX]


class _Enough(Exception):
    """There are as many damages as are reported."""


def _damage(source: StoredCheckpoint, piece: Piece, error: CheckpointError) -> Damaged:
    """What is wrong with a piece. If the disk cannot read anything, that is no damage: the error is raised."""
    if isinstance(error, Damaged):
        return error
    if isinstance(error, NoSuchResource):
        return CorruptManifest(f"{piece.file} is missing", file=piece.file)
    if error.members.get("errno") != errno.EIO:
        raise error
    try:
        read_commit(source.files, source.directory)
    except NotCommitted:
        raise error from None
    what = f"tensor {piece.tensor!r} of group {piece.group!r}, " if piece.tensor is not None else ""
    return CorruptExtent(
        f"{piece.file}: {what}bytes [{piece.start}, {piece.stop}) cannot be read: {error.detail}",
        hint=error.hint,
        file=piece.file,
        tensor=piece.tensor,
        offset=piece.start,
        length=piece.length,
    )
