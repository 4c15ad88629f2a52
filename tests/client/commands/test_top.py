"""`holdfast top` and the typed calls below it, against the real service."""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from holdfast.commands.top import render
from holdfast.rest.api import Api
from holdfast.rest.summaries import summaries, summary
from holdfast.terminal.console import human_seconds
from holdfast_formats.errors import DaemonGone, NoSuchRun, exit_status
from tests.checkpoints import build_root
from tests.kit import commands
from tests.serving import Served, served


@pytest.fixture
def service(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Served]:
    """Two runs, one of which has failed to save since."""
    monkeypatch.setenv("COLUMNS", "240")
    build_root(tmp_path, {"tiny": (5, 10), "other": (1,)})
    with served(tmp_path) as running:
        catalog = running.services.control.catalog
        failed = catalog.rounds.open("tiny", 15, 1, 2, "2026-01-02T00:00:00Z")[0]
        catalog.rounds.end(failed, "aborted", "2026-01-02T00:00:01Z", "no-space", "the disk is full")
        yield running


call = partial(commands.call, "top")


def test_typed_calls(service: Served) -> None:
    """One run, all of them, those of a prefix, those first that need attention, and one that is not there."""
    with Api(service.url) as api:
        assert (summary(api, "tiny").newest, summary(api, "tiny").failed) == (10, 1)
        assert [made.run for made in summaries(api)] == ["other", "tiny"]
        assert [made.run for made in summaries(api, "ot")] == ["other"]
        assert [made.run for made in summaries(api, order="attention", most=1)] == ["tiny"]
        assert [made.run for made in summaries(api, most=1)] == ["other"]
        with pytest.raises(NoSuchRun):
            summary(api, "nope")


def test_once(service: Served) -> None:
    """The table has every run, those first that need attention, and says below what to do."""
    shown = call("--once", "--url", service.url)
    assert shown.exit_code == 0
    assert shown.stdout.index("tiny") < shown.stdout.index("other")
    assert "the last save failed: no-space → free space" in shown.stdout
    assert shown.stdout.count("not measured") == 2  # no save of either run was compared with the disk
    assert call("--by-name", "nothing", "--url", service.url).stdout == "No runs.\n"


def test_json(service: Served) -> None:
    """For programs it is the summaries as the service has them."""
    listed = json.loads(call("--json", "--by-name", "--url", service.url).stdout)
    assert [made["run"] for made in listed] == ["other", "tiny"]
    assert listed[1]["attention"][0]["code"] == "saves-failing"


def test_no_service(tmp_path: Path) -> None:
    """Without a service it says so, by the exit status as well."""
    ended = call("--once", "--url", "http://127.0.0.1:9")
    assert ended.exit_code == exit_status(DaemonGone("nobody"))
    assert "daemon-gone" in ended.stderr


def test_nothing_to_show() -> None:
    """No run is said in words."""
    assert [str(part) for part in render([])] == ["No runs."]


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (None, "-"),
        (0.0, "0 s"),
        (0.0004, "0.4 ms"),
        (0.25, "250 ms"),
        (3.25, "3.2 s"),
        (75.0, "75 s"),
        (7000.0, "117 min"),
        (90_000.0, "25 h"),
        (1e6, "12 d"),
    ],
)
def test_human_seconds(seconds: float | None, text: str) -> None:
    """Short, in the unit that fits."""
    assert human_seconds(seconds) == text
