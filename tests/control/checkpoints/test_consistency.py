"""Catalog and directories are compared, every kind of contradiction is found by name, and a rebuild mends what can be."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import get_args

import pytest
from sqlalchemy import delete, update

from holdfast_formats.rest import bodies
from holdfast_formats.rest.consistency import Kind
from holdfast_service.control.catalog.catalog import Catalog
from holdfast_service.control.checkpoints import consistency, removal, roots
from holdfast_service.control.checkpoints.run_files import RunFile, write_run_file
from holdfast_service.control.database.schema import CheckpointRow, JobRow, ReplicaRow, RunRow, StatisticsRow
from holdfast_service.storage import MemoryTier, PosixStore, PosixTier, Tier
from tests.control.published import a_manifest, mark_verified, put_checkpoint

NOW = "2030-01-01T00:00:00.000Z"


@pytest.fixture
def tier(catalog: Catalog) -> MemoryTier:
    """A root with two runs, all of it listed."""
    made = MemoryTier()
    for step in (1, 2, 3):
        put_checkpoint(made, a_manifest("a", step))
    put_checkpoint(made, a_manifest("b", 7))
    roots.reconcile(PosixStore(made), catalog)
    return made


def kinds(tier: Tier, catalog: Catalog, *writers: str, thorough: bool = False) -> list[tuple[str, str | None, int | None]]:
    found = consistency.check(PosixStore(tier), catalog, writers, thorough)
    assert found.count == len(found.items)
    return [(item.kind, item.run, item.step) for item in found.items]


def change(catalog: Catalog, *statements: object) -> None:
    with catalog.database.write() as session:
        for statement in statements:
            session.add(statement) if isinstance(statement, CheckpointRow | JobRow) else session.execute(statement)  # type: ignore[call-overload]


def a_job(state: str, node: str) -> JobRow:
    facts = {
        "kind": "verify",
        "key": f"{state} {node}",
        "run": "a",
        "step": 1,
        "request": {},
        "cancel": False,
        "created": NOW,
    }
    return JobRow(state=state, node=node, done_bytes=0, total_bytes=0, tries=1, **facts)


def test_what_was_reconciled_is_sound(tier: MemoryTier, catalog: Catalog) -> None:
    """No contradiction, and nothing is read again unless that is asked for."""
    found = consistency.check(PosixStore(tier), catalog)
    assert (found.sound, found.runs, found.checkpoints, found.manifests_read) == (True, 2, 4, 0)
    assert consistency.check(PosixStore(tier), catalog, thorough=True).manifests_read == 4


def plant(kind: str, tier: MemoryTier, catalog: Catalog) -> tuple[str, str | None, int | None]:
    """Make one contradiction of this kind; what a check has to say of it."""
    at, gone = ("a", 2), 99
    if kind == "not-listed":
        change(catalog, delete(CheckpointRow).where(CheckpointRow.step == 2))
    elif kind == "listed-but-gone":
        removal.discard(PosixStore(tier), "a", 2)
    elif kind in ("listed-but-unreadable", "unreadable"):
        tier.replace("a/checkpoints/step-00000002/manifest.json", b"{}")
        if kind == "unreadable":
            change(catalog, delete(CheckpointRow).where(CheckpointRow.step == 2))
    elif kind == "differs":
        change(catalog, update(CheckpointRow).where(CheckpointRow.step == 2).values(bytes=1, stamp=None))
    elif kind == "fence-too-low":
        change(catalog, update(RunRow).where(RunRow.name == "a").values(attempt=0))
        return kind, "a", None
    elif kind == "orphaned-round":
        catalog.rounds.open("a", gone, 1, 2, NOW)
        at = ("a", gone)
    elif kind == "orphaned-job":
        change(catalog, a_job("running", "node-9"))
        at = ("a", 1)
    else:
        table = StatisticsRow if kind.startswith("statistics") else ReplicaRow
        facts = {"tensors": 0, "data": b"?", "layers": {}} if table is StatisticsRow else {
            "tier": "t", "state": "present", "bytes": 1, "since": NOW
        }  # fmt: skip
        with catalog.database.write() as session:
            session.add(table(run="a", step=gone, **facts))
        at = ("a", gone)
    return kind, *at


@pytest.mark.parametrize("kind", get_args(Kind))
def test_every_kind_is_found_and_mended(tier: MemoryTier, catalog: Catalog, kind: str) -> None:
    """One contradiction of each kind is the only one found; a rebuild leaves none."""
    planted = plant(kind, tier, catalog)
    assert kinds(tier, catalog) == [planted]
    made = consistency.rebuild(PosixStore(tier), catalog, (), NOW)
    assert [(item.kind, item.run, item.step) for item in made.mended] == [planted]
    assert made.left == []
    assert kinds(tier, catalog, thorough=True) == []  # what cannot be read is listed as damaged, which says so itself
    assert catalog.newest_attempt("a") == 1


def test_run_files_are_compared(tier: MemoryTier, catalog: Catalog) -> None:
    """A run of which there is a file alone, a file that says something else, and one that cannot be read."""
    write_run_file(tier, "a", RunFile(keep_last=3))
    write_run_file(tier, "c", RunFile(keep_last=3))
    tier.put("b/run.json", b"?")
    assert kinds(tier, catalog) == [("differs", "a", None), ("unreadable", "b", None), ("not-listed", "c", None)]
    left = consistency.rebuild(PosixStore(tier), catalog, (), NOW).left
    assert [(item.kind, item.run) for item in left] == [("unreadable", "b")]
    assert (catalog.keep_last("a"), catalog.keep_last("c")) == (3, 3)


def test_only_a_thorough_check_reads_what_stands_unchanged(tier: MemoryTier, catalog: Catalog) -> None:
    """A row that was changed behind everybody's back differs from a manifest that has not been touched."""
    change(catalog, update(CheckpointRow).where(CheckpointRow.step == 2).values(bytes=1))
    assert kinds(tier, catalog) == []
    assert kinds(tier, catalog, thorough=True) == [("differs", "a", 2)]
    assert kinds(tier, catalog, "node-1", thorough=True) == [("differs", "a", 2)]


def test_what_is_going_on_is_no_contradiction(tier: MemoryTier, catalog: Catalog) -> None:
    """Rounds and jobs of daemons that are up are theirs; of others they are not."""
    catalog.rounds.open("a", 9, 1, 2, NOW)
    change(catalog, a_job("running", "node-1"), a_job("queued", "node-9"), a_job("done", "node-9"))
    assert kinds(tier, catalog, "node-1") == []
    assert kinds(tier, catalog, "node-2") == [("orphaned-job", "a", 1)]
    assert [kind for kind, _, _ in kinds(tier, catalog)] == ["orphaned-round", "orphaned-job"]


def test_known_damage_is_no_contradiction(tier: MemoryTier, catalog: Catalog) -> None:
    """Of a checkpoint that cannot be read and is listed as damaged, catalog and directories say the same."""
    tier.replace("a/checkpoints/step-00000002/manifest.json", b"{}")
    change(catalog, update(CheckpointRow).where(CheckpointRow.step == 2).values(damage={"code": "corrupt-manifest"}))
    assert kinds(tier, catalog) == []


def test_a_round_that_was_published_ends_as_committed(tier: MemoryTier, catalog: Catalog) -> None:
    """Its daemon died between the rename and the end of the round: the directory says what became of it."""
    catalog.rounds.open("a", 8, 1, 2, NOW)
    catalog.rounds.open("a", 9, 1, 2, NOW)
    put_checkpoint(tier, a_manifest("a", 8))
    consistency.rebuild(PosixStore(tier), catalog, (), NOW)
    assert [(made.step, made.state) for made in catalog.rounds.page("a").items] == [(9, "aborted"), (8, "committed")]


def test_what_was_found_out_stays_through_a_rebuild(tier: MemoryTier, catalog: Catalog) -> None:
    """A rebuild of a catalog that can be read keeps what no directory states."""
    mark_verified(catalog, "a", 2)
    change(catalog, update(CheckpointRow).where(CheckpointRow.step == 3).values(nonfinite=4, healthy=False))
    removal.discard(PosixStore(tier), "a", 1)
    consistency.rebuild(PosixStore(tier), catalog, (), NOW)
    listed = {made.step: (made.verified, made.nonfinite) for made in catalog.checkpoints("a", None, 10).items}
    assert listed == {2: (True, None), 3: (False, 4)}


def test_saves_and_removals_meanwhile_are_no_contradictions(
    tmp_path: Path, catalog: Catalog, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is published and listed, and what is trashed and forgotten, one after the other, is never reported."""
    monkeypatch.setattr(consistency, "LOOK_AGAIN_S", (*consistency.LOOK_AGAIN_S, 10.0))  # others may keep the disk busy
    tier, done = PosixTier(tmp_path / "root"), threading.Event()

    def save_and_remove() -> None:
        step = 0
        while not done.is_set():
            step += 1
            made = a_manifest("run", step)
            put_checkpoint(tier, made)
            catalog.record_checkpoint(bodies.describe(made), roots.stamp(PosixStore(tier), "run", step))
            if step > 3:
                removal.discard(PosixStore(tier), "run", step - 3)
                catalog.forget_checkpoint("run", step - 3)

    worker = threading.Thread(target=save_and_remove)
    worker.start()
    try:
        for _ in range(5):
            assert kinds(tier, catalog, "node-1") == []
            roots.reconcile(PosixStore(tier), catalog)
    finally:
        done.set()
        worker.join()
    assert kinds(tier, catalog) == []


def test_a_step_that_is_saved_anew_is_not_taken_for_the_one_before(tier: MemoryTier, catalog: Catalog) -> None:
    """A look that is older than a save neither unlists nor relists what came after it."""
    look = catalog.stamps("a")
    newer = bodies.describe(a_manifest("a", 2, attempt=5))
    catalog.forget_checkpoint("a", 2)
    catalog.record_checkpoint(newer, "new")
    catalog.relist("a", gone={2: look[2]}, found=[(bodies.describe(a_manifest("a", 2)), None)], stamps={}, at=NOW)
    assert catalog.checkpoint("a", 2) == newer
