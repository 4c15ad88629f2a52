"""What control does is told: attempts, removals with their reasons, policies and marks. What changes nothing is no news."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from holdfast_formats.rest.retention import RetentionPolicy
from holdfast_service.control.catalog.catalog import Catalog
from holdfast_service.control.checkpoints import run_files
from holdfast_service.control.control import Control
from holdfast_service.storage import PosixTier, stored_in
from tests.checkpoints import build_root
from tests.databases import sqlite_url


@pytest.fixture
def control(tmp_path: Path) -> Iterator[Control]:
    build_root(tmp_path, {"tiny": (5, 10, 15)})
    catalog = Catalog.open(sqlite_url(tmp_path / "catalog.sqlite"), "node")
    made = Control(stored_in(PosixTier(tmp_path)), catalog, None)
    made.recovery.recover()
    yield made
    made.close()
    catalog.close()


def told(control: Control, kind: str) -> list[tuple[int | None, str]]:
    return [(event.step, event.text) for event in control.events.after(0, 100, "tiny", kind)]


def test_an_attempt_is_told_once(control: Control) -> None:
    """Not for each rank, and not for a rank that comes back to a daemon that was started anew."""
    for launch in ("one", "one", "two", "two"):
        control.launches.declare("tiny", launch, 2, None)
    first, second = told(control, "attempt-declared")
    assert "with 2 ranks" in first[1] and first[1] != second[1]
    control.launches.declare("tiny", "two", 2, None)
    assert len(told(control, "attempt-declared")) == 2


def test_marks_are_told_when_they_change(control: Control) -> None:
    """Setting again what is set is no news."""
    for _ in range(2):
        control.rotation.mark("tiny", 5, lambda file: run_files.pinned(file, 5))
        control.rotation.mark("tiny", 10, lambda file: run_files.labelled(file, 10, "good"))
    control.rotation.unmark("tiny", lambda file: run_files.unpinned(file, 5))
    control.rotation.unmark("tiny", lambda file: run_files.unlabelled(file, 10, "good"))
    assert told(control, "mark-changed") == [
        (5, "step 5 was pinned"),
        (10, "step 10 got the label good"),
        (5, "step 5 was unpinned"),
        (10, "step 10 lost the label good"),
    ]


def test_removals_are_told_with_their_reasons(control: Control) -> None:
    """What the policy lets go says which rule did not keep it, and what was asked for says so."""
    for step in (5, 10, 15):
        control.findings.sound("tiny", step)
    tag = control.rotation.file("tiny").etag
    control.rotation.set_policy("tiny", RetentionPolicy(last=2), tag)
    assert control.rotation.wait_until_applied()
    control.rotation.remove("tiny", 10)
    (first, reasons), (second, asked) = told(control, "checkpoint-removed")
    assert (first, second) == (5, 10)
    assert "newest 2" in reasons or "last" in reasons, reasons
    assert "on request" in asked
    (event,) = control.events.after(0, 100, kind="policy-changed")
    assert event.detail["policy"]["last"] == 2


def test_a_round_whose_checkpoint_stands_is_committed(control: Control) -> None:
    """The daemon ended between the rename and its word: the next start says it, and aborts only what is not there."""
    catalog = control.catalog
    attempt = catalog.checkpoint("tiny", 15).attempt
    catalog.forget_checkpoint("tiny", 15)
    published = catalog.rounds.open("tiny", 15, attempt, 1, "2026-01-01T00:00:00.000Z")[0]
    lost = catalog.rounds.open("tiny", 20, attempt, 1, "2026-01-01T00:00:00.000Z")[0]
    control.recovery.recover()
    ended = {made.id: made for made in catalog.rounds.page("tiny").items}
    assert (ended[published].state, ended[published].node, ended[published].code) == ("committed", "node", None)
    assert (ended[lost].state, ended[lost].code) == ("aborted", "round-aborted")
    assert [step for step, _ in told(control, "checkpoint-committed")] == [15]
