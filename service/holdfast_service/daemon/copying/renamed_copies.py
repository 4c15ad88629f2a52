"""Renames copies of a renamed run in their tier by hard links, so that no byte is copied."""

from __future__ import annotations

import msgspec

from holdfast_formats import naming
from holdfast_formats.disk import manifest
from holdfast_formats.errors import CheckpointError
from holdfast_formats.naming import CheckpointId, Place
from holdfast_service.daemon.copying.copies import Going, ManifestPair, carry, read_back, read_pair
from holdfast_service.storage import Tier


def renamed(tier: Tier, which: CheckpointId, run: str) -> ManifestPair:
    """COMMIT and manifest of a copy under the run's new name; `Damaged` if those of the copy cannot be read."""
    made = msgspec.structs.replace(read_pair(tier, naming.checkpoint_path(*which)).made, run=run)
    manifest.validate(made)
    encoded = manifest.encode(made)
    return ManifestPair(manifest.encode_commit(made, encoded), encoded, made)


def is_another(source: Tier, pair: ManifestPair) -> bool:
    """Whether the root now has another checkpoint under the new name, such as a thinned one."""
    try:
        return read_pair(source, naming.checkpoint_path(pair.made.run, pair.made.step)).encoded != pair.encoded
    except CheckpointError:  # it is damaged: the copy is needed all the more
        return False


def stage(tier: Tier, which: CheckpointId, place: Place, pair: ManifestPair, going: Going) -> None:
    """Stage the verified files of a copy at `place`: as hard links, or as copies if the tier has none.

    Raises `Damaged` for bytes that fail their digest, `CopyStopped`, and errors of the tier.
    """
    old = naming.checkpoint_path(*which)
    read_back(tier, old, pair.made, going)
    tier.remove_tree(place.path)
    if all(tier.link(f"{old}/{file.name}", f"{place.path}/{file.name}") for file in pair.made.files):
        return
    tier.remove_tree(place.path)
    carry(tier, old, tier, place.path, pair.made, going)
