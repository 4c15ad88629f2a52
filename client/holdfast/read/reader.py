"""Reads a committed checkpoint: COMMIT, manifest, then whole extents. Only verified bytes are returned (I5, I7).

Works on any `Source`, without a service and without torch.
"""

from __future__ import annotations

import operator
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from types import TracebackType
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from holdfast.read import requests, verified_load
from holdfast.read.copies import Copies, OtherCopies
from holdfast.read.overwrite_guard import unnoticed
from holdfast.read.requests import ExtentRun, Want, runs
from holdfast.read.sources import Source
from holdfast_files import opened
from holdfast_files.verifying import (
    NewFile,
    OnDamage,
    ReadControl,
    StoredCheckpoint,
    Take,
    VerifiedBatch,
    copy_files,
    read_verified,
)
from holdfast_formats import dtypes, naming, transfer
from holdfast_formats.disk import coded, manifests, verification
from holdfast_formats.disk.manifests import FileEntry, Manifest, TensorEntry
from holdfast_formats.disk.read_planner import resolve
from holdfast_formats.disk.verification import Piece, PieceColumns
from holdfast_formats.errors import (
    CheckpointError,
    Damaged,
    InUse,
    NoSuchResource,
    NotCommitted,
    StorageFailed,
)
from holdfast_formats.region import Box, check_box, whole

REPLACED_MAX = 4  # times that another checkpoint takes the place of one while it is opened
OVERLAP_MIN = 1.25  # times what the groups hold: ranks that cut tensors share the extents at the cuts, and no more


class Damage(NamedTuple):
    """One finding of `verify`: bytes [offset, offset + length) of a file, their tensor, and what is wrong."""

    file: str
    tensor: str | None
    offset: int
    length: int
    what: str


class _Found:
    """Wants, their extents, and whether those were verified."""

    def __init__(self, wants: list[Want], runs: list[ExtentRun]) -> None:
        self.wants = wants
        self.runs = runs
        self.proven = False


class CheckpointReader:
    """Reads the files of one committed checkpoint, with every extent checked against its digest. `open` makes one.

    For tensors by name `holdfast.open()` is simpler. Up to `cores` threads read and check; their buffers have at most 128
    MiB.

    Args:
        source: The files of the checkpoint, which are closed with the reader.
        manifest: The parsed manifest.
        manifest_bytes: The manifest as it is stored.
        commit_bytes: COMMIT as it is stored.
        copies: Other copies of this checkpoint, for what `source` lacks; none by default.

    Example:
        >>> with closing(CheckpointReader.open(DirectorySource(directory))) as reader:
        ...     damages = reader.verify()
    """

    def __init__(
        self,
        source: Source,
        manifest: Manifest,
        manifest_bytes: bytes,
        commit_bytes: bytes,
        copies: Copies | None = None,
    ) -> None:
        self.source = source
        self.copies = copies or Copies(source, commit_bytes)
        self.manifest = manifest
        self.manifest_bytes = manifest_bytes
        self.commit_bytes = commit_bytes
        self.cores = len(os.sched_getaffinity(0))
        self.peers = 1  # ranks of this machine that read from it at this time, each for itself
        self._found = _Found([], [])

    @classmethod
    def open(cls, source: Source, *, complete: bool = True, others: OtherCopies | None = None) -> CheckpointReader:
        """Read COMMIT and manifest, and check that every file exists with its stated length (I5).

        Raises `NotCommitted` or `CorruptManifest` with the file. `complete=False` leaves the other files to `verify`. Takes
        over the source, and closes it if opening fails. What it lacks is read from the `others`.
        """
        try:
            return cls._open(source, complete, others)
        except BaseException:
            source.close()
            raise

    @classmethod
    def _open(cls, source: Source, complete: bool, others: OtherCopies | None) -> CheckpointReader:
        for _ in range(REPLACED_MAX):
            commit_bytes = _read_commit(source)
            try:
                manifest_bytes = opened.read_manifest(source, "", commit_bytes)
                copies = Copies(source, commit_bytes, others)
                reader = cls(source, manifests.decode(manifest_bytes, commit_bytes), manifest_bytes, commit_bytes, copies)
                for file in reader.manifest.files if complete else ():
                    verification.check_size(reader.manifest, file.name, source.size(file.name))
            except Damaged:
                if source.still_has(commit_bytes):
                    raise
                source.close()  # another one has taken its place: all files are opened again
            else:
                return reader
        raise _replaced(source)

    def close(self) -> None:
        self.source.close()
        self.copies.close()

    def __enter__(self) -> CheckpointReader:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    @property
    def state(self) -> bytes:
        """The bytes of state.json, checked."""
        return self.read_file(naming.STATE)

    @cached_property
    def _pieces(self) -> dict[str, PieceColumns]:
        return verification.pieces(self.manifest)

    def pieces(self, file: str) -> PieceColumns:
        """A file's pieces in order; `NoSuchResource` for a file that is not in the manifest."""
        entry = self.manifest.file(file)
        if entry is None:
            raise NoSuchResource(
                f"{self.source.label} has no file {file!r}",
                hint="`holdfast show` lists the files of the checkpoint",
                file=file,
            )
        if not entry.header_bytes:  # a small file: all tensors need not be looked through for it
            return verification.grouped([Piece(file, 0, entry.bytes, entry.digest)])[0]
        return self._pieces[file]

    def read_file(self, name: str) -> bytes:
        """Read a whole file and check every piece of it."""
        parts: dict[int, bytes] = {}
        pieces = self.pieces(name)

        def take(batch: VerifiedBatch) -> None:
            parts[batch.pieces.start] = batch.data.tobytes()

        with self._as_it_stands():
            self.copies.read(lambda source: self._stream(source, [pieces], take))
        return b"".join(parts[start] for start in sorted(parts))

    @cached_property
    def contents(self) -> Manifest:
        """The manifest with every tensor as it was saved; coded ones have no file there."""
        return coded.contents(self.manifest)

    def entry(self, group: str, name: str) -> TensorEntry:
        """A tensor as it was saved, with aliases resolved; `StateMismatch` for an unknown tensor."""
        return resolve(self.contents, group, name, self.source.label)[1]

    def read(self, group: str, name: str, box: Box | None = None) -> NDArray[Any]:
        """Read a tensor, or a box of it, as a numpy array of its dtype; `InvalidRequest` for sub-byte dtypes."""
        entry = self.entry(group, name)
        box = box or whole(entry.shape)
        check_box(box, entry.shape, name)
        array: NDArray[Any] = np.empty(box.shape, dtypes.to_numpy(entry.dtype))
        self.load([Want(group, name, box, array.view(transfer.element_dtype(array.itemsize)))])
        return array

    def prove(self, wants: Iterable[Want]) -> None:
        """Read and check the extents of these wants, and the headers of their files, without storing anything. Raises
        `CorruptExtent`.
        """
        wants = list(wants)
        self.check_headers(wants)
        plain, small = requests.parted(self.manifest, wants)
        with self._as_it_stands():
            for batch in requests.coded_batches(self.manifest, small):
                self._hand_over(requests.wants_of(batch))
            touched = self._touched(plain)
            verified_load.prove(self.copies, touched.runs, self.cores)
        touched.proven = True

    def check_headers(self, wants: Iterable[Want]) -> None:
        """Read and check the headers of these wants' files. Raises `CorruptExtent`."""
        plain, small = requests.parted(self.manifest, wants)
        used = {run.entry.file for run in self._touched(plain).runs} | requests.coded_files(self.manifest, small)
        headers = [Piece(f.name, 0, f.header_bytes, f.digest) for f in self.manifest.files if f.name in used]
        with self._as_it_stands():
            verified_load.check(self.copies, headers)

    def load(self, wants: Iterable[Want], moved: Callable[[int], None] = unnoticed) -> int:
        """Read into the wants, and verify each extent; call `prove` first if nothing may change unless everything is sound.

        Returns the number of bytes in these whole extents, each counted once. Raises `CorruptExtent`, also for bytes that
        were verified before and differ now: a page may have left memory and come back from the disk. Wants may be
        overwritten then, with verified bytes, or with zeros where verification failed. `moved` gets the number of bytes that
        were just read, from several threads.
        """
        plain, small = requests.parted(self.manifest, wants)
        with self._as_it_stands():
            nbytes = self._hand_over(plain, moved)
            for batch in requests.coded_batches(self.manifest, small):
                nbytes += self._hand_over(requests.wants_of(batch), moved)
                requests.decode_batch(self.manifest, batch)
        return nbytes

    @contextmanager
    def _as_it_stands(self) -> Iterator[None]:
        """`InUse` instead of damage if another checkpoint has replaced the one that is being read."""
        try:
            yield
        except (Damaged, NoSuchResource) as error:
            if self._is_replaced():
                raise _replaced(self.source) from error
            raise

    def _is_replaced(self) -> bool:
        return not self.source.still_has(self.commit_bytes)

    def _hand_over(self, wants: list[Want], moved: Callable[[int], None] = unnoticed) -> int:
        """`load` of tensors that are stored as they were saved."""
        touched = self._touched(wants)
        nbytes = sum(run.length for run in touched.runs)
        again = touched.proven or self._overlap(touched.runs, nbytes)
        verified_load.hand_over(self.copies, touched.runs, self.cores, again, moved)
        return nbytes

    def _overlap(self, runs: list[ExtentRun], nbytes: int) -> bool:
        """Whether peers probably read the same bytes: if each read as much, it would be more than all."""
        if self.peers == 1:
            return False
        groups = {run.group for run in runs}
        whole = sum(entry.nbytes for group in groups for entry in self.manifest.tensors.get(group, {}).values())
        return nbytes * self.peers > OVERLAP_MIN * whole

    def verify(self, on_bytes: Callable[[int], None] | None = None) -> list[Damage]:
        """Check every byte of every listed file; return all damages, by file and position, instead of stopping.

        Also checks that headers and indexes agree with the manifest. Files that are not in the manifest are ignored.
        `InUse` if another checkpoint replaces this one in the meantime.
        """
        damages: list[Damage] = []
        present: list[PieceColumns] = []
        for file in self.manifest.files:
            try:
                size = self.source.size(file.name)
                verification.check_size(self.manifest, file.name, size)
            except (Damaged, StorageFailed) as error:
                damages.append(_damage(error, Piece(file.name, 0, file.bytes, file.digest)))
                size = error.members.get("offset") or None  # up to where a shorter file can still be checked
            if size is not None:
                listed = self._pieces[file.name]
                present.append(listed.where(listed.stops <= size))
        indexed = {naming.index_file_name(group): group for group in self.manifest.tensors}

        def agree(batch: VerifiedBatch) -> None:
            file = batch.pieces.file
            try:
                if file in indexed:
                    verification.check_index(self.manifest, indexed[file], batch.data.tobytes())
            except Damaged as error:
                damages.append(_damage(error, batch.pieces[0]))

        self.stream(present, agree, lambda piece, error: damages.append(_damage(error, piece)), on_bytes)
        for name in sorted(indexed.keys() - self._pieces.keys()):
            if self.manifest.tensors[indexed[name]]:
                damages.append(Damage(name, None, 0, 0, "the manifest lists no index for this group"))
        if damages and self._is_replaced():
            raise _replaced(self.source)
        return sorted(damages, key=lambda damage: (damage.file, damage.offset))

    def stream(
        self,
        pieces: Iterable[PieceColumns],
        take: Take,
        on_damage: OnDamage | None = None,
        on_bytes: Callable[[int], None] | None = None,
    ) -> None:
        """Read pieces on several threads, check each one, and then pass it to `take`; the view ends with the call.

        Damage is raised, unless `on_damage` takes it. `on_bytes` is called in the calling thread with the number of bytes
        read.
        """
        with self._as_it_stands():
            self._stream(self.source, pieces, take, on_damage, on_bytes)

    def _stream(
        self,
        source: Source,
        pieces: Iterable[PieceColumns],
        take: Take,
        on_damage: OnDamage | None = None,
        on_bytes: Callable[[int], None] | None = None,
    ) -> None:
        control = ReadControl(verified_load.windows(source), moved=on_bytes or _ignore)
        read_verified(StoredCheckpoint(source, "", self.manifest), pieces, take, on_damage, control)

    def copy(self, files: Sequence[FileEntry], create: Callable[[str, int], NewFile], control: ReadControl) -> None:
        """Copy files, each to the one that `create` makes for a name and a size; raises as `stream`."""
        with self._as_it_stands():
            copy_files(StoredCheckpoint(self.source, "", self.manifest), self.manifest, files, create, control)

    def _touched(self, wants: list[Want]) -> _Found:
        """The extents of these wants. `load` reuses the result of `prove` for the same wants."""
        known = self._found
        if len(wants) != len(known.wants) or not all(map(operator.is_, wants, known.wants)):
            known = self._found = _Found(wants, runs(self.manifest, wants, self.source.label))
        return known


def _replaced(source: Source) -> InUse:
    return InUse(
        f"{source.label} was replaced or removed while it was read",
        hint="read it again: an old checkpoint may have been thinned or compacted",
    )


def _read_commit(source: Source) -> bytes:
    try:
        return opened.read_commit(source)
    except NotCommitted as error:
        if source.size(naming.COMMIT) is not None:
            raise
        raise NotCommitted(
            f"{error.detail}, so it is not a checkpoint",
            hint="`holdfast ls` lists the committed checkpoints",
            file=naming.COMMIT,
        ) from error


def _ignore(size: int) -> None:
    """No progress is shown."""


def _damage(error: CheckpointError, piece: Piece) -> Damage:
    members = error.members
    tensor = members.get("tensor", piece.tensor)
    offset, length = members.get("offset", piece.start), members.get("length", piece.length)
    return Damage(str(members.get("file", piece.file)), tensor, int(offset), int(length), error.detail)
