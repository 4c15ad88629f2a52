"""Reads stored files piece by piece and lends what matches its digest (I7): the loop of checks, copies and exports."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from threading import Lock
from typing import Any, NamedTuple, Protocol

import numpy as np

from holdfast_files.buffers import WINDOW_BYTES, BufferPool
from holdfast_files.opened import join
from holdfast_formats.disk import verification
from holdfast_formats.disk.manifests import FileEntry, Manifest, TensorEntry
from holdfast_formats.disk.verification import Piece, PieceColumns
from holdfast_formats.errors import CheckpointError, Damaged, NoSuchResource, StorageFailed
from holdfast_formats.files import Files
from holdfast_formats.staging.holdings import Bytes


class StoredCheckpoint(NamedTuple):
    """Files of a checkpoint in a directory, and the manifest that headers must agree with; None checks digests alone."""

    files: Files
    directory: str
    manifest: Manifest | None


class VerifiedBatch(NamedTuple):
    """Verified pieces that follow each other in a file, and their bytes."""

    pieces: PieceColumns
    data: Bytes

    def of(self, piece: Piece) -> Bytes:
        start = self.pieces.start
        return self.data[piece.start - start : piece.stop - start]


Take = Callable[[VerifiedBatch], None]
OnDamage = Callable[[Piece, CheckpointError], None]


class ReadControl(NamedTuple):
    """How pieces are read: by how many `workers`, each begun with `begin`, into `windows`, aligned to `alignment` bytes.

    `heed` is called before a read with the number of its bytes: it may wait, and raise to stop. `moved` is called after it,
    in the calling thread.
    """

    workers: int = 1
    heed: Callable[[int], None] = lambda size: None
    moved: Callable[[int], None] = lambda size: None
    windows: BufferPool | None = None
    alignment: int = 1
    begin: Callable[[], None] | None = None


_PLAIN = ReadControl()


def read_verified(
    stored: StoredCheckpoint,
    pieces: Iterable[PieceColumns],
    take: Take | None = None,
    on_damage: OnDamage | None = None,
    control: ReadControl = _PLAIN,
) -> None:
    """Read pieces as they are stored, check them, and lend them to `take`, by several threads, until it returns.

    The first damage is raised. With `on_damage`, which is called in the calling thread and in order, all of them go there,
    and so do pieces that cannot be read; the others are read nevertheless.
    """
    reading = _Reading(stored, take, on_damage is not None, control)
    batches = list(verification.batches(pieces))
    for batch, damages in zip(batches, reading.all(batches), strict=True):
        for piece, error in damages:
            if on_damage is None:
                raise error
            on_damage(piece, error)
        control.moved(batch.stop - batch.start)


class _Reading:
    def __init__(self, stored: StoredCheckpoint, take: Take | None, collect: bool, control: ReadControl) -> None:
        self._stored, self._take, self._collect, self._control = stored, take, collect, control
        self._windows = control.windows or BufferPool(control.workers)

    def all(self, batches: Sequence[PieceColumns]) -> Iterator[list[tuple[Piece, CheckpointError]]]:
        """The damages of each batch, in order."""
        workers = min(self._control.workers, len(batches))
        if workers <= 1 and self._control.begin is None:
            yield from map(self._batch, batches)
            return
        with ThreadPoolExecutor(max(workers, 1), "holdfast-read", initializer=self._control.begin) as pool:
            try:
                yield from pool.map(self._batch, batches)
            finally:
                pool.shutdown(wait=True, cancel_futures=True)

    def _batch(self, batch: PieceColumns, again: bool = False) -> list[tuple[Piece, CheckpointError]]:
        start, stop = batch.start, batch.stop
        if not again:
            self._control.heed(stop - start)
        begin = start - start % self._control.alignment
        room = stop - begin + -stop % self._control.alignment
        path = join(self._stored.directory, batch.file)
        with self._windows.taken() as window:
            buffer = window if room <= WINDOW_BYTES else np.empty(room, np.uint8)  # a large header or asset
            try:
                if again:  # where a disk has lost a place, the rest around it can be read in short reads
                    into = buffer[start - begin : stop - begin].data
                    read = start - begin + self._stored.files.read_into(path, start, into)
                else:
                    read = self._stored.files.read_stored(path, begin, buffer[:room].data)
            except (Damaged, NoSuchResource, StorageFailed) as error:
                failure = error
            else:
                return self._lend(batch, buffer[start - begin : max(min(stop - begin, read), start - begin)])
        if not self._collect:
            raise failure
        if again or isinstance(failure, NoSuchResource):
            return [(batch[0], failure)]
        return [damage for at in range(len(batch)) for damage in self._batch(batch[at : at + 1], again=True)]

    def _lend(self, batch: PieceColumns, data: Bytes) -> list[tuple[Piece, CheckpointError]]:
        """Check the pieces, and lend what follows each other of the sound ones."""
        damages: list[tuple[Piece, CheckpointError]] = []
        first = 0
        for at in self._doubtful(batch, data):
            piece = batch[at]
            try:
                self._check(batch, piece, data[piece.start - batch.start : piece.stop - batch.start])
                continue
            except Damaged as error:
                if not self._collect:
                    raise
                damages.append((piece, error))
            self._pass(batch, slice(first, at), data)
            first = at + 1
        self._pass(batch, slice(first, len(batch)), data)
        return damages

    def _doubtful(self, batch: PieceColumns, data: Bytes) -> list[int]:
        """The pieces without their digest, and one that is a header, which must agree with the manifest too."""
        wrong = verification.numbers_in(batch, data) != batch.rows["digest"]
        wrong[: batch.start == 0] = True
        found: list[int] = np.flatnonzero(wrong).tolist()
        return found

    def _check(self, batch: PieceColumns, piece: Piece, data: Bytes) -> None:
        verification.check(piece, data)
        manifest = self._stored.manifest
        for number, file in enumerate(manifest.files if piece.start == 0 and manifest is not None else ()):
            if file.name == piece.file and file.header_bytes:
                head, columns = data.tobytes(), batch.columns
                if columns is None or not verification.is_as_written(columns, number, file, head):
                    verification.check_header(file, self._headers[piece.file], head)

    @cached_property
    def _headers(self) -> Mapping[str, Mapping[str, TensorEntry]]:
        assert self._stored.manifest is not None
        return verification.tensors_by_file(self._stored.manifest)

    def _pass(self, batch: PieceColumns, which: slice, data: Bytes) -> None:
        sound = batch[which]
        if len(sound) and self._take is not None:
            self._take(VerifiedBatch(sound, data[sound.start - batch.start : sound.stop - batch.start]))


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
        name = batch.pieces.file
        with lock:
            if name not in opened:
                opened[name] = create(name, left[name])
        opened[name].write(batch.pieces.start, [batch.data.data])
        with lock:
            left[name] -= batch.data.nbytes
            is_whole = not left[name]
        if is_whole:
            opened[name].finish()

    pieces = verification.pieces(manifest)
    try:
        read_verified(stored, [pieces[name] for name in left], write, control=control)
    finally:
        for file in opened.values():
            file.discard()
