"""What became of a run follows from goodbyes and lost connections, and from no clock; the next daemon still knows it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager
from itertools import count
from pathlib import Path

import httpx
import pytest
import torch
from typer.testing import CliRunner

from holdfast import Checkpointer
from holdfast.cli import app
from holdfast.rest import summaries
from holdfast.rest.api import Api
from holdfast_formats.rest.bodies import RankHello
from holdfast_formats.rest.measurements import RunSummary
from holdfast_formats.staging.wire import PROTOCOL
from holdfast_service.daemon.saving.rounds import Participant
from holdfast_service.daemon.saving.run_lifecycle import RunLifecycles
from tests.daemon.saver_world import SaverWorld, saver_world
from tests.daemons import RunningDaemon, running, wait_until
from tests.forked import Forked


@pytest.fixture
def world() -> Iterator[SaverWorld]:
    with saver_world() as made:
        yield made


def serving(root: Path) -> AbstractContextManager[RunningDaemon]:
    return running(root, "--silence-max", "1", listen="127.0.0.1:0")


def of(daemon: RunningDaemon, run: str) -> RunSummary:
    with Api(daemon.url) as api:
        return summaries.summary(api, run)


def codes(daemon: RunningDaemon, run: str) -> set[str]:
    return {item.code for item in of(daemon, run).attention}


def metric(daemon: RunningDaemon, run: str) -> str:
    text = httpx.get(f"{daemon.url}/metrics").text
    return next(line.split()[-1][0] for line in text.splitlines() if line.startswith(f'holdfast_run_died{{run="{run}"}}'))


def trainer(daemon: RunningDaemon, run: str, launch: str, step: int = 1) -> Forked:
    """A rank that saves a step and then waits; killed or not, it finds the next daemon by itself."""
    made = Forked(["-m", "tests.crash.rank_process", daemon.socket, run, 0, 1, launch, step, 1000], talks=True)
    assert made.stdout is not None
    while made.stdout.readline().strip() != f"committed {step}":
        pass
    return made


def test_a_killed_trainer_is_lost_until_a_new_launch_begins(tmp_path: Path) -> None:
    """In the API, the metrics, the dashboard's dot, `holdfast top` and `holdfast ls`; a restart does not forget it."""
    with serving(tmp_path) as daemon:
        with trainer(daemon, "killed", "one") as rank:
            assert of(daemon, "killed").state == "running"
            assert metric(daemon, "killed") == "0"
            rank.kill()
        wait_until(lambda: of(daemon, "killed").state_since is not None)
    with serving(tmp_path) as daemon:
        found = of(daemon, "killed")
        assert (found.state, found.exposed_s) == ("died", 0.0) and found.state_since is not None
        assert [item.code for item in found.attention if item.level == "error"] == ["run-died"]
        assert metric(daemon, "killed") == "1"
        assert 'class="dot error"' in httpx.get(daemon.url).text
        shown = CliRunner().invoke(app, ["top", "--once", "--url", daemon.url]).stdout
        listed = CliRunner().invoke(app, ["ls", "--url", daemon.url]).stdout.splitlines()
        assert [line.split()[-1] for line in listed] == ["STATE", "died"]
        assert "died" in shown and "it continues from step 1" in " ".join(shown.split())
        with trainer(daemon, "killed", "two", step=2):
            assert of(daemon, "killed").state == "running"
            assert "run-died" not in codes(daemon, "killed")


def test_an_orderly_end_is_quiet_at_once(tmp_path: Path) -> None:
    """Though the trainer has just committed; an exception in the block of a training is no goodbye."""
    with serving(tmp_path) as daemon:
        state = {"w": torch.zeros(8)}
        with Checkpointer("ended", state, at=daemon.socket) as checkpointer:
            checkpointer.save(1).result(180)
        wait_until(lambda: of(daemon, "ended").state == "finished")
        with pytest.raises(ZeroDivisionError), Checkpointer("failed", state, at=daemon.socket) as failing:
            failing.save(1).result(180)
            raise ZeroDivisionError
        wait_until(lambda: of(daemon, "failed").state == "died")
        assert of(daemon, "ended").exposed_s == 0.0 and not codes(daemon, "ended")
        assert 'class="dot gone" role="img" title="finished"' in httpx.get(daemon.url).text
    with serving(tmp_path) as daemon:
        assert of(daemon, "ended").state == "finished" and metric(daemon, "ended") == "0"


def test_a_daemons_restart_calls_no_living_trainer_lost(tmp_path: Path) -> None:
    """Killed or stopped, with the trainer alive: it is running before it has come back, and after."""
    with serving(tmp_path) as daemon, trainer(daemon, "lives", "one"):
        daemon.kill()
        with serving(tmp_path) as second:
            assert of(second, "lives").state == "running"
        with serving(tmp_path) as third:
            assert of(third, "lives").state == "running"
            wait_until(lambda: httpx.get(f"{third.url}/v1/nodes").json()["items"][0]["ranks"] == 1)
            assert of(third, "lives").state == "running" and not codes(third, "lives") & {"run-died", "no-commit"}
            assert not [event for event in httpx.get(f"{third.url}/v1/events?kind=run-died").json()["items"]]


def test_over_http_a_delete_is_the_goodbye_and_silence_is_none(tmp_path: Path) -> None:
    """A rank that is not heard of for longer than it may be is lost; one that was deleted has ended."""
    with serving(tmp_path) as daemon:
        numbers = count()

        def came(run: str) -> str:
            launch = next(numbers)
            hello = RankHello(protocol=PROTOCOL, run=run, rank=0, world=1, launch=f"{launch}", process="p")
            at = f"{daemon.url}/v1/ranks/{launch:032x}"
            httpx.put(at, json=hello.model_dump()).raise_for_status()
            return at

        def said_goodbye() -> bool:
            httpx.delete(came("far-ended")).raise_for_status()
            return of(daemon, "far-ended").state == "finished"

        wait_until(said_goodbye)  # where the machine is busy, the silence before it may have been too long
        came("far-lost")
        wait_until(lambda: of(daemon, "far-lost").state == "died")
        assert of(daemon, "far-ended").state == "finished"


def test_who_does_not_come_back_to_the_next_daemon_is_lost(world: SaverWorld) -> None:
    """And who does is not; each is recorded once, and a newer attempt is not touched by an older one's end."""
    control, saver = world.control, world.saver
    for run in ("back", "away"):
        control.launches.declare(run, "one", 1, None)
        control.lives.became(run, 1, "running")
    lives = RunLifecycles(saver, control, return_s=0.0)
    back = Participant("back", 0, 1, 1, lambda outcome: None)
    saver.join(back)
    lives.record()
    known = control.attempts.known()
    assert (known["back"].life, known["away"].life) == ("running", "died")
    control.launches.declare("back", "two", 1, None)
    saver.join(Participant("back", 0, 1, 2, lambda outcome: None))
    saver.gone(back)
    lives.record()
    assert control.lives.by_run(None, saver.connected.lives())["back"].life == "running"


def test_a_rank_that_is_gone_is_missing_until_it_is_back(world: SaverWorld) -> None:
    """One rank without a goodbye makes the run lost though others are here; once it is back, nothing is lost."""
    ranks = [Participant("r", rank, 2, 7, lambda outcome: None) for rank in range(2)]
    for who in ranks:
        world.saver.join(who)
    world.saver.gone(ranks[0])
    assert world.saver.connected.lives()["r"] == (7, "died")
    world.saver.join(again := Participant("r", 0, 2, 7, lambda outcome: None))
    assert world.saver.connected.lives()["r"] == (7, "running")
    for who in (again, ranks[1]):
        who.part()
        world.saver.gone(who)
    assert world.saver.connected.lives()["r"] == (7, "finished")
