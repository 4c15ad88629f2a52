"""A typo in a trainer's first save is no alert: the run failed to start, and is shown to those who look for it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import httpx
import pytest
import torch
from typer.testing import CliRunner

from holdfast import Checkpointer
from holdfast.cli import app
from holdfast_formats.errors import InvalidRequest
from tests.daemons import running, wait_until


def wrong_step(checkpointer: Checkpointer, state: dict[str, object]) -> None:
    checkpointer.save(-1)


def wrong_state(checkpointer: Checkpointer, state: dict[str, object]) -> None:
    state["fn"] = lambda: None
    checkpointer.save(1)


@pytest.mark.parametrize("typo", [wrong_step, wrong_state])
def test_a_typo_in_the_first_save_is_no_alert(
    tmp_path: Path, typo: Callable[[Checkpointer, dict[str, object]], None]
) -> None:
    """Neither in the list of alerts, nor as an event of level error, nor on the overview; `--all` lists the run."""
    with running(tmp_path, listen="127.0.0.1:0") as daemon, httpx.Client(base_url=daemon.url, trust_env=False) as http:
        state: dict[str, object] = {"w": torch.zeros(8)}
        with pytest.raises(InvalidRequest), Checkpointer("typo", state, at=daemon.socket) as checkpointer:
            checkpointer.restore()
            typo(checkpointer, state)
        with Checkpointer("fine", {"w": torch.zeros(8)}, at=daemon.socket) as checkpointer:
            checkpointer.save(1).result(180)
        wait_until(lambda: http.get("/v1/runs/typo").json()["life"] == "failed")
        summary = http.get("/v1/runs/typo/summary").json()
        assert summary["attention"] == [] and summary["verdict"].startswith("Failed to start")
        assert http.get("/v1/alerts").json()["items"] == []
        wait_until(lambda: bool(http.get("/v1/events?kind=run-failed&run=typo").json()["items"]))
        events = http.get("/v1/events?run=typo").json()["items"]
        assert "run-died" not in {event["kind"] for event in events} and "error" not in {event["level"] for event in events}

        def listed(path: str) -> list[str]:
            return [one.get("run") or one["name"] for one in http.get(path).raise_for_status().json()["items"]]

        for sort in ("name", "attention"):
            wait_until(lambda order=sort: listed(f"/v1/summaries?failed=false&sort={order}") == ["fine"])
            assert sorted(listed(f"/v1/summaries?sort={sort}")) == ["fine", "typo"]
            assert listed(f"/v1/runs?failed=false&sort={sort}") == ["fine"]
        assert "/runs/typo" not in http.get("/").text and "1 failed to start" in http.get("/").text
        assert "/runs/typo" in http.get("/?q=typo").text
        shown = CliRunner().invoke(app, ["ls", "--url", daemon.url])
        assert "typo" not in shown.stdout and "1 archived or failed run is not shown" in shown.stderr
        lines = CliRunner().invoke(app, ["ls", "--all", "--url", daemon.url]).stdout.splitlines()
        assert [line.endswith("failed to start") for line in lines if line.startswith("typo")] == [True]
        assert "typo" not in CliRunner().invoke(app, ["top", "--once", "--url", daemon.url]).stdout
