"""Clients that stop reading: cut after a while, so that they hold no place for ever."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from holdfast_service.api.content import stall_limit
from holdfast_service.api.content.stall_limit import StallLimit
from holdfast_service.api.problems import TransferAborted


def run(sleep_s: float) -> list[Any]:
    """An app that sends one message to a client that needs `sleep_s` to take it; what the client got."""
    taken: list[Any] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start"})
        await send({"type": "http.response.body"})

    async def send(message: Any) -> None:
        await asyncio.sleep(sleep_s)
        taken.append(message)

    async def receive() -> Any:
        raise AssertionError("nobody asks")

    asyncio.run(StallLimit(app)({"type": "http", "path": "/v1/x"}, receive, send))
    return taken


def test_a_client_that_takes_its_bytes_is_left_alone() -> None:
    """Everything arrives in order."""
    assert [message["type"] for message in run(0)] == ["http.response.start", "http.response.body"]


def test_a_client_that_stalls_is_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who takes nothing for as long as the limit ends with an error, which cuts the connection."""
    monkeypatch.setattr(stall_limit, "STALL_MAX_S", 0.05)
    with pytest.raises(TransferAborted, match="/v1/x"):
        run(10)
