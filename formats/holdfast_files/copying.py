"""Copies files of a checkpoint to new files, every byte verified on the way. Renames nothing: the caller publishes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from threading import Lock
from typing import Any, Protocol

from holdfast_files.verifying import ReadControl, StoredCheckpoint, VerifiedBatch, read_verified
from holdfast_formats.disk import verification
from holdfast_formats.disk.manifests import FileEntry, Manifest


class NewFile(Protocol):
    """A file while it is written, at disjoint ranges by several threads."""

    def write(self, offset: int, buffers: Sequence[Any], /) -> None:
        """Write every byte of the buffers, one after the other from `offset` on."""

    def finish(self) -> None:
        """All bytes are written."""

    def discard(self) -> None:
        """Close; does nothing on a closed file."""


def copy_files(
    stored: StoredCheckpoint,
    manifest: Manifest,
    files: Sequence[FileEntry],
    create: Callable[[str, int], NewFile],
    control: ReadControl,
) -> None:
    """Copy these files of the manifest, each to the one that `create` makes for a name and a size.

    Raises `Damaged`, with file, tensor and range, for bytes that fail their digest, and what reading and writing raise. The
    caller removes what was written by then, and reads back what has to be safe.
    """
    left = {file.name: file.bytes for file in files}
    opened: dict[str, NewFile] = {}
    lock = Lock()

    def write(batch: VerifiedBatch) -> None:
        name = batch.pieces[0].file
        with lock:
            if name not in opened:
                opened[name] = create(name, left[name])
        opened[name].write(batch.pieces[0].start, [batch.data.data])
        with lock:
            left[name] -= batch.data.nbytes
            is_whole = not left[name]
        if is_whole:
            opened[name].finish()

    pieces = verification.pieces(manifest)
    try:
        read_verified(stored, [piece for name in left for piece in pieces[name]], write, control=control)
    finally:
        for file in opened.values():
            file.discard()
