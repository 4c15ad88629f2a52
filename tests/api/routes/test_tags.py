"""Tags of runs over REST: added and removed one by one, listed, and chosen by; of runs that the caller may see."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from holdfast.cli import app
from holdfast.rest import runs
from holdfast.rest.api import Api
from holdfast_formats.rest.runs import RunChange
from holdfast_formats.tags import TAGS_MAX
from holdfast_service.api.access.authentication import Policy
from tests.api.guarded import RUNS, Guarded, code, guarded
from tests.checkpoints import build_root
from tests.client.terminal.test_completion import offered
from tests.serving import served


def tag(guard: Guarded, run: str, *tags: str) -> None:
    assert guard.ask("PATCH", f"/v1/runs/{run}", guard.token("write"), json={"tag": tags}).status_code == 200


def test_runs_are_chosen_by_tag_in_every_order(tmp_path: Path) -> None:
    """By name from the catalog, else from the board: with all tags that are asked for, as they are written."""
    with guarded(tmp_path, Policy(tokens=True)) as guard:
        tag(guard, "team-a", "sweep:lr", "big")
        tag(guard, "other", "sweep:lr")
        tag(guard, "team-b", "Sweep:lr", "sweep:lr2")
        token = guard.token("read")

        def found(route: str, query: str) -> list[str]:
            answer = guard.ask("GET", f"/v1/{route}?{query}", token)
            assert answer.status_code == 200, answer.text
            return [one.get("name") or one["run"] for one in answer.json()["items"]]

        for route in ("runs", "summaries"):
            for sort in ("name", "-storage"):
                assert sorted(found(route, f"sort={sort}&tag=sweep:lr")) == ["other", "team-a"]
                assert found(route, f"sort={sort}&tag=sweep:lr&tag=big") == ["team-a"]
                assert found(route, f"sort={sort}&tag=sweep:lr&prefix=o") == ["other"]
                assert found(route, f"sort={sort}&tag=sweep") == []
            first = guard.ask("GET", f"/v1/{route}?tag=sweep:lr&limit=1", token).json()
            assert found(route, f"tag=sweep:lr&limit=1&cursor={first['next']}") == ["team-a"]
        assert code(guard.ask("GET", "/v1/runs?tag=no%20tag", token)) == (400, "invalid-request")
        assert guard.ask("GET", "/v1/runs/team-a", token).json()["tags"] == ["big", "sweep:lr"]
        assert guard.ask("GET", "/v1/runs/team-a/summary", token).json()["tags"] == ["big", "sweep:lr"]
        listed = guard.ask("GET", "/v1/tags?prefix=sweep", token).json()["items"]
        assert listed == [{"tag": "sweep:lr", "runs": 2}, {"tag": "sweep:lr2", "runs": 1}]
        page = guard.ask("GET", "/v1/tags?limit=2", token).json()
        assert [one["tag"] for one in page["items"]] == ["Sweep:lr", "big"]
        rest = guard.ask("GET", f"/v1/tags?limit=2&cursor={page['next']}", token).json()
        assert [one["tag"] for one in rest["items"]] == ["sweep:lr", "sweep:lr2"] and rest["next"] is None


def test_tags_of_runs_that_a_token_does_not_see(tmp_path: Path) -> None:
    """They are in no list and no count, and give no run away; nor may such a run be tagged."""
    with guarded(tmp_path, Policy(tokens=True)) as guard:
        tag(guard, "team-a", "shared", "ours")
        tag(guard, "other", "shared", "theirs")
        token = guard.token("write", "team-*")
        assert guard.ask("GET", "/v1/tags", token).json()["items"] == [
            {"tag": "ours", "runs": 1},
            {"tag": "shared", "runs": 1},
        ]
        for sort in ("name", "-storage"):
            listed = guard.ask("GET", f"/v1/runs?tag=shared&sort={sort}", token).json()["items"]
            assert [one["name"] for one in listed] == ["team-a"]
            assert guard.ask("GET", f"/v1/runs?tag=theirs&sort={sort}", token).json()["items"] == []
        refused = guard.ask("PATCH", "/v1/runs/other", token, json={"tag": ["mine"]})
        assert refused.status_code in (403, 404)
        read = guard.token("read", "team-*")
        assert guard.ask("PATCH", "/v1/runs/team-a", read, json={"tag": ["mine"]}).status_code == 403


def test_what_is_refused_changes_nothing(tmp_path: Path) -> None:
    """A tag that is not allowed, with its text; and more than a run may have, also one after the other."""
    with guarded(tmp_path, Policy(tokens=True)) as guard:
        token = guard.token("write")

        def ask(**change: Any) -> tuple[int, str]:
            return code(guard.ask("PATCH", "/v1/runs/other", token, json=change))

        tag(guard, "other", *(f"t{number}" for number in range(TAGS_MAX)))
        assert ask(tag=["one-more"], owner="ana") == (413, "limit-exceeded")
        assert ask(tag=["two words"], owner="ana") == (400, "invalid-request")
        assert ask(untag=["two words"]) == ask(tag="text") == (400, "invalid-request")
        about = guard.ask("GET", "/v1/runs/other/about", token).json()
        assert len(about["tags"]) == TAGS_MAX and about["owner"] is None
        tagged = guard.ask("PATCH", "/v1/runs/other", token, json={"tag": ["one-more"], "untag": ["t0", "not-there"]})
        assert "one-more" in tagged.json()["tags"] and "t0" not in tagged.json()["tags"]


def test_tags_outlive_the_catalog_and_another_name(tmp_path: Path) -> None:
    """They are in the run's own file."""
    build_root(tmp_path, RUNS)
    with served(tmp_path) as running, Api(running.url) as api:
        runs.change(api, "team-a", RunChange(tag=["sweep:lr", "draft"]))
        runs.change(api, "team-a", RunChange(untag=["draft"]))
        (event, _) = running.services.control.events.after(0, 99, "team-a")[-2:]
        assert event.kind == "run-changed" and "tagged sweep:lr, draft" in event.text
        runs.rename(api, "team-a", "team-c")
        assert [run.name for run in api.runs(tags=["sweep:lr"])] == ["team-c"]
    for catalog in tmp_path.glob("catalog.sqlite*"):
        catalog.unlink()
    with served(tmp_path) as running, Api(running.url) as api:
        assert [run.name for run in api.runs(tags=["sweep:lr"])] == ["team-c"]
        assert runs.about(api, "team-c").tags == ["sweep:lr"]


def test_many_who_tag_at_once_lose_nothing(tmp_path: Path) -> None:
    build_root(tmp_path, RUNS)
    with served(tmp_path) as running:

        def one(number: int) -> None:
            with Api(running.url) as api:
                runs.change(api, "other", RunChange(tag=[f"t{number}"]))

        with ThreadPoolExecutor(8) as threads:
            list(threads.map(one, range(24)))
        with Api(running.url) as api:
            assert sorted(runs.about(api, "other").tags) == sorted(f"t{number}" for number in range(24))


@pytest.fixture
def holdfast(monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    def run(*words: str, status: int = 0) -> str:
        done = CliRunner().invoke(app, list(words))
        assert done.exit_code == status, done.output
        return done.output

    return run


def test_on_the_command_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, holdfast: Callable[..., str]) -> None:
    """`note` sets them, `tags` and `ls` list them, TAB offers them; a directory alone has none."""
    build_root(tmp_path, RUNS)
    with served(tmp_path) as running:
        monkeypatch.setenv("HOLDFAST_URL", running.url)
        assert "TAGS" not in holdfast("ls")
        assert "tags        big, sweep:lr" in holdfast("note", "team-a", "--tag", "sweep:lr", "--tag", "big")
        holdfast("note", "other", "--tag", "sweep:lr")
        assert [line.split()[:2] for line in holdfast("tags").splitlines()[1:]] == [["big", "1"], ["sweep:lr", "2"]]
        assert [line.split()[0] for line in holdfast("tags", "sweep:lr").splitlines()[1:]] == ["other", "team-a"]
        assert "no run has the tag 'none'" in holdfast("tags", "none", status=3)
        listed = holdfast("ls", "--tag", "sweep:lr").splitlines()
        assert "TAGS" in listed[0] and [line.split()[0] for line in listed[1:]] == ["other", "team-a"]
        assert holdfast("ls", "--tag", "sweep:lr", "--tag", "big", "--sort", "-storage").splitlines()[1].startswith("team-a")
        assert "No such runs" in holdfast("ls", "--tag", "none")
        assert (
            offered("holdfast tags sw")
            == offered("holdfast ls --tag sw")
            == offered("holdfast note team-a --untag sw")
            == ["sweep:lr"]
        )
        assert "tags        sweep:lr" in holdfast("note", "team-a", "--untag", "big")
        assert "two words" in holdfast("note", "team-a", "--tag", "two words", status=2)
        assert "--tag chooses runs" in holdfast("ls", "team-a", "--tag", "big", status=2)
    assert "cannot be listed by tag" in holdfast("ls", "--root", str(tmp_path), "--tag", "big", status=2)
