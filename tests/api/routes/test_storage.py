"""Storage over REST and on the command line: bytes by run and by the age of checkpoints, of the visible runs."""

from __future__ import annotations

import json
from pathlib import Path

import httpx
from sqlalchemy import update

from holdfast_formats import timestamps
from holdfast_service.api.access.authentication import Policy
from holdfast_service.control.database.schema import CheckpointRow
from tests.api.guarded import code, guarded
from tests.checkpoints import build_root
from tests.kit.commands import call
from tests.serving import served

HOUR_S = 3600.0
AGES = {"day_bytes": 1, "week_bytes": 25, "month_bytes": 24 * 8, "older_bytes": 24 * 31}  # hours


def test_by_age(tmp_path: Path) -> None:
    """Each checkpoint counts once, by the time since its commit; the largest run is first, and pages go on there."""
    build_root(tmp_path, {"large": tuple(range(1, 5)), "small": (1,), "middle": (1, 2), "alike": (1, 2)})
    with served(tmp_path) as running, httpx.Client(base_url=f"{running.url}/v1", trust_env=False) as client:
        with running.services.control.catalog.database.write() as session:
            for step, hours in enumerate(AGES.values(), 1):
                created = timestamps.later(timestamps.utc_now(), -hours * HOUR_S)
                at = update(CheckpointRow).where(CheckpointRow.run == "large", CheckpointRow.step == step)
                session.execute(at.values(created=created, bytes=100 * step))
        items, cursor = [], None
        while True:
            page = client.get("/storage", params={"limit": 1} | ({"cursor": cursor} if cursor else {})).json()
            items += page["items"]
            cursor = page["next"]
            if cursor is None:
                break
        assert items == client.get("/storage").json()["items"]
        assert [one["run"] for one in items] == ["alike", "middle", "small", "large"]
        assert {name: items[-1][name] for name in AGES} == dict(zip(AGES, (100, 200, 300, 400), strict=True))
        assert (items[-1]["bytes"], items[-1]["checkpoints"]) == (1000, 4)
        assert [one["run"] for one in client.get("/storage?q=ALL").json()["items"]] == ["small"]
        assert client.get("/storage?cursor=x").status_code == 400
        rows = json.loads(call("storage", "--first", 3, "--url", running.url, "--json").stdout)
        assert rows == items[:3]
        assert "large" in call("storage", "lar", "--url", running.url).stdout


def test_others_runs_are_not_seen(tmp_path: Path) -> None:
    """Nor what they hold."""
    with guarded(tmp_path, Policy(tokens=True)) as guard:
        for runs, seen in (("*", {"other", "team-a", "team-b"}), ("team-*", {"team-a", "team-b"}), ("other", {"other"})):
            items = guard.ask("GET", "/v1/storage", guard.token("read", runs)).json()["items"]
            assert {one["run"] for one in items} == seen
        assert code(guard.ask("GET", "/v1/storage"))[0] == 401
