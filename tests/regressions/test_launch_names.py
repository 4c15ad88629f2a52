"""A launch's name that is used again, as a fixed one of torchrun or of a job that was queued anew, is another start."""

from __future__ import annotations

import itertools
from collections import defaultdict
from pathlib import Path

import pytest
import torch
from pydantic import ValidationError

from holdfast import Checkpointer
from holdfast_formats.errors import InvalidRequest, RunBusy, StaleAttempt
from holdfast_formats.rest import bodies
from holdfast_formats.staging import wire
from holdfast_service.control.catalog.attempts import Attempts, Member
from holdfast_service.daemon.arena.shares import ADMIN
from holdfast_service.daemon.saving import run_busy
from holdfast_service.storage import MemoryTier
from tests.daemon.saver_world import RUN, Rank, saver_world
from tests.daemons import running, wait_until


def test_the_next_start_under_the_same_name_restores_what_was_saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first one was told that there is nothing to restore; that is no answer for the second one."""
    monkeypatch.setenv("HOLDFAST_LAUNCH", "fixed")
    with running(tmp_path / "root", listen="127.0.0.1:0") as daemon:
        for step, at in enumerate((daemon.socket, daemon.socket, daemon.url)):
            monkeypatch.setattr("holdfast.launch._constructed", defaultdict(itertools.count))  # as in a process of its own
            state = {"model": torch.nn.Linear(2, 2)}
            with Checkpointer("run", state, at=at) as checkpointer:
                assert checkpointer.restore() == step
                checkpointer.save(step + 1, wait="durable").result()


def test_every_rank_of_a_start_has_one_attempt_whoever_comes_first() -> None:
    """A checkpointer keeps its attempt whenever it asks again; another one for the same rank begins the next."""
    tier = MemoryTier()
    attempts = Attempts(tier)
    attempts.merge({})

    def declared(rank: int, session: str, launch: str = "fixed") -> int:
        return attempts.declare("run", launch, list, Member(rank, session))[0]

    assert [declared(0, "a0"), declared(1, "a1"), declared(0, "a0")] == [1, 1, 1]
    assert [declared(1, "b1"), declared(0, "b0"), declared(1, "b1")] == [2, 2, 2]
    assert declared(0, "a0") == 1, "the earlier start is shut out; it does not become part of the later one"
    with pytest.raises(StaleAttempt):
        attempts.refuse_older("run", 1)
    assert (declared(0, "c0", "other"), declared(0, "d0")) == (3, 4)


@pytest.mark.parametrize("grown", [(2, 3, 0, 1), (0, 1, 2, 3), (3, 0, 2, 1)])
def test_a_start_with_more_ranks_is_another_one_whichever_of_them_comes_first(grown: tuple[int, ...]) -> None:
    """As when torchrun starts its workers again because a node has joined: its restart count does not change then."""
    tier = MemoryTier()
    attempts = Attempts(tier)
    attempts.merge({})
    for rank in (0, 1):
        assert attempts.declare("run", "fixed", list, Member(rank, f"a{rank}", 2)) == (1, rank == 0)
    attempts.answer("run", 1, 0, None)
    attempts = Attempts(tier)
    assert [attempts.declare("run", "fixed", list, Member(rank, f"b{rank}", 4))[0] for rank in grown] == [2] * 4
    assert attempts.declare("run", "fixed", list, Member(0, "c0", 1))[0] == 3, "and with fewer"


def test_all_ranks_of_an_attempt_that_has_saved_are_known_to_the_next_daemon() -> None:
    """A rank joined after the answers: killed with its daemon, its successor got the answer of the start before."""
    tier = MemoryTier()
    attempts = Attempts(tier)
    attempts.merge({})
    attempts.declare("run", "fixed", list, Member(0, "a0", 2))
    attempts.answer("run", 1, 0, 1)
    attempts.declare("run", "fixed", list, Member(1, "a1", 2))
    attempts.keep_speakers("run")
    again = Attempts(tier)
    assert again.declare("run", "fixed", list, Member(1, "a1", 2)) == (1, False), "the trainer that lives continues"
    assert again.declare("run", "fixed", list, Member(1, "b1", 2)) == (2, True)


def test_a_commit_writes_who_speaks_first() -> None:
    """The daemon that comes after it knows both ranks, of which only the first had declared the attempt."""
    with saver_world() as world:
        assert [world.control.launches.declare(RUN, "fixed", 2, None, rank, f"a{rank}") for rank in (0, 1)] == [1, 1]
        for rank in [Rank(world, rank, 1, 2, 2) for rank in (0, 1)]:
            rank.save(5)
        wait_until(lambda: world.committed() == [5])
        assert Attempts(world.tier).declare(RUN, "fixed", list, Member(1, "b1", 2)) == (2, True)


@pytest.mark.parametrize("world", [2**63, 10**30])
def test_what_no_daemon_could_read_is_not_written(world: int) -> None:
    """One rank's number must not cost all runs their attempts: the file would be set aside at the next start."""
    tier = MemoryTier()
    attempts = Attempts(tier)
    attempts.merge({})
    attempts.declare("good", "fixed", list, Member(0, "a", 1))
    with pytest.raises(InvalidRequest, match="'bad' cannot be recorded"):
        attempts.declare("bad", "fixed", list, Member(0, "a", world))
    again = Attempts(tier)
    assert again.complete and again.newest("good") == 1 and again.newest("bad") == 0
    with pytest.raises(InvalidRequest, match="'good' cannot be recorded"):
        attempts.declare("good", "fixed", list, Member(10**20, "b", 1))
    attempts.keep_speakers("good")
    assert Attempts(tier).complete
    for kind in (wire.Hello, bodies.RankHello):
        with pytest.raises(ValidationError, match="world"):
            kind.model_validate({"id": 0, "protocol": wire.PROTOCOL, "run": "r", "rank": 0, "world": world, "launch": "l"})


def test_the_next_daemon_knows_who_speaks() -> None:
    """Who has asked what to restore is known to a daemon that is started after it; a third start is not taken for it."""
    tier = MemoryTier()
    first = Attempts(tier)
    first.merge({})
    for rank in (0, 1):
        first.declare("run", "fixed", list, Member(rank, f"a{rank}"))
    first.answer("run", 1, 0, None)
    again = Attempts(tier)
    assert again.declare("run", "fixed", list, Member(1, "a1")) == (1, False)
    assert again.declare("run", "fixed", list, Member(1, "b1")) == (2, True)


def test_the_name_of_a_job_that_lives_is_no_way_past_its_fence() -> None:
    """A second job under the first one's launch name is refused; one more rank of the first, and its return, are let in."""
    with saver_world() as world:

        def come(rank: int, session: str, process: str) -> int:
            about = {"run": "run", "world": 2, "launch": "fixed", "process": process, "session": session}
            hello = wire.Hello(id=0, rank=rank, **about)

            def join(attempt: int) -> int:
                world.saver.join(run_busy.ConnectedRank(hello, attempt, lambda outcome: None, lambda: False))
                return attempt

            return run_busy.let_in(world.saver, world.control, hello, join, ADMIN)

        assert [come(0, "a", "p"), come(1, "b", "q"), come(0, "a", "p")] == [1, 1, 1]
        with pytest.raises(RunBusy):
            come(0, "c", "another")
        assert come(0, "d", "p") == 2, "the same process makes another checkpointer of its run"
