"""A real daemon that tells people and programs, and watches another one: by flags, over HTTP, on the pages, in Chromium's eyes."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import pytest
import torch
from typer.testing import CliRunner

from holdfast import Checkpointer
from holdfast.cli import app
from holdfast.rest.api import Api
from holdfast_formats.errors import InvalidRequest
from holdfast_formats.rest.operations import NewToken
from holdfast_service.config import parse
from tests.checkpoints import build_root
from tests.daemons import RunningDaemon, running, wait_until
from tests.dashboard.reading import Page
from tests.telling.receivers import Got, Web, secret, serving

HIDDEN = "services/T0/B0/verysecret"


class World(NamedTuple):
    daemon: RunningDaemon
    other: RunningDaemon
    web: Web
    root: Path
    tokens: dict[str, str]

    def get(self, path: str, who: str = "admin") -> httpx.Response:
        return httpx.get(self.daemon.url + path, headers=self.shown(who), trust_env=False)

    def shown(self, who: str) -> dict[str, str]:
        return {"Authorization": f"Bearer {self.tokens[who]}"}

    def alerts(self, path: str = "/hook") -> list[dict[str, Any]]:
        return [alert for got in self.web.got if got.path == path for alert in json.loads(got.body)["alerts"]]


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    """A daemon that asks for tokens, notifies a webhook and Slack, runs a command for events, and watches another daemon."""
    base = tmp_path_factory.mktemp("telling")
    build_root(base / "other", {"team-a-1": (5, 10), "team-b-1": (7,)})
    key = secret(base, "0123456789abcdef-verysecret")
    command = base / "command.py"
    command.write_text(f"import os, sys\nopen({str(base / 'told')!r}, 'a').write(sys.stdin.read())\nprint(sorted(os.environ))")
    with serving(Web()) as web, running(base / "other", listen="127.0.0.1:0", closed=True) as other:
        tokens = {"other": made(other, "watcher", "read", "*")}
        listed = secret(base, f"{other.url} {tokens['other']}", "tokens")
        (base / "notify.toml").write_text(f"""
dashboard = "https://holdfast.example.com"
[[target]]
name = "ops"
kind = "webhook"
url = "{web.url}/hook"
secret_file = "{key}"
after_s = 0
[[target]]
name = "chat"
kind = "slack"
url = "{web.url}/{HIDDEN}"
level = "error"
runs = "nobody"
""")
        flags = ["--notify", str(base / "notify.toml"), "--watch", other.url, "--watch-tokens", str(listed)]
        flags += ["--on-event", f"{sys.executable} {command}", "--on-event-kinds", "run-lost,attempt-declared"]
        with running(base / "root", *flags, listen="127.0.0.1:0", closed=True) as daemon:
            tokens |= {"admin": made(daemon, "admin", "admin", "*"), "team": made(daemon, "team", "admin", "team-a-*")}
            yield World(daemon, other, web, base, tokens)
            log = daemon.log.read_text()
            assert "Traceback" not in log and "verysecret" not in log and not any(one in log for one in tokens.values())


def made(daemon: RunningDaemon, name: str, scope: str, runs: str) -> str:
    with Api(daemon.url) as api:
        answer = api.request("POST", "/v1/tokens", json={"name": name, "scope": scope, "runs": runs})
    return NewToken.model_validate_json(answer.content).token


def test_a_lost_run_is_told_to_people_and_programs(world: World) -> None:
    """The webhook has the words of the run's summary; the command has the event, and of the environment nothing to steal."""
    lose(world.daemon, "team-a-2")
    wait_until(lambda: any(alert["code"] == "run-lost" for alert in world.alerts()))
    told = next(alert for alert in world.alerts() if alert["code"] == "run-lost")
    summary = world.get("/v1/runs/team-a-2/summary").json()
    assert {one["code"]: (one["text"], one["hint"]) for one in summary["attention"]}["run-lost"] == (told["text"], told["hint"])
    assert (told["run"], told["status"], told["level"]) == ("team-a-2", "firing", "error")
    assert told["url"] == "https://holdfast.example.com/runs/team-a-2"
    assert not world.alerts(f"/{HIDDEN}")
    wait_until(lambda: "run-lost" in events(world))
    assert {"attempt-declared", "run-lost"} == set(events(world))
    counted = world.get("/metrics").text
    assert 'holdfast_event_commands_total{outcome="failed"} 0.0' in counted
    assert 'holdfast_notifications_total{outcome="sent"} ' in counted
    assert f'holdfast_watched_up{{daemon="{world.other.url[7:]}"}} 1.0' in counted and "verysecret" not in counted


def lose(daemon: RunningDaemon, run: str) -> None:
    """Save a step of a run, and let its rank vanish without a goodbye."""
    checkpointer = Checkpointer(run, {"w": torch.zeros(4)}, socket=daemon.socket)
    checkpointer.save(1, wait=True)
    checkpointer._session.drop()


def events(world: World) -> list[str]:
    path = world.root / "told"
    return [json.loads(line)["kind"] for line in path.read_text().splitlines()] if path.exists() else []
