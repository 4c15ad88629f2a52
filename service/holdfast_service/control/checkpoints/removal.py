"""Remove checkpoints, and what a crash left behind. The only deleter (I2); foreign files are never touched."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from itertools import count

from holdfast_formats import naming
from holdfast_formats.disk.manifest import Manifest
from holdfast_formats.errors import AlreadyCommitted, CheckpointError, CorruptManifest, NoSuchCheckpoint, NoSuchResource
from holdfast_service.control.checkpoints.run_files import read_run_file
from holdfast_service.storage import Tier

_OF_A_RUN = frozenset({naming.RUN_FILE, naming.CHECKPOINTS, naming.STAGING, naming.TRASH})


def remove_checkpoint(tier: Tier, run: str, step: int) -> CheckpointError | None:
    """Remove a checkpoint in the order of I4: rename to trash/, both parents durable, then unlink.

    Raises `NoSuchCheckpoint` when it is not there. Returns None, or the failure that left bytes of it in trash/ for the
    next sweep to remove: the checkpoint is gone in both cases. Pins are the caller's to look at.
    """
    return unlink(tier, discard(tier, run, step))


def discard(tier: Tier, run: str, step: int) -> str:
    """The first half of a removal: rename to trash/, durably, and return where to; `NoSuchCheckpoint` when it is gone."""
    source = naming.checkpoint_path(run, step)
    for name in _trash_names(step):
        target = f"{run}/{naming.TRASH}/{name}"
        try:
            tier.publish(source, target)
        except AlreadyCommitted:
            continue
        except NoSuchResource as error:
            raise NoSuchCheckpoint(
                f"{run} has no checkpoint of step {step}", hint=f"holdfast ls {run} lists them"
            ) from error
        return target
    raise AssertionError("no free name in trash/")


def unlink(tier: Tier, trashed: str) -> CheckpointError | None:
    """The second half: free the bytes of what `discard` returned, or return the failure that left them to the next sweep."""
    try:
        tier.remove_tree(trashed)
    except CheckpointError as error:
        return error
    return None


def foreign_files(tier: Tier, made: Manifest) -> list[str]:
    """Names inside a checkpoint's directory that its manifest does not know: somebody else's, so it is not removed."""
    known = {naming.COMMIT, naming.MANIFEST, *(file.name for file in made.files)}
    return [name for name in tier.list(naming.checkpoint_path(made.run, made.step)) if name not in known]


def is_bare(tier: Tier, run: str) -> bool:
    """Whether a run's directory, if there is one, holds nothing but a plain run file in which nobody has set anything."""
    names = set(tier.list(naming.check_run(run)))
    rooms = [f"{run}/{name}" for name in names - {naming.RUN_FILE}]
    if not names <= _OF_A_RUN or any(tier.list(room) or not tier.stamps(room, ()) for room in rooms):
        return False  # what is no directory has no stamp
    try:
        file = read_run_file(tier, run)
    except CorruptManifest:
        return False
    return file.policy is None and not file.pins and not file.labels


def remove_bare_run(tier: Tier, run: str) -> bool:
    """Remove a bare run's directory; False where it is none, or is none any more. Nobody changes its run file meanwhile.

    Directories go only when they are empty, so what comes into them at this moment stays.
    """
    if not is_bare(tier, run):
        return False
    names = tier.list(run)
    if not all(tier.remove_empty(f"{run}/{name}") for name in names if name != naming.RUN_FILE):
        return False
    if naming.RUN_FILE in names:
        tier.remove_file(f"{run}/{naming.RUN_FILE}")
    return tier.remove_empty(run)


def sweep(tier: Tier, idle_s: float | None = None) -> list[str]:
    """At start: remove every tree in staging/ and trash/ whose name is one of ours; return their paths, in order.

    No commit ever published them, so they are garbage by definition. Everything else stays. Where daemons of other nodes
    may be writing, only what has not been written to for `idle_s`.
    """
    removed = []
    for run, room in _rooms(tier):
        for name in tier.list(f"{run}/{room}"):
            path = f"{run}/{room}/{name}"
            if not _is_ours(room, name) or tier.size(path) is not None:
                continue
            if idle_s is None or (tier.idle_s(path) >= idle_s and not _is_needed(tier, run, name)):
                tier.remove_tree(path)
                removed.append(path)
    return removed


def _rooms(tier: Tier) -> Iterator[tuple[str, str]]:
    # A run whose first save was cut short has only staging/, so `roots.runs` does not know it yet.
    for run in filter(naming.is_run_name, tier.list("")):
        for room in (naming.STAGING, naming.TRASH):
            yield run, room


def _is_ours(room: str, name: str) -> bool:
    checkpoint = naming.parse_step_directory(name) is not None
    staged = naming.parse_staging_directory(name) is not None
    return {naming.CHECKPOINTS: checkpoint, naming.STAGING: staged, naming.TRASH: checkpoint or staged}[room]


def sweep_nodes(tier: Tier, known: Collection[str]) -> None:
    """Remove what nodes left in the root that nobody knows any more: containers have a new name at every start."""
    for name in tier.list(""):
        node = naming.parse_attempts_file(name) or naming.parse_daemon_file(name)
        if node and node not in known:
            tier.remove_file(name)


def _is_needed(tier: Tier, run: str, name: str) -> bool:
    """Whether this may be a checkpoint that another node is replacing at this moment, by two renames."""
    staged = naming.parse_staging_directory(name)
    if staged is None or staged.attempt != naming.REPLACED_ATTEMPT:
        return False
    return tier.size(f"{naming.checkpoint_path(run, staged.step)}/{naming.COMMIT}") is None


def _trash_names(step: int) -> Iterator[str]:
    """The checkpoint's own name, then numbered ones, for when trash/ still holds a checkpoint of the same step."""
    yield naming.step_directory(step)
    for number in count(1):
        yield naming.staging_directory(step, number)
