"""Ranks over HTTP as the daemon sees them: chunks that repeat, lie or stop coming, without a socket or a server."""

from __future__ import annotations

import threading
import uuid
from collections.abc import Iterator

import pytest

from holdfast_formats.digest import digest
from holdfast_formats.errors import (
    AlreadyCommitted,
    ArenaFull,
    CheckpointError,
    DeadlineExceeded,
    InvalidRequest,
    LimitExceeded,
    NoSuchResource,
    RoundAborted,
    StaleAttempt,
    StateMismatch,
)
from holdfast_formats.region import Box
from holdfast_formats.rest import bodies
from holdfast_formats.staging import slot_table as table
from holdfast_formats.staging import wire
from holdfast_formats.staging.messages import Room, SlotRequest
from holdfast_formats.staging.slot_table import SlotTable
from holdfast_formats.tensors import StagedFragment, TensorSpec
from holdfast_service.control.checkpoints import planner
from holdfast_service.daemon import remote, remote_rank
from holdfast_service.daemon.arena.upload import Chunk
from holdfast_service.daemon.remote import RemoteRanks
from holdfast_service.daemon.remote_rank import RemoteRank
from tests.daemon.saver_world import RUN, SIZE, SaverWorld, content, refused, saver_world
from tests.daemons import wait_until


@pytest.fixture
def world() -> Iterator[SaverWorld]:
    with saver_world() as made:
        yield made


@pytest.fixture
def ranks(world: SaverWorld) -> Iterator[RemoteRanks]:
    made = RemoteRanks(world.arena, world.saver, world.control)
    yield made
    made.close()


def hello(rank: int = 0, world: int = 1, launch: str = "launch-r", **changes: object) -> bodies.RankHello:
    return bodies.RankHello(
        **{"protocol": wire.PROTOCOL, "run": RUN, "rank": rank, "world": world, "launch": launch, **changes}
    )


def join(ranks: RemoteRanks, *who: object) -> RemoteRank:
    """A rank that has said hello and has two slots."""
    rank = ranks.hello(uuid.uuid4().hex, hello(*who))  # type: ignore[arg-type]
    rank.reserve(Room(slots=2, data_bytes=SIZE, table_bytes=4096))
    return rank


def chunk(data: bytes, offset: int = 0) -> Chunk:
    return Chunk(offset, data, digest(data))


def slot_table(rank: RemoteRank, step: int) -> bytes:
    who = rank.who
    spec = TensorSpec("model", "w", "U8", (who.world, SIZE))
    held = (StagedFragment(spec, (Box((who.rank, 0), (1, SIZE)),), 0),)
    return table.encode(SlotTable(RUN, step, who.attempt, who.rank, who.world, ("model",), held, {}, {}))


def at(step: int) -> SlotRequest:
    return SlotRequest(step=step)


def fill(rank: RemoteRank, number: int, step: int) -> bodies.SealRequest:
    """Open an upload and bring all of it; what is left is to seal it."""
    rank.open(number, at(step))
    data, encoded = content(step, rank.who.rank).tobytes(), slot_table(rank, step)
    rank.write(number, "data", chunk(data[:40]))
    rank.write(number, "data", chunk(data[40:], 40))
    rank.write(number, "table", chunk(encoded))
    return bodies.SealRequest(data_bytes=SIZE, table_bytes=len(encoded), table_digest=digest(encoded))


def test_a_slot_that_came_in_chunks_is_saved(world: SaverWorld, ranks: RemoteRanks) -> None:
    """Remote and local ranks make one world; the outcome is told to both, and the slots are free again."""
    attempt = world.control.launches.declare(RUN, "launch-1", 2, None)
    (local, _) = world.launch(2)
    assert local.attempt == attempt
    far = join(ranks, 1, 2, "launch-1")
    local.save(1)
    sealed = far.seal(0, fill(far, 0, 1))
    assert sealed.state in ("sealed", "committed")
    assert local.wait(1).state == "committed"
    wait_until(lambda: far.state(0).state == "committed")
    assert world.committed() == [1]
    assert [(u.number, u.state) for u in far.outcomes(0).items] == [(0, "committed")]
    assert far.outcomes(far.outcomes(0).next).items == []
    for number, step in ((1, 2), (2, 3)):
        far.open(number, at(step))
    with pytest.raises(ArenaFull):
        far.open(3, at(4))


def test_everything_may_be_repeated(world: SaverWorld, ranks: RemoteRanks) -> None:
    """Hello, reserve, open, chunks, seal: a second time changes nothing, whatever became of the first answer."""
    rank_id = uuid.uuid4().hex
    rank = ranks.hello(rank_id, hello())
    assert ranks.hello(rank_id, hello()) is rank and ranks.count == 1
    for _ in range(2):
        rank.reserve(Room(slots=1, data_bytes=SIZE, table_bytes=4096))
    whole = fill(rank, 0, 1)
    assert rank.open(0, at(1)).data_bytes == SIZE
    assert rank.write(0, "data", chunk(content(1, 0).tobytes()[10:30], 10)).data_bytes == SIZE
    assert rank.seal(0, whole).state in ("sealed", "committed")  # the saver may have been as quick
    wait_until(lambda: rank.seal(0, whole).state == "committed")
    assert rank.open(0, at(1)).state == "committed"
    assert world.committed() == [1]
    with pytest.raises(InvalidRequest, match="already committed"):
        rank.write(0, "data", chunk(b"x"))


@pytest.mark.parametrize(
    ("offset", "data", "error", "message"),
    [
        (41, b"gap", InvalidRequest, "continues at 40"),
        (39, b"overlap", InvalidRequest, "continues at 40"),
        (0, b"other", InvalidRequest, "different contents"),
        (40, bytes(5000), InvalidRequest, "continues at 40"),
    ],
)
def test_a_chunk_that_does_not_fit_changes_nothing(
    ranks: RemoteRanks, offset: int, data: bytes, error: type[CheckpointError], message: str
) -> None:
    """Gaps, overlaps, different contents, and what lies outside the slot are refused; the upload goes on where it was."""
    rank = join(ranks)
    rank.open(0, at(1))
    rank.write(0, "data", chunk(bytes(40)))
    with pytest.raises(error, match=message):
        rank.write(0, "data", chunk(data, offset))
    assert rank.state(0).data_bytes == 40
    rank.write(0, "data", chunk(bytes(24), 40))


def test_a_damaged_chunk_is_refused(ranks: RemoteRanks) -> None:
    """The digest is of the bytes that were sent, or nothing of them is taken."""
    rank = join(ranks)
    rank.open(0, at(1))
    with pytest.raises(InvalidRequest, match="not 0000000000000000") as refusal:
        rank.write(0, "data", Chunk(0, b"bytes", "0" * 16))
    assert refusal.value.members["reason"] == "digest"
    with pytest.raises(InvalidRequest, match="not an xxh3-64"):
        rank.write(0, "data", Chunk(0, b"bytes", "nonsense"))
    assert rank.state(0).data_bytes == 0


def test_a_slot_is_never_half_sealed(world: SaverWorld, ranks: RemoteRanks) -> None:
    """Bytes that are missing, a table of another digest, a table of another rank: no seal, no save."""
    rank = join(ranks)
    whole = fill(rank, 0, 1)
    assert isinstance(refused(rank.seal, 0, whole.model_copy(update={"data_bytes": SIZE - 1})), InvalidRequest)
    assert isinstance(refused(rank.seal, 0, whole.model_copy(update={"table_digest": "0" * 16})), InvalidRequest)
    assert rank.state(0).state == "open"
    rank.open(1, at(2))
    lie = slot_table(rank, 3)
    rank.write(1, "table", chunk(lie))
    stated = bodies.SealRequest(data_bytes=0, table_bytes=len(lie), table_digest=digest(lie))
    assert isinstance(refused(rank.seal, 1, stated), InvalidRequest | StateMismatch)
    assert rank.state(1).state == "aborted"
    rank.seal(0, whole)
    wait_until(lambda: world.committed() == [1])


def test_steps_that_may_not_be_saved_are_refused(world: SaverWorld, ranks: RemoteRanks) -> None:
    """A committed step, a stale attempt, a step twice at a time, an upload of another step, one that is not open."""
    rank = join(ranks)
    rank.seal(0, fill(rank, 0, 1))
    wait_until(lambda: rank.state(0).state == "committed")
    assert isinstance(refused(rank.open, 1, at(1)), AlreadyCommitted)
    rank.open(2, at(2))
    assert isinstance(refused(rank.open, 3, at(2)), StateMismatch)
    assert isinstance(refused(rank.open, 2, at(5)), InvalidRequest)
    assert isinstance(refused(rank.state, 9), InvalidRequest)
    join(ranks, 0, 1, "launch-later")
    assert rank.state(2).state == "aborted"
    assert isinstance(refused(rank.open, 4, at(4)), StaleAttempt)


@pytest.mark.parametrize(
    ("changes", "message"),
    [({"protocol": 99}, "protocol 99"), ({"rank": 3}, "rank 3"), ({"run": "../etc"}, "run name")],
)
def test_an_impossible_hello_is_refused(ranks: RemoteRanks, changes: dict, message: str) -> None:
    """As over the socket; and an id belongs to one rank alone."""
    with pytest.raises(InvalidRequest, match=message):
        ranks.hello("a" * 32, hello().model_copy(update=changes))
    ranks.hello("a" * 32, hello())
    with pytest.raises(InvalidRequest, match="another rank"):
        ranks.hello("a" * 32, hello(launch="other"))


def test_memory_and_ranks_are_limited(world: SaverWorld, ranks: RemoteRanks, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the arena has not is refused with the numbers; a larger segment takes the place of the one before."""
    rank = join(ranks)
    with pytest.raises(
        LimitExceeded, match=r"28672 are reserved, and 1073713152 are left of --arena-bytes-max, 1073741824 bytes"
    ):
        rank.reserve(Room(slots=64, data_bytes=2**30, table_bytes=0))
    rank.reserve(Room(slots=1, data_bytes=2 * SIZE, table_bytes=4096))
    assert world.arena.bytes < 30_000
    rank.open(0, at(1))
    with pytest.raises(LimitExceeded, match="outside"):
        rank.check_room(0, "data", 5000)
    monkeypatch.setattr(remote, "RANKS_MAX", 1)
    with pytest.raises(LimitExceeded):
        join(ranks, 0, 1, "more")


def test_a_reservation_into_which_nothing_comes_is_given_back(
    world: SaverWorld, ranks: RemoteRanks, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever reserves and does not save keeps nobody else out. When it saves after all, it has the memory again."""
    rank_id = uuid.uuid4().hex
    rank = ranks.hello(rank_id, hello(1, 2))
    rank.reserve(Room(slots=2, data_bytes=SIZE, table_bytes=4096))
    fill(join(ranks, 0, 2), 0, 1)
    taken = world.arena.bytes
    ranks.expire()
    assert world.arena.bytes == taken, "not at once"
    monkeypatch.setattr(remote, "UNUSED_S", 0.0)
    ranks.expire()
    assert world.arena.bytes == taken // 2, "what was filled stays"
    rank.reserve(Room(slots=2, data_bytes=SIZE, table_bytes=4096))
    assert world.arena.bytes == taken
    ranks.expire()
    rank.open(0, at(2))
    assert world.arena.bytes == taken


def test_a_silent_rank_is_taken_for_dead(world: SaverWorld, ranks: RemoteRanks) -> None:
    """Its round ends, its memory goes, and should it come back it is told why; what it had sealed is saved."""
    rank_id = uuid.uuid4().hex
    rank = ranks.hello(rank_id, hello())
    rank.reserve(Room(slots=2, data_bytes=SIZE, table_bytes=4096))
    rank.seal(0, fill(rank, 0, 1))
    fill(rank, 1, 2)
    rank.heard -= remote.SILENCE_MAX_S + 1
    assert ranks.find(rank_id) is rank, "a sign of life"
    ranks.expire()
    assert (ranks.count, rank.state(1).state) == (1, "open")
    rank.heard -= remote.SILENCE_MAX_S + 1
    ranks.expire()
    assert (ranks.count, rank.state(1).state) == (0, "aborted")
    with pytest.raises(RoundAborted, match="counts as dead"):
        ranks.find(rank_id)
    assert refused(ranks.find, rank_id) is not refused(ranks.find, rank_id), "each goes with who was told so"
    with pytest.raises(RoundAborted):
        ranks.hello(rank_id, hello())
    with pytest.raises(NoSuchResource):
        ranks.find("b" * 32)
    wait_until(lambda: world.arena.bytes == 0)
    wait_until(lambda: world.committed() == [1])


def test_a_rank_that_begins_anew_takes_its_own_place(ranks: RemoteRanks) -> None:
    """The same rank of the same launch under another id: the old one's uploads end, and the step can be saved."""
    before, heard = join(ranks), []
    before.open(0, at(1))
    with before.listening(lambda: heard.append("ended")):
        after = join(ranks)
    assert ranks.count == 1 and heard
    assert before.state(0).state == "aborted"
    assert after.open(0, at(1)).state == "open"


def test_an_upload_that_is_given_up_ends_the_round(world: SaverWorld, ranks: RemoteRanks) -> None:
    """Abandoning one tells every rank; what is sealed already goes on."""
    first, second = join(ranks, 0, 2), join(ranks, 1, 2)
    first.seal(0, fill(first, 0, 1))
    second.open(0, at(1))
    second.abandon(0, InvalidRequest("a tensor was torn"))
    assert [u.problem["detail"] for u in first.outcomes(0).items if u.problem] == ["a tensor was torn"]
    assert first.state(0).state == second.abandon(0, InvalidRequest("again")).state == "aborted"
    assert world.committed() == []


def test_ends_of_long_ago_are_forgotten_but_counted(ranks: RemoteRanks, monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory of ended uploads is bounded, and the cursor of whoever listens stays right."""
    monkeypatch.setattr(remote_rank, "ENDED_UPLOADS_MAX", 3)
    rank = join(ranks)
    for number in range(5):
        rank.open(number, at(number))
        rank.abandon(number, InvalidRequest("no"))
    kept = rank.outcomes(0)
    assert ([u.number for u in kept.items], kept.next) == ([2, 3, 4], 5)
    assert [u.number for u in rank.outcomes(4).items] == [4]
    assert rank.outcomes(5).items == []


def test_every_rank_gets_one_answer(world: SaverWorld, ranks: RemoteRanks) -> None:
    """The n-th question of an attempt has one answer, also when a commit comes between."""
    first, second = join(ranks, 0, 2), join(ranks, 1, 2)
    assert ranks.choose(first.who, 0, bodies.Question()).step is None
    for rank in (first, second):
        rank.seal(0, fill(rank, 0, 1))
    wait_until(lambda: first.state(0).state == "committed")
    assert ranks.choose(second.who, 0, bodies.Question()).step is None
    assert ranks.choose(second.who, 1, bodies.Question(groups=("model",))).step == 1


def test_a_question_before_the_saves_are_written_is_asked_again(
    world: SaverWorld, ranks: RemoteRanks, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While a complete round is being saved the answer would be wrong, so there is none yet."""
    rank = join(ranks)
    may_commit = threading.Event()
    plan = planner.plan

    def slow(tables: object) -> object:
        may_commit.wait(180)
        return plan(tables)  # type: ignore[arg-type]

    monkeypatch.setattr(planner, "plan", slow)
    rank.seal(0, fill(rank, 0, 1))
    with pytest.raises(DeadlineExceeded):
        ranks.choose(rank.who, 0, bodies.Question())
    may_commit.set()
    assert ranks.choose(rank.who, 0, bodies.Question(wait_s=20)).step == 1


def test_a_hello_that_overtakes_itself_makes_one_rank(world: SaverWorld, ranks: RemoteRanks) -> None:
    """The same hello twice at once, as after a lost answer: both hear of the same rank, and it lives."""
    both_asked = threading.Barrier(2)
    entering = world.saver.entering

    def together(run: str) -> threading.Lock:
        both_asked.wait(180)
        return entering(run)

    world.saver.entering = together  # type: ignore[method-assign]
    found: list[RemoteRank] = []
    threads = [threading.Thread(target=lambda: found.append(ranks.hello("c" * 32, hello()))) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found[0] is found[1] is ranks.find("c" * 32)
