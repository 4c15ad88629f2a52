"""A real daemon that tells people and programs, and watches another one: by flags, over HTTP, on the pages."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple, cast

import httpx
import pytest
import yaml
from click.testing import Result
from typer.testing import CliRunner

from holdfast.cli import app
from holdfast.rest.api import Api
from holdfast_formats.errors import InvalidRequest
from holdfast_formats.rest import bodies
from holdfast_formats.rest.operations import NewToken
from holdfast_service.config import RootPlace, parse
from holdfast_service.control.catalog.events import Events
from holdfast_service.wings.notify import alerts
from holdfast_service.wings.notify.running import watched
from holdfast_service.wings.notify.watched_daemons.watched import DaemonWatch
from holdfast_service.wiring.commands import event_commands
from tests.checkpoints import build_root
from tests.daemons import RunningDaemon, running, wait_until
from tests.kit.lost_runs import lose
from tests.wings.console.reading import Page
from tests.wings.notify.receivers import Web, secret, serving

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
    command.write_text(
        f"import os, sys\nopen({str(base / 'told')!r}, 'a').write(sys.stdin.read())\nprint(sorted(os.environ))"
    )
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
        flags += ["--on-event", f"{sys.executable} {command}", "--on-event-kinds", "run-died,attempt-declared"]
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
    wait_until(lambda: any(alert["code"] == "run-died" for alert in world.alerts()))
    told = next(alert for alert in world.alerts() if alert["code"] == "run-died")
    summary = world.get("/v1/runs/team-a-2/summary").json()
    said = next(one for one in summary["attention"] if one["code"] == "run-died")
    assert said["hint"] == told["hint"]
    assert without_time(said["text"]) == without_time(told["text"])  # which is recorded a moment later
    assert (told["run"], told["status"], told["level"]) == ("team-a-2", "firing", "error")
    assert told["url"] == "https://holdfast.example.com/runs/team-a-2"
    assert not world.alerts(f"/{HIDDEN}")
    wait_until(lambda: "run-died" in events(world))
    assert {"attempt-declared", "run-died"} == set(events(world))
    counted = world.get("/metrics").text
    assert 'holdfast_event_commands_total{outcome="failed"} 0.0' in counted
    assert 'holdfast_notifications_total{outcome="sent"} ' in counted
    assert f'holdfast_watched_up{{daemon="{world.other.url[7:]}"}} 1.0' in counted and "verysecret" not in counted


def without_time(text: str) -> str:
    return re.sub(r" since \S+Z", "", text)


def events(world: World) -> list[str]:
    path = world.root / "told"
    return [json.loads(line)["kind"] for line in path.read_text().splitlines()] if path.exists() else []


def test_targets_are_shown_to_admins_of_all_runs_without_secrets(world: World) -> None:
    """In the API, on the page and by the command; a test message goes out at once."""
    listed = world.get("/v1/notifications")
    page = Page(world.get("/notifications").text)
    assert page.faults() == [] and "Send a test" in page.text and "ops" in page.text
    for text in (listed.text, page.text):
        assert "verysecret" not in text and world.web.url + "/…" in text
    assert world.get("/v1/notifications", "team").status_code == 403
    assert world.web.url not in world.get("/notifications", "team").text

    before = len(world.web.got)
    form = {"Sec-Fetch-Site": "same-origin", **world.shown("admin")}
    sent = httpx.post(f"{world.daemon.url}/notifications/chat/test", headers=form, data={"a": "b"}, trust_env=False)
    assert "accepted by chat" in Page(sent.text).text and len(world.web.got) == before + 1
    assert world.web.got[-1].path == f"/{HIDDEN}" and "test message" in json.loads(world.web.got[-1].body)["text"]
    refused = httpx.post(f"{world.daemon.url}/v1/notifications/chat/test", headers=world.shown("team"), trust_env=False)
    assert refused.status_code == 403 and len(world.web.got) == before + 1


def notify(world: World, *words: str) -> Result:
    environment = {"HOLDFAST_TOKEN": world.tokens["admin"], "COLUMNS": "200"}
    return CliRunner().invoke(app, ["notify", *words, "--url", world.daemon.url], env=environment)


def test_the_command(world: World) -> None:
    """Targets in a table and as JSON; a test that fails has its own exit status."""
    listed = notify(world, "ls")
    assert (
        listed.exit_code == 0 and "ops" in listed.output and "webhook" in listed.output and "verysecret" not in listed.output
    )
    assert [one["name"] for one in json.loads(notify(world, "ls", "--json").stdout)] == ["ops", "chat"]
    assert "ops accepted the test message" in notify(world, "test", "ops").output
    world.web.status = 410
    try:
        failed = notify(world, "test", "ops")
    finally:
        world.web.status = 200
    assert failed.exit_code == 1 and "status 410" in failed.output
    assert notify(world, "test", "nobody").exit_code == 3


def test_watched_runs_are_those_that_the_viewer_may_see(world: World) -> None:
    """An admin of a team sees its runs of all daemons; links lead to each daemon's own page, where its own tokens hold."""
    wait_until(lambda: len(world.get("/v1/watched/runs").json()["items"]) == 2)
    own = world.get("/v1/watched/runs", "team").json()["items"]
    assert [one["summary"]["run"] for one in own] == ["team-a-1"] and own[0]["url"] == f"{world.other.url}/runs/team-a-1"
    assert world.get("/v1/watched/daemons", "team").json()["items"][0]["runs"] == 1
    page = Page(world.get("/daemons", "team").text)
    assert [fault for fault in page.faults() if world.other.url not in fault] == []
    assert "team-a-1" in page.text and "team-b-1" not in page.text
    whole = Page(world.get("/daemons").text)
    assert "team-b-1" in whole.text and f"{world.other.url}/runs/team-b-1" in whole.addresses()
    assert httpx.get(f"{world.other.url}/v1/runs", trust_env=False).status_code == 401
    first = world.get("/v1/watched/runs?limit=1").json()
    second = world.get(f"/v1/watched/runs?limit=1&cursor={first['next']}").json()
    assert first["items"] != second["items"] and second["next"] is None
    assert world.get("/v1/watched/runs?cursor=x").status_code == 400


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--on-event", "no-such-program"], "--on-event"),
        (["--on-event", "true", "--on-event-kinds", "lunch"], "not a kind of event"),
        (["--on-event-timeout", "0"], "--on-event-timeout"),
    ],
)
def test_flags_that_are_wrong(flags: list[str], said: str) -> None:
    with pytest.raises(InvalidRequest, match=said):
        parse(flags, {})


def test_flags_from_the_environment() -> None:
    found = parse([], {"HOLDFAST_WATCH": "http://a, http://b", "HOLDFAST_ON_EVENT_KINDS": "run-died"})
    assert (found.watch, found.on_event_kinds) == (("http://a", "http://b"), ("run-died",))


def test_what_does_not_belong_together_is_refused() -> None:
    with ExitStack() as stack:
        for flags in (["--watch-tokens", "/x"], ["--watch-ca", "/x"], ["--watch", "gpu-1"]):
            with pytest.raises(InvalidRequest, match="--watch"):
                watched(parse(flags, {}), stack)
        with pytest.raises(InvalidRequest, match="needs --on-event"):
            event_commands(parse(["--on-event-kinds", "run-died"], {}), cast(Events, None), RootPlace("/", Path("/")))


@pytest.mark.usefixtures("forked_programs")
def test_a_daemon_that_cannot_tell_does_not_start(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "holdfast_service", "--root", tmp_path / "root", "--socket", tmp_path / "s"]
    flags = ["--listen", "none", "--notify", "/nothing"]
    ended = subprocess.run([*command, *flags], capture_output=True, text=True, timeout=300, check=False)
    assert ended.returncode == 2 and "--notify: cannot read" in ended.stderr


def test_people_and_prometheus_are_told_the_same() -> None:
    """Of nodes and watched daemons, in the words of the rules."""
    rules = yaml.safe_load((Path(__file__).parents[3] / "deploy" / "prometheus" / "alerts.yml").read_text())["groups"][0][
        "rules"
    ]
    said = {rule["alert"]: rule["annotations"] for rule in rules}
    about = {"name": "c", "version": "1", "socket": None, "started": "now", "arena_bytes": 0, "ranks": 0}
    (lost,) = alerts.of_nodes([bodies.Node.model_validate({**about, "state": "lost", "live": False})])
    words = {name: text.replace("{{ $labels.node }}", "c") for name, text in said["HoldfastNodeLost"].items()}
    assert (lost.text, lost.hint) == (words["summary"], words["action"])
    watch = DaemonWatch(["http://127.0.0.1:1"], {}, ask_s=0.05)
    try:
        wait_until(lambda: watch.daemons()[0].unreachable_since is not None)
    finally:
        watch.close()
    ((_, away),) = watch.alerts(0.0)
    assert away.hint == said["HoldfastWatchedDown"]["action"] and "127.0.0.1:1 has not answered since" in away.text
