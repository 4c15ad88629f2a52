"""What was replaced goes when its replacement was read back, and comes back when that is damaged, or gone."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from holdfast_formats import naming
from holdfast_formats.errors import CatalogUnavailable, Damaged, InUse, NoSuchCheckpoint
from holdfast_formats.lineage import Intent
from holdfast_service.control.checkpoints import roots
from holdfast_service.control.recovery import sweep
from holdfast_service.control.retention import replaced_checkpoints
from holdfast_service.daemon.checking.verifier import verify
from holdfast_service.storage import MemoryTier
from tests.daemon.saver_world import RUN, Rank, SaverWorld, saver_world
from tests.daemons import wait_until

ANEW = Intent(existing="replace")
PATH = naming.checkpoint_path(RUN, 1)


class FlippingTier(MemoryTier):
    """A disk that flips a bit of the next one that takes another's place, before anybody reads it back."""

    flips = False

    def exchange(self, source: str, target: str) -> bool:
        done = super().exchange(source, target)
        if self.flips:
            self.flips = False
            flip(self, target)
        return done


def flip(tier: MemoryTier, directory: str) -> None:
    (name,) = [name for name in tier.list(directory) if name.endswith(".safetensors")]
    tier._file(f"{directory}/{name}")[-1] ^= 1


def launch(world: SaverWorld, step: int = 1) -> Rank:
    """A rank that has saved a step, which was read back."""
    world.control.recovery.recover()
    (rank,) = world.launch(1)
    rank.save(step)
    assert rank.wait(step).problem is None
    world.checked()
    assert world.control.findings.result_of(RUN, step) == "sound"
    return rank


def replace(rank: Rank, step: int = 1) -> None:
    del rank.outcomes[step]
    rank.save(step, intent=ANEW)
    assert rank.wait(step).problem is None


@pytest.fixture
def tier() -> FlippingTier:
    return FlippingTier()


@pytest.fixture
def world(tier: FlippingTier, monkeypatch: pytest.MonkeyPatch) -> Iterator[SaverWorld]:
    monkeypatch.setattr(replaced_checkpoints, "MEND_S", 0.05)
    with saver_world(tier) as made:
        yield made


def settled(world: SaverWorld) -> None:
    """All was read back, and nothing is aside any more."""
    world.checked()
    wait_until(lambda: not world.control.store.replaced(RUN) and world.control.rotation.wait_until_applied())


def test_it_goes_once_its_replacement_was_read_back(world: SaverWorld, tier: FlippingTier) -> None:
    """And not before."""
    rank = launch(world)
    before = verify(tier, PATH)
    world.saver.checks.close()  # nobody reads back what comes now
    replace(rank)
    (aside,) = world.control.store.replaced(RUN)
    assert verify(tier, aside.path) == before
    world.control.rotation.apply(RUN)
    assert world.control.store.replaced(RUN) == [aside]
    made = verify(tier, PATH)
    assert made != before
    world.control.record_queue.recorded(30)
    world.control.findings.sound(RUN, 1)
    settled(world)
    assert verify(tier, PATH) == made
    assert tier.list(f"{RUN}/{naming.STAGING}") == tier.list(f"{RUN}/{naming.TRASH}") == []


def test_a_run_is_not_renamed_before_its_replacement_was_read_back(world: SaverWorld) -> None:
    """What was replaced may have to come back, and does not go along."""
    rank = launch(world)
    world.saver.checks.close()
    replace(rank)
    world.control.record_queue.recorded(30)
    with pytest.raises(InUse, match=r"step 1 of .* was replaced"):
        world.control.renaming.rename(RUN, "other")
    world.control.findings.sound(RUN, 1)
    settled(world)
    world.control.renaming.rename(RUN, "other")
    assert roots.committed(world.control.store, "other") == [1]


def test_it_comes_back_where_its_replacement_is_damaged(world: SaverWorld, tier: FlippingTier) -> None:
    """What was verified is restored, and an event says so; it is read back again."""
    rank = launch(world)
    before = verify(tier, PATH)
    tier.flips = True
    replace(rank)
    settled(world)
    assert verify(tier, PATH) == before
    assert world.control.record_queue.recorded(30)
    listed = world.catalog.checkpoint(RUN, 1)
    assert (listed.created, listed.damage) == (before.created, None)
    world.control.rotation.close()
    told = [event.kind for event in world.control.events.after(0, 100) if event.level == "error"]
    assert told == ["checkpoint-damaged", "checkpoint-put-back"]


def test_it_comes_back_where_its_replacement_is_gone(world: SaverWorld, tier: FlippingTier) -> None:
    """Somebody removes by hand what has not been read back yet. What Holdfast removes is gone, with what it replaced."""
    rank = launch(world)
    before = verify(tier, PATH)
    world.saver.checks.close()
    replace(rank)
    tier.remove_tree(PATH)
    assert world.control.record_queue.recorded(30)
    world.control.rotation.apply(RUN)
    assert verify(tier, PATH) == before and not world.control.store.replaced(RUN)
    replace(rank)
    assert world.control.record_queue.recorded(30)
    world.control.rotation.remove(RUN, 1, newest=True)
    assert not tier.list(PATH) and not world.control.store.replaced(RUN)
    with pytest.raises(NoSuchCheckpoint):
        world.control.rotation.remove(RUN, 1)


def replaced_unread(world: SaverWorld) -> naming.Place:
    """Where the one is that was replaced by another, which is not read back."""
    rank = launch(world)
    world.saver.checks.close()
    replace(rank)
    assert world.control.record_queue.recorded(30)
    (aside,) = world.control.store.replaced(RUN)
    return aside


def test_one_that_lacks_a_file_does_not_come_back(world: SaverWorld, tier: FlippingTier) -> None:
    """It is no checkpoint; nor is it removed, since nothing else is left of the step."""
    aside = replaced_unread(world)
    tier.remove_file(f"{aside.path}/{naming.STATE}")
    tier.remove_tree(PATH)
    world.control.rotation.apply(RUN)
    assert world.control.store.replaced(RUN) == [aside] and not tier.list(PATH)


def test_it_does_not_come_back_while_its_replacement_is_read(world: SaverWorld, tier: FlippingTier) -> None:
    """What reads it may be mending it."""
    aside = replaced_unread(world)
    before = verify(tier, aside.path)
    with world.control.readers.reading(RUN, 1):
        tier.remove_tree(PATH)
        world.control.rotation.apply(RUN)
        assert world.control.store.replaced(RUN) == [aside] and not tier.list(PATH)
    world.control.rotation.apply(RUN)
    assert verify(tier, PATH) == before


def test_it_stays_while_the_catalog_describes_another_one(world: SaverWorld) -> None:
    """What was read back is the one before the one that stands there now."""
    aside = replaced_unread(world)
    world.control.rotation.replaced.began(RUN, 1)
    world.control.findings.sound(RUN, 1)
    world.control.rotation.apply(RUN)
    assert world.control.store.replaced(RUN) == [aside]
    world.control.rotation.replaced.listed(RUN, 1)
    world.control.rotation.apply(RUN)
    assert not world.control.store.replaced(RUN)


@pytest.mark.parametrize("replacement", ["sound", "gone"])
def test_a_node_that_may_decide_no_more_leaves_both(
    world: SaverWorld, tier: FlippingTier, replacement: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It stood still for too long: another node decides by now."""
    aside = replaced_unread(world)

    def refuse() -> None:
        raise CatalogUnavailable("the lock was lost")

    @contextmanager
    def lost(run: str, insists: bool) -> Iterator[Callable[[], None]]:
        yield refuse

    monkeypatch.setattr(world.control.rotation, "_elsewhere", lost)
    if replacement == "sound":
        world.control.findings.sound(RUN, 1)
    else:
        tier.remove_tree(PATH)
    with pytest.raises(CatalogUnavailable):
        world.control.rotation.apply(RUN)
    assert world.control.store.replaced(RUN) == [aside] and bool(tier.list(PATH)) == (replacement == "sound")
    monkeypatch.undo()


@pytest.mark.parametrize("damaged", ["replacement", "replaced"])
def test_a_start_after_a_crash_keeps_the_sound_one(
    tier: FlippingTier, monkeypatch: pytest.MonkeyPatch, damaged: str
) -> None:
    """The daemon dies right after the exchange, and one of the two has a flipped bit: the other one is what stands."""
    monkeypatch.setattr(replaced_checkpoints, "MEND_S", 0.05)
    with saver_world(tier) as world:
        rank = launch(world)
        world.saver.checks.close()
        replace(rank)
    aside = naming.Place(RUN, 1, 1).path
    tier.publish(naming.replaced_path(RUN, 1), aside)  # as an exchange leaves it
    sound, hurt = (PATH, aside)[damaged == "replacement"], (PATH, aside)[damaged == "replaced"]
    kept = verify(tier, sound)
    flip(tier, hurt)
    with saver_world(tier) as world:
        sweep(world.control.store)
        assert verify(tier, sound if sound == PATH else naming.replaced_path(RUN, 1)) == kept
        world.control.recovery.recover()
        assert world.control.record_queue.recorded(30)
        try:
            verify(tier, PATH)
        except Damaged as error:
            world.control.findings.damaged(RUN, 1, error)
        else:
            world.control.findings.sound(RUN, 1)
        settled(world)
        assert verify(tier, PATH) == kept
