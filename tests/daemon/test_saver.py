"""Rounds: complete ones are committed, incomplete ones leave nothing, whatever order ranks come, seal and go in."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from holdfast_formats import naming
from holdfast_formats.errors import (
    AlreadyCommitted,
    ArenaFull,
    CheckpointError,
    InvalidRequest,
    RoundAborted,
    StaleAttempt,
    StateMismatch,
)
from holdfast_service.daemon import saver as saver_module
from holdfast_service.storage import MemoryTier
from tests.daemon.saver_world import RUN, Rank, SaverWorld, content, saver_world

WORLD = 2


def test_a_complete_round_is_committed_and_told_to_every_rank() -> None:
    """Two ranks seal: both hear "committed", the step is sound, and their slots are free again."""
    with saver_world() as world:
        ranks = world.launch(WORLD)
        for step in range(1, 6):
            for rank in ranks:
                rank.save(step)
            assert {rank.wait(step).state for rank in ranks} == {"committed"}
        assert world.committed() == [1, 2, 3, 4, 5]


def test_a_rank_that_is_gone_ends_the_round_for_all() -> None:
    """One sealed, one dead: aborted by name, nothing staged, nothing visible; a late lease is told so once."""
    with saver_world() as world:
        first, second, third = world.launch(3)
        first.save(1)
        second.lease(1)
        second.leave()
        assert first.wait(1).problem["code"] == "round-aborted"
        with pytest.raises(RoundAborted):
            third.lease(1)
        assert world.committed() == [] and world.tier.list(f"{RUN}/{naming.STAGING}") == []


def test_what_all_had_sealed_is_saved_though_a_newer_attempt_has_begun() -> None:
    """The fence (I6) stops incomplete rounds and later leases of the old attempt, not what was complete."""
    with saver_world() as world:
        old = world.launch(WORLD)
        for rank in old:
            rank.save(1)
        old[0].save(2)
        new = world.launch(WORLD)
        world.saver.settle(RUN, 30)
        assert old[0].wait(2).problem["code"] == "stale-attempt"
        with pytest.raises(StaleAttempt):
            old[1].lease(3)
        assert world.committed() == [1]
        with pytest.raises(AlreadyCommitted):
            new[0].lease(1)


def test_slots_that_storage_has_not_taken_are_not_given_away() -> None:
    """With both slots sealed in incomplete rounds, a third lease is ArenaFull, not an overwritten slot."""
    with saver_world() as world:
        first, _ = world.launch(WORLD)
        first.save(1)
        first.save(2)
        with pytest.raises(ArenaFull):
            first.lease(3)


def test_a_slot_whose_table_was_changed_after_its_seal_is_refused() -> None:
    """The seal's digest must be the table's; a torn table aborts the round for everybody."""
    with saver_world() as world:
        first, second = world.launch(WORLD)
        first.save(1)
        slot = second.lease(1)
        with pytest.raises(InvalidRequest):
            world.saver.seal(second.who, slot, 1, "0" * 16)
        assert first.wait(1).state == "aborted"


def test_ranks_that_disagree_on_the_world_are_refused() -> None:
    """A rank that says the world has another size cannot join a round."""
    with saver_world() as world:
        first, _ = world.launch(WORLD)
        first.lease(1)
        stranger = Rank(world, 2, first.attempt, 3)
        with pytest.raises(StateMismatch, match="world"):
            stranger.lease(1)


def test_a_lease_that_is_not_sealed_in_time_expires(monkeypatch: pytest.MonkeyPatch) -> None:
    """After the deadline the round is aborted and names the ranks that were late; a late seal is refused."""
    monkeypatch.setattr(saver_module, "LEASE_DEADLINE_S", -1.0)
    with saver_world() as world:
        first, second = world.launch(WORLD)
        first.save(1)
        slot = second.lease(1)
        world.saver.expire()
        assert "ranks [1]" in first.wait(1).problem["detail"]
        with pytest.raises(RoundAborted):
            second.fill_and_seal(1, slot)


def test_retention_waits_for_verification() -> None:
    """With keep_last 1 the older step goes only after the newer was read back (I10)."""
    with saver_world(keep_last=1) as world:
        (rank,) = world.launch(1)
        for step in (1, 2, 3):
            rank.save(step)
            rank.wait(step)
        world.saver.close()
        assert world.committed() == [3]
        assert world.catalog.checkpoint(RUN, 3).verified
        world.saver = type(world.saver)(world.tier, world.decisions, "node")


class Rounds(RuleBasedStateMachine):
    """Drives a saver with the acts of two ranks and compares it with what a reader of the specification expects."""

    def __init__(self) -> None:
        super().__init__()
        self.world = SaverWorld(MemoryTier())
        self.ranks: list[Rank] = []
        self.leases: dict[tuple[int, int], int] = {}  # (rank, step) -> slot
        self.sealed: dict[int, set[int]] = {}  # step -> ranks, of this attempt
        self.aborted: set[int] = set()
        self.expected: set[int] = set()
        self.gone: set[int] = set()
        self.slots: dict[int, dict[int, int]] = {}  # step -> rank -> slot, of this attempt
        self.held: tuple[int, dict[int, int] | None] = (0, None)  # what must be held: step, and its slots if they are ours
        self.begin()

    def begin(self) -> None:
        self.ranks = self.world.launch(WORLD)
        self.held = self.held[0], None
        self.slots.clear()
        self.leases.clear()
        self.sealed.clear()
        self.aborted.clear()
        self.gone.clear()

    @rule(rank=st.integers(0, WORLD - 1), step=st.integers(1, 12))
    def lease(self, rank: int, step: int) -> None:
        """A lease is granted unless the step exists, the rank has it already, the round ended, or no slot is free."""
        if rank in self.gone:
            return
        self.world.saver.settle(RUN, 30)
        held = sum(1 for r, s in self.leases if r == rank) + sum(1 for s, r in self.sealed.items() if rank in r)
        try:
            slot = self.ranks[rank].lease(step)
        except CheckpointError as error:
            known = (step in self.expected, (rank, step) in self.leases, rank in self.sealed.get(step, ()), held >= 2)
            assert any(known) or step in self.aborted, error
        else:
            assert step not in self.expected and held < 2
            self.leases[rank, step] = slot
            self.slots.setdefault(step, {})[rank] = slot
            if self.held[1] is not None and self.held[1][rank] == slot:
                assert held == 1, "a held slot was leased before a free one"
                self.held = 0, None
            self.sealed.setdefault(step, set())

    @precondition(lambda self: self.leases)
    @rule(data=st.data())
    def seal(self, data: st.DataObject) -> None:
        """A seal of a held lease is taken; the last one of the world commits the step."""
        rank, step = data.draw(st.sampled_from(sorted(self.leases)))
        self.ranks[rank].fill_and_seal(step, self.leases.pop((rank, step)))
        self.sealed[step].add(rank)
        if len(self.sealed[step]) == WORLD:
            self.expected.add(step)
            del self.sealed[step]
            assert self.ranks[rank].wait(step).state == "committed"
            self.held = step, self.slots[step]

    @precondition(lambda self: not self.gone)
    @rule(rank=st.integers(0, WORLD - 1))
    def die(self, rank: int) -> None:
        """A rank dies: every round it had not sealed is over."""
        self.ranks[rank].leave()
        self.gone.add(rank)
        for step in [s for s, ranks in self.sealed.items() if rank not in ranks]:
            self._forget(step)

    @rule()
    def restart(self) -> None:
        """A new launch: every incomplete round of the old one is over."""
        for rank in self.ranks:
            if rank.rank not in self.gone:
                rank.leave()
        self.begin()

    def _forget(self, step: int) -> None:
        del self.sealed[step]
        self.aborted.add(step)
        for key in [k for k in self.leases if k[1] == step]:
            del self.leases[key]

    @invariant()
    def exactly_the_complete_steps_are_visible(self) -> None:
        """What every rank sealed is committed and sound byte for byte; nothing else is visible."""
        self.world.saver.settle(RUN, 30)
        assert set(self.world.committed()) == self.expected

    @invariant()
    def the_newest_commit_is_held_until_its_slots_are_needed(self) -> None:
        """Its bytes stand in the slots they came from, of every rank; once one of these is leased, nothing is held."""
        self.world.saver.settle(RUN, 30)
        step, _ = self.held
        found = {rank: data for rank, (_, data) in self.world.held(step).items()}
        assert found == ({rank: content(step, rank).tobytes() for rank in range(WORLD)} if step else {})

    def teardown(self) -> None:
        self.world.close()


TestRounds = Rounds.TestCase
TestRounds.settings = settings(max_examples=25, stateful_step_count=30, deadline=None)
