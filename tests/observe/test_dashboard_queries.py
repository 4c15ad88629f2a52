"""The dashboard's queries and the alerts, asked of a real Prometheus that scrapes a real daemon while two ranks save."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
import yaml

from tests.daemons import RunningDaemon, free_port, running
from tests.kit.ranks import World

DEPLOY = Path(__file__).parents[2] / "deploy"
DASHBOARD = json.loads((DEPLOY / "grafana" / "dashboards" / "holdfast.json").read_text())
QUERIES = {
    f"{panel['title']}: {target['expr']}": target["expr"]
    for panel in DASHBOARD["panels"]
    for target in panel.get("targets", [])
    if "holdfast_objects_" not in target["expr"]  # those of a root in a bucket
}
VARIABLES = {"$__rate_interval": "1m", "$instance": ".*", "$run": ".*"}  # as Grafana fills them in for "All"
SECONDS = 180.0  # of a busy machine; ten are enough elsewhere


class Asked:
    """A Prometheus with the configuration of deploy/, which scrapes one daemon every second."""

    def __init__(self, url: str) -> None:
        self._url = f"{url}/"

    def __call__(self, path: str, **asked: str) -> Any:
        answer = httpx.get(f"{self._url}api/v1/{path}", params=asked, trust_env=False)
        assert answer.status_code == 200, answer.text
        return answer.json()["data"]

    def answers(self) -> bool:
        try:
            return httpx.get(f"{self._url}-/ready", trust_env=False).status_code == 200
        except httpx.TransportError:
            return False

    def empty(self) -> list[str]:
        """The queries of the dashboard that return nothing, or only NaN."""
        found = []
        for name, expression in QUERIES.items():
            for variable, value in VARIABLES.items():
                expression = expression.replace(variable, value)
            series = self("query", query=expression)["result"]
            if all(one["value"][1] == "NaN" for one in series):
                found.append(name)
        return found


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningDaemon]:
    place = tmp_path_factory.mktemp("observed")
    with running(place / "root", "--metrics-open", "--replica", f"copy={place / 'copy'}", listen="127.0.0.1:0") as one:
        yield one


@pytest.fixture(scope="module")
def asked(daemon: RunningDaemon, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Asked]:
    program = shutil.which("prometheus") or shutil.which(Path(sys.executable).with_name("prometheus"))
    if program is None:
        pytest.skip("prometheus is not installed (make tools)")
    place, port = tmp_path_factory.mktemp("prometheus"), free_port()
    about = yaml.safe_load((DEPLOY / "prometheus" / "prometheus.yml").read_text())
    about["global"] = dict.fromkeys(about["global"], "1s")
    (scraped,) = about["scrape_configs"]
    scraped["static_configs"] = [{"targets": [daemon.url.removeprefix("http://")]}]
    (place / "prometheus.yml").write_text(yaml.safe_dump(about))
    shutil.copy(DEPLOY / "prometheus" / "alerts.yml", place)
    command = [program, f"--config.file={place}/prometheus.yml", f"--storage.tsdb.path={place}/data"]
    command += [f"--web.listen-address=127.0.0.1:{port}"]
    with open(place / "log", "wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log)
    try:
        one, limit = Asked(f"http://127.0.0.1:{port}"), time.monotonic() + SECONDS
        while not one.answers():
            assert process.poll() is None and time.monotonic() < limit, (place / "log").read_text()
            time.sleep(0.1)
        yield one
    finally:
        process.terminate()
        process.wait(180)


def set_quota(daemon: RunningDaemon, run: str) -> None:
    with httpx.Client(base_url=daemon.url, trust_env=False) as client:
        known = client.get(f"/v1/runs/{run}/policy")
        policy = {"last": 1, "quota_bytes": 10**9}
        answer = client.put(f"/v1/runs/{run}/policy", json=policy, headers={"If-Match": known.headers["ETag"]})
        assert answer.status_code == 200, answer.text


def test_every_panel_has_data_after_saves(daemon: RunningDaemon, asked: Asked) -> None:
    """But for the lease of a daemon that shares its root with others. No alert fires, and none of their rules fails."""
    state = [{"weight": torch.zeros(256, 64)} for _ in range(2)]
    ranks, step = World(daemon, "observed", state, keep_last=1), 0
    limit, missing = time.monotonic() + SECONDS, list(QUERIES)
    while len(missing) > 1 and time.monotonic() < limit:  # a rate needs saves between two scrapes
        step += 1
        assert ranks.save(step) == [None, None]
        if step == 1:
            set_quota(daemon, "observed")
        time.sleep(0.5)
        missing = asked.empty()
    ranks.close()
    assert [name.partition(": ")[0] for name in missing] == ["Since the last heartbeat"]
    rules = [rule for group in asked("rules")["groups"] for rule in group["rules"]]
    assert rules and {rule["health"] for rule in rules} <= {"ok", "unknown"}, rules  # unknown: not evaluated yet
    assert [alert for alert in asked("alerts")["alerts"] if alert["state"] == "firing"] == []
