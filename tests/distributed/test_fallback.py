"""Two real ranks, and a newest checkpoint that only one of them finds damaged: both go on from the same older one (I7)."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from holdfast.rest.api import Api
from holdfast_formats import naming
from holdfast_formats.disk import manifests
from tests.checkpoints import flip
from tests.daemons import RunningDaemon, running, wait_until
from tests.torchruns import launch

WORKER = "tests.distributed.fallback_worker"


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A root with three checkpoints."""
    root = tmp_path_factory.mktemp("saved") / "root"
    with running(root) as daemon:
        launch(2, WORKER, str(daemon.socket), "save")
    return root


@pytest.fixture
def daemon(saved: Path, tmp_path: Path) -> Iterator[RunningDaemon]:
    """A daemon that scrubs nothing unasked, with three checkpoints, none of which is held in memory."""
    root = Path(shutil.copytree(saved, tmp_path / "root"))
    with running(root, "--scrub-bytes-per-second", "none", listen="127.0.0.1:0") as daemon:
        with Api(daemon.url) as api:
            wait_until(lambda: all(checkpoint.verified for checkpoint in api.checkpoints("r")))
        yield daemon


def damage(root: Path, step: int) -> None:
    """Flip a bit of what rank 1 alone reads."""
    directory = root / naming.checkpoint_path("r", step)
    made = manifests.decode((directory / naming.MANIFEST).read_bytes(), (directory / naming.COMMIT).read_bytes())
    entry = made.tensors["model"]["of_rank_1"]
    flip(directory / entry.file, entry.start + 5)


def restored(out: Path) -> list[dict]:
    return [json.loads(Path(f"{out}.{rank}").read_text()) for rank in range(2)]


def check(found: list[dict], step: int, passed: int) -> None:
    """Both ranks have this step whole, and say which one they could not have, and why."""
    for rank, one in enumerate(found):
        assert (one["step"], one["value"]) == (step, [step + rank])
        said = [note for note in one["notes"] if f"step {passed} is damaged" in note]
        assert said and "of_rank_1" in said[0] and f"restored step {step} instead" in said[0]
        assert said[0] in one["notices"]


@pytest.mark.parametrize("how", ["socket", "url"])
def test_both_ranks_end_on_the_older_step(daemon: RunningDaemon, tmp_path: Path, how: str) -> None:
    """Rank 1 finds the damage, rank 0 does not: both have step 200; the service says the same from then on."""
    damage(daemon.root, 300)
    launch(2, WORKER, str(daemon.socket if how == "socket" else daemon.url), "restore", str(tmp_path / "out"))
    check(restored(tmp_path / "out"), 200, passed=300)
    with Api(daemon.url) as api:
        assert [(c.step, c.state) for c in api.checkpoints("r")] == [(300, "damaged"), (200, "verified"), (100, "verified")]
        assert api.checkpoint("r", "latest").step == 200


def test_training_goes_on_over_the_damaged_step(daemon: RunningDaemon, tmp_path: Path) -> None:
    """The ranks come to the damaged step once more: what they save then takes its place."""
    damage(daemon.root, 300)
    launch(2, WORKER, str(daemon.socket), "restore", str(tmp_path / "out"), "again")
    check(restored(tmp_path / "out"), 200, passed=300)
    with Api(daemon.url) as api:
        wait_until(lambda: api.checkpoint("r", 300).verified)
        assert api.checkpoint("r", "latest").step == 300


def test_two_damaged_ones_in_a_row(daemon: RunningDaemon, tmp_path: Path) -> None:
    """The ranks go back as far as they must."""
    damage(daemon.root, 300)
    damage(daemon.root, 200)
    launch(2, WORKER, str(daemon.socket), "restore", str(tmp_path / "out"))
    found = restored(tmp_path / "out")
    check(found, 100, passed=300)
    check(found, 100, passed=200)


def test_who_read_a_step_that_another_could_not_does_not_go_on_from_it(daemon: RunningDaemon, tmp_path: Path) -> None:
    """With nothing sound left both fail, and neither saves: rank 0 has a step whole, but nobody else has it."""
    for step in (100, 200, 300):
        damage(daemon.root, step)
    launch(2, WORKER, str(daemon.socket), "fail", str(tmp_path / "out"))
    assert restored(tmp_path / "out")[0] == ["corrupt-extent", "state-overwritten"]


def test_with_no_daemon_running_one_is_started_to_agree(daemon: RunningDaemon, tmp_path: Path) -> None:
    """Ranks that know a directory alone start a daemon on it, as their first save would, and agree through it."""
    damage(daemon.root, 300)
    assert daemon.stop() == 0
    launch(2, WORKER, str(daemon.root), "restore", str(tmp_path / "out"))
    check(restored(tmp_path / "out"), 200, passed=300)
