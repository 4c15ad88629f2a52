"""`restore()` never says that there is nothing, where checkpoints of the run were removed by hand or a replica has them."""

from __future__ import annotations

import json
import os
import shutil
import signal
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
import torch

from holdfast import Checkpointer
from holdfast.link import session
from holdfast.read.root_directory import open_checkpoint
from holdfast.rest.api import Api
from holdfast.rest.summaries import summary
from holdfast_formats import naming
from holdfast_formats.errors import CheckpointsMissing, CorruptManifest, DeadlineExceeded
from holdfast_formats.rest.operations import Event
from holdfast_service.storage import PosixTier
from tests.checkpoints import flip
from tests.daemons import RunningDaemon, running, wait_until
from tests.kit.commands import call

RUN = "run"
LIMIT_S = 180.0


class Place:
    """A root with a daemon, and perhaps a replica."""

    def __init__(self, directory: Path, replica: bool) -> None:
        self.root, self.far = directory / "root", directory / "far"
        self.flags = ("--replica", f"far={self.far}") if replica else ()

    @contextmanager
    def served(self) -> Iterator[RunningDaemon]:
        with running(self.root, *self.flags, listen="127.0.0.1:0") as daemon:
            yield daemon

    def save(self, daemon: RunningDaemon, *steps: int) -> None:
        """Checkpoints that are verified, and copied if there is a replica."""
        state = {"x": torch.zeros(1000)}
        with Checkpointer(RUN, state, at=daemon.socket) as checkpointer:
            checkpointer.restore()
            for step in steps:
                state["x"].fill_(step)
                checkpointer.save(step, wait="durable")
        with Api(daemon.url) as api:
            wait_until(lambda: all(made.verified for made in api.checkpoints(RUN)), LIMIT_S)
        if self.flags:
            wait_until(lambda: all((self.far / naming.checkpoint_path(RUN, step)).exists() for step in steps), LIMIT_S)


def restored(at: str | Path, run: str = RUN) -> int:
    """The step that a launch begins with, which is what its tensors hold."""
    state = {"x": torch.zeros(1000)}
    with Checkpointer(run, state, at=at) as checkpointer:
        step = checkpointer.restore() or 0
    assert bool((state["x"] == step).all())
    return step


def _lives(pid: int) -> bool:
    """Whether this process, which may be orphaned, still runs."""
    try:
        return "Z" not in Path(f"/proc/{pid}/stat").read_text().split(")")[1]
    except OSError:
        return False


def remove(place: Place, what: str) -> None:
    shutil.rmtree(place.root / RUN / ("" if what == "run" else naming.CHECKPOINTS))
    if what == "steps":
        (place.root / RUN / naming.CHECKPOINTS).mkdir()


@pytest.mark.parametrize("what", ["checkpoints", "run", "steps"])
@pytest.mark.parametrize("door", ["socket", "http"])
def test_what_was_removed_by_hand_is_copied_back_from_a_replica(tmp_path: Path, what: str, door: str) -> None:
    """The newest step is what the launch begins with, and the alert is over; `holdfast repair` gets others."""
    place = Place(tmp_path, replica=True)
    with place.served() as daemon:
        place.save(daemon, 1, 2)
        remove(place, what)
        assert restored(daemon.url if door == "http" else daemon.socket) == 2
        with Api(daemon.url) as api:
            wait_until(lambda: api.checkpoint(RUN, 2).verified)
            mended = call("repair", f"{RUN}@1", "--url", daemon.url)
            assert mended.exit_code == 0, mended.output
            wait_until(lambda: api.checkpoint(RUN, 1).verified)
            wait_until(lambda: "checkpoint-missing" not in {one.code for one in summary(api, RUN).attention})


@pytest.mark.parametrize("verified", [True, False])
@pytest.mark.parametrize("door", ["socket", "http", "directory"])
def test_a_directory_that_a_person_copied_over_another_is_not_that_step(tmp_path: Path, door: str, verified: bool) -> None:
    """`cp -r step-1 step-3`: it is damaged, and says what it is; the newest sound one is restored, and stays."""
    place = Place(tmp_path, replica=False)
    with place.served() as daemon:
        place.save(daemon, 1, 2)
        with Checkpointer(RUN, {"x": torch.full((1000,), 3.0)}, at=daemon.socket) as checkpointer:
            checkpointer.restore()
            checkpointer.save(3, wait="durable")
        with Api(daemon.url) as api:
            wait_until(lambda: not verified or api.checkpoint(RUN, 3).verified, LIMIT_S)
            one, three = (place.root / naming.checkpoint_path(RUN, step) for step in (1, 3))
            shutil.rmtree(three)
            shutil.copytree(one, three)
            if door == "directory":
                with pytest.raises(CorruptManifest, match=r"step-00000003 contains run@1"):
                    open_checkpoint(place.root, None, RUN, 3)
                return
            assert restored(daemon.url if door == "http" else daemon.socket) == 2
            wait_until(lambda: api.checkpoint(RUN, 3).damage is not None, LIMIT_S)
            assert "contains run@1" in str(api.checkpoint(RUN, 3).damage)
            assert call("keep", RUN, "--last", "1", "--yes", "--url", daemon.url).exit_code == 0
            wait_until(lambda: not one.exists(), LIMIT_S)
        assert restored(daemon.socket) == 2


def test_it_is_refused_where_nothing_has_it(tmp_path: Path) -> None:
    """The error names run, steps and directory, and what to do; after another start of the daemon too. A new run begins at
    0, and so does this one once it was deleted.
    """
    place = Place(tmp_path, replica=False)
    with place.served() as daemon:
        place.save(daemon, 1, 2)
        remove(place, "run")
        for at in (daemon.socket, daemon.url):
            with pytest.raises(CheckpointsMissing, match=r"(?s)steps 2, 1 .*holdfast rm run") as caught:
                restored(at)
            assert f"{RUN}/{naming.CHECKPOINTS}" in caught.value.detail
    with place.served() as daemon:
        with pytest.raises(CheckpointsMissing, match="steps 2, 1"):
            restored(daemon.socket)
        assert restored(daemon.socket, "new") == 0
        with Api(daemon.url) as api:
            api.request("DELETE", f"/v1/runs/{RUN}")
        assert restored(daemon.socket) == 0


def test_what_is_removed_while_no_daemon_looks_is_missed(tmp_path: Path) -> None:
    """The next daemon tells of it, and refuses; a trainer without a daemon starts one to ask."""
    place = Place(tmp_path, replica=False)
    with place.served() as daemon:
        place.save(daemon, 1, 2)
    remove(place, "checkpoints")
    with pytest.raises(CheckpointsMissing, match=r"steps 2, 1"):
        restored(place.root)
    pid = int(json.loads((place.root / naming.DAEMON_FILE).read_bytes())["pid"])
    os.kill(pid, signal.SIGTERM)
    wait_until(lambda: not _lives(pid), LIMIT_S)
    with place.served() as daemon, Api(daemon.url) as api:
        missed = api.pages("/v1/events", Event, {"run": RUN, "kind": "checkpoint-missing"})
        assert {event.step for event in missed} == {1, 2}


def test_what_a_rebuilt_catalog_does_not_list_is_missed(tmp_path: Path) -> None:
    """The comparison that a person asks for finds that they are gone, and the next launch is told."""
    place = Place(tmp_path, replica=False)
    with place.served() as daemon:
        place.save(daemon, 1, 2)
    remove(place, "checkpoints")
    assert call("catalog", "rebuild", "--root", str(place.root)).exit_code == 0
    with place.served() as daemon, pytest.raises(CheckpointsMissing, match="steps 2, 1"):
        restored(daemon.socket)


def test_what_holdfast_removes_is_gone(tmp_path: Path) -> None:
    """The last checkpoint was removed through Holdfast: the run begins at 0, whatever the replica still has."""
    place = Place(tmp_path, replica=True)
    with place.served() as daemon:
        place.save(daemon, 1)
        with Api(daemon.url) as api:
            api.request("DELETE", f"/v1/runs/{RUN}/checkpoints/1", params={"force": "newest-verified"})
        assert restored(daemon.socket) == 0


def test_a_root_that_is_lost_as_a_whole_is_refused(tmp_path: Path) -> None:
    """Its catalog is gone with it: the replica alone knows, and its checkpoints are of launches that this root never had."""
    place = Place(tmp_path, replica=True)
    with place.served() as daemon:
        for step in (1, 2):
            place.save(daemon, step)
    shutil.rmtree(place.root)
    with place.served() as daemon:
        with pytest.raises(CheckpointsMissing, match=r"replica far has steps 2, 1"):
            restored(daemon.socket)
        assert restored(daemon.socket, "new") == 0


def test_damage_does_not_send_a_restore_to_an_older_step(tmp_path: Path) -> None:
    """Damage that a start or a rank finds is read from the replica, or is repaired before anything is chosen, or behind."""
    place = Place(tmp_path, replica=True)
    with place.served() as daemon:
        place.save(daemon, 1, 2)
    directory = naming.checkpoint_path(RUN, 2)
    for name in (naming.COMMIT, naming.MANIFEST):
        flip(place.root / directory / name, 5)
        with place.served() as daemon:
            assert restored(daemon.socket) == 2
    (path,) = (place.root / directory).glob("*.safetensors")
    with place.served() as daemon:
        path.unlink()
        assert restored(daemon.socket) == 2
        wait_until(lambda: PosixTier(place.root).size(f"{directory}/{path.name}") is not None, LIMIT_S)


def test_a_restore_does_not_wait_for_a_daemon_that_is_silent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """One that is stopped repairs nothing: its silence is told after seconds, and it is not asked again."""
    monkeypatch.setattr(session, "SETTLE_WAIT_S", 40.0)
    place = Place(tmp_path, replica=False)
    with place.served() as daemon:
        place.save(daemon, 1)
        with Checkpointer(RUN, {"x": torch.zeros(1000)}, at=daemon.socket) as checkpointer:
            checkpointer.prepare(wait=True)
            daemon.freeze()
            try:
                with pytest.raises(DeadlineExceeded, match="did not answer"):
                    checkpointer.restore()
            finally:
                daemon.thaw()
    assert "restore waits" not in caplog.text


def test_an_older_step_is_told_as_one(tmp_path: Path) -> None:
    """The newest one is gone, and older ones are not: the launch goes on from these, and is told of it."""
    place = Place(tmp_path, replica=False)
    with place.served() as daemon, ExitStack() as stack:
        place.save(daemon, 1, 2)
        shutil.rmtree(place.root / naming.checkpoint_path(RUN, 2))
        checkpointer = stack.enter_context(Checkpointer(RUN, {"x": torch.zeros(1000)}, at=daemon.socket))
        assert checkpointer.restore() == 1
        assert any("step 2 is gone" in notice for notice in checkpointer.notices)
