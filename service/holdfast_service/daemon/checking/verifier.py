"""Reads a checkpoint back and checks every byte against its manifest (I7), with bounded memory.

It reads what is stored, not a cache, if the storage tier can distinguish the two.
"""

from __future__ import annotations

import errno
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import numpy as np

from holdfast_files.opened import open_checkpoint, read_commit
from holdfast_formats.disk import verification
from holdfast_formats.disk.manifest import Manifest, TensorEntry
from holdfast_formats.disk.verification import Piece
from holdfast_formats.errors import CorruptExtent, CorruptManifest, Damaged, NoSuchResource, NotCommitted, StorageFailed
from holdfast_formats.staging.holdings import Bytes
from holdfast_service.daemon.writing.buffers import ALIGNMENT_MAX, WINDOW_BYTES, BufferPool
from holdfast_service.daemon.writing.priority import give_way
from holdfast_service.storage import Tier

WORKERS = 2
DAMAGES_MAX = 100  # that are named of one checkpoint: from there on it is no news

_windows = BufferPool(WORKERS)

Heed = Callable[[int], None]  # called with the number of bytes about to be read; it may wait, and raise to stop
Passed = Callable[
    [Manifest, Sequence[Piece], Sequence[Bytes]], None
]  # is lent what was proven of a file, by several threads


class Examined(NamedTuple):
    """The result of reading back: the manifest, None if it is damaged itself, and the damages in order."""

    manifest: Manifest | None
    damages: tuple[Damaged, ...]


def verify(tier: Tier, directory: str, passed: Passed | None = None) -> Manifest:
    """Check COMMIT, manifest, every header, every extent and every small file under `directory`; return the manifest.

    `passed` gets the verified bytes. Raises `NotCommitted`, `CorruptManifest` or `CorruptExtent` with file, tensor and byte
    range of the first damage.
    """
    made, damages = examine(tier, directory, passed=passed)
    if damages or made is None:
        raise damages[0]
    return made


def examine(
    tier: Tier,
    directory: str,
    heed: Heed | None = None,
    only: Collection[str] | None = None,
    passed: Passed | None = None,
) -> Examined:
    """Like `verify`, but collects all damages, up to a limit. `only` checks some files, besides COMMIT and manifest.

    Raises errors that prevent reading, such as `StorageFailed`; a place that the disk cannot read counts as damaged.
    """
    try:
        made = open_checkpoint(tier, directory).manifest
    except Damaged as error:
        return Examined(None, (error,))
    listed = verification.pieces(made)
    wanted = {file.name: listed[file.name] for file in made.files if only is None or file.name in only}
    return Examined(made, tuple(prove(StoredCheckpoint(tier, directory, made), wanted, heed, passed)))


def prove(
    source: StoredCheckpoint,
    pieces: Mapping[str, Sequence[Piece]],
    heed: Heed | None = None,
    passed: Passed | None = None,
) -> list[Damaged]:
    """Check these pieces, by file, and the length of those files; returns damages, up to a limit.

    Raises what `examine` raises, and what `heed` raises to stop.
    """
    tier, directory, made = source
    damages: list[Damaged] = []
    whole = []
    for name in pieces:
        try:
            verification.check_size(made, name, tier.size(f"{directory}/{name}"))
            whole.append(name)
        except Damaged as error:
            damages.append(error)
    headers = verification.tensors_by_file(made)
    batches = list(verification.batches(piece for name in whole for piece in pieces[name]))
    with ThreadPoolExecutor(WORKERS, "holdfast-verify", initializer=give_way) as pool:
        jobs = [pool.submit(_prove, source, batch, headers, heed, passed) for batch in batches]
        try:
            for job in jobs:
                damages += job.result()
                if len(damages) >= DAMAGES_MAX:
                    break
        finally:
            pool.shutdown(wait=True, cancel_futures=True)
    return damages[:DAMAGES_MAX]


class StoredCheckpoint(NamedTuple):
    """The stored checkpoint that is being verified."""

    tier: Tier
    directory: str
    made: Manifest


def _prove(
    source: StoredCheckpoint,
    batch: Sequence[Piece],
    headers: Mapping[str, Mapping[str, TensorEntry]],
    heed: Heed | None,
    passed: Passed | None,
) -> list[Damaged]:
    tier, directory, made = source
    begin = batch[0].start - batch[0].start % ALIGNMENT_MAX
    room = batch[-1].stop - begin + -batch[-1].stop % ALIGNMENT_MAX
    damages: list[Damaged] = []
    if heed is not None:
        heed(batch[-1].stop - batch[0].start)
    with _windows.taken() as window:
        buffer = window if room <= WINDOW_BYTES else np.empty(room, np.uint8)  # a large header or asset
        try:
            read = tier.read_stored(f"{directory}/{batch[0].file}", begin, buffer[:room])
        except NoSuchResource:
            return [CorruptManifest(f"{batch[0].file} is missing", file=batch[0].file)]
        except StorageFailed as error:
            if error.members.get("errno") != errno.EIO:
                raise
            return _lost(tier, directory, batch, error)
        proven: list[tuple[Piece, Bytes]] = []
        for piece in batch:
            data = buffer[piece.start - begin : max(min(piece.stop - begin, read), piece.start - begin)]
            try:
                _check(made, piece, data, headers)
                proven.append((piece, data))
            except Damaged as error:
                damages.append(error)
        if passed is not None and proven:
            passed(made, *zip(*proven, strict=True))
    return damages


def _check(made: Manifest, piece: Piece, data: Bytes, headers: Mapping[str, Mapping[str, TensorEntry]]) -> None:
    verification.check(piece, data)
    if piece.start == 0 and piece.file in headers:
        file = made.file(piece.file)
        assert file is not None
        verification.check_header(file, headers[piece.file], data.tobytes())


def _lost(tier: Tier, directory: str, batch: Sequence[Piece], why: StorageFailed) -> list[Damaged]:
    """The pieces of a batch that the disk cannot read. If it cannot read anything, that is no damage: `why` is raised."""
    try:
        read_commit(tier, directory)
    except NotCommitted:
        raise why from None
    found: list[Damaged] = []
    for piece in batch:
        try:
            verification.check(piece, tier.read(f"{directory}/{piece.file}", piece.start, piece.length))
        except Damaged as error:
            found.append(error)
        except StorageFailed as error:
            what = f"tensor {piece.tensor!r} of group {piece.group!r}, " if piece.tensor is not None else ""
            found.append(
                CorruptExtent(
                    f"{piece.file}: {what}bytes [{piece.start}, {piece.stop}) cannot be read: {error.detail}",
                    hint=why.hint,
                    file=piece.file,
                    tensor=piece.tensor,
                    offset=piece.start,
                    length=piece.length,
                )
            )
    return found
