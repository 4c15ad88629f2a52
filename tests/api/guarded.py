"""A service with the access policy that a test needs, and requests that come to it."""

from __future__ import annotations

import ssl
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx

from holdfast_formats.rest.operations import Scope, TokenRequest
from holdfast_service.api.access.authentication import Policy
from tests.checkpoints import build_root
from tests.serving import Served, served

RUNS = {"other": (1,), "team-a": (5,), "team-b": (5,)}
_NO_TLS = ssl.create_default_context()  # every request would make its own, which takes longer than most answers
CHECKPOINT = "/v1/runs/team-a/checkpoints/5"


class Guarded:
    """A service that asks for tokens, and a way to make some."""

    def __init__(self, running: Served) -> None:
        self.running = running
        self._count = 0

    def token(self, scope: Scope = "read", runs: str = "*", **more: int) -> str:
        self._count += 1
        return self.running.services.tokens.create(
            TokenRequest(name=f"t{self._count}", scope=scope, runs=runs, **more)
        ).token

    def ask(self, method: str, path: str, token: str | None = None, **parts: object) -> httpx.Response:
        headers = dict(parts.pop("headers", {}))  # type: ignore[call-overload]
        if token is not None:
            headers["Authorization"] = f"Bearer {token}"
        return httpx.request(
            method, self.running.url + path, headers=headers, trust_env=False, timeout=180, verify=_NO_TLS, **parts
        )  # type: ignore[arg-type]


@contextmanager
def guarded(root: Path, policy: Policy) -> Iterator[Guarded]:
    build_root(root, RUNS)
    with served(root, access=policy) as running:
        yield Guarded(running)


def code(response: httpx.Response) -> tuple[int, str]:
    """Status and code; every refusal is a whole problem."""
    body = response.json()
    assert response.headers["content-type"] == "application/problem+json" and body["hint"] is not None
    assert body["status"] == response.status_code
    return response.status_code, body["code"]
