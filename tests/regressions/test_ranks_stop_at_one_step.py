"""A signal that reaches some ranks, in whichever steps they are, ends the launch at one step, which all ranks save."""

from __future__ import annotations

import os
import random
import signal
import time
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import pytest

from holdfast.read.root_directory import published_steps
from tests.daemons import RunningDaemon, free_port, running
from tests.forked import Forked

RANKS = 4
ROUNDS = 12  # of the long test
LIMIT_S = 120


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningDaemon]:
    with running(tmp_path_factory.mktemp("stops") / "root") as daemon:
        yield daemon


@contextmanager
def launched(daemon: RunningDaemon, kind: str, ranks: int = RANKS) -> Iterator[list[Forked]]:
    """Ranks of one launch, all of which have begun to train."""
    about = os.environ | {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(ranks),
        "HOLDFAST_LAUNCH": uuid.uuid4().hex,
        "OMP_NUM_THREADS": "1",
    }
    command = ("-m", "tests.regressions.stopping_rank", daemon.socket, kind)
    processes = [Forked(command, about | {"RANK": str(i), "LOCAL_RANK": str(i)}) for i in range(ranks)]
    try:
        for process in processes:
            assert said(process, "FROM")
        yield processes
    finally:
        for process in processes:
            process.kill()
            process.wait()
            assert process.stdout is not None
            process.stdout.close()


def said(process: Forked, what: str) -> list[str]:
    """The words of the line of a rank that begins so."""
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith(what):
            return line.split()[1:]
    pytest.fail(f"the rank ended with {process.wait(LIMIT_S)} and without saying {what}")


def stopped(processes: Sequence[Forked]) -> int:
    """The step after which all ranks stopped."""
    ends = [said(process, "STOPPED") for process in processes]
    assert [process.wait(LIMIT_S) for process in processes] == [0] * len(processes)
    assert len({end[0] for end in ends}) == 1, f"the ranks stopped after different steps: {ends}"
    return int(ends[0][0])


def committed(daemon: RunningDaemon) -> list[int]:
    return published_steps(daemon.root, "stops")


@pytest.mark.parametrize(("kind", "reached"), [("together", (2,)), ("apart", (0, 1, 3))])
def test_a_signal_to_some_ranks_stops_all_of_them_after_one_step(
    daemon: RunningDaemon, kind: str, reached: tuple[int, ...]
) -> None:
    """Ranks in one process group block in collectives of each other; ranks without one are many steps apart."""
    with launched(daemon, kind) as processes:
        time.sleep(0.3)
        for rank in reached:
            processes[rank].send_signal(signal.SIGTERM)
        step = stopped(processes)
    assert step in committed(daemon)


@pytest.mark.crash_slow
@pytest.mark.parametrize("kind", ["together", "apart"])
def test_signals_to_any_ranks_at_any_time_stop_all_after_one_step(daemon: RunningDaemon, kind: str) -> None:
    """One, several or all ranks, at once or one after the other, also twice, also before the first step."""
    seed = random.randrange(2**32)
    draws = random.Random(seed)
    for number in range(ROUNDS):
        with launched(daemon, kind) as processes:
            time.sleep(draws.random() * draws.choice((0.0, 0.01, 1.0)))
            for rank in draws.sample(range(RANKS), draws.randint(1, RANKS)):
                for _ in range(draws.randint(1, 2)):
                    processes[rank].send_signal(draws.choice((signal.SIGTERM, signal.SIGUSR1)))
                time.sleep(draws.random() * draws.choice((0.0, 0.01)))
            step = stopped(processes)
        assert step in committed(daemon), f"round {number} of {kind}, seed {seed}"


def test_a_rank_that_does_not_answer_is_named(daemon: RunningDaemon) -> None:
    """Half of the time is left then."""
    with launched(daemon, "deaf", 3) as processes:
        processes[0].send_signal(signal.SIGTERM)
        for process in processes[:2]:
            assert "rank 2 has not answered" in " ".join(said(process, "FAILED"))
