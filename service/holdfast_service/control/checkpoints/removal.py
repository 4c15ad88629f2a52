"""Remove checkpoints, and what a crash left behind. The only deleter (I2); foreign files are never touched."""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable

from holdfast_formats import naming
from holdfast_formats.disk.manifests import Manifest
from holdfast_formats.errors import CheckpointError, CorruptManifest
from holdfast_formats.files import Files
from holdfast_service.control.checkpoints.run_files import read_run_file
from holdfast_service.storage import Records, Store

log = logging.getLogger(__name__)

_FILES = (naming.LAUNCHES_FILE, naming.RUN_FILE)  # run.json last: it makes the directory a run
_OWN_FILES = (*_FILES, naming.DELETED_FILE, naming.RENAMED_FILE)
OF_A_RUN = frozenset({*_FILES, naming.DELETED_FILE, naming.RENAMED_FILE, naming.CHECKPOINTS, naming.STAGING, naming.TRASH})


def remove_checkpoint(store: Store, run: str, step: int) -> CheckpointError | None:
    """Remove a checkpoint in the order of I4: gone durably, then its bytes are freed.

    Raises `NoSuchCheckpoint` when it does not exist. Returns None, or the failure that left bytes of it for the next sweep:
    the checkpoint is gone in both cases. The caller checks pins.
    """
    return unlink(store, discard(store, run, step))


def discard(store: Store, run: str, step: int) -> str:
    """The first half of a removal: it is gone, durably; returns what `unlink` needs. `NoSuchCheckpoint` when it is gone."""
    return store.remove(run, step)


def unlink(store: Store, removed: str) -> CheckpointError | None:
    """The second half: free the bytes of what `discard` returned, or return the failure that left them to the next sweep."""
    try:
        store.free(removed)
    except CheckpointError as error:
        return error
    return None


def free(store: Store, removed: Iterable[str]) -> None:
    """`unlink` all of these, and log what is left to the next start."""
    for path in removed:
        left = unlink(store, path)
        if left is not None:
            log.warning("could not delete all of %s; trying again at the next start: %s", path, left.detail)


def foreign_files(tier: Files, manifest: Manifest) -> list[str]:
    """Names inside a checkpoint's directory that its manifest does not list: foreign files, so it is not removed."""
    known = {naming.COMMIT, naming.MANIFEST, *(file.name for file in manifest.files)}
    return [name for name in tier.list(naming.checkpoint_path(manifest.run, manifest.step)) if name not in known]


def is_half_written(name: str) -> bool:
    """Whether a crash has left this file of a run's directory while Holdfast was replacing one."""
    return name.startswith(".") and name.endswith(".new") and any(name[1:].startswith(own) for own in _OWN_FILES)


def is_bare(records: Records, run: str) -> bool:
    """Whether a run's directory, if any, holds only a run file with default values."""
    names = set(records.list(naming.check_run(run)))
    rooms = [f"{run}/{name}" for name in names - {*_FILES}]
    if not names <= OF_A_RUN or not all(records.is_empty(room) for room in rooms):
        return False
    try:
        file = read_run_file(records, run)
    except CorruptManifest:
        return False
    return not any((file.policy, file.pins, file.labels, file.owner, file.notes, file.archived))


def remove_bare_run(records: Records, run: str) -> bool:
    """Remove a bare run's directory; False where it is not bare any more. The caller blocks changes of its run file.

    Directories go only when they are empty, so files that appear meanwhile stay.
    """
    if not is_bare(records, run):
        return False
    names = records.list(run)
    if not all(records.remove_empty(f"{run}/{name}") for name in names if name not in _FILES):
        return False
    for name in _FILES:
        if name in names:
            records.remove_file(f"{run}/{name}")
    return records.remove_empty(run)


def sweep_nodes(records: Records, known: Collection[str]) -> None:
    """Remove the files of unknown nodes from the root: containers have a new name at every start."""
    for name in records.list(""):
        node = naming.parse_attempts_file(name) or naming.parse_daemon_file(name)
        if node and node not in known:
            records.remove_file(name)
