"""A daemon that several share: one run, token or name after the other leaves something to whoever comes next."""

from __future__ import annotations

import uuid
from collections.abc import Iterator

import httpx
import pytest

from holdfast.rest import owner_token
from holdfast_formats.staging import wire
from tests.daemons import RunningDaemon, running

ARENA_BYTES = 100_000_000
FLAGS = ("--arena-bytes-max", str(ARENA_BYTES), "--spill", "never")


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningDaemon]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_RUNTIME_DIR", str(tmp_path_factory.mktemp("runtime")))
        patch.delenv("HOLDFAST_TOKEN", raising=False)
        with running(tmp_path_factory.mktemp("shared") / "root", *FLAGS, listen="127.0.0.1:0", closed=True) as made:
            yield made


def client(daemon: RunningDaemon, runs: str | None = None) -> httpx.Client:
    """Requests of the owner's, or of a new token's that may write to these runs."""
    owner = owner_token.owners(daemon.url)
    assert owner is not None
    made = httpx.Client(
        base_url=daemon.url, headers={"Authorization": f"Bearer {owner.token}"}, trust_env=False, timeout=180
    )
    if runs is None:
        return made
    with made:
        wanted = {"name": uuid.uuid4().hex, "scope": "write", "runs": runs}
        token = made.post("/v1/tokens", json=wanted).json()["token"]
    return httpx.Client(base_url=daemon.url, headers={"Authorization": f"Bearer {token}"}, trust_env=False, timeout=180)


def hello(http: httpx.Client, run: str) -> tuple[str, httpx.Response]:
    path = f"/v1/ranks/{uuid.uuid4().hex}"
    return path, http.put(path, json={"protocol": wire.PROTOCOL, "run": run, "rank": 0, "world": 1, "launch": "x"})


def reserve(http: httpx.Client, run: str, size: int) -> httpx.Response:
    path, welcome = hello(http, run)
    assert welcome.status_code == 200, welcome.text
    return http.put(f"{path}/segment", json={"slots": 1, "data_bytes": size, "table_bytes": 4096})


def test_memory(daemon: RunningDaemon) -> None:
    """A rank over HTTP gets half of the arena and not more; its team's other names, and another token of the same
    runs, get nothing more; another team, and the owner, get something each. What a team is told names no run of others.
    """
    team, again, other = client(daemon, "team-*"), client(daemon, "team-*"), client(daemon, "other-*")
    with team, again, other, client(daemon) as owner:
        refused = reserve(team, "team-all", ARENA_BYTES - 50_000)
        assert (refused.status_code, refused.json()["code"]) == (413, "limit-exceeded")
        assert "may reserve 50 % of what others have not reserved" in refused.json()["detail"]
        assert reserve(team, "team-most", 49 * ARENA_BYTES // 100).status_code == 204
        for http, run in ((team, "team-2"), (again, "team-3")):
            refused = reserve(http, run, ARENA_BYTES // 50)
            assert refused.status_code == 413 and "all runs of tokens for the runs 'team-*'" in refused.json()["detail"]
        assert reserve(other, "other-1", ARENA_BYTES // 5).status_code == 204
        assert reserve(owner, "own", ARENA_BYTES // 4).status_code == 204
        refused = reserve(other, "other-2", ARENA_BYTES // 2)
        assert refused.status_code == 413 and "team" not in refused.text
        shown = {http: http.get("/metrics").text for http in (team, owner)}
        assert 'holdfast_run_arena_bytes{run="team-most"}' in shown[team] and "other-1" not in shown[team]
        assert 'holdfast_run_arena_bytes{run="other-1"}' in shown[owner]
