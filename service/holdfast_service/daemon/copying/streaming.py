"""The executor of imports, exports and conversions: mapped tensors of a source, streamed into target files one by one.

Memory is bounded for any model: a few windows, and a band of a computed tensor. While a window is written, the next one is
read. Each finished file is durable and recorded (`finished_files`), so a killed job repeats one file at most.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from contextlib import ExitStack
from typing import NamedTuple

import numpy as np

from holdfast_files.buffers import BufferPool
from holdfast_files.verifying import StoredCheckpoint, read_verified
from holdfast_formats.digest import digest
from holdfast_formats.disk import verification
from holdfast_formats.disk.manifests import EXTENT_BYTES_MAX, Extent
from holdfast_formats.disk.packing import extent_bytes
from holdfast_formats.disk.verification import Piece
from holdfast_formats.errors import CheckpointError, CorruptExtent, InvalidRequest, StateMismatch
from holdfast_formats.files import Files
from holdfast_formats.mapping import box_moves, equality, target_files
from holdfast_formats.mapping.listing import TensorKey
from holdfast_formats.mapping.target_files import LiteralBytes, TargetFile
from holdfast_formats.region import first_overlap
from holdfast_formats.staging.holdings import Bytes
from holdfast_service.daemon.copying.copies import CopyControl
from holdfast_service.daemon.copying.finished_files import (
    FinishedFile,
    FinishedFiles,
    FinishedTensor,
    job_digest,
    members,
    source_files,
)
from holdfast_service.daemon.copying.member_sums import MemberPlace
from holdfast_service.daemon.copying.target_bytes import TargetBytes, TargetCut, Tensors
from holdfast_service.daemon.copying.watched_source import WatchedSource
from holdfast_service.daemon.writing.priority import give_way
from holdfast_service.storage import FileWriter, Records, StagedFiles

WINDOWS = 2  # one is read while the other is written


class StreamTarget(NamedTuple):
    """Where the files of a job are staged, and the records of those that are finished; without `records` all files are
    written, to where nothing is staged yet.
    """

    staged: StagedFiles
    records: Records | None = None

    def notes(self, job: str = "") -> FinishedFiles | None:
        return None if self.records is None else FinishedFiles(self.records, self.staged, job)

    def forget(self) -> None:
        """Remove the records of published files."""
        if (notes := self.notes()) is not None:
            notes.remove()

    def discard(self) -> None:
        """Remove staged files and their records."""
        self.forget()
        self.staged.clear()


def stream(
    source: Files, tensors: Tensors, files: Sequence[TargetFile], target: StreamTarget, going: CopyControl
) -> tuple[FinishedFile, ...]:
    """Stage target files, durably; files finished by an earlier start of the same job stay.

    Raises `StateMismatch` for a source file that changes meanwhile, a tensor that is not filled exactly, or a copy that
    differs from its tensor; `InvalidRequest` for files with gaps; `CopyStopped`; errors of both sides. The caller removes
    staged files and records when it gives up (`discard`) or has published them (`forget`).
    """
    _check(tensors, files)
    watched = source if isinstance(source, WatchedSource) else WatchedSource(source)
    notes = target.notes(digest_of(watched, tensors, files))
    finished = {} if notes is None else notes.found(files)
    work = _Streaming(watched, tensors, files, target.staged, going)
    with _one_thread() as writing, _one_thread() as ahead:
        for number, file in enumerate(files):
            if file.name in finished:
                going.moved(file.bytes)
                continue
            target.staged.drop(file.name)  # what a killed start had not finished
            finished[file.name] = work.write(file, writing, ahead)
            if notes is not None:
                notes.add(number, finished[file.name])
    watched.check_unchanged(_used(tensors, files))
    return tuple(finished[file.name] for file in files)


def noted(source: Files, tensors: Tensors, files: Sequence[TargetFile], target: StreamTarget) -> tuple[FinishedFile, ...]:
    """The records of an earlier start of the same job: all of them, fewer while it was taking them away, or none."""
    watched = source if isinstance(source, WatchedSource) else WatchedSource(source)
    notes = target.notes(digest_of(watched, tensors, files))
    return () if notes is None else notes.noted(files)


def computed(source: Files, tensors: Tensors, files: Sequence[TargetFile], going: CopyControl) -> tuple[FinishedFile, ...]:
    """What `stream` would record for these files, without writing them."""
    extents = _extent_bytes(files)
    finished, buffer = [], np.empty(EXTENT_BYTES_MAX, np.uint8)
    for file in files:
        content = TargetBytes(source, tensors, file, extents)
        for window in content.windows():
            going.check()
            content.fill(window, buffer[: window[-1].stop - window[0].start])
        finished.append(_finished(content))
    return tuple(finished)


def digest_of(source: WatchedSource, tensors: Tensors, files: Sequence[TargetFile]) -> str:
    """The digest of a job: of its plan and of its sources' present state."""
    return job_digest(files, tensors, {name: source.stamp(name) for name in _used(tensors, files)})


def prove(target: Files, directory: str, files: Sequence[FinishedFile], going: CopyControl) -> None:
    """Verify the files' stored bytes, past any cache; `CorruptExtent` by file."""

    def refuse(piece: Piece, error: CheckpointError) -> None:
        if not isinstance(error, CorruptExtent):
            raise error
        raise CorruptExtent(
            f"{piece.file}: bytes [{piece.start}, {piece.stop}) differ from what was written",
            hint="check the disk, then try again",
            file=piece.file,
            offset=piece.start,
            length=piece.length,
        )

    pieces = verification.grouped(piece for file in files for piece in _pieces(file))
    read_verified(StoredCheckpoint(target, directory, None), pieces, on_damage=refuse, control=going.control)


class _Streaming:
    def __init__(
        self, source: WatchedSource, tensors: Tensors, files: Sequence[TargetFile], staged: StagedFiles, going: CopyControl
    ) -> None:
        self._source, self._tensors, self._staged, self._going = source, tensors, staged, going
        self._extent_bytes = _extent_bytes(files)
        self._windows = BufferPool(WINDOWS)
        self._compared: set[TensorKey] = set()
        # A member of a zip file is checked when the last file that is made of it is written. If we are killed before, the
        # next start writes that file, and reads all of the member again.
        self._last_users = {place: file.name for file in files for place in self._members_of(file)}

    def write(self, file: TargetFile, writing: Executor, ahead: Executor) -> FinishedFile:
        self._source.watch(self._members_of(file))
        self._compare_copies(file)
        content = TargetBytes(self._source, self._tensors, file, self._extent_bytes, ahead)
        writer = self._staged.create(file.name, file.bytes)
        pending: list[Future[None]] = []
        try:
            self._windows_of(content, writer, writing, pending)
            for literal in content.sealed():
                writer.write(literal.start, [literal.data])
            self._source.check_members([place for place in self._members_of(file) if self._last_users[place] == file.name])
            self._source.check_unchanged(_used(self._tensors, [file]))
            writer.finish()
        finally:
            for job in pending:
                job.exception()  # no thread may write when the file is closed
            content.close()
            writer.discard()
        return _finished(content)

    def _members_of(self, file: TargetFile) -> list[MemberPlace]:
        keys = {move.source for one in file.tensors for move in one.mapped.moves}
        return list(dict.fromkeys(place for key in sorted(keys) for place in members(self._tensors[key])))

    def _windows_of(self, content: TargetBytes, writer: FileWriter, writing: Executor, pending: list[Future[None]]) -> None:
        """Read window after window, each while the one before is written. Blocks are whole: a window's rest is written with
        the next one.
        """
        alignment, rest = writer.alignment, b""
        for window in content.windows():
            self._going.check()
            low, end = window[0].start - len(rest), window[-1].stop
            with ExitStack() as held:
                buffer = held.enter_context(self._windows.taken())
                while pending and pending[0].done():
                    pending.pop(0).result()
                self._read(content, window, buffer, rest)
                high = content.file.bytes if end == content.file.bytes else end - end % alignment
                rest = buffer[high - low : end - low].tobytes()
                pending.append(writing.submit(_put, writer, low, buffer[: high - low], held.pop_all()))
            self._going.moved(end - window[0].start)
        for job in pending:
            job.result()

    def _read(self, content: TargetBytes, window: Sequence[TargetCut], buffer: Bytes, rest: bytes) -> None:
        length = window[-1].stop - window[0].start
        if self._going.pace is not None:
            self._going.pace.take(length)
        buffer[: len(rest)] = np.frombuffer(rest, np.uint8)
        content.fill(window, buffer[len(rest) : len(rest) + length])

    def _compare_copies(self, file: TargetFile) -> None:
        """Copies must be equal to the tensor, because no rule could choose between them."""
        for key in {move.source for one in file.tensors for move in one.mapped.moves} - self._compared:
            for copy in self._tensors[key].copies:
                equality.check_copy(self._source, self._tensors[key], copy, self._going.check)
            self._compared.add(key)


def _extent_bytes(files: Sequence[TargetFile]) -> int:
    return extent_bytes(sum(one.mapped.spec.nbytes for file in files for one in file.tensors))


def _finished(content: TargetBytes) -> FinishedFile:
    """The record of a file, once all of its windows have been filled."""
    file = content.file
    literals = [extent for literal in (*file.literals, *content.sealed()) for extent in _extents(literal)]
    placed = zip(file.tensors, content.extents, strict=True)
    tensors = [FinishedTensor(*one.mapped.key, one.start, tuple(extents)) for one, extents in placed]
    return FinishedFile(file.name, file.bytes, tuple(literals), tuple(tensors))


def _one_thread() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(1, "holdfast-stream", initializer=give_way)


def _put(writer: FileWriter, start: int, data: Bytes, held: ExitStack) -> None:
    """Write a window from an aligned place on: its whole blocks, and then the rest at the end of the file."""
    with held:
        whole = data.nbytes - data.nbytes % writer.alignment
        if whole:
            writer.write(start, [data[:whole]])
        if whole < data.nbytes:
            writer.write(start + whole, [data[whole:]])


def _check(tensors: Tensors, files: Sequence[TargetFile]) -> None:
    """`InvalidRequest` or `StateMismatch` for files that cannot be written as planned."""
    specs = {key: tensor.spec for key, tensor in tensors.items()}
    names = {file.name for file in files}
    if len(names) != len(files):
        raise InvalidRequest("two target files have the same name")
    for file in files:
        target_files.check(file)
        for one in file.tensors:
            box_moves.check(one.mapped, specs)
            for move in one.mapped.moves:
                pieces = tensors[move.source].pieces
                if len(pieces) > 1 and first_overlap([piece.box for piece in pieces]) is not None:
                    name = move.source.name
                    raise StateMismatch(f"pieces of stored tensor {name!r} overlap", tensor=name)


def _used(tensors: Tensors, files: Sequence[TargetFile]) -> list[str]:
    keys = {move.source for file in files for one in file.tensors for move in one.mapped.moves}
    return sorted({name for key in keys for name in source_files(tensors[key])})


def _extents(literal: LiteralBytes) -> Iterator[Extent]:
    for at in range(0, len(literal.data), EXTENT_BYTES_MAX):
        part = literal.data[at : at + EXTENT_BYTES_MAX]
        yield Extent(literal.start + at, len(part), digest(part))


def _pieces(file: FinishedFile) -> Iterator[Piece]:
    for extent in file.literals:
        yield Piece(file.name, extent.offset, extent.length, extent.digest)
    for one in file.tensors:
        for extent in one.extents:
            yield Piece(file.name, one.start + extent.offset, extent.length, extent.digest)
