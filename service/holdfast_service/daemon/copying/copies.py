"""Copies a checkpoint's files from one storage to another: every byte is verified on the way and at the target."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping
from typing import NamedTuple

import msgspec

from holdfast_files.buffers import ALIGNMENT_MAX
from holdfast_files.opened import join
from holdfast_files.verifying import ReadControl, StoredCheckpoint, copy_files, read_verified
from holdfast_formats.disk import verification
from holdfast_formats.disk.manifests import Manifest
from holdfast_formats.errors import CheckpointError, Damaged, NoSuchResource
from holdfast_formats.files import Files
from holdfast_service.storage import StagedCheckpoint, StagedFiles
from holdfast_service.storage.pacing import Pace

log = logging.getLogger(__name__)

NOTHING: Mapping[str, int] = {}


class CopyStopped(Exception):
    """The copy was stopped; what it has staged can be removed."""


class CopyControl(NamedTuple):
    """Control of a copy: no faster than `pace`, until `ended`; `moved` is called for every byte read."""

    pace: Pace | None = None
    ended: Callable[[], bool] = lambda: False
    moved: Callable[[int], None] = lambda count: None

    def heed(self, size: int) -> None:
        """Wait until so many bytes may be read; `CopyStopped`."""
        self.check()
        if self.pace is not None:
            self.pace.take(size)

    def check(self) -> None:
        """`CopyStopped` once the copy has ended."""
        if self.ended():
            raise CopyStopped

    @property
    def control(self) -> ReadControl:
        """Of reads in the calling thread, each with a window of its own: a disk that hangs holds up no other copy."""
        return ReadControl(heed=self.heed, moved=self.moved, alignment=ALIGNMENT_MAX)


def carry(source: Files, here: str, staged: StagedFiles, manifest: Manifest, going: CopyControl) -> None:
    """Stage a copy of every file in the manifest from the directory `here`, durably, and read it back (I7).

    Raises `Damaged`, with file, tensor and range, for bytes that fail their digest on either side; `CopyStopped`;
    and errors of both sides. The caller removes what was written by then.
    """
    _check_sizes(source, here, manifest)
    copy_files(StoredCheckpoint(source, here, manifest), manifest, manifest.files, staged.create, going.control)
    read_back(staged.files, staged.path, manifest, going)


def go_on(
    source: Files,
    here: str,
    staged: StagedCheckpoint,
    manifest: Manifest,
    going: CopyControl,
    unchanged: Mapping[str, int] = NOTHING,
) -> None:
    """`carry` except for files that an earlier start has staged whole, and `unchanged` ones, which are taken from committed
    checkpoints of these steps: both are read back, and the others are copied. When it raises, what was written by then can
    be gone on with.
    """
    left = staged.go_on()
    whole = {file.name for file in manifest.files if left.get(file.name) == file.bytes}
    taken = {name for name, step in unchanged.items() if name not in whole and _is_taken(staged, name, step)}
    proven = {name for name in whole | taken if _is_proven(staged, only(manifest, (name,)), going)}
    for name in taken - proven:  # a second name must not be written to
        staged.drop(name)
    if proven:
        log.info("%s: %d of %d files were there", staged.path, len(proven), len(manifest.files))
    rest = {file.name for file in manifest.files} - proven
    carry(source, here, staged, only(manifest, rest), going)


def _is_taken(staged: StagedCheckpoint, file: str, step: int) -> bool:
    try:
        staged.drop(file)  # what an earlier start has left of it
        return staged.take(file, step)
    except CheckpointError as error:  # it was removed meanwhile, say
        log.info("%s: %s is copied, and not taken from step %d: %s", staged.path, file, step, error.detail)
        return False


def _is_proven(staged: StagedFiles, manifest: Manifest, going: CopyControl) -> bool:
    try:
        read_back(staged.files, staged.path, manifest, going)
    except (Damaged, NoSuchResource) as error:
        log.info("%s: a file that was there is copied again: %s", staged.path, error.detail)
        return False
    return True


def only(manifest: Manifest, names: Collection[str]) -> Manifest:
    """A manifest of these files, for verification only."""
    tensors = {
        group: {name: entry for name, entry in named.items() if entry.file in names}
        for group, named in manifest.tensors.items()
    }
    files = tuple(file for file in manifest.files if file.name in names)
    return msgspec.structs.replace(manifest, files=files, tensors=tensors, aliases={})


def read_back(files: Files, directory: str, manifest: Manifest, going: CopyControl) -> None:
    """Verify every byte of a checkpoint's stored files; raises like `carry`."""
    _check_sizes(files, directory, manifest)
    listed = verification.pieces(manifest).values()
    read_verified(StoredCheckpoint(files, directory, manifest), listed, control=going.control)


def _check_sizes(files: Files, directory: str, made: Manifest) -> None:
    for entry in made.files:
        verification.check_size(made, entry.name, files.size(join(directory, entry.name)))
