"""Network work in bounded time, and why it failed, in words without any address."""

from __future__ import annotations

import asyncio
import socket
import threading
from typing import Any

import httpx
import pytest

from holdfast_service.wings.notify.watched_daemons.tls_connections import cause, within
from tests.daemons import free_port


async def get(url: str) -> None:
    async with httpx.AsyncClient(trust_env=False) as client:
        await client.get(url)


def test_nobody_waits_for_a_name_server(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither the time of the whole, nor a daemon that ends."""
    answers = threading.Event()
    asked = threading.Event()

    def hang(*_: Any, **__: Any) -> Any:
        asked.set()
        answers.wait(180)
        raise socket.gaierror(socket.EAI_AGAIN, "at last")

    with monkeypatch.context() as slow:
        slow.setattr(socket, "getaddrinfo", hang)
        with pytest.raises(TimeoutError):
            within(0.5, get("http://slow.invalid/"))
    assert asked.is_set() and all(one.daemon for one in threading.enumerate() if one.name == "holdfast-name")
    answers.set()


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1"])
def test_a_cause_has_no_address(host: str) -> None:
    """Whether a host has one address or two."""
    with pytest.raises(httpx.ConnectError) as failed:
        within(30, get(f"http://{host}:{free_port()}/"))
    assert cause(failed.value) == "Connection refused"


def test_what_is_done_is_returned() -> None:
    async def seven() -> int:
        await asyncio.sleep(0)
        return 7

    assert within(30, seven()) == 7
