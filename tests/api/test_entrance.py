"""Who may come in at an address, as it is decided at the start."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from holdfast_formats.errors import InvalidRequest
from holdfast_formats.operations import TokenRequest
from holdfast_service.api import entrance
from holdfast_service.api.doors import Policy
from holdfast_service.config import parse
from holdfast_service.control.database import Database
from holdfast_service.control.decisions import utc_now
from holdfast_service.control.events import Events
from holdfast_service.control.tokens import Tokens


@pytest.fixture
def tokens(tmp_path: Path) -> Iterator[Tokens]:
    database = Database.open(f"sqlite:///{tmp_path / 'catalog.sqlite'}")
    yield Tokens(database, Events(database, "node-1", utc_now), utc_now)
    database.close()


def policy(tokens: Tokens, host: str, *flags: str) -> Policy:
    """The policy of a daemon that is started with these flags."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as listener:
        try:
            listener.bind((host, 0))
        except OSError as error:
            pytest.skip(f"no {host} here: {error}")
        return entrance.policy(parse(flags, {}), listener, tokens)


@pytest.mark.parametrize("host", ["127.0.0.1", "127.9.9.9", "::1"])
def test_loopback_is_open_unless_it_was_said(tokens: Tokens, host: str) -> None:
    """Nobody needs a token there; with either flag everybody does, and a proxy that speaks TLS is known of."""
    assert policy(tokens, host) == Policy()
    assert policy(tokens, host, "--require-tokens").tokens
    assert policy(tokens, host, "--behind-tls", "--metrics-open") == Policy(tokens=True, tls=True, metrics_open=True)


@pytest.mark.parametrize("host", ["0.0.0.0", "::"])
def test_elsewhere_there_has_to_be_a_token(tokens: Tokens, host: str) -> None:
    """Refused by name before there is one, with what to do; then asked for. One that has ended is none."""
    with pytest.raises(InvalidRequest, match="there is no token yet") as refused:
        policy(tokens, host, "--require-tokens")
    for advice in ("holdfast token create", "--behind-tls", "--insecure-no-tokens"):
        assert advice in refused.value.hint
    tokens.create(TokenRequest(name="a"))
    assert policy(tokens, host) == Policy(tokens=True)
    tokens.revoke("a")
    with pytest.raises(InvalidRequest):
        policy(tokens, host)
    assert policy(tokens, host, "--behind-tls").tokens
    assert policy(tokens, host, "--insecure-no-tokens") == Policy(metrics_open=True, hosts=None)


@pytest.mark.parametrize("flag", ["--require-tokens", "--behind-tls"])
def test_flags_that_contradict(tokens: Tokens, flag: str) -> None:
    """Tokens are asked for or they are not."""
    with pytest.raises(InvalidRequest, match="contradicts"):
        policy(tokens, "127.0.0.1", "--insecure-no-tokens", flag)


def test_without_a_listener(tokens: Tokens) -> None:
    """An embedded daemon has no door that anybody could come in by."""
    assert entrance.policy(parse(["--listen", "none"], {}), None, tokens) == Policy()
