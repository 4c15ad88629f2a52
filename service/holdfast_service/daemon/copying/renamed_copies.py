"""Renames copies of a renamed run in their tier by hard links, so that no byte is copied."""

from __future__ import annotations

import msgspec

from holdfast_files.opened import CommittedManifest, open_checkpoint
from holdfast_formats import naming
from holdfast_formats.disk import manifests
from holdfast_formats.errors import CheckpointError
from holdfast_formats.naming import CheckpointId, Place
from holdfast_service.daemon.copying.copies import CopyControl, carry, read_back
from holdfast_service.storage import Tier


def renamed(tier: Tier, which: CheckpointId, run: str) -> CommittedManifest:
    """COMMIT and manifest of a copy under the run's new name; `Damaged` if those of the copy cannot be read."""
    renamed_manifest = msgspec.structs.replace(open_checkpoint(tier, naming.checkpoint_path(*which)).manifest, run=run)
    manifests.validate(renamed_manifest)
    encoded = manifests.encode(renamed_manifest)
    return CommittedManifest(manifests.encode_commit(renamed_manifest, encoded), encoded, renamed_manifest)


def is_another(source: Tier, pair: CommittedManifest) -> bool:
    """Whether the root now has another checkpoint under the new name, such as a thinned one."""
    try:
        return open_checkpoint(source, naming.checkpoint_path(pair.manifest.run, pair.manifest.step)).encoded != pair.encoded
    except CheckpointError:  # it is damaged: the copy is needed all the more
        return False


def stage(tier: Tier, which: CheckpointId, place: Place, pair: CommittedManifest, going: CopyControl) -> None:
    """Stage the verified files of a copy at `place`: as hard links, or as copies if the tier has none.

    Raises `Damaged` for bytes that fail their digest, `CopyStopped`, and errors of the tier.
    """
    old = naming.checkpoint_path(*which)
    read_back(tier, old, pair.manifest, going)
    tier.remove_tree(place.path)
    if all(tier.link(f"{old}/{file.name}", f"{place.path}/{file.name}") for file in pair.manifest.files):
        return
    tier.remove_tree(place.path)
    carry(tier, old, tier, place.path, pair.manifest, going)
