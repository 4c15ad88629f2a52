"""Removal takes away what it should, in the order of I4, and nothing else."""

from __future__ import annotations

from pathlib import Path

import pytest

from holdfast_formats.errors import NoSuchCheckpoint, StorageFailed
from holdfast_service.control.checkpoints.removal import remove_checkpoint
from holdfast_service.storage import MemoryTier, PosixStore, PosixTier, Tier
from tests.control.published import a_manifest, put_checkpoint


@pytest.fixture(params=["memory", "posix"])
def tier(request: pytest.FixtureRequest, tmp_path: Path) -> Tier:
    return MemoryTier() if request.param == "memory" else PosixTier(tmp_path)


def tree(tier: Tier, path: str = "") -> list[str]:
    """Every path below `path`, directories without content included."""
    found = []
    for name in tier.list(path):
        below = f"{path}/{name}" if path else name
        found += [below, *tree(tier, below)]
    return found


def test_removed_checkpoint_is_gone(tier: Tier) -> None:
    """Nothing of it is left, its neighbours are whole."""
    for step in (1, 2):
        put_checkpoint(tier, a_manifest("run", step))
    assert remove_checkpoint(PosixStore(tier), "run", 1) is None
    assert tier.list("run/checkpoints") == ["step-00000002"]
    assert tier.list("run/trash") == []
    assert len(tier.list("run/checkpoints/step-00000002")) == 3


def test_removal_is_durable_before_anything_is_unlinked() -> None:
    """I4: rename, then both parents fsynced, and only then are files removed."""

    class Watched(MemoryTier):
        def remove_tree(self, path: str) -> None:
            self.acts.append(("remove", path))
            super().remove_tree(path)

    tier = Watched()
    put_checkpoint(tier, a_manifest("run", 7))
    tier.acts.clear()
    remove_checkpoint(PosixStore(tier), "run", 7)
    assert tier.acts == [
        ("rename", "run/trash/step-00000007"),
        ("directory", "run/trash"),
        ("directory", "run/checkpoints"),
        ("remove", "run/trash/step-00000007"),
    ]


def test_removal_finds_a_free_name_in_the_trash(tier: Tier) -> None:
    """A checkpoint of the same step that lies in the trash already is in nobody's way."""
    for name in ("step-00000007", "step-00000007.a1"):
        tier.put(f"run/trash/{name}/left", b"x")
    put_checkpoint(tier, a_manifest("run", 7))
    assert remove_checkpoint(PosixStore(tier), "run", 7) is None
    assert tier.list("run/checkpoints") == []
    assert tier.list("run/trash") == ["step-00000007", "step-00000007.a1"]


def test_removal_of_what_is_not_there(tier: Tier) -> None:
    """A step without a directory is named."""
    put_checkpoint(tier, a_manifest("run", 7))
    for run, step in (("run", 8), ("other", 7)):
        with pytest.raises(NoSuchCheckpoint):
            remove_checkpoint(PosixStore(tier), run, step)
    assert tier.list("run/checkpoints") == ["step-00000007"]


def test_removal_that_cannot_unlink_leaves_the_rest_to_the_sweep() -> None:
    """The checkpoint is gone, the failure is handed back, and the next sweep removes the bytes."""

    class Stubborn(MemoryTier):
        def remove_tree(self, path: str) -> None:
            raise StorageFailed(f"{path} stays")

    tier = Stubborn()
    put_checkpoint(tier, a_manifest("run", 7))
    failure = remove_checkpoint(PosixStore(tier), "run", 7)
    assert isinstance(failure, StorageFailed)
    assert tier.list("run/checkpoints") == []
    assert len(tier.list("run/trash/step-00000007")) == 3


def test_sweep_removes_garbage_and_nothing_else(tier: Tier) -> None:
    """Staged and trashed trees of every run go, also of a run that has no checkpoint yet; the checkpoints stay."""
    put_checkpoint(tier, a_manifest("run", 1))
    put_checkpoint(tier, a_manifest("run", 123456789))
    before = tree(tier, "run/checkpoints")
    tier.put("run/staging/step-00000002.a1/model.safetensors", b"half")
    tier.put("run/staging/step-00000002.a12/receipts/node.json", b"{}")
    tier.put("run/trash/step-00000001/COMMIT", b"{}")
    tier.put("run/trash/step-00000001.a1/COMMIT", b"{}")
    tier.put("first-save/staging/step-00000005.a1/model.safetensors", b"half")
    assert PosixStore(tier).sweep() == [
        "first-save/staging/step-00000005.a1",
        "run/staging/step-00000002.a1",
        "run/staging/step-00000002.a12",
        "run/trash/step-00000001",
        "run/trash/step-00000001.a1",
    ]
    assert tree(tier, "run/checkpoints") == before
    assert tree(tier, "run/staging") == tree(tier, "run/trash") == []
    assert PosixStore(tier).sweep() == []


STRANGERS = [
    "notes.txt",
    "photos/2030/staging/step-00000001.a1/picture",
    "run/readme",
    "run/checkpoints/step-1/file",
    "run/checkpoints/old-step-00000005/file",
    "run/checkpoints/file",
    "run/checkpoints/step-00000009.a1/file",
    "run/staging/experiment/file",
    "run/staging/step-00000001/file",
    "run/staging/step-00000003.a1",
    "run/trash/step-00000004",
    "run/trash/letters/file",
    "_hidden/staging/step-00000001.a1/file",
]


def test_sweep_never_touches_strangers(tier: Tier) -> None:
    """What has no name of ours, or is a file where a tree belongs, stays byte for byte."""
    put_checkpoint(tier, a_manifest("run", 1))
    for path in STRANGERS:
        tier.put(path, b"precious")
    for path in (".holdfast.lock", "catalog.sqlite", "catalog.sqlite-wal", "run/run.json"):
        tier.put(path, b"ours")
    before = tree(tier)
    assert PosixStore(tier).sweep() == []
    assert tree(tier) == before


def test_sweep_does_not_follow_links(tmp_path: Path) -> None:
    """A link in the place of a staged tree goes, what it points to stays; behind a linked staging/ nothing is touched."""
    outside = tmp_path / "outside"
    (outside / "step-00000001.a1").mkdir(parents=True)
    (outside / "step-00000001.a1/precious").write_bytes(b"x")
    tier = PosixTier(tmp_path / "root")
    tier.put("run/run.json", b"{}")
    tier.put("other/staging/step-00000002.a1/file", b"x")
    (tier.root / "run/staging").symlink_to(outside)
    (tier.root / "other/staging/step-00000001.a1").symlink_to(outside)
    assert PosixStore(tier).sweep() == ["other/staging/step-00000001.a1", "other/staging/step-00000002.a1"]
    assert (outside / "step-00000001.a1/precious").read_bytes() == b"x"
