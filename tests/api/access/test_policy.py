"""Who may come in at an address, as it is decided at the start."""

from __future__ import annotations

import socket

import pytest

from holdfast_formats.errors import InvalidRequest
from holdfast_service.api.access import policy as entrance
from holdfast_service.api.access.authentication import Policy
from holdfast_service.config import parse

# What a service is called by itself: its machine, and its --listen, which is the default one in these tests.
OWN = frozenset({socket.gethostname().lower(), "127.0.0.1"})


def policy(host: str, *flags: str) -> Policy:
    """The policy of a daemon that is started with these flags."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as listener:
        try:
            listener.bind((host, 0))
        except OSError as error:
            pytest.skip(f"no {host} here: {error}")
        return entrance.policy(parse(flags, {}), listener)


@pytest.mark.parametrize("host", ["127.0.0.1", "127.9.9.9", "::1", "0.0.0.0", "::"])
def test_everybody_needs_a_token(host: str) -> None:
    """Wherever it listens, unless it was said that nobody does; a proxy that speaks TLS is known of."""
    assert policy(host) == Policy(tokens=True, hosts=OWN)
    assert policy(host, "--behind-tls", "--metrics-open") == Policy(tokens=True, tls=True, metrics_open=True, hosts=OWN)
    assert policy(host, "--insecure-no-tokens") == Policy(metrics_open=True, hosts=OWN)


def test_a_loopback_address_may_be_open() -> None:
    """On a machine of one user, when that is said; never at an address that others reach."""
    assert policy("127.0.0.1", "--loopback-open") == Policy(hosts=OWN)
    with pytest.raises(InvalidRequest, match="--loopback-open needs a loopback address"):
        policy("0.0.0.0", "--loopback-open")


@pytest.mark.parametrize("flags", [(), ("--insecure-no-tokens",), ("--behind-tls",)])
def test_names_hold_at_every_door(flags: tuple[str, ...]) -> None:
    """The machine's name, that of --listen and those allowed, whatever else is said and wherever it listens."""
    named = ("--allowed-hosts", "Checkpoints.example")
    for host in ("127.0.0.1", "0.0.0.0"):
        assert policy(host, "--listen", "Node-7.example:0", *named, *flags).hosts == {
            socket.gethostname().lower(),
            "node-7.example",
            "checkpoints.example",
        }


@pytest.mark.parametrize(
    "flags",
    [
        ("--insecure-no-tokens", "--behind-tls"),
        ("--loopback-open", "--behind-tls"),
        ("--loopback-open", "--insecure-no-tokens"),
        ("--loopback-open", "--logins=nowhere.json"),
        ("--insecure-no-tokens", "--logins=nowhere.json"),
    ],
)
def test_flags_that_contradict(flags: tuple[str, str]) -> None:
    """Tokens are asked for or they are not, and by whom is said once."""
    with pytest.raises(InvalidRequest, match="cannot be combined"):
        policy("127.0.0.1", *flags)


def test_without_a_listener() -> None:
    """An embedded daemon has no HTTP address to come in by."""
    assert entrance.policy(parse(["--listen", "none"], {}), None).hosts == {socket.gethostname().lower()}
