"""Tiers: the root keeps what has yet to be copied, and a tier keeps copies by rules of its own."""

from __future__ import annotations

import shutil
from pathlib import Path

from holdfast_formats import naming
from holdfast_service.control.checkpoints.replicas import removed
from holdfast_service.control.checkpoints.run_files import pinned, unpinned
from holdfast_service.control.retention.policy import Candidate
from holdfast_service.control.retention.tier_retention import TierRetention
from tests.daemon.copies_world import RUN, CopiesWorld, copies

STEPS = (5, 10, 15)

world = copies(STEPS)


def far(tmp_path: Path, step: int) -> Path:
    return tmp_path / "far" / naming.checkpoint_path(RUN, step)


def tiered(world: CopiesWorld, keep: int | None = None) -> None:
    """The replica `far` as a tier."""
    world.control.tiers.add("far", world.replicators["far"].standing.look)
    parts = (world.catalog, world.control.files, world.records.lost, world.control.readers)
    world.replicators["far"].tier = TierRetention("far", keep, *parts)
    world.records.copied.subscribe(world.control.rotation.due)


def test_what_has_yet_to_be_copied_to_a_tier_stays(world: CopiesWorld, tmp_path: Path) -> None:
    """Retention waits for the copy, says so, and removes when it is there; the tier keeps what it has."""
    tiered(world)
    world.keep(last=1)
    assert world.control.store.steps(RUN) == list(STEPS)
    (verdict,) = world.control.rotation.verdicts.preview(RUN, step=5).verdicts
    assert verdict.keep and verdict.reasons == ["it has yet to be copied to the tier far"]
    world.copy()
    assert world.control.rotation.wait_until_applied()
    assert world.control.store.steps(RUN) == [15]
    world.copy()
    assert [world.states(step) for step in STEPS] == [{"far": "present"}] * 3
    assert all(far(tmp_path, step).exists() for step in STEPS)


def test_room_for_a_save_is_made_before_the_copy(world: CopiesWorld) -> None:
    """Those that were copied go first, and of one that was not an event tells."""
    tiered(world)
    world.replicators["far"].run_once()  # the newest
    world.keep(last=1)
    for gone in (5, 10, None):
        assert world.control.rotation.make_room(RUN, Candidate(20, 0.0, True, groups=frozenset(("model", "optim")))) == gone
    told = world.control.events.after(0, 100, kind="checkpoint-removed")
    assert [(event.level, event.step) for event in told] == [("warning", 5), ("warning", 10)]
    assert all("it has yet to be copied to the tier far" in event.text for event in told)


def test_a_copy_that_is_restored_stays_meanwhile(world: CopiesWorld, tmp_path: Path) -> None:
    """By no rule and by no request is it removed from the tier before the launch has read it."""
    tiered(world, keep=1)
    world.copy()
    world.control.readers.hold(RUN, 5, "attempt 1", 3600.0)
    world.keep(last=1)
    world.control.readers.hold(RUN, 10, "attempt 2", 3600.0)
    shutil.rmtree(world.path(5))
    world.control.watch.relist(RUN)
    world.copy()
    assert world.states(5) == {"far": "present"} and far(tmp_path, 5).exists()
    with world.catalog.database.write() as session:
        removed(session, RUN, 5, requested=True)
    world.copy()
    assert world.states(5) == {"far": "gone"} and far(tmp_path, 5).exists()
    world.control.readers.release(RUN, 5, "attempt 1")
    world.copy()
    assert not far(tmp_path, 5).exists()


def test_a_removal_by_name_is_one_in_the_tier_too(world: CopiesWorld, tmp_path: Path) -> None:
    """It asks for this checkpoint to be gone, wherever it is."""
    tiered(world)
    world.copy()
    world.control.rotation.remove(RUN, 10)
    world.copy()
    assert not far(tmp_path, 10).exists() and world.states(10) == {}


def test_a_tier_has_a_retention_of_its_own(world: CopiesWorld, tmp_path: Path) -> None:
    """The newest stay, and what is pinned or in the root: nothing is copied and removed in turns."""
    tiered(world, keep=1)
    world.copy()
    assert all(far(tmp_path, step).exists() for step in STEPS), "all are in the root"
    world.control.rotation.mark(RUN, 5, lambda file: pinned(file, 5))
    world.keep(last=1)
    assert world.control.rotation.wait_until_applied() and world.control.store.steps(RUN) == [5, 15]
    world.copy()
    assert [far(tmp_path, step).exists() for step in STEPS] == [True, False, True]
    world.control.rotation.unmark(RUN, lambda file: unpinned(file, 5))
    assert world.control.rotation.wait_until_applied()
    world.copy()
    assert [far(tmp_path, step).exists() for step in STEPS] == [False, False, True]
    assert world.records.due("far") == []


def test_a_copy_that_is_gone_justifies_no_removal(world: CopiesWorld, tmp_path: Path) -> None:
    """The catalog says that it is in the tier; the root keeps the checkpoint until it is there again."""
    tiered(world)
    world.copy()
    shutil.rmtree(far(tmp_path, 5))
    world.keep(last=1)
    assert world.control.store.steps(RUN) == [5, 15] and world.states(5) == {}
    (told,) = world.control.events.after(0, 100, kind="copies-gone")
    assert (told.level, told.detail) == ("warning", {"tier": "far", "copies": 1, "lost": 0})
    assert told.text == (
        "copies in replica far are gone, removed by something other than Holdfast: step 5; those of checkpoints in the root "
        "are made again"
    )
    (verdict,) = world.control.rotation.verdicts.preview(RUN, step=5).verdicts
    assert verdict.keep and verdict.reasons == ["it has yet to be copied to the tier far"]
    world.copy()
    assert far(tmp_path, 5).exists()
    assert world.control.rotation.wait_until_applied() and world.control.store.steps(RUN) == [15]


def test_a_copy_that_was_cut_justifies_no_removal(world: CopiesWorld, tmp_path: Path) -> None:
    """It is repaired from the root first."""
    tiered(world)
    world.copy()
    cut = next(far(tmp_path, 10).glob("model*.safetensors"))
    cut.write_bytes(cut.read_bytes()[:-1])
    world.keep(last=1)
    assert world.control.store.steps(RUN) == [10, 15] and world.states(10) == {"far": "damaged"}
    world.copy()
    assert world.states(10) == {"far": "present"}
    assert world.control.rotation.wait_until_applied() and world.control.store.steps(RUN) == [15]


def test_a_tier_that_cannot_be_looked_at_keeps_all(world: CopiesWorld) -> None:
    """What was copied stays in the root while the copies cannot be seen; a save that needs the room takes it, and an event
    tells which checkpoint was not seen.
    """
    tiered(world)
    world.copy()
    copied, world.replicators["far"]._opened = world.replicators["far"]._opened, None
    world.keep(last=1)
    assert world.control.store.steps(RUN) == list(STEPS)
    (verdict,) = world.control.rotation.verdicts.preview(RUN, step=5).verdicts
    assert verdict.reasons == ["its copy in the tier far cannot be looked at now"]
    incoming = Candidate(20, 0.0, True, groups=frozenset(("model", "optim")))
    assert world.control.rotation.make_room(RUN, incoming) == 5
    (told,) = world.control.events.after(0, 100, kind="checkpoint-removed")
    assert told.level == "warning" and "its copy in the tier far cannot be looked at now" in told.text
    world.replicators["far"]._opened = copied
    world.control.rotation.apply(RUN)
    assert world.control.store.steps(RUN) == [15]


def test_only_copies_that_are_there_count_in_a_tier(world: CopiesWorld, tmp_path: Path) -> None:
    """A copy that was removed by hand is none of the newest ones that the tier keeps."""
    tiered(world, keep=2)
    world.copy()
    world.control.rotation.mark(RUN, 5, lambda file: pinned(file, 5))
    world.keep(last=1)
    assert world.control.rotation.wait_until_applied() and world.control.store.steps(RUN) == [5, 15]
    world.copy()  # its manifests are known from now on
    world.control.rotation.unmark(RUN, lambda file: unpinned(file, 5))
    assert world.control.rotation.wait_until_applied() and world.control.store.steps(RUN) == [15]
    shutil.rmtree(far(tmp_path, 10))
    world.copy()
    assert [far(tmp_path, step).exists() for step in STEPS] == [True, False, True]
    (told,) = world.control.events.after(0, 100, kind="copies-gone")
    assert told.level == "error" and told.text.endswith("step 10; the root does not have step 10 either")
