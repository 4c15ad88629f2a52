"""A checkpoint as a tar archive on a stream, for a pipe to `tar` or `ssh`. Every byte is checked before it is written.

COMMIT is the archive's last file, so what an interrupted transfer has unpacked is no checkpoint.
"""

from __future__ import annotations

import tarfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import BinaryIO

from holdfast.export.copy import Copied, chosen
from holdfast.read.reader import CheckpointReader
from holdfast.read.verified_load import windows
from holdfast_files.verifying import VerifiedBatch
from holdfast_formats import naming, timestamps
from holdfast_formats.disk import verification
from holdfast_formats.disk.verification import PieceColumns


def stream(reader: CheckpointReader, out: BinaryIO, groups: Sequence[str], on_bytes: Callable[[int], None]) -> Copied:
    """Write every file, or those of some groups, as an archive. With `groups` it has neither manifest nor COMMIT.

    Raises what `CheckpointReader.stream` raises, and `OSError` where `out` takes no more; the archive then has no end.
    """
    files = {file.name: file for file in chosen(reader, groups)}
    created = timestamps.read(reader.manifest.created).timestamp()
    pieces = [reader.pieces(name) for name in files]
    begun = ""
    for batch, data in _in_order(reader, pieces):
        if batch.file != begun:
            begun = batch.file
            out.write(_header(begun, files[begun].bytes, created))
        out.write(data)
        if batch.stop == files[begun].bytes:
            out.write(_padding(files[begun].bytes))
        on_bytes(len(data))
    small = () if groups else ((naming.MANIFEST, reader.manifest_bytes), (naming.COMMIT, reader.commit_bytes))
    for name, content in small:
        out.write(_header(name, len(content), created) + content + _padding(len(content)))
    out.write(bytes(2 * tarfile.BLOCKSIZE))
    out.flush()
    return Copied(len(files) + len(small), sum(file.bytes for file in files.values()), committed=not groups)


def _in_order(reader: CheckpointReader, pieces: Iterable[PieceColumns]) -> Iterator[tuple[PieceColumns, bytes]]:
    """Batches by file and position, with their bytes. As many are read at a time as their buffers and their copies fit."""
    batches = list(verification.batches(pieces))
    count = max(windows(reader.source) // 2, 1)
    for first in range(0, len(batches), count):
        some = batches[first : first + count]
        read = _read(reader, some)
        yield from ((batch, read.pop((batch.file, batch.start))) for batch in some)


def _read(reader: CheckpointReader, batches: Sequence[PieceColumns]) -> dict[tuple[str, int], bytes]:
    """The bytes of batches, by file and first byte."""
    read: dict[tuple[str, int], bytes] = {}

    def take(batch: VerifiedBatch) -> None:
        read[batch.pieces.file, batch.pieces.start] = batch.data.tobytes()

    reader.stream(batches, take)
    return read


def _header(name: str, size: int, created: float) -> bytes:
    entry = tarfile.TarInfo(name)
    entry.size, entry.mtime, entry.mode = size, int(created), 0o644
    return entry.tobuf(tarfile.PAX_FORMAT)


def _padding(size: int) -> bytes:
    return bytes(-size % tarfile.BLOCKSIZE)
