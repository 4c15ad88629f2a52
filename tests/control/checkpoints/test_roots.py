"""A root is read as it stands, and the catalog is made to say the same."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from holdfast_formats import naming
from holdfast_formats.disk import manifests as manifest
from holdfast_formats.disk.manifests import COMMIT_BYTES_MAX
from holdfast_formats.errors import (
    CorruptManifest,
    InvalidRequest,
    NoSuchCheckpoint,
    NotCommitted,
    StorageFailed,
)
from holdfast_formats.rest import bodies
from holdfast_service.control.catalog.catalog import Catalog
from holdfast_service.control.checkpoints import removal, roots
from holdfast_service.control.checkpoints.run_files import RunFile, read_run_file, write_run_file
from holdfast_service.control.database.visible import limited_to
from holdfast_service.storage import MemoryTier, PosixStore
from tests.control.published import a_manifest, a_row, put_checkpoint


@pytest.fixture
def tier() -> MemoryTier:
    return MemoryTier()


def listed(catalog: Catalog, run: str) -> dict[int, bool]:
    """What the catalog lists: step -> verified."""
    return {checkpoint.step: checkpoint.verified for checkpoint in catalog.checkpoints(run, None, 1000).items}


def test_runs(tier: MemoryTier) -> None:
    """A run is a directory with a run's name that holds checkpoints/ or run.json."""
    for path in ("b/checkpoints/x/y", "a/run.json", "photos/file", ".hidden/run.json", "_x/run.json", "file"):
        tier.put(path, b"x")
    assert roots.runs(tier) == ["a", "b"]


def test_committed(tier: MemoryTier) -> None:
    """Directories that hold COMMIT under an exact name, in order of their steps."""
    for name in ("step-00000010", "step-00000002", "step-1000000000", "step-3", "old-step-00000005", "step-00000004.a1"):
        tier.put(f"run/checkpoints/{name}/COMMIT", b"{}")
    tier.put("run/checkpoints/step-00000007/model.safetensors", b"")
    tier.put("run/checkpoints/step-00000008", b"a file")
    assert roots.committed(PosixStore(tier), "run") == [2, 10, 1000000000]
    assert roots.committed(PosixStore(tier), "other") == []


def test_load_manifest(tier: MemoryTier) -> None:
    """A sound checkpoint gives the manifest that was written."""
    made = a_manifest("run", 5)
    put_checkpoint(tier, made)
    assert roots.load_manifest(tier, "run", 5) == made
    assert bodies.describe(made, verified=True) == a_row("run", 5, verified=True)


@pytest.mark.parametrize(
    ("broken", "kind"),
    [
        ({}, NoSuchCheckpoint),
        ({"manifest.json": b"{}"}, NotCommitted),
        ({"COMMIT": b"", "manifest.json": b"{}"}, NotCommitted),
        ({"COMMIT": b"{}"}, CorruptManifest),
        ({"COMMIT": b"x" * (COMMIT_BYTES_MAX + 1), "manifest.json": b"{}"}, NotCommitted),
    ],
    ids=["nothing", "no COMMIT", "empty COMMIT", "no manifest", "oversized COMMIT"],
)
def test_load_manifest_names_what_is_broken(tier: MemoryTier, broken: dict[str, bytes], kind: type[Exception]) -> None:
    """What is missing or unreadable is told apart."""
    for name, data in broken.items():
        tier.put(f"run/checkpoints/step-00000005/{name}", data)
    with pytest.raises(kind):
        roots.load_manifest(tier, "run", 5)


@pytest.mark.parametrize("target", ["run/checkpoints/step-00000006", "other/checkpoints/step-00000005"])
def test_moved_checkpoint_is_refused(tier: MemoryTier, target: str) -> None:
    """A directory under another step's or run's name is not that step's checkpoint."""
    put_checkpoint(tier, a_manifest("run", 5))
    tier.publish("run/checkpoints/step-00000005", target)
    run, step = ("run", 6) if target.startswith("run") else ("other", 5)
    with pytest.raises(CorruptManifest, match="run@5") as caught:
        roots.load_manifest(tier, run, step)
    assert "step-00000005" in caught.value.hint


def test_run_names_are_checked(tier: MemoryTier) -> None:
    """A name that is no run's never becomes a path."""
    for call in (lambda: read_run_file(tier, "../outside"), lambda: roots.committed(PosixStore(tier), "../outside")):
        with pytest.raises(InvalidRequest):
            call()


def test_reconcile_lists_what_is_found(tier: MemoryTier, catalog: Catalog) -> None:
    """An empty catalog learns runs, limits and checkpoints; what was only found is not verified."""
    put_checkpoint(tier, a_manifest("a", 1))
    put_checkpoint(tier, a_manifest("a", 2, attempt=4))
    write_run_file(tier, "b", RunFile(keep_last=2))
    assert roots.reconcile(PosixStore(tier), catalog) == []
    assert listed(catalog, "a") == {1: False, 2: False}
    assert catalog.checkpoint("a", 1) == a_row("a", 1)
    assert (catalog.keep_last("a"), catalog.keep_last("b")) == (None, 2)
    assert catalog.declare_attempt("a", "launch", 1, "now") == 5  # never a number that a checkpoint bears


def test_reconcile_keeps_verified_and_forgets_what_is_gone(tier: MemoryTier, catalog: Catalog) -> None:
    """A row that is as the directory says keeps its mark; a row without a directory goes; a run stays known."""
    for step in (1, 2, 3):
        put_checkpoint(tier, a_manifest("run", step))
    for step in (1, 3, 4):
        catalog.record_checkpoint(a_row("run", step, verified=True))
    catalog.record_checkpoint(a_row("gone", 9, verified=True))
    assert roots.reconcile(PosixStore(tier), catalog) == []
    assert listed(catalog, "run") == {1: True, 2: False, 3: True}
    assert listed(catalog, "gone") == {}
    assert catalog.newest_attempt("gone") == 1


def test_reconcile_does_not_trust_another_checkpoint_of_the_same_step(tier: MemoryTier, catalog: Catalog) -> None:
    """When the directory holds another checkpoint than the row says, the row is replaced and verified no more."""
    put_checkpoint(tier, a_manifest("run", 1, attempt=2))
    catalog.record_checkpoint(a_row("run", 1, verified=True))
    assert roots.reconcile(PosixStore(tier), catalog) == []
    assert catalog.checkpoint("run", 1).attempt == 2
    assert listed(catalog, "run") == {1: False}


def test_reconcile_lists_what_is_damaged_as_damaged(tier: MemoryTier, catalog: Catalog) -> None:
    """A checkpoint that cannot be read stays on disk and listed, with its problem; so is a bad run file told of."""
    for step in (1, 2, 3):
        put_checkpoint(tier, a_manifest("run", step))
        catalog.record_checkpoint(a_row("run", step, verified=True))
    catalog.set_keep_last("run", 7)
    tier.replace("run/checkpoints/step-00000002/manifest.json", b"{}")
    tier.remove_file("run/checkpoints/step-00000003/COMMIT")
    tier.put("run/run.json", b"?")
    problems = roots.reconcile(PosixStore(tier), catalog)
    assert [(p.run, p.step, type(p.error)) for p in problems] == [
        ("run", None, CorruptManifest),
        ("run", 2, CorruptManifest),
        ("run", 3, NotCommitted),
    ]
    assert listed(catalog, "run") == {1: True, 2: False, 3: False}
    found = {step: catalog.checkpoint("run", step) for step in (1, 2, 3)}
    assert [found[step].state for step in (1, 2, 3)] == ["verified", "damaged", "damaged"]
    assert (found[2].damage or {})["file"] == naming.MANIFEST and found[2].created == a_row("run", 2).created
    assert (catalog.newest("run"), catalog.run("run").newest) == (1, 1)
    assert catalog.keep_last("run") == 7
    assert tier.list("run/checkpoints") == ["step-00000001", "step-00000002", "step-00000003"]


def test_reconcile_lists_what_it_never_knew_and_cannot_read(tier: MemoryTier, catalog: Catalog) -> None:
    """With the catalog lost, a checkpoint without a sound manifest is listed with what lies there; mended, it is whole."""
    put_checkpoint(tier, a_manifest("run", 1))
    manifest = tier.read("run/checkpoints/step-00000001/manifest.json")
    tier.replace("run/checkpoints/step-00000001/manifest.json", b"{}")
    roots.reconcile(PosixStore(tier), catalog)
    found = catalog.checkpoint("run", 1)
    assert (found.state, found.files, found.groups, found.created) == ("damaged", 3, [], "")
    tier.replace("run/checkpoints/step-00000001/manifest.json", manifest)
    roots.reconcile(PosixStore(tier), catalog)
    assert catalog.checkpoint("run", 1) == a_row("run", 1)


def test_reconcile_looks_at_all_runs_whoever_asks(tier: MemoryTier, catalog: Catalog) -> None:
    """A restore with a token for one run may be the reason: what is known of others' damaged checkpoints stays, and their
    manifests are not all read again.
    """
    for run in ("mine", "theirs"):
        put_checkpoint(tier, a_manifest(run, 1))
    catalog.record_checkpoint(a_row("theirs", 1, verified=True), roots.stamp(PosixStore(tier), "theirs", 1))
    tier.replace("theirs/checkpoints/step-00000001/manifest.json", b"{}")
    with limited_to("mine"):
        roots.reconcile(PosixStore(tier), catalog)
    found = catalog.checkpoint("theirs", 1)
    assert (found.state, found.created, found.metrics) == ("damaged", a_row("theirs", 1).created, {"loss": 2.5})
    assert listed(catalog, "mine") == {1: False}


def test_reconcile_goes_on_after_a_failing_disk(catalog: Catalog) -> None:
    """A checkpoint that cannot be read is a problem of its own, not of the others."""

    class Failing(MemoryTier):
        def read(self, path: str, offset: int = 0, length: int | None = None) -> bytes:
            if "step-00000001/" in path:
                raise StorageFailed(f"read {path}: Input/output error")
            return super().read(path, offset, length)

    tier = Failing()
    for step in (1, 2):
        put_checkpoint(tier, a_manifest("run", step))
    assert [(p.step, type(p.error)) for p in roots.reconcile(PosixStore(tier), catalog)] == [(1, StorageFailed)]
    assert listed(catalog, "run") == {2: False}


class Meddled(MemoryTier):
    """Once it is armed, something else happens behind the next time that a file of step 1 is read."""

    def __init__(self, file: str, what: Callable[[MemoryTier], None]) -> None:
        super().__init__()
        self.armed, self._what, self._path = False, what, f"run/checkpoints/step-00000001/{file}"

    def read(self, path: str, offset: int = 0, length: int | None = None) -> bytes:
        found = super().read(path, offset, length)
        if self.armed and path == self._path:
            self.armed = False
            self._what(self)
        return found


def test_reconcile_does_not_take_a_step_that_is_replaced_meanwhile_for_damaged(catalog: Catalog) -> None:
    """COMMIT of one checkpoint and manifest of the next do not agree, and nothing is wrong with either."""

    def replace(tier: MemoryTier) -> None:
        newer = a_manifest("run", 1, attempt=2)
        encoded = manifest.encode(newer)
        for name, data in ((naming.MANIFEST, encoded), (naming.COMMIT, manifest.encode_commit(newer, encoded))):
            tier.replace(f"run/checkpoints/step-00000001/{name}", data)
        catalog.record_checkpoint(bodies.describe(newer, verified=True), roots.stamp(PosixStore(tier), "run", 1))

    tier = Meddled(naming.COMMIT, replace)
    put_checkpoint(tier, a_manifest("run", 1))
    catalog.record_checkpoint(a_row("run", 1, verified=True))
    tier.armed = True
    roots.reconcile(PosixStore(tier), catalog, thorough=True)
    found = catalog.checkpoint("run", 1)
    assert (found.attempt, found.state, catalog.newest("run")) == (2, "verified", 1)


@pytest.mark.parametrize("known", [False, True])
def test_reconcile_does_not_bring_back_what_is_damaged_and_removed_meanwhile(catalog: Catalog, known: bool) -> None:
    """Neither a checkpoint that was listed, nor one that nobody knew."""

    def remove(tier: MemoryTier) -> None:
        removal.discard(PosixStore(tier), "run", 1)
        catalog.forget_checkpoint("run", 1)

    tier = Meddled(naming.MANIFEST, remove)
    put_checkpoint(tier, a_manifest("run", 1))
    tier.replace("run/checkpoints/step-00000001/manifest.json", b"{}")
    if known:
        catalog.record_checkpoint(a_row("run", 1, verified=True))
    tier.armed = True
    roots.reconcile(PosixStore(tier), catalog)
    assert listed(catalog, "run") == {}
