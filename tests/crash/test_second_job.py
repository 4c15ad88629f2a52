"""Two jobs on one run's name: the second is refused, a dead one's successor is not, and who takes over fences (I6)."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from holdfast_formats.errors import RunBusy
from holdfast_service.daemon.arena.shares import ADMIN
from holdfast_service.daemon.remote import RemoteRanks
from holdfast_service.daemon.saving import run_busy
from holdfast_service.daemon.saving.rounds import Participant
from tests.daemon.saver_world import Rank, saver_world
from tests.daemon.test_remote import hello
from tests.daemons import RunningDaemon, freeze, running
from tests.forked import Forked

HOLDING = Path(__file__).with_name("holding_rank.py")
SCRIPT = Path(__file__).with_name("second_job.py")


class Job:
    """A training process that is told when to save."""

    def __init__(self, place: str, **environment: str) -> None:
        self.process = Forked([SCRIPT, place], {**os.environ, **environment}, talks=True)

    def heard(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def save(self, step: int) -> str:
        assert self.process.stdin is not None
        self.process.stdin.write(f"{step}\n")
        self.process.stdin.flush()
        return self.heard()

    def end(self) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGCONT)
            self.process.kill()
        self.process.communicate()


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[RunningDaemon]:
    with running(tmp_path / "root") as made:
        yield made


def test_the_second_job_is_refused_and_the_first_goes_on(daemon: RunningDaemon) -> None:
    """A mistaken start ends with `run-busy`; the job that trains does not notice."""
    first, second = Job(str(daemon.socket)), None
    try:
        assert (first.heard(), first.save(1)) == ("restored 0", "saved 1")
        second = Job(str(daemon.socket))
        assert second.heard() == "refused run-busy"
        assert first.save(2) == "saved 2"
    finally:
        for job in filter(None, (first, second)):
            job.end()


def test_a_successor_of_a_dead_job_begins_at_once(daemon: RunningDaemon) -> None:
    """SIGKILL ends a job for the daemon as well: its successor restores and saves."""
    first = Job(str(daemon.socket))
    assert (first.heard(), first.save(1)) == ("restored 0", "saved 1")
    first.end()
    second = Job(str(daemon.socket))
    try:
        assert (second.heard(), second.save(2)) == ("restored 1", "saved 2")
    finally:
        second.end()


def test_who_takes_over_fences_a_paused_job(daemon: RunningDaemon) -> None:
    """A job that hangs keeps its connection: the next one says that it takes over, and the old one can save no more."""
    first = Job(str(daemon.socket))
    assert (first.heard(), first.save(1)) == ("restored 0", "saved 1")
    freeze(first.process)
    second = Job(str(daemon.socket), HOLDFAST_TAKE_OVER="1")
    try:
        assert (second.heard(), second.save(2)) == ("restored 1", "saved 2")
        first.process.send_signal(signal.SIGCONT)
        assert first.save(3) == "refused stale-attempt"
        assert second.save(4) == "saved 4"
    finally:
        first.end()
        second.end()


class TestDistantRanks:
    """Ranks over HTTP, whose death nobody tells."""

    @pytest.fixture
    def ranks(self) -> Iterator[RemoteRanks]:
        with saver_world() as world:
            made = RemoteRanks(world.arena, world.saver, world.control)
            yield made
            made.close()

    def test_one_that_spoke_lately_is_alive(self, ranks: RemoteRanks, monkeypatch: pytest.MonkeyPatch) -> None:
        """The refusal says how long that can last; after so long a silence the run is free."""
        ranks.hello("a" * 32, hello(launch="one", process="p"))
        with pytest.raises(RunBusy) as refused:
            ranks.hello("b" * 32, hello(launch="two", process="q"))
        assert 0 < refused.value.members["retry_after_s"] <= run_busy.BUSY_SILENCE_MAX_S
        monkeypatch.setattr(run_busy, "BUSY_SILENCE_MAX_S", 0.0)
        assert ranks.hello("b" * 32, hello(launch="two", process="q")).who.attempt == 2

    def test_ranks_of_one_launch_and_of_one_process_are_one_job(self, ranks: RemoteRanks) -> None:
        """The second rank of a launch, another checkpointer of a process, and one that takes over are let in."""
        ranks.hello("a" * 32, hello(0, 2, "one", process="p"))
        assert ranks.hello("b" * 32, hello(1, 2, "one", process="q")).who.attempt == 1
        assert ranks.hello("c" * 32, hello(0, 2, "two", process="p")).who.attempt == 2
        assert ranks.hello("d" * 32, hello(0, 1, "three", process="r", take_over=True)).who.attempt == 3

    def test_a_process_that_was_first_to_close_is_of_the_job_that_the_others_still_end(self, ranks: RemoteRanks) -> None:
        """Ranks that make one checkpointer after the other do not keep step; once all are gone, it is nobody's."""
        ranks.hello("a" * 32, hello(0, 2, "one", process="p"))
        ranks.hello("b" * 32, hello(1, 2, "one", process="q"))
        ranks.leave("a" * 32)
        with pytest.raises(RunBusy):
            ranks.hello("c" * 32, hello(0, 2, "two", process="another"))
        assert ranks.hello("d" * 32, hello(0, 2, "three", process="p")).who.attempt == 2
        for rank_id in ("b" * 32, "d" * 32):
            ranks.leave(rank_id)
        ranks.hello("e" * 32, hello(0, 1, "four", process="r"))
        with pytest.raises(RunBusy):
            ranks.hello("f" * 32, hello(0, 2, "five", process="p"))


@pytest.mark.parametrize("world_size", [2, 4])
def test_the_ranks_of_one_launch_may_all_come_at_once(world_size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """While the first to come is looked at, the others are let in: it finds ranks there, and they are its own."""
    with saver_world() as world:
        present = world.saver.connected.of
        there: list[Rank] = []

        def others_come_first(run: str) -> list[Participant]:
            monkeypatch.setattr(world.saver.connected, "of", present)
            there.extend(world.launch(world_size)[1:])
            return present(run)

        monkeypatch.setattr(world.saver.connected, "of", others_come_first)
        joined = [
            run_busy.let_in(world.saver, world.control, hello(0, world_size, "launch-1"), lambda attempt: attempt, ADMIN)
        ]
        assert joined == [1]
        with pytest.raises(RunBusy):
            run_busy.let_in(
                world.saver, world.control, hello(0, world_size, "launch-2", process="another"), joined.append, ADMIN
            )
        assert joined == [1]
        for rank in there:
            rank.leave()


@pytest.mark.parametrize("tries", [20])
def test_of_two_jobs_that_start_at_once_one_is_let_in(tries: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither has joined when the other one is looked for: one is refused all the same, every time."""
    monkeypatch.setattr(run_busy, "DYING_S", 0.05)
    for number in range(tries):
        with saver_world() as world:
            ranks = RemoteRanks(world.arena, world.saver, world.control)
            both, refused = threading.Barrier(2), []

            def start(
                name: str, ranks: RemoteRanks = ranks, both: threading.Barrier = both, refused: list = refused
            ) -> None:
                both.wait(180)
                try:
                    ranks.hello(name * 32, hello(0, 1, f"launch-{name}", process=name))
                except RunBusy:
                    refused.append(name)

            threads = [threading.Thread(target=start, args=(name,)) for name in ("a", "b")]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            ranks.close()
            assert len(refused) == 1, number


@pytest.mark.parametrize("holding", ["waiting", "forked"])
def test_a_killed_job_counts_as_gone_whatever_still_holds_its_connection(tmp_path: Path, holding: str) -> None:
    """A rank is killed while the daemon waits for its slot, or leaves a child with its connection: a successor begins."""
    with running(tmp_path / "root", "--write-bytes-per-second", "1000") as daemon:
        first = Forked([HOLDING, daemon.socket, holding], {**os.environ}, talks=True)
        assert first.stdout is not None and first.stdout.readline().strip() == "holding"
        first.send_signal(signal.SIGKILL)
        second = Job(str(daemon.socket))
        try:
            assert second.heard() == "restored 0"
        finally:
            second.end()
            assert first.stdin is not None
            first.communicate()
        daemon.kill()
