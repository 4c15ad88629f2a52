"""Stages files of a checkpoint again, for one that replaces it: as second names of the same bytes, or as copies."""

from __future__ import annotations

from holdfast_formats import naming
from holdfast_formats.disk.manifests import Manifest
from holdfast_formats.errors import Damaged, NoSuchCheckpoint
from holdfast_formats.files import Files
from holdfast_formats.naming import CheckpointId, Place
from holdfast_service.daemon.copying.copies import CopyControl, carry, read_back
from holdfast_service.storage import StagedCheckpoint, Store


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
