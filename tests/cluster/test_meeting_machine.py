"""A stateful model of nodes that save one checkpoint: they arrive, seal, write, deliver, claim and commit in any order, die
at any call, lose answers of the catalog, and have clocks hours apart. I11 to I18 hold after every step.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule, run_state_machine_as_test
from sqlalchemy import select, update

from holdfast_formats import naming
from holdfast_formats.staging.plan import decode_receipt
from holdfast_service.control.database.cluster_schema import JointRoundRow, PartRow
from holdfast_service.daemon.checking.verifier import verify
from holdfast_service.daemon.saving.rounds import RoundKey
from holdfast_service.storage import MemoryTier, PosixStore
from holdfast_service.wings.cluster.membership import later
from holdfast_service.wings.cluster.round_bodies import unpack
from holdfast_service.wings.cluster.saving import awaited_nodes, joint_writing
from tests.cluster import meeting_nodes as meeting
from tests.cluster.meeting_nodes import CLOCK, RUN, MeetingNode, content
from tests.databases import Postgres
from tests.wings.cluster.nodes import Nodes

NAMES = "abcde"
STEPS = (1, 2, 3)
HEALING = 60  # steps of all nodes after which everything has ended
_postgres: list[Postgres] = []


class Meeting(RuleBasedStateMachine):
    """Two to five nodes, a rank each, that save three steps of one run."""

    def __init__(self) -> None:
        super().__init__()
        self.url = _postgres[0].take()
        self.nodes = Nodes(self.url)
        self.tier = MemoryTier()
        self.all: list[MeetingNode] = []
        self.attempt = 1
        self.stood: dict[int, dict[str, bytes]] = {}
        self.parts: dict[tuple[int, str], tuple[Any, ...]] = {}
        self.ended: dict[int, str] = {}
        self.unable: dict[int, str] = {}
        self.helpers: dict[int, str] = {}
        self.seen_by: dict[int, tuple[str, int]] = {}
        self.late: set[int] = set()  # rounds of older attempts that were open when a newer one began

    @initialize(world=st.integers(2, 5))
    def begin(self, world: int) -> None:
        CLOCK.seconds = 0.0
        self.all = [MeetingNode(self.nodes, self.tier, NAMES[rank], rank, world) for rank in range(world)]
        for node in self.all:
            node.control.launches.declare(RUN, "launch 1", world, None, node.rank, f"rank {node.rank}")

    @property
    def alive(self) -> list[MeetingNode]:
        return [node for node in self.all if node.up]

    def _one(self, number: int) -> MeetingNode:
        return self.all[number % len(self.all)]

    @rule(number=st.integers(0, 4), step=st.sampled_from(STEPS))
    def save(self, number: int, step: int) -> None:
        """One rank seals, and its node may meet the others at once."""
        node = self._one(number)
        key = RoundKey(RUN, step, self.attempt)
        if node.up and self._follows(node, key):
            node.save(key)
            node.step()

    @rule(step=st.sampled_from(STEPS))
    def save_all(self, step: int) -> None:
        """All ranks seal, as in most saves."""
        key = RoundKey(RUN, step, self.attempt)
        for node in self.alive:
            if self._follows(node, key):
                node.save(key)

    def _follows(self, node: MeetingNode, key: RoundKey) -> bool:
        """Ranks save the same: a rank tries a step once more only when it was told how its last try ended."""
        return key not in node.held

    @rule(number=st.integers(0, 4))
    def meet(self, number: int) -> None:
        node = self._one(number)
        if node.up:
            node.step()

    @rule(number=st.integers(0, 4))
    def write(self, number: int) -> None:
        node = self._one(number)
        if node.up:
            node.write()

    @rule()
    def go_on(self) -> None:
        """All nodes meet and write once."""
        for node in self.alive:
            node.step()
            if node.up:
                node.write()

    @rule(times=st.integers(2, 6))
    def go_on_for_long(self, times: int) -> None:
        for _ in range(times):
            self.go_on()

    @rule(number=st.integers(0, 4), step=st.sampled_from(STEPS))
    def drop(self, number: int, step: int) -> None:
        self._one(number).give_up(RoundKey(RUN, step, self.attempt))

    @rule(
        number=st.integers(0, 4),
        fate=st.sampled_from(["dies before", "dies after", "no answer", "answer lost"]),
        left=st.integers(0, 12),
    )
    def doom(self, number: int, fate: meeting.Fate, left: int) -> None:
        """At one of its next calls."""
        self._one(number).doom.set(fate, left)

    @rule(number=st.integers(0, 4))
    def disk_fills(self, number: int) -> None:
        """The node cannot write from now on, or can again."""
        disk = self._one(number).disk
        disk.broken = not disk.broken

    @precondition(lambda self: any(not node.up for node in self.all))
    @rule()
    def start_again(self) -> None:
        for node in self.all:
            if not node.up:
                node.start()

    @rule(number=st.integers(0, 4))
    def loses_its_lease(self, number: int) -> None:
        """It stood still for long; if it lives, it joins anew."""
        node = self._one(number)
        self.nodes.lapse(node.cluster)
        if node.up:
            node.cluster.membership.beat()

    @rule()
    def claims_end(self) -> None:
        """Who has claimed takes longer than a claim lasts: another one may commit beside it."""
        with self.all[0].cluster.database.write() as session:
            session.execute(update(JointRoundRow).values(claimed_until=later(-1)))

    @rule(seconds=st.sampled_from([3.0, 30.0, 100.0]))
    def time_passes(self, seconds: float) -> None:
        CLOCK.seconds += seconds

    @precondition(lambda self: self.attempt < 3 and len(self.alive) == len(self.all))
    @rule()
    def a_new_launch(self) -> None:
        """Its ranks are other processes: what those before had sealed and nobody wrote is gone."""
        for node in self.all:
            node.doom.fate = None
            for key in [key for key in node.held if key in node._open]:
                node.give_up(key)
        with self.all[0].cluster.database.read() as session:
            going = select(JointRoundRow.id).where(JointRoundRow.state == "open")
            self.late |= set(session.scalars(going))
        self.attempt += 1
        for node in self.all:
            world = len(self.all)
            found = node.control.launches.declare(
                RUN, f"launch {self.attempt}", world, None, node.rank, f"{self.attempt}.{node.rank}", True
            )
            assert found == self.attempt

    @invariant()
    def a_checkpoint_is_that_of_one_round(self) -> None:
        """At most one a step, whole, and of one try of all ranks; what stands stays as it is (I1, I4, I12, I13)."""
        steps = PosixStore(self.tier).steps(RUN)
        assert set(self.stood) <= set(steps)
        for step in steps:
            path = naming.checkpoint_path(RUN, step)
            found = {name: self.tier.read(f"{path}/{name}") for name in self.tier.list(path)}
            if step in self.stood:
                assert found == self.stood[step]
                continue
            made = verify(self.tier, path)
            tries = {content(RoundKey(RUN, step, made.attempt), number) for number in range(1, 80)}
            values = {
                value
                for tensor in made.tensors["model"].values()
                for value in np.unique(
                    np.frombuffer(self.tier.read(f"{path}/{tensor.file}", tensor.start, tensor.nbytes), "u1")
                )
            }
            assert len(values) == 1 and values <= tries, (step, values)
            self.stood[step] = found

    @invariant()
    def rounds_go_one_way(self) -> None:
        """What was sealed does not change, nor how a round ended; a receipt stands (I12, I13)."""
        if not self.all:
            return
        with self.all[0].cluster.database.read() as session:
            rounds = {row.id: row for row in session.scalars(select(JointRoundRow))}
            for number, row in rounds.items():
                assert row.state == self.ended.get(number, row.state), (number, row.state, self.ended[number])
                if row.state in ("committed", "aborted"):
                    self.ended[number] = row.state
                assert number not in self.late or row.state in ("open", "aborted")
            for part in session.scalars(select(PartRow)):
                of = rounds[part.round_id]
                if of.state not in ("sealed", "committing"):
                    continue
                self._is_of_one_writer(of, part)
                now = (tuple(part.ranks), part.declaration, part.said)
                kept = self.parts.setdefault((part.round_id, part.node), (*now, None))
                assert now == kept[:3] and kept[3] in (None, part.receipt)
                self.parts[part.round_id, part.node] = (*now, part.receipt)

    def _is_of_one_writer(self, of: JointRoundRow, part: PartRow) -> None:
        """What its node could not write, only the helper has written; and a helper stays the one (I11)."""
        if part.receipt is not None:
            writer = decode_receipt(unpack(part.receipt)).node
            assert writer == (of.helper if part.node == of.unable else part.node), (of.id, part.node, writer)
        if of.unable is not None:
            assert self.unable.setdefault(of.id, of.unable) == of.unable
        if of.helper is not None:
            assert self.helpers.setdefault(of.id, of.helper) == of.helper

    @invariant()
    def what_ranks_hear_is_so(self) -> None:
        """Who was told that a save is committed finds it."""
        for node in self.all:
            for told in node.told:
                assert told.error is not None or told.key.step in self.stood, told

    @invariant()
    def garbage_is_told_from_what_lives(self) -> None:
        """What is staged names its round, and what a going round has staged is there (I11, I16)."""
        if not self.all:
            return
        staged = {name: naming.parse_staging_directory(name) for name in self.tier.list(f"{RUN}/{naming.STAGING}")}
        assert all(found is not None and found.round_id for found in staged.values()), staged

    def teardown(self) -> None:
        """All nodes come back, nothing fails any more: every save ends, for all ranks alike."""
        try:
            if self.all:
                self._heal()
        finally:
            for node in self.alive:
                node.die()
            self.nodes.close()
            _postgres[0].give_back(self.url)

    def _heal(self) -> None:
        for _ in range(HEALING):
            for node in self.all:
                node.doom.fate, node.disk.broken = None, False
                if not node.up:
                    node.start()
                node.cluster.membership.beat()
            for node in self.all:
                node.step()
                node.write()
            CLOCK.seconds += 3
            if not any(node.held or node.joint.busy for node in self.all):
                break
            waiting = {key for node in self.all for key in node.held if self._lacks_ranks(key)}
            for node in self.all:
                for key in waiting & node.held.keys():
                    node.give_up(key)
        self.a_checkpoint_is_that_of_one_round()
        self.rounds_go_one_way()
        self.what_ranks_hear_is_so()
        assert not any(node.held for node in self.all), [(node.name, node.held.keys()) for node in self.all]
        self._all_have_heard_the_same()

    def _lacks_ranks(self, key: RoundKey) -> bool:
        return any(key not in node.held for node in self.all)

    def _all_have_heard_the_same(self) -> None:
        """Of each try of a save all ranks hear that it is committed, or all of them that it is not."""
        heard: dict[tuple[RoundKey, int], set[bool]] = defaultdict(set)
        for node in self.all:
            for told in node.told:
                heard[told.key, told.number].add(told.error is None)
        for which, ends in heard.items():
            assert len(ends) == 1, (which, [node.told for node in self.all])


def _examine(postgres: Postgres, count: int, steps: int) -> None:
    patch = pytest.MonkeyPatch()
    meeting.still(patch)
    patch.setattr(joint_writing, "PEER_PATIENCE_S", 0.0)
    patch.setattr(joint_writing, "AWAY_S", 0.0)
    patch.setattr(awaited_nodes, "DEAD_S", 20.0)
    _postgres[:] = [postgres]
    quiet = [HealthCheck.too_slow, HealthCheck.filter_too_much, HealthCheck.data_too_large]
    chosen = settings(max_examples=count, stateful_step_count=steps, suppress_health_check=quiet, deadline=None)
    try:
        run_state_machine_as_test(
            Meeting,
            settings=chosen,
        )
    finally:
        patch.undo()


def test_a_few_meetings(postgres: Postgres) -> None:
    """Short ones."""
    _examine(postgres, 4, 20)


@pytest.mark.cluster
@pytest.mark.cluster_slow
def test_many_meetings(postgres: Postgres, request: pytest.FixtureRequest) -> None:
    """At length: five for each round of the lane."""
    _examine(postgres, 5 * int(request.config.getoption("--cluster-rounds")), 60)
