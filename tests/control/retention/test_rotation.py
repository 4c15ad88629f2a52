"""Rotation removes what retention lets go (I10), heeds marks and readers (I4), and leaves alone what is not ours."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from holdfast_formats import naming
from holdfast_formats.errors import (
    CorruptManifest,
    InUse,
    NewestHealthy,
    NewestVerified,
    NoSuchCheckpoint,
    NoSuchRun,
    Pinned,
    PreconditionFailed,
    StorageFailed,
)
from holdfast_formats.rest.retention import Best, RetentionPolicy
from holdfast_service.control.catalog.catalog import Catalog
from holdfast_service.control.checkpoints import run_files
from holdfast_service.control.checkpoints.readers import Readers
from holdfast_service.control.checkpoints.run_files import RunFiles
from holdfast_service.control.database.database import Database
from holdfast_service.control.retention.policy import Candidate
from holdfast_service.control.retention.rotation import Rotation
from holdfast_service.storage import MemoryTier, PosixStore, Tier
from tests.control.published import a_manifest, a_row, mark_verified, put_checkpoint
from tests.daemons import wait_until
from tests.databases import sqlite_url

RUN = "run"


class World:
    """A root with checkpoints that the catalog knows, and what rotates them."""

    def __init__(self, tier: Tier, catalog: Catalog) -> None:
        self.tier, self.catalog = tier, catalog
        self.late_s = 0.0  # how much later it is for readers
        self.files, self.readers = RunFiles(tier), Readers(lambda: time.monotonic() + self.late_s)
        self.rotation = Rotation(PosixStore(tier), catalog, self.files, self.readers)

    def put(self, *steps: int, verified: bool = True, healthy: bool | None = None) -> None:
        for step in steps:
            put_checkpoint(self.tier, a_manifest(RUN, step))
            self.catalog.record_checkpoint(a_row(RUN, step, verified).model_copy(update={"healthy": healthy}))

    def keep(self, **rules: object) -> None:
        self.rotation.set_policy(RUN, RetentionPolicy(**rules), "*")
        assert self.rotation.wait_until_applied()

    @property
    def steps(self) -> list[int]:
        """The steps on storage, which are those that the catalog lists."""
        there = [naming.parse_step_directory(name) for name in self.tier.list(f"{RUN}/{naming.CHECKPOINTS}")]
        listed = sorted(c.step for c in self.catalog.checkpoints(RUN, None, 100).items)
        assert sorted(step for step in there if step is not None) == listed
        return listed


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    catalog = Catalog.open(sqlite_url(tmp_path / "catalog.sqlite"))
    made = World(MemoryTier(), catalog)
    yield made
    made.rotation.close()
    catalog.close()


def test_a_policy_is_applied_when_it_is_set(world: World) -> None:
    """What no rule keeps goes, its bytes too; applying it again removes nothing."""
    world.put(10, 20, 25, 30)
    world.keep(last=1, every_steps=20)
    assert world.steps == [20, 30]
    assert world.tier.list(f"{RUN}/{naming.TRASH}") == []
    assert world.rotation.apply(RUN) == []
    assert dict(world.rotation.removed) == {"retention": 2}


def test_removal_follows_verification_and_not_commit(world: World) -> None:
    """I10 on the real path: a newer checkpoint displaces no older one until it is verified."""
    world.put(10, 20)
    world.keep(last=1)
    world.put(30, verified=False)
    assert world.rotation.apply(RUN) == []
    assert world.steps == [20, 30]
    mark_verified(world.catalog, RUN, 30)
    world.rotation.due(RUN)
    assert world.rotation.wait_until_applied()
    assert world.steps == [30]


def test_a_stale_change_of_the_policy_changes_nothing(world: World) -> None:
    """Who read the policy before somebody else changed it is refused; the run has to exist."""
    world.put(1, 2)
    stale = world.rotation.file(RUN).etag
    world.keep(last=5)
    with pytest.raises(PreconditionFailed):
        world.rotation.set_policy(RUN, RetentionPolicy(last=1), stale)
    assert world.rotation.wait_until_applied()
    assert world.steps == [1, 2]
    assert world.catalog.run(RUN).keep_last == 5
    for call in (world.rotation.file, world.rotation.verdicts.preview):
        with pytest.raises(NoSuchRun):
            call("nobody")


def test_pins_and_labels_hold_until_they_are_taken_away(world: World) -> None:
    """What has a mark stays; when it is taken away the rules decide. Only what is there can be marked."""
    world.put(1, 2, 3, 4)
    world.rotation.mark(RUN, 1, lambda file: run_files.pinned(file, 1))
    world.rotation.mark(RUN, 2, lambda file: run_files.labelled(file, 2, "best"))
    world.keep(last=1)
    assert world.steps == [1, 2, 4]
    for step in (1, 2):
        with pytest.raises(Pinned):
            world.rotation.remove(RUN, step)
    with pytest.raises(NoSuchCheckpoint):
        world.rotation.mark(RUN, 3, lambda file: run_files.pinned(file, 3))
    world.rotation.unmark(RUN, lambda file: run_files.unpinned(file, 1))
    world.rotation.unmark(RUN, lambda file: run_files.unlabelled(file, 2, "best"))
    assert world.rotation.wait_until_applied()
    assert world.steps == [4]


def test_a_reader_holds_and_its_end_is_noticed(world: World) -> None:
    """What is being read stays; when the reader is done it goes without anything else having to happen."""
    world.put(1, 2)
    with world.readers.reading(RUN, 1, "a test"):
        world.keep(last=1)
        assert world.steps == [1, 2]
        assert "it is being read" in world.rotation.verdicts.preview(RUN).verdicts[1].reasons
        with pytest.raises(InUse, match="being read"):
            world.rotation.remove(RUN, 1)
    assert world.rotation.wait_until_applied()
    assert world.steps == [2]


def test_a_hold_that_ends_by_itself_is_noticed_too(world: World) -> None:
    """A reader that is never heard of again keeps a checkpoint for its time and no longer."""
    world.put(1, 2)
    world.readers.hold(RUN, 1, "gone", 30.0)
    world.keep(last=1)
    assert world.steps == [1, 2]
    world.late_s = 20.0
    assert world.rotation.apply(RUN) == []
    world.late_s = 60.0
    wait_until(lambda: world.tier.list(f"{RUN}/{naming.CHECKPOINTS}") == ["step-00000002"])


def test_files_of_others_are_never_touched(world: World) -> None:
    """A checkpoint into which somebody put a file stays, by rule and on request, and names it; so does all else unknown."""
    world.put(1, 2, 3)
    world.tier.put(f"{naming.checkpoint_path(RUN, 1)}/evaluation.json", b"precious")
    world.tier.put(f"{RUN}/{naming.CHECKPOINTS}/old-step-00000002/COMMIT", b"precious")
    world.keep(last=1)
    assert world.tier.read(f"{naming.checkpoint_path(RUN, 1)}/evaluation.json") == b"precious"
    assert world.tier.list(f"{RUN}/{naming.CHECKPOINTS}") == ["old-step-00000002", "step-00000001", "step-00000003"]
    with pytest.raises(InUse, match=r"evaluation\.json"):
        world.rotation.remove(RUN, 1)


def test_damage_is_removed_on_request(world: World) -> None:
    """A checkpoint whose manifest cannot be read any more can be removed all the same."""
    world.put(1, 2)
    world.tier.replace(f"{naming.checkpoint_path(RUN, 1)}/{naming.MANIFEST}", b"{}")
    assert world.rotation.remove(RUN, 1).step == 1
    assert world.steps == [2]


def test_the_newest_verified_goes_only_by_name(world: World) -> None:
    """Not the newest one, but the newest that is known to be sound, has to be named to be removed."""
    world.put(1, 2)
    world.put(3, verified=False)
    with pytest.raises(NewestVerified):
        world.rotation.remove(RUN, 2)
    assert world.rotation.remove(RUN, 3, dry_run=True).step == 3
    assert world.steps == [1, 2, 3]
    world.rotation.remove(RUN, 3)
    world.rotation.remove(RUN, 2, newest=True)
    assert world.steps == [1]
    assert dict(world.rotation.removed) == {"request": 2}


def test_the_newest_healthy_goes_only_by_name(database: Database) -> None:
    """Where newer ones are unhealthy, the newest that is not has to be named as that to be removed, on every database."""
    world = World(MemoryTier(), Catalog(database))
    world.put(1, 2)
    world.put(3, 4, healthy=False)
    world.put(5, verified=False)
    try:
        for forced in (False, True):
            with pytest.raises(NewestHealthy, match="--force newest-healthy"):
                world.rotation.remove(RUN, 2, newest=forced)
        with pytest.raises(NewestVerified):
            world.rotation.remove(RUN, 4, healthy=True)
        assert world.rotation.remove(RUN, 2, dry_run=True, healthy=True).step == 2
        assert world.steps == [1, 2, 3, 4, 5]
        world.rotation.remove(RUN, 3)  # it is neither
        world.rotation.remove(RUN, 2, healthy=True)
        with pytest.raises(NewestHealthy):  # now it is this one, and the last
            world.rotation.remove(RUN, 1)
        assert world.steps == [1, 4, 5]
    finally:
        world.rotation.close()


def test_where_none_is_healthy_none_is_kept_for_it(database: Database) -> None:
    """Unhealthy checkpoints, and those that nobody has read back, are removed without a name."""
    world = World(MemoryTier(), Catalog(database))
    world.put(1, 2, healthy=False)
    world.put(3, verified=False)
    try:
        world.rotation.remove(RUN, 1)
        world.rotation.remove(RUN, 3)
        assert world.steps == [2]
    finally:
        world.rotation.close()


def test_preview_changes_nothing_and_adds_up(world: World) -> None:
    """Every checkpoint has its verdict, reasons and marks; the bytes are those of both sides."""
    world.put(1, 2, 3)
    world.rotation.mark(RUN, 1, lambda file: run_files.labelled(file, 1, "golden"))
    seen = world.rotation.verdicts.preview(RUN, RetentionPolicy(last=1, best=(Best(metric="loss", count=1),)))
    assert [(v.step, v.keep, v.labels) for v in seen.verdicts] == [(3, True, []), (2, False, []), (1, True, ["golden"])]
    assert (seen.bytes_kept, seen.bytes_removed) == (4, 2)
    assert seen.verdicts[1].reasons == [
        "last 1: 1 newer checkpoint is verified",
        "best 1 by min loss: 2.5 ranks number 2",
    ]
    assert world.steps == [1, 2, 3]
    assert world.rotation.verdicts.preview(RUN).policy == RetentionPolicy()


def test_an_unreadable_run_file_removes_nothing(world: World) -> None:
    """Where pins cannot be read nothing goes, by rule or on request; the thread lives on for other runs."""
    world.put(1, 2)
    world.keep(last=2)
    world.tier.replace(f"{RUN}/{naming.RUN_FILE}", b"?")
    world.rotation.due(RUN)
    assert world.rotation.wait_until_applied()
    with pytest.raises(CorruptManifest):
        world.rotation.remove(RUN, 1)
    assert world.steps == [1, 2]
    world.tier.remove_file(f"{RUN}/{naming.RUN_FILE}")
    world.keep(last=1)
    assert world.steps == [2]


def test_room_is_made_one_at_a_time_among_the_superseded(world: World) -> None:
    """The oldest that the policy will let go goes first; the newest verified one and what is held never."""
    world.put(1, 2, 3)
    world.keep(last=3)
    incoming = Candidate(4, 0.0, groups=frozenset({"model"}))
    with world.readers.reading(RUN, 1, "a test"):
        assert world.rotation.make_room(RUN, incoming) is None
    assert world.rotation.make_room(RUN, incoming) == 1
    assert world.rotation.make_room(RUN, incoming) is None
    world.keep(last=1)
    assert world.steps == [3]
    assert world.rotation.make_room(RUN, incoming) is None


def test_a_failing_disk_stops_one_run_only(tmp_path: Path) -> None:
    """What cannot be renamed stays listed, and the thread goes on with the next run."""

    class Failing(MemoryTier):
        def publish(self, source: str, target: str) -> None:
            if source.startswith(f"{RUN}/"):
                raise StorageFailed(f"publish {source}: Input/output error")
            super().publish(source, target)

    catalog = Catalog.open(sqlite_url(tmp_path / "catalog.sqlite"))
    world = World(Failing(), catalog)
    world.put(1, 2)
    for step in (1, 2):
        put_checkpoint(world.tier, a_manifest("other", step))
        catalog.record_checkpoint(a_row("other", step, verified=True))
    world.keep(last=1)
    world.rotation.set_policy("other", RetentionPolicy(last=1), "*")
    assert world.rotation.wait_until_applied()
    assert world.steps == [1, 2]
    assert world.tier.list(f"other/{naming.CHECKPOINTS}") == ["step-00000002"]
    world.rotation.close()
    catalog.close()


class Watched(MemoryTier):
    """Calls `act` before every rename."""

    act: Callable[[], None] = staticmethod(lambda: None)

    def publish(self, source: str, target: str) -> None:
        self.act()
        super().publish(source, target)


def test_a_mark_never_loses_to_a_removal_under_way(tmp_path: Path) -> None:
    """A pin that is set while its checkpoint is being renamed away is refused; it never returns as if it held."""
    tier = Watched()
    catalog = Catalog.open(sqlite_url(tmp_path / "catalog.sqlite"))
    world = World(tier, catalog)
    world.put(1, 2)
    errors: list[Exception | None] = []

    def pin() -> None:
        try:
            world.rotation.mark(RUN, 1, lambda file: run_files.pinned(file, 1))
            errors.append(None)
        except NoSuchCheckpoint as error:
            errors.append(error)

    late = threading.Thread(target=pin)

    def begin() -> None:
        late.start()
        late.join(0.2)  # were it not kept waiting, it would be done by now

    tier.act = begin  # type: ignore[method-assign]
    world.keep(last=1)
    late.join()
    assert world.steps == [2]
    assert isinstance(errors[0], NoSuchCheckpoint)
    assert world.files.read(RUN).pins == ()
    world.rotation.close()
    catalog.close()


def test_closing_does_what_is_due(world: World) -> None:
    """What is due when the daemon ends is still removed; afterwards nothing is taken on."""
    world.put(*range(20))
    world.rotation.set_policy(RUN, RetentionPolicy(last=1), "*")
    world.rotation.close()
    assert world.steps == [19]
    world.put(30)
    world.rotation.due(RUN)
    assert world.steps == [19, 30]


def test_who_begins_to_read_while_others_are_removed_holds(tmp_path: Path) -> None:
    """A reader that comes after the decision and before the rename keeps its checkpoint; one that comes later gets none."""
    tier = Watched()
    catalog = Catalog.open(sqlite_url(tmp_path / "catalog.sqlite"))
    world = World(tier, catalog)
    world.put(1, 2, 3)
    told: list[str] = []

    def read() -> None:
        tier.act = lambda: None  # type: ignore[method-assign]
        world.readers.hold(RUN, 2, "just in time", 60)
        with pytest.raises(NoSuchCheckpoint):
            world.readers.hold(RUN, 1, "too late", 60)
        told.append("read")

    tier.act = read  # type: ignore[method-assign]
    world.keep(last=1)
    assert told == ["read"]
    assert world.steps == [2, 3]
    world.rotation.close()
    catalog.close()
