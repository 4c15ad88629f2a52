"""adoption: what a daemon makes of each state in which an earlier one left a segment."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Iterator, Sequence

import pytest

from holdfast.link import unattended
from holdfast_formats import naming
from holdfast_formats.digest import digest
from holdfast_formats.region import Box
from holdfast_formats.staging import arena, slot_table
from holdfast_formats.staging.arena import SegmentOwner, SlotHeader, SlotState
from holdfast_formats.staging.messages import SlotRequest
from holdfast_formats.staging.slot_table import SlotTable
from holdfast_formats.staging.wire import Outcome
from holdfast_formats.tensors import StagedFragment, TensorSpec
from holdfast_service.control.catalog.catalog import Catalog
from holdfast_service.control.control import Control
from holdfast_service.daemon.arena.arena import Arena
from holdfast_service.daemon.arena.budget import Budget
from holdfast_service.daemon.arena.segment import ArenaSegment
from holdfast_service.daemon.checking.verifier import verify
from holdfast_service.daemon.saving.adoption import RETURN_S, Adoption
from holdfast_service.daemon.saving.rounds import Participant
from holdfast_service.daemon.saving.saver import Saver
from holdfast_service.storage import MemoryTier, stored_in
from tests.daemon.memory_keeper import MemoryKeeper
from tests.daemon.saver_world import RUN, SIZE, content
from tests.daemons import wait_until
from tests.databases import sqlite_url
from tests.in_memory import memory

GEOMETRY = arena.geometry(2, SIZE, 4096)


def fill(segment: ArenaSegment, slot: int, step: int, seal: bool = True) -> None:
    """What a rank does to a slot that it has leased."""
    owner = segment.owner
    assert owner is not None
    lease = SlotHeader(SlotState.LEASED, step, owner.attempt, 0, 0, 0)
    arena.write_header(segment.memory, GEOMETRY, slot, lease)
    start = GEOMETRY.data_offset(slot)
    segment.memory[start : start + SIZE] = content(step, owner.rank).data
    spec = TensorSpec("model", "w", "U8", (owner.world, SIZE))
    held = (StagedFragment(spec, (Box((owner.rank, 0), (1, SIZE)),), 0),)
    encoded = slot_table.encode(SlotTable(RUN, step, owner.attempt, owner.rank, owner.world, ("model",), held, {}, {}))
    at = GEOMETRY.table_offset(slot)
    segment.memory[at : at + len(encoded)] = encoded
    if seal:
        sizes = {"data_bytes": SIZE, "table_bytes": len(encoded)}
        arena.seal(segment.memory, GEOMETRY, slot, lease._replace(**sizes), digest(encoded))


class Node:
    """A root whose daemons come and go: `start` is the next one, over what the last one left."""

    def __init__(self) -> None:
        self.tier, self.keeper = MemoryTier(), MemoryKeeper()
        # A question may still be asked when it goes.
        self._directory = tempfile.TemporaryDirectory(dir=memory(), ignore_cleanup_errors=True)
        self.catalog = Catalog.open(sqlite_url(f"{self._directory.name}/catalog.sqlite"))
        self.control = Control(stored_in(self.tier), self.catalog, None)
        self.saver: Saver | None = None
        self._dead: list[Saver] = []
        self._attached: list[tuple[Participant, ArenaSegment]] = []
        self.told: list[Outcome] = []

    def ranks(self, world: int, launch: str = "x") -> list[ArenaSegment]:
        """The segments of a launch, made by a daemon that has died since."""
        attempt = self.control.launches.declare(RUN, launch, world, None)
        before = Arena(Budget(2**30), self.keeper)
        return [before.reserve(GEOMETRY, "test", SegmentOwner(RUN, rank, world, attempt)) for rank in range(world)]

    def start(self) -> Saver:
        """The next daemon: it has taken up what there is, and listens to nobody yet."""
        self.arena = Arena(Budget(2**30), self.keeper)
        self._dead += [self.saver] if self.saver is not None else []
        self.saver = Saver(self.tier, self.control, "node")
        self.adoption = Adoption(self.arena, self.saver, self.control)
        self.control.recovery.recover(self.adoption.start)
        return self.saver

    def give_up(self) -> None:
        """The ranks that have not come back never will."""
        self.adoption.close()

    def back(self, segment: ArenaSegment, awaited: Sequence[int], turn: int = 0) -> Participant:
        """A rank comes back with the segment that it had all the while; its saves are of this turn."""
        owner = segment.owner
        assert owner is not None
        attempt = self.control.launches.declare(RUN, "x", owner.world, None)
        who = Participant(RUN, owner.rank, owner.world, attempt, self.told.append)
        assert self.saver is not None
        self.saver.join(who)
        found, taken = self.arena.attach(segment.fd, owner)
        refused = self.adoption.take_up(found, taken, who).refused
        self.saver.take_over(who, dict.fromkeys(awaited, turn), refused)
        self.adoption.back(who, found)
        self._attached.append((who, found))
        return who

    def committed(self) -> list[int]:
        """The steps that are checkpoints, each verified."""
        steps = []
        for name in self.tier.list(f"{RUN}/{naming.CHECKPOINTS}"):
            step = naming.parse_step_directory(name)
            assert step is not None
            verify(self.tier, naming.checkpoint_path(RUN, step))
            steps.append(step)
        return steps

    def close(self) -> None:
        if self.saver is not None:
            self.give_up()
            for who, segment in self._attached:
                self.saver.gone(who)
                self.arena.drop(segment)
            self.saver.close()
            wait_until(lambda: self.keeper.kept == {})
            assert self.arena.bytes == 0
        for saver in self._dead:
            saver.close()  # their threads live, and would look for the catalog without a pause
        self.control.close()
        self.catalog.close()
        self._directory.cleanup()


@pytest.fixture
def node() -> Iterator[Node]:
    """A node; at its end nothing may be kept any more."""
    node = Node()
    yield node
    node.close()


def test_what_all_ranks_had_sealed_is_saved(node: Node) -> None:
    """No rank comes back, no message was ever processed: the slots alone suffice, for several steps."""
    segments = node.ranks(2)
    for segment in segments:
        fill(segment, 0, 5)
        fill(segment, 1, 6)
    saver = node.start()
    saver.settle(RUN, 30)
    assert node.committed() == [5, 6]
    assert [segment.state(slot) for segment in segments for slot in (0, 1)] == [SlotState.FREE] * 4


def test_a_step_that_is_committed_is_not_committed_again(node: Node) -> None:
    """The daemon died between commit and release: the slots are released, and the rank hears that it is committed."""
    (segment,) = node.ranks(1)
    fill(segment, 0, 5)
    node.start().settle(RUN, 30)
    made = node.tier.read(f"{naming.checkpoint_path(RUN, 5)}/{naming.COMMIT}")
    fill(segment, 0, 5)
    node.start()
    assert segment.state(0) is SlotState.FREE
    node.back(segment, [5])
    assert [(told.step, told.state) for told in node.told] == [(5, "committed")]
    assert node.tier.read(f"{naming.checkpoint_path(RUN, 5)}/{naming.COMMIT}") == made


def test_what_was_to_be_replaced_is_not_what_replaces_it(node: Node) -> None:
    """A rank saves a step again, in the place of its own, and the daemon loses what it leased: the old one stands, and
    the rank is not told that the new one is committed.
    """
    (segment,) = node.ranks(1)
    fill(segment, 0, 5)
    node.start().settle(RUN, 30)
    node.start()
    node.back(segment, [5], turn=1)
    assert [(told.step, told.state) for told in node.told] == [(5, "aborted")]
    assert node.committed() == [5]


@pytest.mark.parametrize("harm", ["table", "seal", "header", "attempt"])
def test_a_torn_slot_is_freed(node: Node, harm: str) -> None:
    """A table, seal word or header that is not what was sealed, or of another attempt: no checkpoint, and a free slot."""
    (segment,) = node.ranks(1)
    fill(segment, 0, 5)
    if harm == "table":
        segment.memory[GEOMETRY.table_offset(0)] ^= 1
    elif harm == "attempt":
        header = arena.read_header(segment.memory, GEOMETRY, 0)
        arena.write_header(segment.memory, GEOMETRY, 0, header._replace(attempt=99))
    else:
        segment.memory[GEOMETRY.header_offset(0) + (arena._SEAL_OFFSET if harm == "seal" else 0)] ^= 1
    node.start().settle(RUN, 30)
    assert node.committed() == [] and segment.state(0) is SlotState.FREE


def test_an_incomplete_round_waits_for_its_ranks(node: Node) -> None:
    """Rank 0 had sealed, rank 1 was copying: both come back, rank 1 seals, the step is committed and both hear of it."""
    first, second = node.ranks(2)
    fill(first, 0, 5)
    fill(second, 1, 5, seal=False)
    saver = node.start()
    assert saver.busy and node.committed() == []
    node.back(first, [5])
    who = node.back(second, [5])
    fill(second, 1, 5)
    proof = f"{arena.read_header(second.memory, GEOMETRY, 1).seal:016x}"
    saver.seal(who, 1, 5, proof)
    saver.seal(who, 1, 5, proof)  # the answer to the first one was lost
    saver.settle(RUN, 30)
    wait_until(lambda: len(node.told) == 2)
    assert node.committed() == [5] and {told.state for told in node.told} == {"committed"}
    saver.seal(who, 1, 5, proof)  # and so was the answer to the second


def test_a_rank_that_sealed_and_died_unheard_counts(node: Node) -> None:
    """Adopted as leased, sealed in shared memory after that, and its rank never came back: it was sealed."""
    (segment,) = node.ranks(1)
    fill(segment, 0, 5, seal=False)
    saver = node.start()
    fill(segment, 0, 5)
    node.give_up()
    saver.settle(RUN, 30)
    assert node.committed() == [5]


def test_ranks_that_do_not_come_back_end_their_rounds(node: Node) -> None:
    """The one that came back hears that the step is aborted; nothing of it is visible."""
    first, second = node.ranks(2)
    fill(first, 0, 5)
    fill(second, 0, 5, seal=False)
    saver = node.start()
    node.back(first, [5])
    node.give_up()
    assert [(told.step, told.state) for told in node.told] == [(5, "aborted")]
    assert not saver.busy and node.committed() == [] and first.state(0) is SlotState.FREE


def test_a_lease_that_the_rank_never_heard_of_is_given_back(node: Node) -> None:
    """The daemon died between lease and answer: the rank may lease for the same step again."""
    (segment,) = node.ranks(1)
    fill(segment, 0, 5, seal=False)
    saver = node.start()
    who = node.back(segment, [])
    assert node.told == []
    found, taken = node.arena.attach(segment.fd, who.owner)
    assert not taken and saver.lease(who, found, SlotRequest(step=5), 0) == 0


def test_a_rank_without_its_slot_ends_the_round(node: Node) -> None:
    """It awaits a step of which the next daemon has nothing: it is told so, and the others do not wait for it."""
    first, second = node.ranks(2)
    fill(second, 0, 5)
    node.start()
    node.back(first, [5, 6])
    assert [(told.step, told.state) for told in node.told] == [(5, "aborted"), (6, "aborted")]
    assert second.state(0) is SlotState.FREE


def test_memory_of_an_older_attempt_is_saved_only_if_it_was_taken(node: Node) -> None:
    """A round that the last daemon had taken over completely goes on; one that it had not is fenced off (I6)."""
    taken, sealed = node.ranks(1)[0], None
    fill(taken, 0, 5)
    round_id = node.control.saves.begin(RUN, 5, 1, 1)
    node.control.rounds.seal(round_id, 1)
    fill(taken, 1, 6)
    node.control.launches.declare(RUN, "newer", 1, None)
    node.start().settle(RUN, 30)
    assert node.committed() == [5] and sealed is None
    assert taken.state(1) is SlotState.FREE


def test_a_rank_brings_memory_that_nobody_kept(node: Node) -> None:
    """With no holder the rank's own descriptor is enough; a stranger's, or one that could shrink, is refused."""
    (segment,) = node.ranks(1)
    fill(segment, 0, 5)
    for name in list(node.keeper.kept):
        node.keeper.drop(name)
    saver = node.start()
    node.back(segment, [5])
    saver.settle(RUN, 30)
    wait_until(lambda: bool(node.told))
    assert node.committed() == [5] and node.told[0].state == "committed"
    found, _ = node.arena.attach(segment.fd, SegmentOwner(RUN, 0, 1, 1))
    with pytest.raises(Exception, match="attached a segment of"):
        node.arena.attach(segment.fd, SegmentOwner(RUN, 0, 1, 2))
    loose = os.memfd_create("loose")
    os.pwrite(loose, bytes(segment.memory), 0)
    with pytest.raises(Exception, match="not a staging arena"):
        node.arena.attach(loose, SegmentOwner(RUN, 0, 1, 1))
    os.close(loose)
    node.arena.drop(found)


@pytest.mark.parametrize("sealed", [True, False])
def test_a_slot_that_its_rank_took_while_nobody_served_it(node: Node, sealed: bool) -> None:
    """All slots were free when the next daemon found them, then the rank took one: it is saved once the rank is back."""
    (segment,) = node.ranks(1)
    saver = node.start()
    assert unattended.take_slot(segment.fd, 5, 1) == 0
    fill(segment, 0, 5, seal=sealed)
    who = node.back(segment, [5])
    if not sealed:
        fill(segment, 0, 5)
        header = arena.read_header(segment.memory, GEOMETRY, 0)
        saver.seal(who, 0, 5, f"{header.seal:016x}")
    saver.settle(RUN, 30)
    assert node.committed() == [5]
    assert {(told.step, told.state) for told in node.told} == {(5, "committed")}  # twice, if it was saved meanwhile


def test_a_step_that_a_rank_took_a_slot_for_and_may_not_save(node: Node) -> None:
    """It is told why, as it would have been by a daemon at once, and the slot is free again."""
    (segment,) = node.ranks(1)
    fill(segment, 0, 5)
    node.start().settle(RUN, 30)
    assert unattended.take_slot(segment.fd, 5, 1) == 0, "the only slot with memory"
    fill(segment, 0, 5)
    node.back(segment, [5], turn=7)
    assert [told.problem["code"] for told in node.told if told.problem] == ["already-committed"]
    assert segment.state(0) is SlotState.FREE


@pytest.mark.parametrize("first_back", [0, 1])
def test_a_step_that_one_rank_had_no_slot_for(node: Node, first_back: int) -> None:
    """While no daemon was there one rank took a slot and sealed it, and the other dropped the step: nobody waits for it."""
    segments = node.ranks(2)
    saver = node.start()
    assert unattended.take_slot(segments[0].fd, 5, 1) == 0
    fill(segments[0], 0, 5)
    for rank in (first_back, 1 - first_back):
        who = node.back(segments[rank], [5] if rank == 0 else [])
        if rank == 1:
            saver.give_up(who, 5, unattended.dropped(5, "newest-wins"))
    assert [(told.step, told.problem and told.problem["code"]) for told in node.told] == [(5, "generation-dropped")]
    assert segments[0].state(0) is SlotState.FREE


def rounds(node: Node) -> list[tuple[int, str, str | None]]:
    return [(found.step, found.state, found.detail) for found in node.catalog.rounds.page().items]


def lost(node: Node) -> list[tuple[int | None, str]]:
    """The steps of which it was said that they are lost, and the level."""
    assert node.control.record_queue.recorded(60)
    told = node.control.events.after(0, 1000, kind="staged-save-lost")
    return [(one.step, one.level) for one in told]


def staged_and_not_kept(node: Node) -> tuple[ArenaSegment, Saver]:
    """The memory of a rank that has staged step 5, and the saver of the next daemon, to which nothing was handed over."""
    (segment,) = node.ranks(1)
    fill(segment, 0, 5)
    round_id = node.control.saves.begin(RUN, 5, 1, 1)
    node.control.rounds.seal(round_id, 1)
    assert node.control.record_queue.recorded(60)
    for name in list(node.keeper.kept):
        node.keeper.drop(name)
    node.control.close()
    node.control = Control(stored_in(node.tier), node.catalog, None)
    saver = node.start()
    return segment, saver


@pytest.mark.parametrize("record", [False, True], ids=["killed", "let-go"])
def test_a_staged_save_that_nothing_kept_is_said_to_be_lost(node: Node, record: bool) -> None:
    """The daemon and what kept its memory were killed, as a container's processes are together, and the ranks as well: an
    event of level error and the list of rounds say so, once ranks have had time to bring it, and no sooner.
    """
    saver = staged_and_not_kept(node)[1]
    if record:
        save = {"run": RUN, "step": 5, "rank": 0, "world": 1}
        node.control.staged_before.let_go({"why": "its root is gone", "saves": [save, {"run": "../x"}, {}]})
    node.adoption.expire(time.monotonic())
    assert lost(node) == [] and rounds(node) == [(5, "sealed", None)]
    node.adoption.expire(time.monotonic() + RETURN_S + 1)
    assert lost(node) == [(5, "error")] and not saver.busy
    ((step, state, detail),) = rounds(node)
    assert (step, state) == (5, "aborted") and detail is not None and "all ranks had staged this save" in detail
    assert ("its root is gone" in detail) == record
    node.adoption.expire(time.monotonic() + 2 * RETURN_S)
    assert lost(node) == [(5, "error")], "it is said once"


def test_a_staged_save_whose_rank_brings_it_is_not_lost(node: Node) -> None:
    """Nothing kept the memory but the rank itself: the save that was staged goes on, under the number that it had."""
    segment, saver = staged_and_not_kept(node)
    node.back(segment, [5])
    saver.settle(RUN, 30)
    node.adoption.expire(time.monotonic() + RETURN_S + 1)
    assert lost(node) == [] and node.committed() == [5]
    assert rounds(node) == [(5, "committed", None)]


def test_what_is_not_ours_is_let_go(node: Node) -> None:
    """Noise with the keeper is dropped, and the daemon starts."""
    noise = os.memfd_create("noise")
    os.pwrite(noise, b"x" * 9000, 0)
    node.keeper.keep("noise", noise)
    os.close(noise)
    node.start()
    assert node.keeper.kept == {}
