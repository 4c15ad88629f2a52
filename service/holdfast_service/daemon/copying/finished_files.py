"""Records of finished files, durable beside where these are staged, from which killed work continues."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import msgspec

from holdfast_formats import decoding, naming
from holdfast_formats.digest import digest
from holdfast_formats.disk.manifests import Extent
from holdfast_formats.mapping.listing import Decoder, ForeignTensor, TensorKey
from holdfast_formats.mapping.target_files import TargetFile
from holdfast_service.daemon.copying.member_sums import MemberPlace
from holdfast_service.storage import Records, StagedFiles

NOTE_BYTES_MAX = 2**28


class FinishedTensor(msgspec.Struct, frozen=True, array_like=True):
    """A tensor in a finished file: its first byte there, and its extents."""

    group: str
    name: str
    start: int
    extents: tuple[Extent, ...]


class FinishedFile(msgspec.Struct, frozen=True):
    """A target file that is written and durable. Literals, whose offsets count in the file, and tensors tile it."""

    name: str
    bytes: int
    literals: tuple[Extent, ...]
    tensors: tuple[FinishedTensor, ...]


class _Note(msgspec.Struct, frozen=True):
    job: str
    file: FinishedFile


_decode = decoding.decoder(_Note)


class FinishedFiles:
    """The records of one job's `staged` files, at `naming.progress_path(staged.path)`."""

    def __init__(self, records: Records, staged: StagedFiles, job: str) -> None:
        self._records, self._staged, self._job = records, staged, job
        self._there = naming.progress_path(staged.path)

    def found(self, files: Sequence[TargetFile]) -> dict[str, FinishedFile]:
        """The finished files, by name. Another job's files and records are removed."""
        notes = self._notes()
        if not notes or any(note.job != self._job for note in notes):
            self.remove()
            self._staged.clear()
            return {}
        by_name = {note.file.name: note.file for note in notes}
        sizes = {file.name: file.bytes for file in files}
        return {
            name: file
            for name, file in by_name.items()
            if file.bytes == sizes.get(name) == self._staged.files.size(f"{self._staged.path}/{name}")
        }

    def noted(self, files: Sequence[TargetFile]) -> tuple[FinishedFile, ...]:
        """The notes of this job's files that are there, none if any is another job's. Nothing is removed."""
        notes = self._notes()
        if any(note.job != self._job for note in notes):
            return ()
        by_name = {note.file.name: note.file for note in notes}
        return tuple(by_name[file.name] for file in files if file.name in by_name)

    def add(self, number: int, file: FinishedFile) -> None:
        """Record a durable file; the record is durable when this returns."""
        self._staged.sync(file.name)
        self._records.replace(f"{self._there}/{number:06}.json", msgspec.json.encode(_Note(self._job, file)))

    def remove(self) -> None:
        for name in self._records.list(self._there):
            self._records.remove_file(f"{self._there}/{name}")
        self._records.remove_empty(self._there)

    def _notes(self) -> list[_Note]:
        """All records; an incomplete one, from a crash, is removed."""
        notes_read = []
        for name in self._records.list(self._there):
            try:
                notes_read.append(_decode(self._records.read(f"{self._there}/{name}", 0, NOTE_BYTES_MAX)))
            except (msgspec.DecodeError, ValueError, RecursionError):
                self._records.remove_file(f"{self._there}/{name}")
        return notes_read


def job_digest(files: Sequence[TargetFile], tensors: Mapping[TensorKey, ForeignTensor], stamps: Mapping[str, str]) -> str:
    """Identifies a job by its files, their sources, and the stamps of the sources."""
    used = sorted({move.source for file in files for one in file.tensors for move in one.mapped.moves})
    parts = ([_file(file) for file in files], [_source(tensors[key]) for key in used], sorted(stamps.items()))
    return digest(repr(parts).encode(errors="backslashreplace"))


def source_files(tensor: ForeignTensor) -> Iterator[str]:
    yield from (piece.file for piece in (*tensor.pieces, *tensor.copies))
    if tensor.decoder is not None:
        for other in tensor.decoder.inputs:
            yield from source_files(other)


def members(tensor: ForeignTensor) -> Iterator[MemberPlace]:
    """The members of zip files that a tensor is read from, if their CRC-32 is known."""
    yield from (MemberPlace(one.file, one.member) for one in (*tensor.pieces, *tensor.copies) if one.member is not None)
    if tensor.decoder is not None:
        for other in tensor.decoder.inputs:
            yield from members(other)


def _file(file: TargetFile) -> object:
    literals = [(one.start, digest(one.data)) for one in file.literals]
    return file.name, file.bytes, literals, file.tensors, file.sealed is not None


def _source(tensor: ForeignTensor) -> object:
    decoder = tensor.decoder
    inner = () if decoder is None else (_said(decoder), [_source(other) for other in decoder.inputs])
    return tensor.spec, tensor.pieces, tensor.copies, inner


def _said(decoder: Decoder) -> object:
    terms = getattr(decoder, "terms", None)
    return type(decoder).__name__ if terms is None else (type(decoder).__name__, terms)
