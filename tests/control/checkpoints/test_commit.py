"""What commit makes of a store's answers: one committer of several, in whichever order they come and fail (I12 to I14)."""

from __future__ import annotations

import pytest

from holdfast_formats import naming
from holdfast_formats.disk import manifests
from holdfast_formats.errors import AlreadyCommitted, RoundAborted, StorageFailed
from holdfast_formats.staging.joint import JointlyStaged
from holdfast_service.control.checkpoints import commit
from holdfast_service.control.checkpoints.commit import About
from holdfast_service.daemon.checking.verifier import verify
from holdfast_service.storage import MemoryTier, PosixStore
from tests.daemon.writing.test_path import files_of
from tests.wings.cluster.saving.test_part_writer import CREATED, STAGED, Site, columns

TARGET = naming.checkpoint_path("r", 7)
LATER = "2026-01-02T00:00:00Z"


def written(tier: MemoryTier, place: naming.Place = STAGED) -> tuple[Site, JointlyStaged]:
    """A round that two nodes have written, and nobody has committed."""
    site = Site(columns([500, 700], 2), [0, 1])
    return site, JointlyStaged(place, [site.write(tier, node, place) for node in range(2)], CREATED)


def synced(tier: MemoryTier) -> list[str]:
    return [path for act, path in tier.acts if act == "directory"]


@pytest.mark.parametrize("again", [commit.publish_joint, commit.published_already])
def test_what_another_has_published_is_durable_before_it_counts(again) -> None:
    """The one that renamed it may have been lost before its directories were synced: a second committer syncs them."""
    tier = MemoryTier()
    site, staged = written(tier)
    first = commit.publish_joint(PosixStore(tier), site.plan, staged)
    tier.acts.clear()
    assert again(PosixStore(tier), site.plan, staged) == first
    assert {"r/checkpoints", "r/staging"} <= set(synced(tier))


def test_names_that_cannot_be_made_durable_are_an_unknown_outcome() -> None:
    """It stands there, and may not outlast a power cut: the second committer does not say that it is committed."""

    class Failing(MemoryTier):
        def sync_directory(self, path: str) -> None:
            if self.size(f"{TARGET}/{naming.COMMIT}") is not None:
                raise StorageFailed(f"fsync of {path}: input/output error")
            super().sync_directory(path)

    tier = Failing()
    site, staged = written(tier)
    commit.publish_joint(PosixStore(tier), site.plan, staged)  # this tier renames durably by itself
    for act in (commit.publish_joint, commit.published_already):
        with pytest.raises(StorageFailed, match="outcome unknown") as raised:
            act(PosixStore(tier), site.plan, staged)
        assert raised.value.members["outcome"] == "unknown"


def replacement(tier: MemoryTier) -> tuple[Site, JointlyStaged, manifests.Manifest]:
    """A checkpoint that has replaced another: who wrote it, what was staged, and its manifest."""
    before, old = written(tier, naming.Place("r", 7, 1, 4))
    commit.publish_joint(PosixStore(tier), before.plan, old)
    site, staged = written(tier)
    late = JointlyStaged(staged.place, staged.receipts, LATER)
    return site, late, commit.publish_joint(PosixStore(tier), site.plan, late, About(over=True))


def test_a_late_committer_of_a_replacement_does_not_undo_it() -> None:
    """What was replaced stands in staging until what replaced it was read back, with files of the same names and sizes: it
    is not taken for what the round has written.
    """
    tier = MemoryTier()
    site, late, made = replacement(tier)
    (aside,) = PosixStore(tier).replaced("r")
    replaced, files = tier.read(f"{aside.path}/{naming.MANIFEST}"), files_of(tier)
    assert commit.publish_joint(PosixStore(tier), site.plan, late, About(over=True)) == made
    assert files_of(tier) == files and verify(tier, TARGET) == made
    assert tier.read(f"{aside.path}/{naming.MANIFEST}") == replaced


class Unreadable(MemoryTier):
    """COMMIT of what stands there cannot be read."""

    def read(self, path: str, offset: int = 0, length: int | None = None) -> bytes:
        if path == f"{TARGET}/{naming.COMMIT}":
            raise StorageFailed(f"{path}: input/output error")
        return super().read(path, offset, length)


def test_what_cannot_be_read_is_replaced() -> None:
    """A damaged place of the disk under COMMIT does not keep a round from taking its step. A second committer, who cannot
    read either that its bytes stand there, leaves them alone: what is staged by then is what they have replaced.
    """
    tier = Unreadable()
    site, late, made = replacement(tier)
    manifest_bytes = tier.read(f"{TARGET}/{naming.MANIFEST}")
    assert manifests.decode(manifest_bytes, manifests.encode_commit(made, manifest_bytes)) == made
    with pytest.raises(StorageFailed, match="input/output"):
        commit.publish_joint(PosixStore(tier), site.plan, late, About(over=True))
    assert tier.read(f"{TARGET}/{naming.MANIFEST}") == manifest_bytes


def test_a_step_that_another_round_has_taken() -> None:
    """The later round is refused by name, also when what it staged is gone by then; what stands there stays."""
    tier = MemoryTier()
    first, one = written(tier)
    second, other = written(tier, naming.Place("r", 7, 1, 6))
    other = other._replace(created=LATER)
    commit.publish_joint(PosixStore(tier), first.plan, one)
    files = files_of(tier)
    with pytest.raises(AlreadyCommitted):
        commit.publish_joint(PosixStore(tier), second.plan, other)
    PosixStore(tier).discard(other.place)
    with pytest.raises(AlreadyCommitted):
        commit.publish_joint(PosixStore(tier), second.plan, other)
    assert files_of(tier) == files


def test_a_round_that_was_given_up() -> None:
    """Its files are gone: nothing is published, and the error says which is missing."""
    tier = MemoryTier()
    site, staged = written(tier)
    PosixStore(tier).discard(staged.place)
    with pytest.raises(RoundAborted, match="is not there, but the nodes have written"):
        commit.publish_joint(PosixStore(tier), site.plan, staged)
    assert tier.list(TARGET) == []
