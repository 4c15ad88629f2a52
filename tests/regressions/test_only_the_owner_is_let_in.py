"""A daemon's HTTP door on its own machine: its user needs nothing, everybody else is asked for a token."""

from __future__ import annotations

import fcntl
import os
import pwd
import socket
import stat
from collections.abc import Iterator
from pathlib import Path

import httpx
import msgspec
import pytest
import torch
from typer.testing import CliRunner

from holdfast import Api, Checkpointer
from holdfast.cli import app
from holdfast.rest import owner_token
from holdfast_formats import owner_key
from holdfast_formats.errors import Unauthenticated
from holdfast_service.api.access import owner_file
from holdfast_service.control.access import owner
from tests.daemons import RunningDaemon, running

NOBODY = 65_534


@pytest.fixture(scope="module", autouse=True)
def surroundings(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A runtime directory and a home of these tests' own, for daemons and clients alike."""
    with pytest.MonkeyPatch.context() as patch:
        place = tmp_path_factory.mktemp("runtime")
        for name in ("HOLDFAST_TOKEN", "HOLDFAST_URL", "XDG_CONFIG_HOME", "DISPLAY", "WAYLAND_DISPLAY"):
            patch.delenv(name, raising=False)
        patch.setenv("XDG_RUNTIME_DIR", str(place))
        patch.setenv("HOME", str(place))
        patch.setenv("COLUMNS", "200")
        yield place / "holdfast"


@pytest.fixture(scope="module")
def daemon(surroundings: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningDaemon]:
    with running(tmp_path_factory.mktemp("owned") / "root", listen="127.0.0.1:0", closed=True) as found:
        os.rename(found.socket, found.socket.with_suffix(".hidden"))  # what follows goes over HTTP
        yield found


def port(daemon: RunningDaemon) -> int:
    return int(daemon.url.rpartition(":")[2])


def token(daemon: RunningDaemon) -> str:
    found = owner_token.owners(daemon.url)
    assert found is not None
    return found.token


def ask(daemon: RunningDaemon, path: str, **parts: object) -> httpx.Response:
    return httpx.get(daemon.url + path, trust_env=False, timeout=180, **parts)  # type: ignore[arg-type]


def test_its_user_needs_nothing(daemon: RunningDaemon) -> None:
    """Client, commands and a trainer that shares no memory find the token by themselves, by address and as localhost."""
    state = {"x": torch.arange(100_000)}
    with Checkpointer("mine", state, at=daemon.url) as checkpointer:
        checkpointer.save(1, wait="durable")
    live = {"x": torch.zeros_like(state["x"])}
    with Checkpointer("mine", live, at=daemon.url) as checkpointer:
        assert checkpointer.restore() == 1
    assert torch.equal(live["x"], state["x"])
    for url in (daemon.url, f"http://localhost:{port(daemon)}"):
        with Api(url) as api:
            assert [run.name for run in api.runs()] == ["mine"]
        assert "mine" in CliRunner().invoke(app, ["ls", "--url", url]).stdout


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"X-Forwarded-For": "127.0.0.1"},
        {"Forwarded": "for=127.0.0.1"},
        {"X-Real-IP": "::1"},
        {"Authorization": "Bearer hf_no"},
    ],
)
def test_everybody_else_is_asked_for_a_token(daemon: RunningDaemon, headers: dict[str, str]) -> None:
    """Nothing that a request says of itself makes it the owner's; the refusal says what to do. Probes are answered."""
    for path in ("/v1/runs", "/metrics", "/openapi.json", "/v1/nodes"):
        answer = ask(daemon, path, headers=headers)
        assert answer.status_code == 401, path
        assert all(word in answer.json()["hint"] for word in ("holdfast open", "HOLDFAST_TOKEN", "holdfast token create"))
    assert [ask(daemon, path, headers=headers).status_code for path in ("/healthz", "/readyz", "/login")] == [200] * 3


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_another_user_does_not_find_it(daemon: RunningDaemon, surroundings: Path) -> None:
    """The kernel keeps the file from others, who are asked for a token."""
    name, url = owner_key.file_name(port(daemon)), daemon.url
    assert stat.S_IMODE((surroundings / name).stat().st_mode) == 0o600
    os.seteuid(NOBODY)
    try:
        assert owner_token.owners(url) is None
        with pytest.raises(OSError):
            (surroundings / name).read_bytes()
        with Api(url) as api, pytest.raises(Unauthenticated):
            list(api.runs())
    finally:
        os.seteuid(0)


@pytest.mark.parametrize("unit", ["holdfast", "holdfast-USER"])
def test_keys_of_units_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, unit: str) -> None:
    """systemd gives a unit its own runtime directory, which is not that of the user's session."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "session"))
    monkeypatch.setattr(owner_key, "SYSTEM_DIRECTORY", str(tmp_path / "holdfast"))
    path = tmp_path / unit.replace("USER", pwd.getpwuid(os.geteuid()).pw_name) / owner_key.file_name(8420)
    path.parent.mkdir()
    path.write_bytes(msgspec.json.encode(owner_key.OwnerKey(host="127.0.0.1", port=8420, token="hf_x")))
    path.chmod(0o600)
    assert owner_token.owners("http://127.0.0.1:8420") == owner_token.FoundToken("http://127.0.0.1:8420", "hf_x")


@pytest.mark.parametrize("spoil", ["readable by others", "a link", "not a key", "a directory"])
def test_files_that_are_not_believed(
    daemon: RunningDaemon, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, spoil: str
) -> None:
    """A file that others can read, or that is something else, is none."""
    text = msgspec.json.encode(owner_key.OwnerKey(host="127.0.0.1", port=port(daemon), token="hf_x")).decode()
    path = tmp_path / "holdfast" / owner_key.file_name(port(daemon))
    path.parent.mkdir()
    if spoil == "a directory":
        path.mkdir()
    elif spoil == "a link":
        (tmp_path / "real").write_text(text)
        (tmp_path / "real").chmod(0o600)
        path.symlink_to(tmp_path / "real")
    else:
        path.write_text(text if spoil == "readable by others" else "{}")
        path.chmod(0o640 if spoil == "readable by others" else 0o600)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    assert owner_token.owners(daemon.url) is None
    if spoil == "readable by others":
        path.chmod(0o600)
        assert owner_token.owners(daemon.url) == (daemon.url, "hf_x")


def test_a_link_takes_a_browser_in_once(daemon: RunningDaemon) -> None:
    """`holdfast open` prints it where there is no display; its code is good once, and the cookie is no token."""
    shown = CliRunner().invoke(app, ["open", "--url", daemon.url])
    link = shown.stdout.strip()
    assert shown.exit_code == 0 and link.startswith(f"{daemon.url}/enter?code=")
    assert ask(daemon, link.removeprefix(daemon.url), headers={"Host": "evil.example"}).status_code == 403
    first, second = (ask(daemon, link.removeprefix(daemon.url)) for _ in range(2))
    cookie = first.headers["set-cookie"]
    assert first.status_code == 200 and "HttpOnly" in cookie and "SameSite=strict" in cookie and 'url=/"' in first.text
    assert token(daemon) not in cookie and first.headers["cache-control"] == "no-store"
    assert second.status_code == 401 and "set-cookie" not in second.headers and "holdfast open" in second.text
    signed_in = {"Cookie": cookie.partition(";")[0]}
    assert ask(daemon, "/v1/runs", headers=signed_in).status_code == 200
    assert ask(daemon, "/", headers=signed_in).status_code == 200
    foreign = {**signed_in, "Origin": "http://evil.example"}
    refused = httpx.post(f"{daemon.url}/v1/tokens", headers=foreign, json={"name": "x"}, trust_env=False)
    assert refused.status_code == 403
    assert httpx.post(f"{daemon.url}/v1/links", trust_env=False).status_code == 401


def test_a_session_ends_with_the_token_that_it_came_from(daemon: RunningDaemon) -> None:
    """It may do no more than that token, and nothing once that is revoked."""
    with Api(daemon.url) as api:
        made = api.request("POST", "/v1/tokens", json={"name": "viewer", "runs": "mine"}).json()["token"]
        with Api(daemon.url, token=made) as viewer:
            path = viewer.request("POST", "/v1/links").json()["path"]
        signed_in = {"Cookie": ask(daemon, path).headers["set-cookie"].partition(";")[0]}
        assert ask(daemon, "/v1/runs", headers=signed_in).status_code == 200
        assert ask(daemon, "/v1/tokens", headers=signed_in).status_code == 403
        api.request("DELETE", "/v1/tokens/viewer")
        assert ask(daemon, "/v1/runs", headers=signed_in).status_code == 401


def test_links_and_sessions_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """A code after a minute, a session after a week; there are only so many of either."""
    now = [1000.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    links = owner.Links()
    late, code = links.offer("hf_x"), links.offer("hf_x")
    session = links.redeem(code)
    assert links.token_of(session) == "hf_x"
    now[0] += owner.LINK_WAIT_MAX_S + 1
    with pytest.raises(Unauthenticated, match="has expired"):
        links.redeem(late)
    now[0] += owner.SESSION_MAX_S
    with pytest.raises(Unauthenticated, match="ended"):
        links.token_of(session)
    codes = [links.offer("hf_x") for _ in range(owner.LINKS_MAX + 1)]
    assert links.redeem(codes[-1])
    with pytest.raises(Unauthenticated):
        links.redeem(codes[0])


def test_nobody_signs_others_out() -> None:
    """Whoever has a token for a little can make links and sessions without end, and gives up their own alone."""
    links = owner.Links()
    session = links.redeem(links.offer("hf_owner"))
    code = links.offer("hf_owner")
    for _ in range(owner.SESSIONS_MAX + 9):
        links.redeem(links.offer("hf_other"))
    kept = [links.offer("hf_other") for _ in range(owner.LINKS_MAX + 9)]
    assert links.token_of(session) == "hf_owner" and links.token_of(links.redeem(code)) == "hf_owner"
    assert links.token_of(links.redeem(kept[-1])) == "hf_other"


def test_each_start_has_another_token(surroundings: Path, tmp_path: Path) -> None:
    """A client goes on over a restart; what a killed daemon left is swept; after an orderly end nothing is left."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        listen = f"127.0.0.1:{probe.getsockname()[1]}"
    first = RunningDaemon(tmp_path / "root", listen=listen, closed=True)
    old = token(first)
    with Api(first.url) as api:
        assert list(api.runs()) == []
        first.kill()
        stale = surroundings / owner_key.file_name(1)
        stale.write_bytes((surroundings / owner_key.file_name(port_of(listen))).read_bytes())
        with running(tmp_path / "root", listen=listen, closed=True) as second:
            assert list(api.runs()) == []
            assert token(second) != old and not stale.exists()
            assert ask(second, "/v1/runs", headers={"Authorization": f"Bearer {old}"}).status_code == 401
            assert old not in second.log.read_text() and token(second) not in second.log.read_text()
    assert not (surroundings / owner_key.file_name(port_of(listen))).exists()


def test_a_daemon_that_starts_at_the_same_time_sweeps_no_new_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It may see the file before it is locked. The file is made again then, or no command would find the token."""
    lock, swept = fcntl.flock, []

    def sweep_first(descriptor: int, how: int) -> None:
        if not swept:
            swept.append(descriptor)
            owner_file._sweep(tmp_path)
        lock(descriptor, how)

    monkeypatch.setattr(owner_file.fcntl, "flock", sweep_first)
    key = owner_key.OwnerKey(host="127.0.0.1", port=8420, token="hf_x")
    with owner_file.left_for_owner(key, [tmp_path]):
        assert owner_key.read_key((tmp_path / owner_key.file_name(8420)).read_bytes()) == key
    assert swept and not list(tmp_path.iterdir())


def port_of(listen: str) -> int:
    return int(listen.rpartition(":")[2])
