"""Lists say within seconds what others have done to the checkpoints of a root."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from holdfast_formats import naming
from holdfast_service.control.catalog.catalog import Catalog
from holdfast_service.control.control import Control
from holdfast_service.control.insight.summary_queries import Summaries
from holdfast_service.storage import MemoryTier, stored_in
from tests.control.published import a_manifest, a_row, put_checkpoint
from tests.daemons import wait_until
from tests.databases import sqlite_url

RUN = "run"


@pytest.fixture
def control(tmp_path: Path) -> Iterator[Control]:
    catalog = Catalog.open(sqlite_url(tmp_path / "catalog.sqlite"))
    made = Control(stored_in(MemoryTier()), catalog, None)
    made.recovery.recover()
    for step in (1, 2, 3):
        put_checkpoint(made.storage.directory("a test"), a_manifest(RUN, step))
        catalog.record_checkpoint(a_row(RUN, step))
        made.findings.sound(RUN, step)
    assert made.rotation.wait_until_applied()
    yield made
    made.close()
    catalog.close()


def listed(control: Control) -> dict[int, bool]:
    return {made.step: made.verified for made in control.catalog.checkpoints(RUN, None, 100).items}


def test_a_directory_that_was_removed_is_listed_no_more(control: Control) -> None:
    """The thread finds it by itself; an error says so until a newer checkpoint is verified."""
    control.watch.start()
    control.storage.directory("a test").remove_tree(naming.checkpoint_path(RUN, 3))
    wait_until(lambda: set(listed(control)) == {1, 2})
    control.watch.close()
    summaries = Summaries(control.store, control.catalog)
    (item,) = [one for one in summaries.one(RUN).attention if one.code == "checkpoint-missing"]
    assert (item.level, item.step) == ("error", 3)
    put_checkpoint(control.storage.directory("a test"), a_manifest(RUN, 4))
    control.catalog.record_checkpoint(a_row(RUN, 4))
    control.findings.sound(RUN, 4)
    assert "checkpoint-missing" not in {one.code for one in summaries.one(RUN).attention}


def test_a_directory_that_is_put_back_is_missing_no_more(control: Control) -> None:
    """The alert is over when the checkpoint that was missing has been read back, as its hint says."""

    def alerts() -> set[str]:
        return {one.code for one in Summaries(control.store, control.catalog).one(RUN).attention}

    control.storage.directory("a test").remove_tree(naming.checkpoint_path(RUN, 3))
    control.watch.scan()
    control.findings.sound(RUN, 2)
    assert "checkpoint-missing" in alerts()
    put_checkpoint(control.storage.directory("a test"), a_manifest(RUN, 3))
    for _ in range(2):
        control.watch.scan()
    assert 3 in listed(control) and "checkpoint-missing" in alerts()
    control.findings.sound(RUN, 3)
    assert "checkpoint-missing" not in alerts()


def test_what_is_put_there_is_listed_and_checked(control: Control) -> None:
    """A checkpoint that somebody has copied there is listed at the second look: one that is being committed is listed by
    its daemon. What is no checkpoint is not.
    """
    asked: list[object] = []
    control.watch.unread.subscribe(asked.extend)
    put_checkpoint(control.storage.directory("a test"), a_manifest(RUN, 9))
    control.storage.directory("a test").put(f"{naming.checkpoint_path(RUN, 10)}/{naming.STATE}", b"{}")
    control.watch.scan()
    assert 9 not in listed(control)
    control.watch.scan()
    assert listed(control) == {1: True, 2: True, 3: True, 9: False}
    assert asked == [(RUN, 9)]


def test_what_holdfast_removes_itself_is_no_news(control: Control) -> None:
    """A removal is told of as a removal."""
    control.rotation.remove(RUN, 1)
    control.watch.scan()
    assert {event.kind for event in control.events.after(0, 100) if event.step == 1} >= {"checkpoint-removed"}
    assert not [event for event in control.events.after(0, 100) if event.kind == "checkpoint-missing"]


def test_what_is_being_replaced_is_left_alone(control: Control) -> None:
    """Until the catalog knows the new one, its files are not those of the old one."""
    control.rotation.replaced.began(RUN, 3)
    path = f"{naming.checkpoint_path(RUN, 3)}/{naming.STATE}"
    control.records.replace(path, b"{}")
    control.watch.scan()
    assert listed(control)[3]
    control.rotation.replaced.listed(RUN, 3)
    control.watch.scan()
    assert not listed(control)[3]


def test_a_step_that_retention_removes_during_a_scan_does_not_stop_it(
    control: Control, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The step is removed between the list of the scan and its look at the step; the later steps are looked at."""
    removed: list[int] = []
    look = control.rotation.probe.probe

    def probe(run: str, step: int) -> str:
        if not removed:
            removed.append(step)
            control.rotation.remove(run, step)
        return look(run, step)

    control.records.replace(f"{naming.checkpoint_path(RUN, 2)}/{naming.STATE}", b"{ }")
    monkeypatch.setattr(control.rotation.probe, "probe", probe)
    control.watch.scan()
    assert (removed, listed(control)) == ([1], {2: False, 3: True})
    assert not [event for event in control.events.after(0, 100) if event.kind == "checkpoint-missing"]
