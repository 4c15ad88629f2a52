"""A verified copy of a checkpoint in another directory. If the checkpoint is damaged, no copy is left."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

from holdfast.read.reader import CheckpointReader
from holdfast_formats import naming
from holdfast_formats.disk.manifest import FileEntry
from holdfast_formats.disk.verification import Piece
from holdfast_formats.errors import InvalidRequest, NoSpace, NoSuchResource, StateMismatch, StorageFailed
from holdfast_formats.whereabouts import check_output_place

_NO_SPACE = frozenset({28, 122})  # ENOSPC, EDQUOT


class Copied(NamedTuple):
    files: int
    bytes: int
    committed: bool


def copy_checkpoint(reader: CheckpointReader, out: Path, groups: Sequence[str], on_bytes: Callable[[int], None]) -> Copied:
    """Copy every file, or those of some groups, into `out`, which must be empty or absent; every byte is checked first.

    The manifest and then COMMIT are written last, so `out` is a checkpoint only when it is complete; with `groups` neither
    is written. On any error the written files are removed again. Nothing is synced: a power cut may lose the copy.
    """
    files = _chosen(reader, groups)
    made = _prepare(out)
    written: list[Path] = []
    try:
        with ExitStack() as opened:
            descriptors = {file.name: _create(out / file.name, file.bytes, written, opened) for file in files}

            def take(piece: Piece, data: memoryview) -> None:
                write(descriptors[piece.file], piece.start, data)

            reader.stream([piece for file in files for piece in reader.pieces(file.name)], take, on_bytes=on_bytes)
            if not groups:
                for name, data in ((naming.MANIFEST, reader.manifest_bytes), (naming.COMMIT, reader.commit_bytes)):
                    write(_create(out / name, len(data), written, opened), 0, memoryview(data))
    except BaseException as error:
        for path in written:
            path.unlink(missing_ok=True)
        if made:
            out.rmdir()
        if isinstance(error, OSError):
            raise translated(out, error) from error
        raise
    return Copied(len(written), sum(file.bytes for file in files), committed=not groups)


def _chosen(reader: CheckpointReader, groups: Sequence[str]) -> list[FileEntry]:
    listed = reader.manifest.files
    if not groups:
        return list(listed)
    unknown = sorted(set(groups) - set(reader.manifest.groups))
    if unknown:
        raise NoSuchResource(
            f"the checkpoint has no group {unknown[0]!r}", hint=f"groups: {', '.join(reader.manifest.groups)}"
        )
    small = reader.manifest.compacted
    if small is not None and (coded := sorted(small.tensors.keys() & set(groups))):
        raise StateMismatch(
            f"group {coded[0]!r} of this checkpoint is stored in fewer bytes, which other programs cannot read",
            hint="copy the checkpoint without --group, or write the values with --layout, or `holdfast export --as`",
        )
    ours = {naming.index_file_name(group) for group in reader.manifest.groups} | {naming.STATE}
    wanted = {tensor.file for group in groups for tensor in reader.manifest.tensors[group].values()}
    wanted |= {naming.index_file_name(group) for group in groups}
    return [file for file in listed if file.name in wanted or not (file.header_bytes or file.name in ours)]


def _prepare(out: Path) -> bool:
    check_output_place(out)
    try:
        if out.is_dir():
            if any(out.iterdir()):
                raise InvalidRequest(
                    f"{out} is not empty", hint="pass --out a directory that is empty or does not exist yet"
                )
            return False
        out.mkdir(parents=True)
    except OSError as error:
        raise translated(out, error) from error
    return True


def _create(path: Path, size: int, written: list[Path], opened: ExitStack) -> int:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644)
    opened.callback(os.close, descriptor)
    written.append(path)
    os.truncate(descriptor, size)
    return descriptor


def write(descriptor: int, offset: int, data: memoryview) -> None:
    done = 0
    while done < len(data):
        done += os.pwrite(descriptor, data[done:], offset + done)


def translated(out: Path, error: OSError) -> StorageFailed | NoSpace:
    """The named error for a file or directory that could not be written."""
    if error.errno in _NO_SPACE:
        return NoSpace(f"no space left on device while writing {out}", hint="free some space, or choose another directory")
    return StorageFailed(f"cannot write {out}: {error.strerror}", hint="check its permissions", errno=error.errno)
