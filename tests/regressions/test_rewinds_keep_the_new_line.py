"""Going back to an older step begins a new line: what it saves is kept and restored, what it left behind is set aside."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from torch import nn

from holdfast import Api, Checkpointer
from holdfast.read.directory_root import DirectoryRoot
from holdfast.read.root_directory import living_steps
from holdfast.read.root_index import RootIndex
from holdfast.rest import retention
from holdfast_formats.errors import AlreadyCommitted, Pinned, StateMismatch
from holdfast_formats.lineage import NO_INTENT, NOTHING, Intent
from holdfast_formats.naming import CATALOG
from holdfast_service.control.catalog import lineage_records
from tests.daemons import RunningDaemon, running, wait_until


class Training:
    """A launch whose weights say which step they are of, and on which line."""

    def __init__(self, daemon: RunningDaemon, run: str, **options: Any) -> None:
        self.model = nn.Linear(4, 4)
        self.checkpointer = Checkpointer(run, {"model": self.model}, at=daemon.socket, **options)

    def __enter__(self) -> Training:
        return self

    def __exit__(self, *error: Any) -> None:
        self.checkpointer.close()

    @property
    def value(self) -> float:
        return float(self.model.weight.detach().flatten()[0])

    def save(self, step: int, value: float, **options: Any) -> None:
        with torch.no_grad():
            self.model.weight.fill_(value)
        self.checkpointer.save(step, wait="durable", **options)


def listed(daemon: RunningDaemon, run: str) -> dict[int, str]:
    """Steps and states, once everything has been read back."""

    def known() -> dict[int, str]:
        with Api(daemon.url) as api:
            return {c.step: c.state for c in api.checkpoints(run)}

    wait_until(lambda: "committed" not in known().values())
    return known()


def train(daemon: RunningDaemon, run: str, *steps: int, **options: Any) -> None:
    with Training(daemon, run, **options) as training:
        for step in steps:
            training.save(step, float(step))
    listed(daemon, run)


def test_the_new_line_is_kept_and_restored(daemon: RunningDaemon, run: str) -> None:
    """After restore(50) of 50, 150, 200 the saves 60, 70, 80 count, 150 is saved anew, and plain restores take them."""
    train(daemon, run, 50, 150, 200)
    with Training(daemon, run) as training:
        assert training.checkpointer.restore(step=50) == 50
        for step in (60, 70, 80):
            training.save(step, step + 0.5)
        assert listed(daemon, run) == dict.fromkeys((50, 60, 70, 80), "verified") | dict.fromkeys((150, 200), "abandoned")
    with Training(daemon, run) as training:
        assert training.checkpointer.restore() == 80 and training.value == 80.5
        training.save(150, 150.5)
        assert listed(daemon, run)[150] == "verified"
    with Training(daemon, run) as training:
        assert training.checkpointer.restore() == 150 and training.value == 150.5
    assert RootIndex(DirectoryRoot(daemon.root)).runs()[0].name and living_steps(DirectoryRoot(daemon.root), run)[0] == 150


def test_retention_counts_the_new_line_alone(daemon: RunningDaemon, run: str) -> None:
    """With keep_last=2 the new line is not removed for the sake of the one that was left behind; that goes."""
    train(daemon, run, 50, 150, keep_last=2)
    with Training(daemon, run, keep_last=2) as training:
        training.checkpointer.restore(step=50)
        training.save(60, 60.5)
        wait_until(lambda: set(listed(daemon, run)) == {50, 60})
        training.save(70, 70.5)
        wait_until(lambda: set(listed(daemon, run)) == {60, 70})


def test_looking_at_an_old_step_leaves_all_as_it_is(daemon: RunningDaemon, run: str) -> None:
    """A launch that restores an old step and saves nothing sets nothing aside."""
    train(daemon, run, 50, 150)
    with Training(daemon, run) as training:
        assert training.checkpointer.restore(step=50) == 50
    assert set(listed(daemon, run).values()) == {"verified"}
    with Training(daemon, run) as training:
        assert training.checkpointer.restore() == 150
        training.save(160, 160.0)
    assert set(listed(daemon, run).values()) == {"verified"}


def test_healthy_restores_in_a_loop(daemon: RunningDaemon, run: str) -> None:
    """One launch goes back from NaN twice, saves the same steps again, and a plain restore takes what came of it last."""
    with Training(daemon, run) as training:
        training.save(100, 1.0)
        for retry in range(2):
            training.save(150, math.nan)
            training.save(200, math.nan)
            wait_until(lambda: [listed(daemon, run)[step] for step in (150, 200)] == ["unhealthy"] * 2)
            assert training.checkpointer.restore(healthy=True) == 100 and training.value == 1.0, retry
        training.save(150, 1.5)
        assert listed(daemon, run) == {100: "verified", 150: "verified", 200: "abandoned"}
        assert training.checkpointer.restore() == 150 and training.value == 1.5
        training.save(200, 2.0)
    with Training(daemon, run) as training:
        assert training.checkpointer.restore() == 200 and training.value == 2.0


def test_what_to_do_with_a_step_that_exists(daemon: RunningDaemon, run: str) -> None:
    """By default it is refused; "same" takes what this line saved for saved, "replace" puts the new one there."""
    train(daemon, run, 10, 20)
    with Training(daemon, run) as training:
        training.checkpointer.restore()
        with pytest.raises(AlreadyCommitted):
            training.save(20, 21.0)
        training.save(20, 21.0, existing="same")
        assert training.checkpointer.restore() == 20 and training.value == 20.0
        training.save(20, 22.0, existing="replace")
        assert training.checkpointer.restore() == 20 and training.value == 22.0


def test_a_launch_that_restored_nothing_does_not_go_back(daemon: RunningDaemon, run: str) -> None:
    """It is refused by name, behind and above what is there, and may begin the run anew if it says so."""
    train(daemon, run, 10, 20)
    with Training(daemon, run) as training:
        for step in (5, 30):
            with pytest.raises(AlreadyCommitted, match="step 20 of an earlier launch"):
                training.save(step, 5.5)
        training.save(5, 5.5, existing="replace")
        training.save(6, 6.5)
    assert listed(daemon, run) == {5: "verified", 6: "verified", 10: "abandoned", 20: "abandoned"}


def test_a_launch_that_restored_nothing_saves_above_if_it_says_so(daemon: RunningDaemon, run: str) -> None:
    """What is there stays then, and its next saves need not say it again."""
    train(daemon, run, 10, 20)
    with Training(daemon, run) as training:
        training.save(30, 30.5, existing="replace")
        training.save(40, 40.5)
    assert listed(daemon, run) == dict.fromkeys((10, 20, 30, 40), "verified")


def test_a_launch_that_restored_nothing_may_find_its_step_saved(daemon: RunningDaemon, run: str) -> None:
    """A script that is run again may count the newest step as saved: nothing is superseded by that. No other step."""
    train(daemon, run, 10, 20)
    with Training(daemon, run) as training:
        training.save(20, 20.5, existing="same")
        for step in (10, 30):
            with pytest.raises(AlreadyCommitted, match="restored nothing"):
                training.save(step, 20.5, existing="same")
        assert training.checkpointer.restore() == 20 and training.value == 20.0


def test_a_launch_that_loaded_its_state_by_other_means_says_so(daemon: RunningDaemon, run: str) -> None:
    """By `goes_on_from()`; or it has restored the weights alone."""
    train(daemon, run, 10)
    with Training(daemon, run) as training:
        training.checkpointer.goes_on_from(10)
        training.save(20, 20.0)
    with Training(daemon, run) as training:
        training.checkpointer.restore(groups=("model",))
        training.save(30, 30.0)
    assert listed(daemon, run) == dict.fromkeys((10, 20, 30), "verified")


def test_the_place_of_a_launch_that_restored_nothing() -> None:
    """A damaged step below is not superseded. What the launch has said goes with every save, so a daemon that was killed
    since, and has nothing of the save that said it, asks for it no more.
    """
    sound = lineage_records.ListedCheckpoint(10, 1, 0, ())
    with pytest.raises(AlreadyCommitted, match="restored nothing"):
        lineage_records.place([sound], "r", (20, 2), NO_INTENT)
    assert not lineage_records.place([sound._replace(sound=False)], "r", (20, 2), NO_INTENT).over
    assert lineage_records.place([sound], "r", (40, 2), Intent(turn=1, again=1)).lineage.rewinds == ()
    assert lineage_records.place([sound], "r", (5, 2), Intent(turn=1, again=1)).lineage.rewinds == ((2, 1, NOTHING),)


def test_pins_on_what_was_left_behind_hold(daemon: RunningDaemon, run: str) -> None:
    """A pinned step is neither removed nor replaced by the new line."""
    train(daemon, run, 50, 150, 200, keep_last=1)
    with Training(daemon, run) as training, Api(daemon.url) as api:
        retention.pin(api, run, 200)
        training.checkpointer.restore(step=200)
        training.save(210, 210.0)
        training.checkpointer.restore(step=200)
        with pytest.raises(AlreadyCommitted):
            training.save(200, 0.0)
    with Api(daemon.url) as api:
        retention.pin(api, run, 210)
    with pytest.raises(Pinned), Training(daemon, run) as training:
        training.checkpointer.restore(step=200)
        training.save(210, 0.0)
    assert {200, 210} <= set(listed(daemon, run))


def test_lines_survive_the_loss_of_the_catalog(tmp_path: Path) -> None:
    """The directories alone tell which line lives: after the catalog is gone, and with no daemon at all."""
    root = tmp_path / "root"
    with running(root, listen="127.0.0.1:0") as daemon:
        train(daemon, "r", 50, 150)
        with Training(daemon, "r") as training:
            training.checkpointer.restore(step=50)
            training.save(60, 60.5)
    states = {c.step: c.abandoned for c in RootIndex(DirectoryRoot(root)).checkpoints("r").checkpoints}
    assert states == {50: False, 60: False, 150: True} and living_steps(DirectoryRoot(root), "r") == [60, 50]
    for path in root.glob(f"{CATALOG}*"):
        path.unlink()
    with running(root, listen="127.0.0.1:0") as daemon:
        assert listed(daemon, "r") == {50: "verified", 60: "verified", 150: "abandoned"}
        with Training(daemon, "r") as training:
            assert training.checkpointer.restore() == 60 and training.value == 60.5


def test_a_named_step_is_that_step_or_an_error(daemon: RunningDaemon, run: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where another rank of the launch was first and has had another answer, the rank that names a step is refused."""
    train(daemon, run, 1, 2, 3)
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("HOLDFAST_LAUNCH", "a")
    ranks = []
    for rank in ("0", "1"):
        monkeypatch.setenv("RANK", rank)
        ranks.append(Checkpointer(run, {"model": nn.Linear(4, 4)}, at=daemon.socket))
    assert ranks[0].restore(step=3) == 3
    with pytest.raises(StateMismatch, match="another rank of its launch restores step 3"):
        ranks[1].restore(step=2)
    for rank in ranks:
        rank.close(wait=False)


def test_who_downloads_what_is_replaced_holds_up_nobody(daemon: RunningDaemon, run: str) -> None:
    """A reader over HTTP reads on in the old bytes, the new line is committed, and so is what another run saves."""
    train(daemon, run, 50, 150)
    with Api(daemon.url) as api, Training(daemon, run) as training, Training(daemon, f"{run}-other") as other:
        assert training.checkpointer.restore(step=50) == 50
        name = next(file.name for file in api.files(run, 150) if file.name.endswith(".safetensors"))
        path = f"/v1/runs/{run}/checkpoints/150/files/{name}"
        with httpx.stream("GET", f"{daemon.url}{path}", trust_env=False, timeout=180) as reading:
            old = reading.iter_raw(16)
            begun = next(old)
            training.save(150, 150.5)
            other.save(1, 1.0)
            assert len(begun + b"".join(old)) == int(reading.headers["content-length"])
        assert listed(daemon, run)[150] == "verified"
        assert training.checkpointer.restore() == 150 and training.value == 150.5
