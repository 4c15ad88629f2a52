"""`holdfast jobs` and `holdfast events`, against the real service."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from holdfast.rest.api import Api
from holdfast_formats import naming
from holdfast_formats.errors import DeadlineExceeded
from holdfast_formats.rest.jobs import ExportJob
from holdfast_service.control.catalog import events
from tests.checkpoints import build_root, flip
from tests.kit.commands import call
from tests.serving import Served, hold_up, served


@pytest.fixture
def service(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Served]:
    build_root(tmp_path, {"tiny": (5, 10)})
    monkeypatch.setenv("COLUMNS", "200")
    with served(tmp_path) as running:
        monkeypatch.setenv("HOLDFAST_URL", running.url)
        yield running


def test_a_job_is_submitted_followed_and_listed(service: Served) -> None:
    """The step may be `latest`; following shows what came of it."""
    done = call("jobs", "submit", "verify", "tiny@latest", "--follow")
    assert done.exit_code == 0, done.output
    assert "verify tiny@10" in done.output and "done" in done.output
    shown = json.loads(call("jobs", "show", 1, "--json").output)
    assert (shown["id"], shown["state"], shown["step"]) == (1, "done", 10)
    listed = call("jobs", "ls", "--state", "done", "--run", "tiny")
    assert "tiny@10" in listed.output and "verify" in listed.output
    assert json.loads(call("jobs", "ls", "--json").output) == [shown]
    assert "No jobs." in call("jobs", "ls", "--kind", "export").output


def test_a_failed_job_says_so_by_its_exit_status(service: Served) -> None:
    """The branch of its problem, as for every command; the problem is shown."""
    file = sorted((service.root / naming.checkpoint_path("tiny", 5)).glob("model*.safetensors"))[0]
    flip(file, file.stat().st_size - 1)
    failed = call("jobs", "submit", "verify", "tiny@5", "--follow")
    assert failed.exit_code == 5
    assert "corrupt-extent" in failed.output and file.name in failed.output
    followed = call("jobs", "show", 1, "--follow", "--json")
    assert (followed.exit_code, json.loads(followed.output)["problem"]["file"]) == (5, file.name)


def test_a_job_is_cancelled(service: Served) -> None:
    """Arguments are handed on as they are given."""
    hold_up(service)
    submitted = json.loads(call("jobs", "submit", "export", "tiny@5", "-a", "to=a=b", "--json").output)
    assert submitted["arguments"] == {"to": "a=b"}
    assert call("jobs", "cancel", submitted["id"]).exit_code == 0
    with Api(service.url) as api:
        assert api.wait_job(submitted["id"], 30).state == "cancelled"


def test_waiting_for_a_job_ends(service: Served) -> None:
    """With the job, or when the time is up."""
    hold_up(service)
    with Api(service.url) as api:
        wanted = ExportJob(run="tiny", step=5, arguments={"to": "there"})
        job = api.submit_job(wanted)
        assert api.submit_job(wanted).id == job.id
        with pytest.raises(DeadlineExceeded):
            api.wait_job(job.id, 0.1)
        api.cancel_job(job.id)
        assert api.wait_job(job.id).state == "cancelled"
        assert [found.id for found in api.jobs(kind="export", state="cancelled")] == [job.id]


@pytest.mark.parametrize(
    ("arguments", "status"),
    [
        (["submit", "fold"], 2),
        (["submit", "verify"], 2),
        (["submit", "verify", "tiny@6"], 3),
        (["show", 99], 3),
        (["cancel", 99], 3),
    ],
)
def test_errors_end_with_their_status(service: Served, arguments: list[object], status: int) -> None:
    """By branch, and named."""
    assert call("jobs", *arguments).exit_code == status


def test_events_shows_the_past_and_ends(service: Served) -> None:
    """Oldest first; of one run or kind, the newest N, since a time, after an ID; with --json one object a line."""
    for step in range(3):
        service.services.control.events.add("checkpoint-committed", f"step {step} is committed", "a", step)
    service.services.control.events.add("save-aborted", "it went wrong", "b", 1, "warning")
    shown = call("events")
    assert shown.exit_code == 0
    assert [line.split()[2] for line in shown.output.splitlines()] == ["checkpoint-committed"] * 3 + ["save-aborted"]
    for words, steps in (
        (("a",), [0, 1, 2]),
        (("a", "--after", 1), [1, 2]),
        (("a", "-n", 1), [2]),
        (("a", "--since", "2h"), [0, 1, 2]),
        (("a", "--since", "2999-01-01"), []),
    ):
        lines = call("events", *words, "--json").output.splitlines()
        assert [json.loads(line)["step"] for line in lines] == steps
    assert "it went wrong" in call("events", "--kind", "save-aborted").output
    assert call("events", "--kind", "nonsense").exit_code == call("events", "--count", 2).exit_code == 2


def test_events_follows(service: Served) -> None:
    """Past events once, then those that happen."""
    control = service.services.control
    for step in range(3):
        control.events.add("checkpoint-committed", f"step {step} is committed", "a", step)
    later = threading.Timer(0.5, control.events.add, ("checkpoint-committed", "one more", "a", 3))
    later.start()
    for words in (("--last", 2), ("--after", 1), ("--since", "1h", "-n", 2)):
        lines = call("events", "a", "--follow", "--count", 2, "--json", *words).output.splitlines()
        assert [json.loads(line)["step"] for line in lines] in ([1, 2], [2, 3])
    last = call("events", "a", "--follow", "--count", 1, "--json", "--after", 3).output
    assert json.loads(last)["step"] == 3
    later.join()


def test_events_says_what_is_forgotten(service: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """A gap, on stderr or as a line of its own."""
    monkeypatch.setattr(events, "EVENTS_MAX", 2)
    monkeypatch.setattr(events, "TRIM_EVERY", 2)
    for step in range(6):
        service.services.control.events.add("checkpoint-committed", "it is", "a", step)
    follow = ("events", "--after", 1, "-f", "--count", 1)
    lines = call(*follow, "--json").output.splitlines()
    assert [json.loads(line).get("gap") for line in lines] == [{"asked": 1, "oldest": 5}, None]
    assert "no longer stored; continuing with 5" in call(*follow).output
