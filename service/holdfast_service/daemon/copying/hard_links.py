"""Files that a checkpoint can take from another one, as second names of the same bytes: those of the checkpoint that it
replaces, in a replica those that earlier copies have, and those that were repaired. A repair reads other files of the same
bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from holdfast_files.opened import open_checkpoint
from holdfast_formats import naming
from holdfast_formats.disk import verification
from holdfast_formats.disk.manifests import Manifest
from holdfast_formats.errors import CheckpointError, Damaged, NoSuchCheckpoint
from holdfast_formats.files import Files
from holdfast_formats.naming import CheckpointId, Place
from holdfast_service.daemon.copying.copies import CopyControl, carry, read_back
from holdfast_service.daemon.copying.repair_sources import Directory
from holdfast_service.storage import FileIdentity, StagedCheckpoint, Store

LOOKED_AT_MAX = 3  # copies in a replica, those of the nearest steps, for their unchanged files


def stage_again(store: Store, place: Place, proof: Manifest, going: CopyControl) -> StagedCheckpoint:
    """Stage at `place` the files that `proof` lists of its step's checkpoint, verified first.

    Raises `Damaged` for bytes that fail their digest, `NoSuchCheckpoint` if the checkpoint is removed meanwhile,
    `CopyStopped`.
    """
    prove(store.files, CheckpointId(place.run, place.step), proof, going)
    staged = store.begin(place)
    take(staged, CheckpointId(place.run, place.step), proof, going)
    return staged


def prove(files: Files, which: CheckpointId, proof: Manifest, going: CopyControl) -> None:
    """Verify every byte of these files of a checkpoint; raises as `stage_again`."""
    directory = naming.checkpoint_path(*which)
    try:
        read_back(files, directory, proof, going)
    except Damaged:
        if not files.list(directory):
            raise NoSuchCheckpoint(f"{which} was removed in the meantime") from None
        raise


def take(staged: StagedCheckpoint, which: CheckpointId, proof: Manifest, going: CopyControl) -> None:
    """Take these files of a checkpoint beside what is staged already, or copy all of them."""
    if all(staged.take(entry.name, which.step, which.run) for entry in proof.files):
        return
    for entry in proof.files:  # a second name must not be written to
        staged.drop(entry.name)
    carry(staged.files, naming.checkpoint_path(*which), staged, proof, going)


class _Having(NamedTuple):
    """A checkpoint that has a file of the same bytes; None where every file has bytes of its own."""

    step: int
    identity: FileIdentity | None


def unchanged(store: Store, manifest: Manifest) -> dict[str, int]:
    """For files of a checkpoint that `store` lacks: the step of another one there from which they are to be taken.

    Where several have a file, it is taken from one with other bytes on the disk than the nearest step, so that one damaged
    byte is not in all of them; and where these are all the same bytes, it is copied once more.
    """
    found = dict[str, list[_Having]]()
    others = [step for step in store.steps(manifest.run) if step != manifest.step]
    for step in sorted(others, key=lambda step: abs(step - manifest.step))[:LOOKED_AT_MAX]:
        directory = naming.checkpoint_path(manifest.run, step)
        try:
            other, identities = open_checkpoint(store.files, directory).manifest, store.identities(directory)
        except CheckpointError:  # its own check says what is wrong with it
            continue
        for file in same_files(manifest, other):
            found.setdefault(file, []).append(_Having(step, identities.get(file)))
    return {name: source for name, having in found.items() if (source := _source(having)) is not None}


def _source(having: Sequence[_Having]) -> int | None:
    nearest = having[0]
    if nearest.identity is None or len(having) == 1:
        return nearest.step
    return next((one.step for one in having if one.identity is not None and one.identity.id != nearest.identity.id), None)


def same_files(manifest: Manifest, other: Manifest) -> list[str]:
    """The files with tensors of which two manifests state the same: length, header, and digests of all bytes."""
    mine, theirs = _extents_by_file(manifest), _extents_by_file(other)
    both = [file.name for file in other.files if file in manifest.files and file.name in theirs]
    return [name for name in both if theirs[name] == mine[name]]


def neighbours(store: Store, manifest: Manifest, file: str) -> list[Directory]:
    """Other checkpoints of the run that state the same of this file, and have it as another file on the disk, each of these
    once, the nearest step first. Only where one of the two files has several names: so its steps share it, and are not
    alike by chance.
    """
    own = store.identities(naming.checkpoint_path(manifest.run, manifest.step))
    known = {own[file].id} if file in own else set[str]()
    names = own[file].names if file in own else 0
    found = list[Directory]()
    others = store.steps(manifest.run) if own else []
    for step in sorted(others, key=lambda other: abs(other - manifest.step)):
        directory = naming.checkpoint_path(manifest.run, step)
        try:
            theirs = store.identities(directory).get(file)
            if theirs is None or theirs.id in known or max(theirs.names, names) == 1:
                continue
            if file in same_files(manifest, open_checkpoint(store.files, directory).manifest):
                known.add(theirs.id)
                found.append(Directory(f"step {step}", store.files, directory))
        except CheckpointError:  # its own check says what is wrong with it
            continue
    return found


def share(store: Store, which: CheckpointId, file: str, step: int) -> None:
    """Give a checkpoint's file to another one whose manifest states the same of it, in place of its own (I4)."""
    run, path = which.run, naming.checkpoint_path
    pair = open_checkpoint(store.files, path(run, step))
    if file not in same_files(pair.manifest, open_checkpoint(store.files, path(*which)).manifest):
        return
    place = naming.job_place(run, step)  # another node may repair it
    staged = store.begin(place)
    try:
        if staged.take(file, which.step):
            store.mend(place, pair.encoded, pair.commit)
    finally:
        store.discard(place)


def _extents_by_file(manifest: Manifest) -> dict[str, dict[str, object]]:
    by_file = verification.tensors_by_file(manifest)
    return {file: {name: entry.extents for name, entry in tensors.items()} for file, tensors in by_file.items()}
