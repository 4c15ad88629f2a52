"""Whose token goes along, and the door for browsers: the pages before an API that opens to one token alone."""

from __future__ import annotations

from collections.abc import Iterator

import httpx
import pytest
from fastapi import FastAPI, Request
from starlette.responses import JSONResponse
from starlette.testclient import TestClient

from holdfast_service.wings.console import pages
from holdfast_service.wings.console.pages.sign_in import sign_in_router

GOOD = "Bearer good"


class Door:
    """The pages, over an API that answers with empty lists, and notes what each question says of who asks."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.app = FastAPI()
        for router in (pages.router, sign_in_router):
            self.app.include_router(router)
        self.app.add_api_route("/readyz", lambda: {"status": "ready", "version": "1", "root": "/"})
        self.app.add_api_route("/v1/{path:path}", self.answer)

    async def answer(self, request: Request) -> JSONResponse:
        self.asked.append(request.headers.get("authorization", ""))
        if self.asked[-1] != GOOD:
            return JSONResponse({"code": "unauthenticated", "detail": "who are you?"}, 401)
        who = {"name": "ci", "by": "token", "scope": "read", "runs": "*", "address": "127.0.0.1"}
        return JSONResponse({"items": [], "next": None, **(who if request.url.path == "/v1/whoami" else {})})


@pytest.fixture
def door() -> Door:
    return Door()


@pytest.fixture
def browser(door: Door) -> Iterator[httpx.Client]:
    """Keeps cookies, and follows to where it is sent."""
    with TestClient(door.app) as client:
        yield client


def test_pages_ask_as_the_viewer(door: Door, browser: httpx.Client) -> None:
    """The viewer's token goes along with every question to the API, from the cookie or as it was given."""
    assert browser.get("/nodes", headers={"Authorization": GOOD}).status_code == 200
    assert browser.get("/nodes", headers={"Cookie": "holdfast_token=good"}).status_code == 200
    assert set(door.asked) == {GOOD}
    assert len(door.asked) == 4


def test_signing_in(browser: httpx.Client) -> None:
    """Who has no token is led to the door and from there to the page; a wrong one is not kept; signing out forgets it."""
    found = browser.get("/nodes?x=1")
    assert (found.url.path, dict(found.url.params)) == ("/login", {"next": "/nodes?x=1"})
    wrong = browser.post("/login", data={"token": "bad", "next": "/nodes"})
    assert (wrong.status_code, "This token is unknown" in wrong.text, list(browser.cookies)) == (401, True, [])
    inside = browser.post("/login", data={"token": "good", "next": "/nodes"})
    assert (inside.status_code, inside.url.path) == (200, "/nodes")
    kept = inside.history[0].headers["set-cookie"].lower()
    assert all(part in kept for part in ("httponly", "samesite=strict", "path=/"))
    assert "secure" not in kept
    assert browser.post("/logout").url.path == "/login"
    assert browser.get("/nodes").url.path == "/login"


def test_the_cookie_keeps_to_tls(door: Door, browser: httpx.Client) -> None:
    """Behind a proxy that speaks TLS, the cookie travels by TLS alone."""
    door.app.state.behind_tls = True
    assert "Secure" in browser.post("/login", data={"token": "good"}, follow_redirects=False).headers["set-cookie"]


@pytest.mark.parametrize("elsewhere", ["//evil.example", "https://evil.example", "/\\evil.example", "javascript:alert(1)"])
def test_the_door_leads_nowhere_else(browser: httpx.Client, elsewhere: str) -> None:
    """A link to the door cannot send people on to another site."""
    answer = browser.post("/login", data={"token": "good", "next": elsewhere}, follow_redirects=False)
    assert answer.headers["location"] == "/?said=signed-in"
