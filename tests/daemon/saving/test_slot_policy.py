"""Back-pressure: which save gives way where storage is slower than the saves, and that every rank hears of it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from holdfast_formats.errors import ArenaFull, GenerationDropped, RoundAborted, StateMismatch
from holdfast_formats.staging.arena import geometry
from holdfast_formats.staging.messages import Policy, SlotRequest
from holdfast_formats.staging.slot_table import SlotTable
from holdfast_service.daemon.arena.segment import SealedSlot
from holdfast_service.daemon.saving.active_saves import ActiveSaves
from holdfast_service.daemon.saving.rounds import RoundKey, SaveRound
from holdfast_service.daemon.saving.slot_policy import gives_way
from holdfast_service.storage import MemoryTier
from tests.daemon.saver_world import RUN, GatedTier, Rank, SaverWorld, refused, saver_world

WORLD = 2


@pytest.fixture
def busy() -> Iterator[tuple[SaverWorld, list[Rank]]]:
    """Two ranks of two slots; step 1 is being written and does not get on, step 2 waits."""
    tier = GatedTier(MemoryTier())
    with saver_world(tier) as world:  # type: ignore[arg-type] - a tier by delegation
        ranks = world.launch(WORLD)
        tier.gate.swing(shut=True)
        for step in (1, 2):
            for rank in ranks:
                rank.save(step)
        tier.gate.wait_for(1)
        yield world, ranks
        tier.gate.swing(shut=False)


def ended(world: SaverWorld) -> dict[int, tuple[str, str | None]]:
    """How each round of the catalog stands, once everything is saved."""
    world.tier.gate.swing(shut=False)  # type: ignore[attr-defined]
    assert world.saver.settle(RUN, 30)
    return {found.step: (found.state, found.code) for found in world.catalog.rounds.page().items}


@pytest.mark.parametrize(
    ("complete", "incomplete", "dropped"),
    [
        ([], [], None),
        ([2], [], 2),
        ([2, 3], [], 2),
        ([2, 3, 4], [5], 2),
        ([2], [3], 3),
        ([2], [3, 4], 4),
        ([], [3, 4], 4),
    ],
)
def test_what_gives_way(complete: list[int], incomplete: list[int], dropped: int | None) -> None:
    """Under newest-wins the newest complete one goes last, and of the incomplete the oldest; else the new save goes."""
    assert gives_way("newest-wins", complete, incomplete) == dropped
    assert gives_way("oldest-durable", complete, incomplete) is None


def test_a_save_that_cannot_become_complete_drops_no_other(busy: tuple[SaverWorld, list[Rank]]) -> None:
    """A rank has ended, and another one saves on: what all had sealed is committed and gives no slot away."""
    world, ranks = busy
    ranks[1].who.part()
    world.saver.gone(ranks[1].who)
    assert isinstance(refused(lambda: ranks[0].lease(3, "newest-wins")), GenerationDropped)
    assert ended(world) == {1: ("committed", None), 2: ("committed", None), 3: ("dropped", "generation-dropped")}
    assert world.committed() == [1, 2]


def test_newest_wins_drops_what_waits_and_tells_every_rank(busy: tuple[SaverWorld, list[Rank]]) -> None:
    """Step 2 ends for both ranks with the first lease of step 3; what is being written and the newest are committed."""
    world, ranks = busy
    slots = [rank.lease(3, "newest-wins") for rank in ranks]
    for rank, slot in zip(ranks, slots, strict=True):
        assert rank.outcomes[2].problem["code"] == "generation-dropped"
        assert "was dropped for step 3" in rank.outcomes[2].problem["detail"]
        rank.fill_and_seal(3, slot)
    assert ended(world) == {1: ("committed", None), 2: ("dropped", "generation-dropped"), 3: ("committed", None)}
    assert world.committed() == [1, 3]
    assert world.catalog.rounds.counts()["dropped"] == 1


def test_oldest_durable_drops_the_new_save_for_every_rank(busy: tuple[SaverWorld, list[Rank]]) -> None:
    """The first rank is refused at once, one that comes later as well; what waits is committed."""
    world, ranks = busy
    for rank in ranks:
        with pytest.raises(GenerationDropped, match="those before it"):
            rank.lease(3, "oldest-durable")
    assert ended(world) == {1: ("committed", None), 2: ("committed", None), 3: ("dropped", "generation-dropped")}


def test_a_drop_names_what_is_waited_for(busy: tuple[SaverWorld, list[Rank]]) -> None:
    """A slow storage, or ranks that have not sealed: then no faster storage is asked for."""
    world, ranks = busy
    for rank in ranks:
        with pytest.raises(GenerationDropped, match="storage is slower") as slow:
            rank.lease(3, "oldest-durable")
    assert "faster storage" in slow.value.hint
    ended(world)
    with saver_world() as other:
        first, _ = other.launch(WORLD, slots=1)
        first.save(1)
        with pytest.raises(GenerationDropped, match="step 1 is waiting for the part of rank 1, not sealed yet") as late:
            first.lease(2, "oldest-durable")
        assert "storage" not in late.value.detail + late.value.hint


def test_a_drop_names_other_nodes_and_the_catalog() -> None:
    """Where this node's ranks have sealed, the others are waited for, or, while they cannot be met, PostgreSQL."""
    asked = geometry(1, 4096, 4096)
    with saver_world() as world:
        segment = world.arena.reserve(asked, "r")
        going = ActiveSaves(jointly=True)
        waits = SaveRound(RoundKey("r", 1, 1), 1, 2, 0.0)
        waits.sealed[0] = SealedSlot(segment, 0, SlotTable("r", 1, 1, 0, 2, (), (), {}, {}), memoryview(b""))
        with going.lock:
            going.open[waits.key] = waits
            assert "step 1 is waiting for other nodes" in going.awaited(segment).why
        going.renew()
        with going.lock:
            found = going.awaited(segment)
        assert "is waiting for the catalog" in found.why and "PostgreSQL" in found.hint


def test_what_is_being_written_is_never_dropped() -> None:
    """With one slot the new save goes, whatever the policy."""
    tier = GatedTier(MemoryTier())
    with saver_world(tier) as world:  # type: ignore[arg-type] - a tier by delegation
        (rank,) = world.launch(1, slots=1)
        tier.gate.swing(shut=True)
        rank.save(1)
        tier.gate.wait_for(1)
        for step, policy in ((2, "newest-wins"), (3, "oldest-durable")):
            with pytest.raises(GenerationDropped):
                rank.lease(step, policy)  # type: ignore[arg-type]
        tier.gate.swing(shut=False)
        assert rank.wait(1).state == "committed"
        assert ended(world)[2][0] == ended(world)[3][0] == "dropped"


def test_a_rank_that_joined_a_step_hears_that_another_had_no_slot_for_it(busy: tuple[SaverWorld, list[Rank]]) -> None:
    """The drop of a new save is one decision for the world, also for ranks that hold a slot of it already."""
    world, (first, second) = busy
    third_slot = world.arena.reserve(first.segment.geometry, "larger")  # the first rank has been given more memory
    world.saver.lease(first.who, third_slot, SlotRequest(step=3, policy="oldest-durable"), 0)
    with pytest.raises(GenerationDropped):
        second.lease(3, "oldest-durable")
    assert first.wait(3).problem["code"] == "generation-dropped"
    assert ended(world)[3] == ("dropped", "generation-dropped")


def test_a_late_seal_of_a_dropped_step_changes_nothing(busy: tuple[SaverWorld, list[Rank]]) -> None:
    """A rank that was still copying is told why, and its slot goes to its next save."""
    _, (first, second) = busy
    first.lease(3, "newest-wins")
    slot = second.lease(3, "newest-wins")
    first.lease(4, "newest-wins")
    error = refused(second.fill_and_seal, 3, slot)
    assert isinstance(error, GenerationDropped)
    second.segment.disown(slot)
    assert second.lease(4, "newest-wins") == slot
    assert second.outcomes[3].problem["code"] == "generation-dropped"


@pytest.mark.parametrize("policy", ["newest-wins", "oldest-durable"])
def test_a_step_is_not_saved_twice_at_a_time(busy: tuple[SaverWorld, list[Rank]], policy: Policy) -> None:
    """A step that waits or is being written is refused by name before anything is dropped for it."""
    world, (first, _) = busy
    for step in (1, 2):
        with pytest.raises(StateMismatch, match="already saving"):
            first.lease(step, policy)
    assert ended(world) == {1: ("committed", None), 2: ("committed", None)}


def test_a_lease_that_found_no_slot_leaves_no_open_round(busy: tuple[SaverWorld, list[Rank]]) -> None:
    """Under wait the round that was begun for it ends in the catalog, with the reason; ranks that hold a part go on."""
    world, (first, _) = busy
    with pytest.raises(ArenaFull):
        first.lease(3)
    assert ended(world)[3] == ("aborted", "arena-full")


def test_a_rank_that_is_back_hears_that_its_step_was_dropped(busy: tuple[SaverWorld, list[Rank]]) -> None:
    """The outcome may have been lost with a connection: who awaits the step is told again, by the same name."""
    _, (first, second) = busy
    first.lease(3, "newest-wins")
    del second.outcomes[2]
    world = second.world
    world.saver.take_over(second.who, {2: 0, 77: 0})
    assert second.wait(2).problem["code"] == "generation-dropped"
    assert second.wait(77).problem["code"] == RoundAborted.code
