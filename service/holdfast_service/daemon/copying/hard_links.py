"""Stages the remaining files of a checkpoint that another one replaces, as hard links or copies."""

from __future__ import annotations

from holdfast_formats import naming
from holdfast_formats.disk.manifests import Manifest
from holdfast_formats.errors import Damaged, NoSuchCheckpoint
from holdfast_formats.naming import Place
from holdfast_service.daemon.copying.copies import CopyControl, carry, read_back
from holdfast_service.storage import Store, Tier
from holdfast_service.storage.store import StagedCheckpoint


def stage_again(tier: Tier, store: Store, place: Place, proof: Manifest, going: CopyControl) -> None:
    """Stage the files that `proof` lists of a checkpoint of `tier`, verified first.

    Raises `Damaged` for bytes that fail their digest, `NoSuchCheckpoint` if the checkpoint is removed meanwhile,
    `CopyStopped`.
    """
    prove(tier, place, proof, going)
    tier.remove_tree(place.path)  # of an earlier start
    take(tier, store.begin(place), place, proof, going)


def prove(tier: Tier, place: Place, proof: Manifest, going: CopyControl) -> None:
    """Verify every byte of these files of a checkpoint; raises as `stage_again`."""
    directory = naming.checkpoint_path(place.run, place.step)
    try:
        read_back(tier, directory, proof, going)
    except Damaged:
        if not tier.list(directory):
            raise NoSuchCheckpoint(f"{place.run}@{place.step} was removed in the meantime") from None
        raise


def take(tier: Tier, staged: StagedCheckpoint, place: Place, proof: Manifest, going: CopyControl) -> None:
    """Hard-link the files beside what is staged already, or copy them."""
    if all(staged.take(entry.name, place.step) for entry in proof.files):
        return
    for entry in proof.files:
        if tier.size(f"{place.path}/{entry.name}") is not None:
            tier.remove_file(f"{place.path}/{entry.name}")
    carry(tier, naming.checkpoint_path(place.run, place.step), tier, place.path, proof, going)
