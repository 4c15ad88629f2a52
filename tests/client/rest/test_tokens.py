"""Tokens from end to end: the command that makes them, the daemon that asks for them, the client that shows them."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

import pytest
import torch

from holdfast import Checkpointer
from holdfast.config import given_token
from holdfast.rest.api import Api
from holdfast.rest.owner_token import owners
from holdfast.rest.tokens import RootTokens, ServiceTokens
from holdfast_formats import naming
from holdfast_formats.errors import (
    CheckpointError,
    Forbidden,
    InvalidRequest,
    NoSuchResource,
    NoSuchRun,
    Unauthenticated,
)
from holdfast_formats.rest.operations import TokenRequest
from holdfast_service.config import parse
from holdfast_service.control.access.audit import local_user
from tests.checkpoints import build_root
from tests.client.remote.test_http_link import far_daemon
from tests.daemons import running
from tests.databases import Postgres
from tests.kit import commands

pytestmark = pytest.mark.usefixtures("forked_programs")

HERE = "127.0.0.1:0"


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A home of the test's own, without a token, and without what daemons leave for their user."""
    monkeypatch.setattr("holdfast.rest.owner_token.owners", lambda url: None)
    for name in ("HOLDFAST_TOKEN", "HOLDFAST_URL", "XDG_CONFIG_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("COLUMNS", "200")
    return tmp_path / "home"


call = partial(commands.call, "token")


def test_the_first_token_is_made_with_the_service_down(tmp_path: Path) -> None:
    """In the root's catalog, by the command; then the daemon lets its owner in, who makes the next one over REST."""
    root = tmp_path / "root"
    made = call("create", "boss", "--scope", "admin", "--root", root)
    assert made.exit_code == 0, made.output
    boss = made.stdout.strip()
    assert boss.startswith("hf_") and "cannot be shown again" in made.stderr
    with running(root, listen=HERE, closed=True) as daemon:
        with Api(daemon.url) as nobody, pytest.raises(Unauthenticated) as refused:
            list(nobody.runs())
        assert "HOLDFAST_TOKEN" in refused.value.hint
        with Api(daemon.url, token=boss) as api:
            assert list(api.runs()) == []
            store = ServiceTokens(api)
            viewer = store.create(TokenRequest(name="viewer", runs="team-*", expires_s=3600))
            assert [token.name for token in store.all()] == ["viewer", "boss"]
        with Api(daemon.url, token=viewer.token) as api, pytest.raises(Forbidden):
            ServiceTokens(api).all()
        RootTokens(root).revoke("viewer")  # beside the daemon that runs
        with Api(daemon.url, token=viewer.token) as api, pytest.raises(Unauthenticated, match="revoked"):
            list(api.runs())
        assert boss not in daemon.log.read_text() and viewer.token not in daemon.log.read_text()


def test_a_token_is_not_made_in_a_catalog_that_no_daemon_reads(
    tmp_path: Path, postgres: Postgres, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The root was served with another catalog, whose URL comes from the option, or where the daemon has it from, too."""
    monkeypatch.delenv("HOLDFAST_CATALOG", raising=False)
    root, url = tmp_path / "root", postgres.make()
    with running(root, "--catalog", url, "--exchange", HERE, listen=HERE, closed=True) as daemon:
        lost = call("create", "lost", "--root", root)
        assert lost.exit_code == 4 and "are in the catalog postgresql://" in lost.output and "--catalog" in lost.output
        assert not (root / naming.CATALOG).exists()
        by_option = call("create", "one", "--root", root, "--catalog", url).stdout.strip()
        monkeypatch.setenv("HOLDFAST_CATALOG", url)
        by_setting = call("create", "two", "--root", root).stdout.strip()
        for token in (by_option, by_setting):
            with Api(daemon.url, token=token) as api:
                assert list(api.runs()) == []


def test_whoami_says_until_when_the_token_is_valid(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The owner's is made by the daemon at its start, and ends with it."""
    root = tmp_path / "root"
    boss = RootTokens(root).create(TokenRequest(name="boss", scope="admin")).token
    with running(root, listen=HERE, closed=True) as daemon:
        own = owners(daemon.url)
        assert own is not None
        for token, until in ((own.token, "this daemon ends"), (boss, "for ever")):
            monkeypatch.setenv("HOLDFAST_TOKEN", token)
            lines = commands.call("whoami", "--url", daemon.url).stdout.splitlines()
            assert [line.removeprefix("until").strip() for line in lines if line.startswith("until")] == [until]


def test_the_command_over_rest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same command at an address, with HOLDFAST_TOKEN; refusals have the exit status of their branch."""
    root = tmp_path / "root"
    boss = RootTokens(root).create(TokenRequest(name="boss", scope="admin")).token
    with running(root, listen=HERE, closed=True) as daemon:
        denied = call("ls", "--url", daemon.url)
        assert denied.exit_code == 7 and "HOLDFAST_TOKEN" in denied.stderr
        monkeypatch.setenv("HOLDFAST_TOKEN", boss)
        made = json.loads(call("create", "ci", "--scope", "write", "--expires", "30d", "--url", daemon.url, "--json").stdout)
        assert (made["scope"], made["runs"]) == ("write", "*") and made["expires"] > made["created"]
        shown = call("ls", "--url", daemon.url).stdout
        assert "ci" in shown and "never" in shown and "in 30 d" in shown
        rotated = json.loads(call("rotate", "ci", "--grace", "2h", "--url", daemon.url, "--json").stdout)
        with Api(daemon.url, token=made["token"]) as old, Api(daemon.url, token=rotated["token"]) as new:
            assert (list(old.runs()), list(new.runs())) == ([], [])
        assert commands.call("whoami", "--url", daemon.url).stdout.split()[:3] == ["you", "are", "boss"]
        assert json.loads(commands.call("whoami", "--url", daemon.url, "--json").stdout)["runs"] == "*"
        assert commands.call("quota", "set", "team-*", "20TB", "--url", daemon.url).exit_code == 0
        assert "20.0 TB" in commands.call("quota", "ls", "--url", daemon.url).stdout
        assert commands.call("quota", "rm", "team-*", "--url", daemon.url).exit_code == 0
        assert call("rotate", "offline", "--root", root).exit_code == 3
        assert call("create", "offline", "--root", root).exit_code == 0
        told = json.loads(commands.call("audit", "--url", daemon.url, "--json").stdout)
        assert [(one["kind"], one["who"], one["via"], one["target"]) for one in told] == [
            ("token-created", local_user(), "offline", "offline"),
            ("quota-removed", "boss", "client", "team-*"),
            ("quota-set", "boss", "client", "team-*"),
            ("token-rotated", "boss", "client", "ci"),
            ("token-created", "boss", "client", "ci"),
            ("read", "", "client", None),
            ("token-created", local_user(), "offline", "boss"),
        ]
        assert "token-rotated" in commands.call("audit", "--who", "boss", "--url", daemon.url).stdout
        assert commands.call("audit", "--refused", "--csv", "--url", daemon.url).stdout.count("\n") == 2
        assert call("revoke", "ci", "--url", daemon.url).exit_code == 0
        assert "revoked" in call("ls", "--url", daemon.url).stdout
        monkeypatch.setenv("HOLDFAST_TOKEN", made["token"])
        assert call("ls", "--url", daemon.url).exit_code == 7


def test_the_command_refuses_by_name(tmp_path: Path) -> None:
    """Wrong names, patterns, spans and options are told, and nothing is made."""
    root = tmp_path / "root"
    store = RootTokens(root)
    store.create(TokenRequest(name="taken"))
    for line, status in (
        ("create a --scope god", 2),
        ("create a..b/c", 2),
        ("create a --runs a*b", 2),
        ("create a --expires soon", 2),
        ("create a --expires 99999999d", 2),
        ("create taken", 2),
        ("revoke nobody", 3),
        ("rotate nobody", 3),
        ("rotate taken --grace 31d", 2),
        ("rotate taken --grace soon", 2),
        ("ls --url http://127.0.0.1:9", 2),
    ):
        refused = call(*line.split(), "--root", root)
        assert refused.exit_code == status and "hint:" in refused.stderr, (line, refused.output)
    assert [token.name for token in store.all()] == ["taken"]


def test_a_root_that_is_not_there(tmp_path: Path) -> None:
    """Only making a token makes a root."""
    with pytest.raises(NoSuchResource):
        RootTokens(tmp_path / "none").all()
    assert not (tmp_path / "none").exists()
    assert call("ls", "--catalog", "sqlite://").exit_code == 2


def test_no_token_is_made_in_a_checkpoint(tmp_path: Path) -> None:
    """A catalog that is put there makes it one that nothing removes."""
    root = tmp_path / "root"
    build_root(root, {"r": (5,)})
    directory = root / "r" / "checkpoints" / "step-00000005"
    before = sorted(directory.iterdir())
    with pytest.raises(InvalidRequest, match="cannot be a root"):
        RootTokens(directory).create(TokenRequest(name="first"))
    assert sorted(directory.iterdir()) == before


def test_where_the_token_comes_from(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The environment first, then the user's file, which nobody else may read."""
    assert given_token() is None
    kept = home / ".config" / "holdfast" / "token"
    kept.parent.mkdir(parents=True)
    kept.write_text("hf_kept\n")
    kept.chmod(0o640)
    with pytest.raises(InvalidRequest, match="is readable by other users") as caught:
        given_token()
    assert "chmod 600" in caught.value.hint
    kept.chmod(0o600)
    assert given_token() == "hf_kept"
    monkeypatch.setenv("XDG_CONFIG_HOME", str(home / ".config"))
    assert given_token() == "hf_kept"
    monkeypatch.setenv("HOLDFAST_TOKEN", " hf_stated ")
    assert given_token() == "hf_stated"
    for wrong in ("hf_a\r\nX-Evil: 1", "hf a", "hf_é"):
        with pytest.raises(InvalidRequest, match="does not contain a token") as caught:
            Api("http://127.0.0.1:9", token=wrong)
        assert wrong not in str(caught.value)


@pytest.mark.parametrize("hidden", [True, False], ids=["far", "near"])
def test_a_rank_at_a_url_needs_a_token_that_writes(hidden: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Uploads, outcomes and restores go through with it; without it, or for another run, the save is refused. So it is
    where the daemon's socket, which knows no tokens, can be reached as well.
    """
    root = tmp_path / "root"
    tokens = {
        name: RootTokens(root).create(TokenRequest(name=name, scope=scope, runs=runs)).token  # type: ignore[arg-type]
        for name, scope, runs in (("writer", "write", "far-*"), ("reader", "read", "*"))
    }
    state = {"x": torch.arange(100_000)}
    with far_daemon(root, closed=True) if hidden else running(root, listen=HERE, closed=True) as daemon:
        for token, kind, run in (
            ("", Unauthenticated, "far-1"),
            (tokens["reader"], Forbidden, "far-1"),
            (tokens["writer"], Forbidden, "near-1"),
        ):
            monkeypatch.setenv("HOLDFAST_TOKEN", token)
            with pytest.raises(kind) as caught, Checkpointer(run, state, at=daemon.url) as checkpointer:
                checkpointer.save(1, wait="durable")
            assert caught.value.hint
        monkeypatch.setenv("HOLDFAST_TOKEN", tokens["writer"])
        with Checkpointer("far-1", state, at=daemon.url) as checkpointer:
            checkpointer.save(1, wait="durable")
        monkeypatch.setenv("HOLDFAST_TOKEN", tokens["reader"])
        with Api(daemon.url) as api:
            assert [made.step for made in api.checkpoints("far-1")] == [1]
        monkeypatch.setenv("HOLDFAST_TOKEN", tokens["writer"])
        live = {"x": torch.zeros_like(state["x"])}
        with Checkpointer("far-1", live, at=daemon.url) as checkpointer:
            assert checkpointer.restore() == 1
        assert torch.equal(live["x"], state["x"])
        with Api(daemon.url) as api, pytest.raises(NoSuchRun):
            api.run("near-1")


def test_a_token_that_is_revoked_under_a_trainer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The next save is refused by name instead of waiting for a daemon that answers."""
    root = tmp_path / "root"
    monkeypatch.setenv("HOLDFAST_TOKEN", RootTokens(root).create(TokenRequest(name="writer", scope="write")).token)
    with far_daemon(root, closed=True) as daemon:
        checkpointer = Checkpointer("far-1", {"x": torch.ones(5)}, at=daemon.url)
        checkpointer.save(1, wait="durable")
        RootTokens(root).revoke("writer")
        with pytest.raises(CheckpointError) as caught:
            checkpointer.save(2, wait="durable")
        assert caught.value.code == "unauthenticated" and caught.value.hint
        checkpointer.close(wait=False)


def test_every_door_asks_for_a_token(tmp_path: Path) -> None:
    """On every address, with no token made yet; unless something else is said, which is logged."""
    root = tmp_path / "root"
    for flags, listen, said, expected in (
        (("--behind-tls",), "0.0.0.0:0", "", 401),
        (("--insecure-no-tokens",), "0.0.0.0:0", "--insecure-no-tokens", 200),
        ((), "0.0.0.0:0", "in clear text", 401),
        ((), HERE, "the dashboard: holdfast open --url", 401),
        (("--loopback-open",), HERE, "--loopback-open", 200),
    ):
        with running(root, *flags, listen=listen, closed=True) as daemon:
            assert status(daemon.url) == (expected, 200)
            assert said in daemon.log.read_text()


def status(url: str) -> tuple[int, int]:
    import httpx

    url = url.replace("0.0.0.0", "127.0.0.1")
    return tuple(httpx.get(url + path, trust_env=False).status_code for path in ("/v1/runs", "/healthz"))  # type: ignore[return-value]


def test_flags_of_the_door(tmp_path: Path) -> None:
    """They are read from the command line and from the environment alike."""
    config = parse(["--loopback-open", "--allowed-hosts", "node-7.example, B "], {"HOLDFAST_METRICS_OPEN": "true"})
    assert config.loopback_open and config.metrics_open and not config.behind_tls
    assert config.allowed_hosts == {"node-7.example", "b"}
    with pytest.raises(InvalidRequest, match="--behind-tls"):
        parse([], {"HOLDFAST_BEHIND_TLS": "perhaps"})


def test_names_that_are_allowed(tmp_path: Path) -> None:
    """A service without tokens is asked by the names that were allowed, and by no others."""
    import httpx

    root = tmp_path / "root"
    build_root(root, {"tiny": (1,)})
    with running(root, "--allowed-hosts", "node-7.example", listen=HERE) as daemon:
        for host, expected in (("node-7.example", 200), ("attacker.example", 403)):
            got = httpx.get(f"{daemon.url}/v1/runs", headers={"Host": host}, trust_env=False)
            assert got.status_code == expected
