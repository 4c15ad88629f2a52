"""Renames copies of a renamed run where they are, by second names of the same bytes if possible."""

from __future__ import annotations

import msgspec

from holdfast_files.opened import CommittedManifest, open_checkpoint
from holdfast_formats import naming
from holdfast_formats.disk import manifests
from holdfast_formats.errors import CheckpointError
from holdfast_formats.files import Files
from holdfast_formats.naming import CheckpointId
from holdfast_service.daemon.copying import hard_links
from holdfast_service.daemon.copying.copies import CopyControl, read_back
from holdfast_service.storage import StagedCheckpoint


def renamed(files: Files, which: CheckpointId, run: str) -> CommittedManifest:
    """COMMIT and manifest of a copy under the run's new name; `Damaged` if those of the copy cannot be read."""
    renamed_manifest = msgspec.structs.replace(open_checkpoint(files, naming.checkpoint_path(*which)).manifest, run=run)
    manifests.validate(renamed_manifest)
    encoded = manifests.encode(renamed_manifest)
    return CommittedManifest(manifests.encode_commit(renamed_manifest, encoded), encoded, renamed_manifest)


def is_another(source: Files, pair: CommittedManifest) -> bool:
    """Whether the root now has another checkpoint under the new name, such as a thinned one."""
    try:
        return open_checkpoint(source, naming.checkpoint_path(pair.manifest.run, pair.manifest.step)).encoded != pair.encoded
    except CheckpointError:  # it is damaged: the copy is needed all the more
        return False


def stage(staged: StagedCheckpoint, which: CheckpointId, pair: CommittedManifest, going: CopyControl) -> None:
    """Stage the verified files of a copy: taken, or copied if that is not possible.

    Raises `Damaged` for bytes that fail their digest, `CopyStopped`, and errors of the storage.
    """
    read_back(staged.files, naming.checkpoint_path(*which), pair.manifest, going)
    hard_links.take(staged, which, pair.manifest, going)
