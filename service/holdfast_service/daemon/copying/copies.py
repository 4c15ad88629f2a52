"""Copies a checkpoint's files from one tier to another: every byte is verified on the way and at the target."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

import numpy as np

from holdfast_formats.disk import manifest, verification
from holdfast_formats.disk.manifest import Manifest
from holdfast_formats.disk.verification import Piece
from holdfast_formats.files import Files
from holdfast_formats.staging.holdings import Bytes
from holdfast_service.daemon.writing.buffers import ALIGNMENT_MAX, WINDOW_BYTES, BufferPool
from holdfast_service.storage import FileWriter, Tier
from holdfast_service.storage.pacing import Pace


class CopyStopped(Exception):
    """The copy was stopped; its staging directory can be deleted."""


class Going(NamedTuple):
    """Control of a copy: no faster than `pace`, until `ended`; `moved` is called for every byte read."""

    pace: Pace | None = None
    ended: Callable[[], bool] = lambda: False
    moved: Callable[[int], None] = lambda count: None


class Proven(NamedTuple):
    """Verified bytes of a file."""

    file: str
    start: int
    data: memoryview


def carry(source: Files, here: str, target: Tier, there: str, made: Manifest, going: Going) -> None:
    """Copy every file in the manifest from `here` into a staging directory, durably, and read it back `there` (I7).

    Raises `Damaged`, with file, tensor and range, for bytes that fail their digest on either side; `CopyStopped`;
    and errors of the two tiers. The caller removes what was written by then.
    """
    for entry in made.files:
        verification.check_size(made, entry.name, source.size(_path(here, entry.name)))
    opened: dict[str, FileWriter] = {}
    left = {entry.name: entry.bytes for entry in made.files}
    try:
        for part in proven(source, here, made, going):
            if part.file not in opened:
                opened[part.file] = target.create(f"{there}/{part.file}", left[part.file])
            opened[part.file].write(part.start, [part.data])
            left[part.file] -= len(part.data)
            if not left[part.file]:
                opened[part.file].finish()
    finally:
        for writer in opened.values():
            writer.discard()
    read_back(target, there, made, going)


def read_back(tier: Tier, directory: str, made: Manifest, going: Going) -> None:
    """Verify every byte of a checkpoint's stored files; raises like `carry`."""
    for entry in made.files:
        verification.check_size(made, entry.name, tier.size(_path(directory, entry.name)))
    for _ in proven(tier, directory, made, going):
        pass


def proven(tier: Files, directory: str, made: Manifest, going: Going) -> Iterator[Proven]:
    """All bytes of all files, a window at a time and in order; each window is valid until the next iteration."""
    headers = verification.tensors_by_file(made)
    listed = (piece for pieces in verification.pieces(made).values() for piece in pieces)
    for batch in stored(tier, directory, listed, going):
        for piece in batch.pieces:
            data = batch.of(piece)
            verification.check(piece, data)
            if piece.start == 0 and piece.file in headers:
                _check_header(made, piece, headers, data.tobytes())
        yield Proven(batch.pieces[0].file, batch.pieces[0].start, batch.data.data)


class StoredBatch(NamedTuple):
    """Consecutive pieces of a file, and their bytes, as far as the file has them."""

    pieces: tuple[Piece, ...]
    data: Bytes

    def of(self, piece: Piece) -> Bytes:
        """The bytes of one of the pieces; fewer if the file is truncated."""
        start = self.pieces[0].start
        return self.data[piece.start - start : piece.stop - start]


def stored(tier: Files, directory: str, pieces: Iterable[Piece], going: Going) -> Iterator[StoredBatch]:
    """The bytes of pieces, by file and position, uncached and unverified: as many as fit a window are read at once.

    Each batch is valid until the next iteration. `CopyStopped`, and errors of the tier.
    """
    windows = BufferPool(1)  # its own: a copy that hangs in a disk must not keep another one's
    for batch in verification.batches(pieces):
        if going.ended():
            raise CopyStopped
        start, stop = batch[0].start, batch[-1].stop
        if going.pace is not None:
            going.pace.take(stop - start)
        begin = start - start % ALIGNMENT_MAX
        room = stop - begin + -stop % ALIGNMENT_MAX
        with windows.taken() as window:
            buffer = window if room <= WINDOW_BYTES else np.empty(room, np.uint8)  # a large header or asset
            read = tier.read_stored(_path(directory, batch[0].file), begin, buffer[:room]) if room else 0
            yield StoredBatch(batch, buffer[start - begin : max(min(stop - begin, read), start - begin)])
        going.moved(stop - start)


def _check_header(made: Manifest, piece: Piece, headers: dict[str, dict[str, manifest.TensorEntry]], head: bytes) -> None:
    entry = made.file(piece.file)
    assert entry is not None
    verification.check_header(entry, headers[piece.file], head)


def _path(directory: str, name: str) -> str:
    return f"{directory}/{name}" if directory else name
