"""A signal that reaches some ranks, in whichever steps they are, ends the launch at one step, which all ranks save."""

from __future__ import annotations

import os
import random
import re
import signal
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

from holdfast.read.directory_root import published_steps
from tests.daemons import RunningDaemon, free_port, hide, running
from tests.forked import Forked
from tests.regressions.test_many_daemons import Site, site

__all__ = ["site"]
pytestmark = pytest.mark.usefixtures("forked_programs")
RANKS = 4
ROUNDS = 12  # of the long test
LIMIT_S = 180.0


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningDaemon]:
    with running(tmp_path_factory.mktemp("stops") / "root") as daemon:
        yield daemon


@pytest.fixture(scope="module")
def far(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningDaemon]:
    """A daemon that ranks reach over HTTP alone."""
    with running(tmp_path_factory.mktemp("far") / "root", listen=f"127.0.0.1:{free_port()}") as daemon:
        hide(daemon)
        yield daemon


@contextmanager
def launched(places: Sequence[Path | str], kind: str) -> Iterator[list[Forked]]:
    """Ranks of one launch, each at its daemon, all of which have begun to train."""
    ranks = len(places)
    about = os.environ | {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(ranks),
        "HOLDFAST_LAUNCH": uuid.uuid4().hex,
        "OMP_NUM_THREADS": "1",
    }
    words = ("-m", "tests.regressions.stopping_rank")
    processes = [Forked((*words, at, kind), about | {"RANK": str(i), "LOCAL_RANK": str(i)}) for i, at in enumerate(places)]
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


def said(process: Forked, *what: str) -> list[str]:
    """The words of the line of a rank that begins with one of these; without that one, if it is the only one."""
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith(what):
            return line.split()[len(what) == 1 :]
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
    with launched([daemon.socket] * RANKS, kind) as processes:
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
        with launched([daemon.socket] * RANKS, kind) as processes:
            time.sleep(draws.random() * draws.choice((0.0, 0.01, 1.0)))
            for rank in draws.sample(range(RANKS), draws.randint(1, RANKS)):
                for _ in range(draws.randint(1, 2)):
                    processes[rank].send_signal(draws.choice((signal.SIGTERM, signal.SIGUSR1)))
                time.sleep(draws.random() * draws.choice((0.0, 0.01)))
            step = stopped(processes)
        assert step in committed(daemon), f"round {number} of {kind}, seed {seed}"


def test_a_rank_that_does_not_answer_is_named(daemon: RunningDaemon) -> None:
    """Half of the time is left then."""
    with launched([daemon.socket] * 3, "deaf") as processes:
        processes[0].send_signal(signal.SIGTERM)
        for process in processes[:2]:
            told = " ".join(said(process, "FAILED"))
            assert re.search(r"(rank 2 has|ranks [01], 2 have) not answered", told), told  # the other one may be late


def test_ranks_over_http_stop_after_one_step(far: RunningDaemon) -> None:
    """They hear that they are asked with the ends of their uploads."""
    with launched([far.url] * 3, "apart") as processes:
        time.sleep(0.3)
        processes[1].send_signal(signal.SIGTERM)
        step = stopped(processes)
    assert step in committed(far)


def test_ranks_of_two_nodes_stop_after_one_step(site: Site) -> None:
    """The signal reaches ranks of one node alone; one of the other node's ranks uses HTTP."""
    a, b = site.start("a"), site.start("b")
    with launched([a.socket, b.socket, f"{b.url}/"], "apart") as processes:
        time.sleep(0.3)
        processes[0].send_signal(signal.SIGTERM)
        step = stopped(processes)
    assert step in published_steps(site.root, "stops")


@pytest.mark.cluster
def test_a_catalog_that_is_away_is_named(site: Site) -> None:
    """The nodes cannot meet: no rank stops, and each is told why in its time."""
    a, b = site.start("a"), site.start("b")
    with launched([a.socket, b.socket], "brief") as processes:
        site.postgres.stop()
        try:
            for process in processes:
                process.send_signal(signal.SIGTERM)
            for process in processes:
                assert ("the catalog, through which nodes communicate, is not available") in " ".join(
                    said(process, "FAILED")
                )
                assert process.wait(LIMIT_S) == 3
        finally:
            site.postgres.start()


def test_a_frozen_daemon_is_told_of_in_time(tmp_path: Path) -> None:
    """No rank stops then, however long it is frozen: the others could not know where."""
    with running(tmp_path / "root") as daemon, launched([daemon.socket] * 3, "brief") as processes:
        daemon.freeze()
        try:
            for process in processes:
                process.send_signal(signal.SIGTERM)
            for process in processes:
                assert "the ranks" in " ".join(said(process, "FAILED"))
                assert process.wait(LIMIT_S) == 3
        finally:
            daemon.thaw()


def disturbed(places: Sequence[Path | str], disturb: Callable[[], object], draws: random.Random) -> list[list[str]]:
    """How a launch ends that is told to stop while a daemon is disturbed: STOPPED or FAILED, for each rank."""
    with launched(places, "brief") as processes:
        time.sleep(draws.random() / 2)
        for process in draws.sample(processes, draws.randint(1, len(processes))):
            process.send_signal(signal.SIGTERM)
        time.sleep(draws.choice((0.0, 0.01, 0.05, 0.2)) * draws.random())
        disturb()
        for process in processes:  # one that no signal has reached may never hear of it
            process.send_signal(signal.SIGTERM)
        ends = [said(process, "STOPPED", "FAILED") for process in processes]
    assert len({end[1] for end in ends if end[0] == "STOPPED"}) < 2, ends
    return ends


def pause(daemon: RunningDaemon, seconds: float) -> None:
    daemon.freeze()
    time.sleep(seconds)
    daemon.thaw()


@pytest.mark.crash_slow
@pytest.mark.parametrize("transport", ["socket", "http"])
@pytest.mark.parametrize("what", ["freeze", "kill"])
def test_a_daemon_that_dies_or_stands_still_while_ranks_agree(tmp_path: Path, transport: str, what: str) -> None:
    """At any moment, for any time: each rank gets an error or the step, and no two get different ones."""
    draws, listen = random.Random(uuid.uuid4().int), f"127.0.0.1:{free_port()}"

    def start() -> RunningDaemon:
        made = RunningDaemon(tmp_path / "root", listen=listen)
        if transport == "http":
            hide(made)
        return made

    def disturb() -> None:
        nonlocal daemon
        if what == "freeze":
            pause(daemon, draws.choice((0.1, 1.0, 4.0)))
        else:
            daemon.kill()
            time.sleep(draws.choice((0.0, 1.0, 4.0)))
            daemon = start()

    daemon = start()
    try:
        for _ in range(ROUNDS // 3):
            disturbed([daemon.socket if transport == "socket" else daemon.url] * 3, disturb, draws)
    finally:
        daemon.kill()


@pytest.mark.cluster
@pytest.mark.cluster_slow
@pytest.mark.parametrize("what", ["freeze", "kill"])
def test_one_of_two_daemons_that_dies_or_stands_still_while_ranks_agree(site: Site, what: str) -> None:
    """The same where ranks are at two nodes, and either is disturbed."""
    draws = random.Random(uuid.uuid4().int)
    daemons = {name: site.start(name) for name in ("a", "b")}

    def disturb() -> None:
        name = draws.choice(("a", "b"))
        if what == "freeze":
            pause(daemons[name], draws.choice((0.1, 1.0, 4.0)))
        else:
            daemons[name].kill()
            time.sleep(draws.choice((0.0, 1.0)))
            daemons[name] = site.start(name)

    for _ in range(ROUNDS // 3):
        disturbed([daemons["a"].socket, daemons["a"].socket, daemons["b"].socket], disturb, draws)
