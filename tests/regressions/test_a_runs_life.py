"""What a run is doing, by real processes that are killed, frozen, interrupted or end; and what is remembered of it."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from typer.testing import CliRunner

from holdfast import Checkpointer
from holdfast.cli import app
from holdfast.link import run_info
from holdfast.rest import runs, summaries
from holdfast.rest.api import Api
from holdfast_formats.errors import InUse, InvalidRequest
from holdfast_formats.rest.measurements import RunSummary
from holdfast_formats.rest.runs import RunAbout, RunChange
from holdfast_service.api.access import bodies
from tests.daemons import RunningDaemon, freeze, running, wait_until
from tests.forked import Forked

STATE = {"w": torch.zeros(8)}


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningDaemon]:
    with running(tmp_path_factory.mktemp("root") / "data", listen="127.0.0.1:0") as made:
        yield made


def of(daemon: RunningDaemon, run: str) -> RunSummary:
    with Api(daemon.url) as api:
        return summaries.summary(api, run)


def life(daemon: RunningDaemon, run: str) -> str:
    """As both routes say it."""
    with Api(daemon.url) as api:
        said = api.run(run).life
    return said if said == of(daemon, run).life else "they differ"


def seen(daemon: RunningDaemon, run: str) -> bool:
    """Whether an alert says that it died, and that somebody has acknowledged that."""
    (item,) = of(daemon, run).attention
    return item.code == "run-died" and item.acknowledged is not None and bool(item.acknowledged.by and item.acknowledged.at)


def about(daemon: RunningDaemon, run: str) -> RunAbout:
    with Api(daemon.url) as api:
        return runs.about(api, run)


def change(daemon: RunningDaemon, run: str, **wanted: Any) -> RunAbout:
    with Api(daemon.url) as api:
        return runs.change(api, run, RunChange(**wanted))


def trainer(daemon: RunningDaemon, run: str, launch: str = "one", step: int = 1, rank: int = 0, world: int = 1) -> Forked:
    """A rank that saves a step, and then waits for a line before it ends in order."""
    return Forked(["-m", "tests.crash.rank_process", daemon.socket, run, rank, world, launch, step, 1000], talks=True)


def heard(made: Forked, line: str) -> None:
    assert made.stdout is not None
    while made.stdout.readline().strip() != line:
        pass


@contextmanager
def resumed(daemon: RunningDaemon, run: str, step: int) -> Iterator[None]:
    """A new launch that saves a step and ends in order."""
    with Checkpointer(run, STATE, at=daemon.socket) as checkpointer:
        checkpointer.goes_on_from(step - 1)
        checkpointer.save(step).result(180)
        yield


def holdfast(*words: str) -> str:
    done = CliRunner().invoke(app, list(words))
    assert done.exit_code == 0, done.output
    return done.output


def test_a_killed_run_stays_dead_until_somebody_deals_with_it(tmp_path: Path) -> None:
    """Over SIGKILLs of the daemon, and without its catalog; acknowledged it is idle, and it dies anew."""
    root = tmp_path / "data"
    with running(root, listen="127.0.0.1:0") as daemon:
        with trainer(daemon, "r") as rank:
            heard(rank, "committed 1")
            assert life(daemon, "r") == "training"
            with pytest.raises(InUse, match="connected"):
                change(daemon, "r", archived=True)
            with pytest.raises(InvalidRequest, match="has not died"):
                change(daemon, "r", acknowledged=True)
            rank.kill()
        wait_until(lambda: of(daemon, "r").state_since is not None)
        daemon.kill()
    with running(root, listen="127.0.0.1:0") as daemon:
        found = of(daemon, "r")
        assert found.life == "died" and found.verdict.startswith("Died") and "step 1" in found.verdict
        assert "state       idle" in holdfast("acknowledge", "r", "--url", daemon.url)
        shown = holdfast("note", "r", "--url", daemon.url)
        assert "death seen  by " in shown and " ago" in shown
        assert life(daemon, "r") == "idle" and seen(daemon, "r")
        daemon.kill()
    for catalog in root.glob("catalog.sqlite*"):  # what people have set is in the run's own file
        catalog.unlink()
    with running(root, listen="127.0.0.1:0") as daemon:
        wait_until(lambda: life(daemon, "r") == "idle")
        assert seen(daemon, "r")
        with trainer(daemon, "r", "two", 2) as rank:
            heard(rank, "committed 2")
            assert life(daemon, "r") == "training"
            rank.kill()
        wait_until(lambda: life(daemon, "r") == "died")


def test_ranks_that_are_frozen_have_not_died(daemon: RunningDaemon) -> None:
    """A hung trainer is connected: its saves, or their absence, say more."""
    with trainer(daemon, "hung") as rank:
        heard(rank, "committed 1")
        freeze(rank)
        assert life(daemon, "hung") == "training"
        rank.kill()
    wait_until(lambda: life(daemon, "hung") == "died")


@pytest.mark.parametrize(
    ("name", "end", "state"),
    [
        ("interrupt", lambda rank: rank.send_signal(signal.SIGINT), "died"),
        ("terminate", lambda rank: rank.send_signal(signal.SIGTERM), "died"),
    ],
)
def test_how_a_trainer_ends(daemon: RunningDaemon, name: str, end: Callable[[Forked], None], state: str) -> None:
    """Only a goodbye is one: a process that is ended by a signal has closed nothing."""
    with trainer(daemon, name) as rank:
        heard(rank, "committed 1")
        end(rank)
        rank.wait(180)
    wait_until(lambda: life(daemon, name) == state)
    assert [item.code for item in of(daemon, name).attention] == ["run-died"]


def test_one_of_several_ranks_dies(daemon: RunningDaemon) -> None:
    """The run has died though the others are there; once a new launch is there, it trains."""
    with trainer(daemon, "many", rank=0, world=2) as first, trainer(daemon, "many", rank=1, world=2) as second:
        heard(first, "committed 1")
        heard(second, "committed 1")
        assert life(daemon, "many") == "training"
        second.kill()
        wait_until(lambda: life(daemon, "many") == "died")
        first.kill()
    with resumed(daemon, "many", 2):
        assert life(daemon, "many") == "training"
    wait_until(lambda: life(daemon, "many") == "finished")
    assert not of(daemon, "many").attention


def test_what_a_launch_says_is_remembered(daemon: RunningDaemon) -> None:
    """With what is found out beside it, for each launch; and it is in the run's directory, not in the catalog alone."""
    info = {"owner": "ana", "notes": "the one with 8 experts", "config": {"lr": 3e-4, "api_key": "mine"}}
    with Checkpointer("told", STATE, at=daemon.socket, info=info) as checkpointer:
        checkpointer.save(1).result(180)
    wait_until(lambda: len(about(daemon, "told").launches) == 1)
    with Checkpointer(
        "told", STATE, at=daemon.socket, info={"owner": "ben", "host": None, "tags": ["sweep:lr"]}
    ) as checkpointer:
        checkpointer.restore()
        checkpointer.save(2).result(180)
    wait_until(lambda: [launch.attempt for launch in about(daemon, "told").launches] == [2, 1])
    found = about(daemon, "told")
    newer, older = (launch.info for launch in found.launches)
    assert older["config"] == {"lr": 3e-4, "api_key": "***"} and older["notes"] == info["notes"]
    assert newer["torch"] == torch.__version__ and newer["command"] and "host" not in newer and older["host"]
    assert found.owner == "ben" and not found.notes and found.tags == ["sweep:lr"]
    with Api(daemon.url) as api:
        assert api.run("told").owner == "ben" and summaries.summary(api, "told").owner == "ben"
        assert [run.name for run in api.runs(tags=["sweep:lr"])] == ["told"]
    assert json.loads((daemon.root / "told" / "launches.json").read_bytes())["launches"][0]["info"]["owner"] == "ana"
    shown = holdfast("show", "told", "--url", daemon.url)
    assert "owner       ben" in shown and "told@2" in shown and "mine" not in shown
    assert json.loads(holdfast("show", "told", "--json", "--url", daemon.url))["about"]["owner"] == "ben"


def test_what_is_taken_is_taken_over_http_too() -> None:
    """The access check has limits of its own: of depth, of numbers, of text."""
    deep: Any = {"x": -(2**63) + 1}
    for _ in range(200):
        deep = {"x": deep, "y": [2**63 - 1]}
    info = run_info.check({"deep": deep, "\ud800": "\udfff"})
    assert bodies.parse(json.dumps({"info": info}).encode()) == {"info": info}


def test_what_people_set_counts(daemon: RunningDaemon) -> None:
    """Owner and notes; given back they are the trainer's again. No more is changed than was said."""
    with Checkpointer("noted", STATE, at=daemon.socket, info={"owner": "ana"}) as checkpointer:
        checkpointer.save(1).result(180)
    wait_until(lambda: about(daemon, "noted").owner == "ana")
    assert "owner       cleo" in holdfast("note", "noted", "--owner", "cleo", "--url", daemon.url)
    assert "notes       stopped: bad data" in holdfast("note", "noted", "--notes", "stopped: bad data", "--url", daemon.url)
    found = about(daemon, "noted")
    assert (found.owner, found.notes) == ("cleo", "stopped: bad data")
    with Api(daemon.url) as api:
        assert api.run("noted").owner == "cleo"
    assert change(daemon, "noted", owner="").owner == "ana"
    for refused in ({"owner": "x" * 129}, {"notes": "x" * 16_385}, {"name": "other"}, {"archived": "perhaps"}):
        answer = httpx.patch(f"{daemon.url}/v1/runs/noted", json=refused)
        assert answer.status_code in (400, 422), answer.text
    assert about(daemon, "noted").notes == "stopped: bad data"
    events = httpx.get(f"{daemon.url}/v1/events?run=noted&kind=run-changed").json()["items"]
    assert len(events) == 3


def test_an_archived_run_is_put_away_until_it_is_launched(daemon: RunningDaemon) -> None:
    """It is not listed unless asked for, and raises no alert; a new launch takes it back."""
    with trainer(daemon, "old") as rank:
        heard(rank, "committed 1")
        rank.kill()
    wait_until(lambda: life(daemon, "old") == "died")
    holdfast("archive", "old", "--url", daemon.url)
    found = of(daemon, "old")
    assert found.life == "archived" and not found.attention and found.state == "died"
    assert "old" not in [line.split()[0] for line in holdfast("ls", "--url", daemon.url).splitlines()]
    assert "archived" in next(
        line for line in holdfast("ls", "--all", "--url", daemon.url).splitlines() if line.startswith("old")
    )
    assert "state       died" in holdfast("archive", "old", "--undo", "--url", daemon.url)
    change(daemon, "old", archived=True)
    with resumed(daemon, "old", 2):
        assert life(daemon, "old") == "training"
    wait_until(lambda: life(daemon, "old") == "finished")
    assert about(daemon, "old").archived is None


def test_a_run_that_was_moved_away_is_not_made_again(tmp_path: Path) -> None:
    """`mv ROOT/run elsewhere`: not by ranks that come back to the next daemon, nor by who acknowledges its death; so it can
    be moved back as it was. A new launch begins another one.
    """
    root, away = tmp_path / "data", tmp_path / "away"
    with running(root, listen="127.0.0.1:0") as daemon, trainer(daemon, "killed") as rank:
        heard(rank, "committed 1")
        checkpointer = Checkpointer("r", STATE, at=daemon.socket, keep_last=3, info={"owner": "ana"})
        checkpointer.save(1).result(180)
        rank.kill()
        wait_until(lambda: of(daemon, "killed").state_since is not None)
        away.mkdir()
        for run in ("r", "killed"):
            (root / run).rename(away / run)
        daemon.kill()
    with running(root, listen="127.0.0.1:0") as daemon:
        wait_until(lambda: life(daemon, "r") == "training")
        checkpointer.close()
        refused = CliRunner().invoke(app, ["acknowledge", "killed", "--url", daemon.url])
        assert refused.exit_code == 3 and "something other than Holdfast" in refused.output, refused.output
    assert not {"r", "killed"} & set(os.listdir(root))
    (away / "r").rename(root / "r")
    with running(root, listen="127.0.0.1:0") as daemon:
        assert about(daemon, "r").owner == "ana" and of(daemon, "r").checkpoints == 1
        holdfast("rm", "killed", "--yes", "--url", daemon.url)
        with Checkpointer("killed", STATE, at=daemon.socket, info={"owner": "bo"}) as checkpointer:
            checkpointer.restore()
            wait_until((root / "killed" / "launches.json").exists)


def test_a_deleted_run_comes_back_as_it_was(daemon: RunningDaemon) -> None:
    """By the command line, with a living daemon: gone from every list and from `latest`, and restored from again."""
    weights = {"w": torch.arange(8.0)}
    with Checkpointer("gone", weights, at=daemon.socket) as checkpointer:
        checkpointer.save(3).result(180)
        refused = CliRunner().invoke(app, ["rm", "gone", "--yes", "--url", daemon.url])
        assert refused.exit_code == 4 and "connected" in refused.output
    holdfast("rm", "gone", "--dry-run", "--url", daemon.url)
    declined = CliRunner().invoke(app, ["rm", "gone", "--url", daemon.url], input="n\n")
    assert declined.exit_code == 1 and life(daemon, "gone") == "finished"
    assert "deleted gone (1 checkpoint" in holdfast("rm", "gone", "--yes", "--url", daemon.url)
    assert "gone" not in holdfast("ls", "--all", "--url", daemon.url)
    assert "gone" not in holdfast("ls", "--root", str(daemon.root))
    assert CliRunner().invoke(app, ["show", "gone", "--url", daemon.url]).exit_code == 3
    assert "gone" in holdfast("trash", "--url", daemon.url)
    with Checkpointer("gone", {"w": torch.zeros(8)}, at=daemon.socket) as checkpointer:
        assert checkpointer.restore() == 0, "nothing in the trash is restored"
    with Api(daemon.url) as api:
        (entry,) = (one.entry for one in runs.trash(api).items if one.run == "gone")
        assert api.run("gone").checkpoints == 0
    holdfast("rm", "gone", "--yes", "--url", daemon.url)
    assert "brought gone back" in holdfast("undelete", "gone", "--entry", entry, "--url", daemon.url)
    wait_until(lambda: "verified" in holdfast("ls", "gone", "--url", daemon.url))
    restored = {"w": torch.zeros(8)}
    with Checkpointer("gone", restored, at=daemon.socket) as checkpointer:
        assert checkpointer.restore() > 0
    assert torch.equal(restored["w"], torch.arange(8.0))
    with Api(daemon.url) as api:
        assert runs.delete(api, "gone").checkpoints == 1
        assert f"holdfast_trash_bytes {runs.trash(api).bytes}" in httpx.get(f"{daemon.url}/metrics").text
    holdfast("trash", "--empty", "gone", "--yes", "--url", daemon.url)
    assert "empty" in holdfast("trash", "--url", daemon.url)
