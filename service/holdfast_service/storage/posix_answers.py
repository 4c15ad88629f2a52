"""The result of a commit in a directory whose name was taken, or whose rename failed: the published bytes tell (I14)."""

from __future__ import annotations

from holdfast_formats import naming
from holdfast_formats.disk import manifests
from holdfast_formats.errors import AlreadyCommitted, CheckpointError, NoSuchResource, StorageFailed
from holdfast_formats.naming import Place

from .store import CommitContents, Publication
from .tier import Tier

PUBLISHED = Publication("published")


def published_commit(tier: Tier, target: str) -> bytes | None:
    """The published COMMIT."""
    path = f"{target}/{naming.COMMIT}"
    try:
        return None if tier.size(path) is None else tier.read(path, 0, manifests.COMMIT_BYTES_MAX)
    except NoSuchResource:  # removed at this moment
        return None


def asked(tier: Tier, place: Place, contents: CommitContents, over: bool, question: CheckpointError) -> Publication:
    """The name is taken, or the staged files are missing: another committer may have published the same (I14)."""
    target = naming.checkpoint_path(place.run, place.step)
    try:
        stands = published_commit(tier, target)
    except StorageFailed as failure:
        return Publication("unknown", f"{question.detail}, and {target} cannot be read: {failure.detail}")
    if stands == contents.commit:
        return confirmed(tier, place, target)
    if stands is None and isinstance(question, NoSuchResource) and _is_listed(tier, target):
        # A client of a network file system may remember for a while that a name was not there.
        return Publication("unknown", f"{question.detail}, and {target} exists, but its {naming.COMMIT} cannot be seen yet")
    is_taken = isinstance(question, AlreadyCommitted) or (stands is not None and not over)
    return Publication("taken" if is_taken else "gone", question.detail)


def _is_listed(tier: Tier, target: str) -> bool:
    directory, _, name = target.rpartition("/")
    return name in tier.list(directory)


def confirmed(tier: Tier, place: Place, target: str) -> Publication:
    """Another committer has published it, and may have died before the names were durable."""
    try:
        tier.sync_directory(target.rpartition("/")[0])
        tier.sync_directory(place.path.rpartition("/")[0])
    except NoSuchResource:
        pass  # nothing was staged by way of this root since
    except CheckpointError as failure:
        return Publication("unknown", f"{target} is visible, but fsync of its parent directory failed: {failure.detail}")
    return PUBLISHED


def lost(tier: Tier, contents: CommitContents, target: str, failure: StorageFailed) -> Publication:
    """The rename has failed, or its result is unknown, or it is not durable (I9)."""
    visible = f"{target} is visible, but fsync of its parent directory failed: {failure.detail}"
    if failure.members.get("outcome") == "unknown":
        return Publication("unknown", visible)
    try:
        if published_commit(tier, target) != contents.commit:
            raise failure
    except StorageFailed as error:
        if error is failure:
            raise
        return Publication("unknown", f"{failure.detail}; whether {target} is visible is unknown: {error.detail}")
    return Publication("unknown", visible)
