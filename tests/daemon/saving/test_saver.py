"""Rounds: complete ones are committed, incomplete ones leave nothing, whatever order ranks come, seal and go in."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Collection
from typing import get_args

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from holdfast_formats import naming
from holdfast_formats.errors import (
    AlreadyCommitted,
    ArenaFull,
    InvalidRequest,
    RoundAborted,
    StaleAttempt,
    StateMismatch,
)
from holdfast_formats.lineage import NO_INTENT, Intent
from holdfast_formats.staging.arena import SlotState
from holdfast_formats.staging.messages import Policy
from holdfast_service.daemon.saving import saver
from holdfast_service.storage import MemoryTier
from tests.daemon.saver_world import RUN, GatedTier, Rank, SaverWorld, content, refused, saver_world
from tests.daemons import wait_until

WORLD, SLOTS = 2, 3


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


@pytest.mark.parametrize("other", [False, True])
def test_a_rank_that_is_gone_is_named_with_another_step_that_it_began(other: bool) -> None:
    with saver_world() as world:
        first, second = world.launch(2)
        first.save(4)
        second.lease(5 if other else 4)
        second.leave()
        said = first.wait(4).problem["detail"]
        assert said.startswith("rank 1 disconnected before step 4 was complete")
        assert said.endswith("; the last step that it began to save was 5") == other


def lease_late(world: SaverWorld, rank: Rank) -> None:
    """Another one has died, and this one hears of it when it leases."""
    with pytest.raises(RoundAborted):
        rank.lease(1)


def seal_wrongly(world: SaverWorld, rank: Rank) -> None:
    """It says what its table does not, and ends the round itself."""
    with pytest.raises(InvalidRequest):
        world.saver.seal(rank.who, rank.lease(2), 2, "0" * 16)


@pytest.mark.parametrize("refuse", [lease_late, seal_wrongly])
def test_why_a_round_ended_keeps_no_memory(refuse: Callable[[SaverWorld, Rank], None]) -> None:
    """The reason is kept for those who come late; the memory of the rank that was told so goes when that rank does."""
    with saver_world() as world:
        ranks = world.launch(3)
        ranks[1].lease(1)
        ranks[1].leave()
        refuse(world, ranks[2])
        memory = weakref.ref(ranks[2].segment)
        ranks.pop().leave()

        def collected() -> bool:
            gc.collect()  # does nothing while another thread's collection goes on
            return memory() is None

        wait_until(collected)
        with pytest.raises(RoundAborted):
            ranks[0].lease(1)


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
    monkeypatch.setattr(saver, "LEASE_DEADLINE_S", -1.0)
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
        world.checked()
        assert world.control.rotation.wait_until_applied()
        assert world.committed() == [3]
        assert world.catalog.checkpoint(RUN, 3).verified


class Rounds(RuleBasedStateMachine):
    """Drives a saver with the acts of two ranks and compares it with what a reader of the specification expects.

    While the gate is shut, the first complete round is being written and those behind it wait.
    """

    def __init__(self) -> None:
        super().__init__()
        self.tier = GatedTier(MemoryTier())
        self.world = SaverWorld(self.tier)  # type: ignore[arg-type] - a tier by delegation
        self.expected: set[int] = set()  # committed
        self.drops = 0
        self.begin()

    def begin(self) -> None:
        self.ranks = self.world.launch(WORLD, SLOTS)
        self.open: dict[int, dict[int, int | None]] = {}  # step -> rank -> its lease, None once sealed
        self.queue: list[int] = []  # complete; the first one is being written
        self.given_up: dict[int, tuple[set[int], str]] = {}  # ranks that know, code
        self.gone: set[int] = set()
        self.intent = Intent(restored=max(self.expected)) if self.expected else NO_INTENT

    @rule(rank=st.integers(0, WORLD - 1), step=st.integers(1, 12), policy=st.sampled_from(get_args(Policy)))
    def lease(self, rank: int, step: int, policy: Policy) -> None:
        """A lease is granted or refused as stated, and where no slot is free the policy says what is dropped."""
        if rank in self.gone:
            return
        code, victim = self._expected_of_lease(rank, step, policy)
        error = refused(self._lease, rank, step, policy)
        assert (error.code if error else None) == code
        if victim is not None:
            self._give_up(victim, "generation-dropped", {rank} if victim == step else set())
        if code is None:
            self.open.setdefault(step, {})[rank] = self.granted

    def _lease(self, rank: int, step: int, policy: Policy) -> None:
        self.granted = self.ranks[rank].lease(step, policy, self.intent)

    def _expected_of_lease(self, rank: int, step: int, policy: Policy) -> tuple[str | None, int | None]:
        """The code of the refusal, if any, and the step that is dropped, if any."""
        known, code = self.given_up.get(step, (set(), ""))
        if code and rank not in known:
            known.add(rank)
            return code, None
        if step in self.expected:
            return "already-committed", None
        taken = [s for s, ranks in self.open.items() if rank in ranks]
        full = len(taken) + len(self.queue) == SLOTS
        if full and policy == "wait":
            return "arena-full", None
        if step in taken or step in self.queue:
            return "state-mismatch", None
        if not full:
            return None, None
        waiting = self.queue[1:]
        if policy == "oldest-durable" or not (waiting or taken):
            return "generation-dropped", step
        return None, waiting[0] if len(waiting) > 1 or not taken else taken[-1]

    @precondition(lambda self: any(slot is not None for ranks in self.open.values() for slot in ranks.values()))
    @rule(data=st.data())
    def seal(self, data: st.DataObject) -> None:
        """A seal of a held lease is taken; the last one of the world sets the round going."""
        leases = [(s, r) for s, ranks in self.open.items() for r, slot in ranks.items() if slot is not None]
        step, rank = data.draw(st.sampled_from(leases))
        self.ranks[rank].fill_and_seal(step, self.open[step][rank], self.intent)
        self.open[step][rank] = None
        if list(self.open[step].values()) != [None] * WORLD:
            return
        del self.open[step]
        self.queue.append(step)
        if not self.tier.gate.shut:
            self.drain()
        elif len(self.queue) == 1:
            self.tier.gate.wait_for(step)

    @precondition(lambda self: not self.tier.gate.shut)
    @rule()
    def shut(self) -> None:
        """From here on storage takes nothing."""
        self.tier.gate.swing(shut=True)

    @rule()
    def drain(self) -> None:
        """Storage goes on: every complete round is committed."""
        self.tier.gate.swing(shut=False)
        for step in self.queue:
            for rank in self.ranks:
                assert rank.rank in self.gone or rank.wait(step).state == "committed"
        self.expected |= set(self.queue)
        self.queue.clear()
        self.world.saver.settle(RUN, 30)

    @precondition(lambda self: not self.gone)
    @rule(rank=st.integers(0, WORLD - 1))
    def die(self, rank: int) -> None:
        """A rank dies: every round it had not sealed is over."""
        self.ranks[rank].leave()
        self.gone.add(rank)
        for step in [s for s, ranks in self.open.items() if ranks.get(rank, -1) is not None]:
            self._give_up(step, "round-aborted")

    @rule()
    def restart(self) -> None:
        """A new launch: every incomplete round of the old one is over."""
        self.drain()
        for rank in self.ranks:
            if rank.rank not in self.gone:
                rank.leave()
        self.begin()

    def _give_up(self, step: int, code: str, knowing: Collection[int] = ()) -> None:
        """Every rank of the round has heard why it ended; who is still filling a slot of it is refused."""
        held = self.open.pop(step, None)
        if held is None and step in self.queue:
            self.queue.remove(step)
            held = dict.fromkeys(range(WORLD))
        held = held or {}
        self.drops += code == "generation-dropped"
        self.given_up[step] = ({*held, *knowing}, code)
        for rank, slot in held.items():
            if rank in self.gone:
                continue
            assert self.ranks[rank].wait(step).problem["code"] == code
            del self.ranks[rank].outcomes[step]
            if slot is not None and self.ranks[rank].segment.state(slot) is SlotState.FREE:
                error = refused(self.ranks[rank].fill_and_seal, step, slot, self.intent)
                assert error is not None and error.code == code
                self.ranks[rank].segment.disown(slot)  # as the conversation does

    @invariant()
    def what_is_held_is_what_was_committed(self) -> None:
        """Whatever was leased, dropped or restarted: a held step's slots show its bytes, of every rank."""
        for step in self.expected:
            found = {rank: data for rank, (_, data) in self.world.held(step).items()}
            assert found in ({}, {rank: content(step, rank).tobytes() for rank in range(WORLD)})

    @invariant()
    def exactly_the_complete_steps_are_visible(self) -> None:
        """What every rank sealed and nobody dropped is committed and sound byte for byte; nothing else is visible."""
        assert set(self.world.committed()) == self.expected

    @invariant()
    def every_slot_and_every_round_is_accounted_for(self) -> None:
        """No slot stays taken by a round that is over, and the catalog knows how each of them ended."""
        for rank in self.ranks:
            if rank.rank not in self.gone:
                taken = sum(rank.rank in ranks for ranks in self.open.values()) + len(self.queue)
                assert rank.free_slots() == SLOTS - taken
        counts = self.world.catalog.rounds.counts()
        assert counts["open"] + counts["sealed"] == len(self.open) + len(self.queue)
        assert (counts["dropped"], counts["committed"]) == (self.drops, len(self.expected))

    def teardown(self) -> None:
        self.tier.gate.swing(shut=False)
        self.world.close()


TestRounds = Rounds.TestCase
TestRounds.settings = settings(stateful_step_count=40)
