"""The scrub: what is due is read back, slowly, behind everything else; damage is found, named, and moves `latest` on."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from functools import partial
from pathlib import Path

import pytest

from holdfast_formats.errors import CorruptExtent, DaemonGone
from holdfast_formats.rest.operations import Job
from holdfast_service.daemon import scrub as scrubbing
from holdfast_service.daemon.saving.saver import Saver
from holdfast_service.daemon.scrub import CheckJobs, Rate, Scrub, ScrubPlan
from tests.checking import RUN, Checked, checked_root
from tests.checkpoints import flip
from tests.daemons import wait_until

FAST = 10**12
NEVER = ScrubPlan(None, None)


@pytest.fixture
def root(tmp_path: Path) -> Iterator[Checked]:
    with checked_root(tmp_path / "root") as made:
        yield made


@contextmanager
def scrubbed(root: Checked, plan: ScrubPlan) -> Iterator[Scrub]:
    """A scrub over the root, beside a saver that saves nothing."""
    with (
        closing(Saver(root.tier, root.control, "node", root.checker)) as saver,
        closing(Scrub(root.checker, root.control, saver, plan)) as scrub,
    ):
        yield scrub


def damage(root: Checked, step: int) -> None:
    entry = next(e for e in root.built[RUN, step].manifest.tensors["model"].values() if e.nbytes)
    flip(root.path(step) / entry.file, entry.start)


def states(root: Checked) -> list[str]:
    return [root.known(step).state for step in (1, 2, 3)]


def test_what_was_never_checked_comes_first_and_what_is_due_once(root: Checked) -> None:
    """Everything is read once, damage is marked, one event tells of it; within the period nothing is read again."""
    damage(root, 3)
    with scrubbed(root, ScrubPlan(FAST, 3600.0)):
        wait_until(lambda: len(root.control.events.after(0, 10, kind="scrub-finished")) == 1)
    assert states(root) == ["verified", "verified", "damaged"]
    assert root.catalog.newest(RUN) == 2
    (event,) = root.control.events.after(0, 10, kind="scrub-finished")
    assert (event.level, event.detail["checkpoints"], event.detail["damaged"]) == ("warning", 3, 1)
    read = root.checker.counts.all()["bytes"]
    with scrubbed(root, ScrubPlan(FAST, 3600.0)) as scrub:
        scrub.check_soon([])
        time.sleep(0.3)
    assert root.checker.counts.all()["bytes"] == read
    assert root.control.findings.due("9999") == [(RUN, 3), (RUN, 2), (RUN, 1)]
    assert root.control.findings.oldest() == root.known(3).checked


def test_turned_off_it_still_checks_what_nobody_has(root: Checked) -> None:
    """What a start finds unchecked is checked whatever the rate; what is due is left alone."""
    root.checker.check(RUN, 1)
    checked = root.known(1).checked
    assert root.control.findings.unchecked() == [(RUN, 3), (RUN, 2)]
    with scrubbed(root, NEVER) as scrub:
        scrub.check_soon(root.control.findings.unchecked())
        wait_until(lambda: states(root) == ["verified"] * 3)
    assert root.known(1).checked == checked
    assert root.control.findings.unchecked() == []


def test_it_waits_for_saves(root: Checked, monkeypatch: pytest.MonkeyPatch) -> None:
    """While a save is being written nothing is read; afterwards it goes on."""
    writing = threading.Event()
    writing.set()
    monkeypatch.setattr(Saver, "writing", property(lambda saver: writing.is_set()))
    with scrubbed(root, ScrubPlan(FAST, 3600.0)):
        time.sleep(0.3)
        assert root.checker.counts.all()["bytes"] == 0
        writing.clear()
        wait_until(lambda: states(root) == ["verified"] * 3)


def test_it_says_whether_it_has_looked_at_what_it_was_told_of(root: Checked, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who waits for a run that was brought back to be verified asks this."""
    writing = threading.Event()
    writing.set()
    monkeypatch.setattr(Saver, "writing", property(lambda saver: writing.is_set()))
    with scrubbed(root, NEVER) as scrub:
        assert not scrub.waiting
        scrub.check_soon(root.control.findings.unchecked())
        assert scrub.waiting
        writing.clear()
        wait_until(lambda: not scrub.waiting)
        assert states(root) == ["verified"] * 3


def test_it_ends_in_the_middle_of_a_checkpoint(root: Checked) -> None:
    """A daemon that ends does not wait for a slow scrub: what was not read to its end stays due."""
    with scrubbed(root, ScrubPlan(1, 3600.0)):
        wait_until(lambda: root.checker.counts.all()["bytes"] > 0)
    assert states(root) == ["committed"] * 3
    assert len(root.control.findings.due("9999")) == 3


def test_it_gives_way_to_removals(root: Checked) -> None:
    """It holds nothing: a checkpoint is removed while it is read, and that is no damage."""
    with scrubbed(root, ScrubPlan(1, 3600.0)):
        wait_until(lambda: root.checker.counts.all()["bytes"] > 0)
        root.control.rotation.remove(RUN, 3, newest=True)
    assert root.events("checkpoint-damaged") == []


def test_what_cannot_be_read_is_left_alone_for_a_while(root: Checked, monkeypatch: pytest.MonkeyPatch) -> None:
    """A directory that is gone is no damage, and is not looked for again at once."""
    monkeypatch.setattr(scrubbing, "LOOK_S", 0.05)
    root.path(2).rename(root.root / "elsewhere")
    with scrubbed(root, ScrubPlan(FAST, 3600.0)):
        wait_until(lambda: len(root.control.events.after(0, 10, kind="scrub-finished")) == 1)
        time.sleep(0.3)
    assert [root.known(step).state for step in (1, 3)] == ["verified"] * 2
    assert len(root.control.events.after(0, 10, kind="scrub-finished")) == 1
    assert root.known(2).state == "committed"


def test_a_rate_is_kept() -> None:
    """Bytes are waited for, one asker after the other; time that nobody used is not made up for."""
    waits: list[float] = []
    rate, began = Rate(1000, waits.append), time.monotonic()
    for _ in range(3):
        rate.take(500)
    passed = time.monotonic() - began
    assert all(due - passed <= wait <= due for due, wait in zip([0.5, 1.0], waits, strict=True))


class Reports:
    """How far a job says it is; it is stopped after some reports."""

    def __init__(self, stop_after: int = 10**9) -> None:
        self.said: list[tuple[int, int]] = []
        self._stop_after = stop_after

    def report(self, done_bytes: int, total_bytes: int) -> None:
        self.said.append((done_bytes, total_bytes))
        if len(self.said) > self._stop_after:
            raise KeyError("stopped")


SCRUB = Job(
    id=1, kind="scrub", state="running", run=None, step=None, arguments={}, done_bytes=0, total_bytes=0, node="n",
    created="now", started="now", ended=None,
)  # fmt: skip


def test_jobs_say_what_came_of_it(root: Checked) -> None:
    """A sound one, a damaged one, and all: bytes are reported, the damage is raised and in the catalog."""
    damage(root, 3)
    with scrubbed(root, NEVER) as scrub:
        jobs = CheckJobs(root.checker, scrub, root.tier)
        progress = Reports()
        done = jobs.verify(RUN, 2, progress)
        assert (done["bytes"], done["files"]) == (root.known(2).bytes, root.known(2).files)
        assert progress.said[-1][0] == root.known(2).bytes and progress.said == sorted(progress.said)
        with pytest.raises(CorruptExtent):
            jobs.verify(RUN, 3, Reports())
        assert jobs.scrub(SCRUB, Reports())["damaged"] == (f"{RUN}@3",)
        assert states(root) == ["verified", "verified", "damaged"]


def test_a_job_that_is_stopped_stops(root: Checked) -> None:
    """What a report raises comes out again, and nothing is recorded."""
    with scrubbed(root, NEVER) as scrub:
        jobs = CheckJobs(root.checker, scrub, root.tier)
        for act in (partial(jobs.verify, RUN, 2), partial(jobs.scrub, SCRUB)):
            with pytest.raises(KeyError, match="stopped"):
                act(Reports(stop_after=2))
        scrub.close()
        with pytest.raises(DaemonGone):
            jobs.verify(RUN, 2, Reports())
    assert root.known(2).state == "committed"
