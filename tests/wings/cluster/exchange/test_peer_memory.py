"""Memory of other nodes, over real sockets: fetched once, proven, and given up where a peer dies, hangs or lies."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack, closing

import pytest

from holdfast.read.held_slots import HeldSlot
from holdfast_formats.errors import CatalogUnavailable
from holdfast_formats.staging import wire
from holdfast_formats.staging.slot_ranges import SlotRange
from holdfast_service.daemon.arena.memory_checkpoints import MemoryStep
from holdfast_service.daemon.saving.other_nodes import NO_OTHER_NODES, Borrower
from holdfast_service.wings.cluster.exchange import memory_requests, mirrors, peer_memory
from holdfast_service.wings.cluster.exchange import ranges as wanted
from holdfast_service.wings.cluster.exchange import server as serving
from holdfast_service.wings.cluster.exchange.holders import HolderLost
from holdfast_service.wings.cluster.exchange.node_connection import NodeConnection, Unproven
from holdfast_service.wings.cluster.exchange.peer_memory import PeerMemory
from tests.wings.cluster.exchange.holding_nodes import SECRET, SIZE, STEP, Holding

ROOM = 2**40
WHOLE = {rank: SlotRange(rank, 0, SIZE) for rank in range(4)}


@pytest.fixture
def two() -> Iterator[tuple[Holding, Holding]]:
    with ExitStack() as stack:
        found = Holding("a", 0), Holding("b", 1)
        for one in found:
            stack.callback(one.close)
        yield found


def memory(*nodes: Holding, spare: int = ROOM) -> PeerMemory:
    return PeerMemory(lambda of: [one.node for one in nodes], lambda: spare)


def read(found: list[mirrors.Mirror], rank: int) -> bytes:
    """What a rank of this node reads of a slot, as it would."""
    mirror = next(one for one in found if one.report.rank == rank)
    fd = os.dup(mirror.fd)
    slot = HeldSlot(fd, mirror.part, STEP.step, elsewhere=True)
    os.close(fd)
    assert (slot.table.rank, slot.table.attempt) == (rank, STEP.attempt)
    slot.close()
    return bytes(slot.data)


def test_what_two_ranks_want_crosses_the_network_once(two: tuple[Holding, Holding]) -> None:
    """Overlapping ranges of two users, of two nodes: every byte is right, and none is sent twice."""
    peers = memory(*two)
    found = peers.open(STEP, "first")
    assert [one.report.rank for one in peers.open(STEP, "second")] == [one.report.rank for one in found] == [0, 1]
    before = two[0].relay.sent
    assert peers.fetch(STEP, [SlotRange(0, 100, 1_000_000)]) == set()
    assert read(found, 0)[100:1_000_000] == two[0].data[100:1_000_000]
    assert peers.fetch(STEP, [SlotRange(0, 700_000, SIZE), WHOLE[1]]) == set()
    assert read(found, 0) == two[0].data and read(found, 1) == two[1].data
    sent = two[0].relay.sent
    assert SIZE < sent - before < SIZE + 2000
    assert peers.fetch(STEP, [WHOLE[0], WHOLE[1]]) == set() and two[0].relay.sent == sent


def test_memory_goes_with_the_last_who_reads(two: tuple[Holding, Holding]) -> None:
    """Nothing is kept of it; who asks later is told so, and may look anew."""
    peers = memory(*two)
    (first, second), _ = peers.open(STEP, "first"), peers.open(STEP, "second")
    peers.release("first")
    assert first.fd >= 0
    peers.release("second")
    assert first.fd == second.fd == -1
    assert peers.fetch(STEP, [WHOLE[0]]) == {0}
    assert len(peers.open(STEP, "third")) == 2
    peers.release("third")


def test_a_peer_that_is_cut_off_in_the_middle_is_lost_alone(two: tuple[Holding, Holding]) -> None:
    """What had come stays, the other node's comes, and the lost one is not asked again."""
    peers = memory(*two)
    found = peers.open(STEP, "r")
    assert peers.fetch(STEP, [SlotRange(0, 0, 1000)]) == set()
    two[0].relay.cut_after = two[0].relay.sent + 300_000
    assert peers.fetch(STEP, list(WHOLE.values())) == {0, 2, 3}
    assert read(found, 1) == two[1].data
    assert peers.fetch(STEP, [SlotRange(0, 10, 900)]) == set() and read(found, 0)[:1000] == two[0].data[:1000]
    sent, two[0].relay.cut_after = two[0].relay.sent, 2**62
    assert peers.fetch(STEP, [WHOLE[0]]) == {0} and two[0].relay.sent == sent


@pytest.mark.parametrize("after", [0, 400_000])
def test_a_peer_that_hangs_is_not_waited_for(
    two: tuple[Holding, Holding], monkeypatch: pytest.MonkeyPatch, after: int
) -> None:
    """Before it says anything, or in the middle: the rank is told that its bytes are lost, and of nothing else."""
    monkeypatch.setattr(peer_memory, "GRACE_S", 0.5)
    monkeypatch.setattr(peer_memory, "ASK_S", 0.5)
    peers = memory(*two)
    if after:
        peers.open(STEP, "r")
    two[0].relay.stall_after = two[0].relay.sent + after
    found = peers.open(STEP, "r")
    assert [one.report.rank for one in found] == ([0, 1] if after else [1])
    assert peers.fetch(STEP, [WHOLE[0], WHOLE[1]]) == {0} and read(found, 1) == two[1].data


def test_a_peer_that_is_too_slow_is_asked_no_more(two: tuple[Holding, Holding], monkeypatch: pytest.MonkeyPatch) -> None:
    """Measured over all that it has sent: what came is used."""
    monkeypatch.setattr(peer_memory, "RATE_MIN", 2**60)
    peers = memory(two[0])
    peers.open(STEP, "r")
    monkeypatch.setattr(peer_memory, "GRACE_S", 0.0)
    monkeypatch.setattr(peer_memory, "_limit_s", lambda ranges: 30.0)
    assert peers.fetch(STEP, [SlotRange(0, 0, 10)]) == set()
    assert peers.fetch(STEP, [WHOLE[0]]) == {0}
    assert peers.fetch(STEP, [SlotRange(0, 0, 10)]) == set()


def test_a_slot_that_is_used_anew_between_the_answer_and_the_read(two: tuple[Holding, Holding]) -> None:
    """Its rank saves another step into it: nothing is sent, and saving waits for nobody."""
    peers = memory(*two)
    peers.open(STEP, "r")
    assert two[0].segment.lease(8, STEP.attempt, 0) == 0
    assert peers.fetch(STEP, [WHOLE[0], WHOLE[1]]) == {0}
    assert [one.report.rank for one in memory(*two).open(STEP, "r")] == [1]


@pytest.mark.parametrize("before", [False, True])
@pytest.mark.parametrize("at", [1, 2, 3])
def test_a_slot_that_is_used_anew_while_it_is_sent(
    two: tuple[Holding, Holding], monkeypatch: pytest.MonkeyPatch, at: int, before: bool
) -> None:
    """The answer is cut short at that chunk, whether it was digested just before or is just after."""
    peers = memory(two[0])
    peers.open(STEP, "r")
    right, calls = serving.digest, []

    def digest(data: memoryview) -> str:
        calls.append(len(data))
        found = right(data)
        if len(calls) == at:
            two[0].segment.lease(8, STEP.attempt, 0)
            start = two[0].segment.geometry.data_offset(0)
            two[0].segment.memory[start : start + SIZE] = bytes(SIZE)
        return right(data) if before else found

    monkeypatch.setattr(serving, "digest", digest)
    monkeypatch.setattr(wanted, "CHUNK_BYTES", 500_000)
    assert peers.fetch(STEP, [WHOLE[0]]) == {0}


def test_changed_on_its_way(two: tuple[Holding, Holding], monkeypatch: pytest.MonkeyPatch) -> None:
    """What does not match the digest that came with it is lost."""
    peers = memory(two[0])
    peers.open(STEP, "r")
    monkeypatch.setattr(serving, "digest", lambda data: "0" * 16)
    assert peers.fetch(STEP, [WHOLE[0]]) == {0}


def test_another_save_of_the_same_step_is_not_lent(two: tuple[Holding, Holding]) -> None:
    """Of an older or newer attempt, of another turn, world, run or step."""
    peers = memory(*two)
    changes = ({"attempt": 1}, {"attempt": 3}, {"turn": 1}, {"world": 5}, {"run": "runs"}, {"step": 8})
    for change in changes:
        assert peers.open(STEP._replace(**change), "r") == [], change
    assert peers.open(STEP._replace(world=peer_memory.WORLD_MAX + 1), "r") == []


def test_a_forged_table_is_refused(two: tuple[Holding, Holding]) -> None:
    """A node whose slot's table is not the one that it names: nobody reads that node, others are read."""
    at = two[0].segment.geometry.table_offset(0)
    two[0].segment.memory[at + 5] ^= 1
    assert [one.report.rank for one in memory(*two).open(STEP, "r")] == [1]


@pytest.mark.parametrize(
    "change",
    [
        {"rank": -1},
        {"rank": 4},
        {"table_at": 4095},
        {"table_at": 2**50},
        {"data_bytes": -1},
        {"data_bytes": 8193},
        {"table_bytes": 0},
        {"table_bytes": 2**40},
    ],
)
def test_slots_that_cannot_be(change: dict[str, int]) -> None:
    """What another node says of its slots is looked at before memory is made for it."""
    said = memory_requests.SlotReport(rank=3, table_digest="0" * 16, table_at=8192, data_bytes=8192, table_bytes=10)
    assert said.is_possible(STEP) and not said._replace(**change).is_possible(STEP)


def test_without_memory_to_spare_nothing_is_fetched(two: tuple[Holding, Holding]) -> None:
    """Saves come first."""
    assert memory(*two, spare=10).open(STEP, "r") == []
    peers = memory(*two, spare=100_000)
    assert len(peers.open(STEP, "r")) == 2 and peers.fetch(STEP, [WHOLE[0]]) == {0}


def test_without_the_catalog_nobody_is_asked(two: tuple[Holding, Holding]) -> None:
    """Who holds what is in it."""

    def find(of: MemoryStep) -> list[memory_requests.SlotReport]:
        raise CatalogUnavailable("away")

    assert PeerMemory(find, lambda: ROOM).open(STEP, "r") == []  # type: ignore[arg-type, return-value]


def test_a_node_that_is_gone(two: tuple[Holding, Holding]) -> None:
    """Its lease may last still."""
    nodes = [one.node for one in two]
    two[0].exchange.close()
    two[0].relay.close()
    assert [one.report.rank for one in PeerMemory(lambda of: nodes, lambda: ROOM).open(STEP, "r")] == [1]


def test_only_places_that_a_rank_has_filled(two: tuple[Holding, Holding]) -> None:
    """What a rank asks for beyond a slot's data is lost, and never asked of the node."""
    peers = memory(*two)
    peers.open(STEP, "r")
    for begin, end in ((-1, 5), (0, SIZE + 1), (SIZE, SIZE + 10), (5, 5), (7, 3)):
        assert peers.fetch(STEP, [SlotRange(0, begin, end)]) == {0}, (begin, end)


@pytest.mark.parametrize(
    ("path", "body", "status"),
    [
        ("/held", b"{}", 400),
        ("/held", b'{"of":["run",7,2,0]}', 400),
        ("/held", b'{"of":["run",7,2,0,"4"]}', 400),
        ("/held/bytes", b'{"of":["run",7,2,0,4],"tables":{},"ranges":[[0,0,5]]}', 400),
        ("/held/bytes", b'{"of":["run",7,2,0,4],"tables":{"0":"0000000000000000"},"ranges":[[0,0,5]]}', 409),
        ("/held/bytes", b'{"of":["run",7,1,0,4],"tables":{"0":"%s"},"ranges":[[0,0,5]]}', 409),
        ("/held/bytes", b'{"of":["run",7,2,0,4],"tables":{"0":"%s"},"ranges":[[0,0,1500004]]}', 400),
        ("/held/bytes", b'{"of":["run",7,2,0,4],"tables":{"0":"%s"},"ranges":[[1,0,5]]}', 400),
        ("/held/bytes", b'{"of":["run",7,2,0,4],"tables":{"0":"%s"},"ranges":[[0,-5,5]]}', 400),
        ("/held/bytes", b"[" * 100_000, 400),
    ],
)
def test_nothing_but_what_is_held(two: tuple[Holding, Holding], path: str, body: bytes, status: int) -> None:
    """Requests that no node makes; and without the secret, none is looked at."""
    slot = two[0].holds.lent(STEP)[0]
    body = body.replace(b"%s", slot.table_digest.encode())
    with closing(NodeConnection(two[0].exchange.url, [SECRET], 180, 180)) as connection:
        assert connection.request(path, body).status == status
    with closing(NodeConnection(two[0].exchange.url, ["x"], 180, 180)) as connection, pytest.raises(Unproven):
        connection.request(path, body)


def test_what_a_lent_slot_shows_ends_with_the_hold(two: tuple[Holding, Holding]) -> None:
    """Also where its header stays: memory that is given back is empty, and its header is not."""
    slot = two[0].holds.lent(STEP)[0]
    assert slot.is_still()
    two[0].holds.end("run")
    assert not slot.is_still()
    with pytest.raises(HolderLost):
        two[0].node.fetch(STEP, [], [SlotRange(0, 0, 5)], {}, 5.0)


def test_a_rank_gets_bytes_of_its_own_run_only(two: tuple[Holding, Holding]) -> None:
    """The run is its connection's; what it asks names a save of that run, and whatever it names of another one is lost."""
    peers = memory(*two)
    said = {"step": STEP.step, "attempt": STEP.attempt, "turn": STEP.turn, "world": STEP.world}
    mine, other = Borrower(peers), Borrower(peers)
    asked = wire.HeldElsewhere(id=1, **said)
    fetch = wire.Fetch(id=2, ranges=((0, 0, 100), (1, 5, 9)), **said)
    assert [mirror.report.rank for mirror in mine.slots("run", asked)] == [0, 1]
    assert mine.fetch("run", fetch).lost == ()
    assert other.slots("another", asked) == [] and other.fetch("another", fetch).lost == (0, 1)
    assert [mirror.report.rank for mirror in mine.slots("run", asked.model_copy(update={"after": 0}))] == [1]
    alone = Borrower(NO_OTHER_NODES)
    assert alone.slots("run", asked) == [] and alone.fetch("run", fetch).lost == (0, 1)
    for one in (mine, other, alone):
        one.release()
    assert mine.fetch("run", fetch).lost == (0, 1)
