"""Nothing that a browser is given names another origin, and no answer is without a policy: the admin's cookie is of this
origin.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from html.parser import HTMLParser
from urllib.parse import urlsplit

import httpx
import pytest

from holdfast_service.api.access.authentication import Policy
from tests.api.guarded import CHECKPOINT, Guarded, guarded

NAMED = re.compile(r"(?:https?:)?//[A-Za-z0-9.-]+\.[a-z]{2,}")


class Addresses(HTMLParser):
    """Every address that a page has its browser load, and how many scripts stand in it (data is none)."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.loaded: list[str] = []
        self.inline = 0
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = dict(attrs)
        self.loaded += [str(found[name]) for name in ("src", "href", "action", "data") if found.get(name)]
        self.inline += tag == "script" and not found.get("src") and found.get("type") != "application/json"


@pytest.fixture(scope="module")
def guard(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Guarded]:
    with guarded(tmp_path_factory.mktemp("pages"), Policy()) as made:
        yield made


def paths(guard: Guarded) -> list[str]:
    """Every address of the API that is read without a choice to make, the pages, and what the framework brings besides."""
    described = guard.ask("GET", "/openapi.json").json()["paths"]
    api = [path for path, methods in described.items() if "{" not in path and "get" in methods]
    pages = [
        "/",
        "/nodes",
        "/jobs",
        "/events",
        "/tokens",
        "/api",
        "/login",
        "/runs/team-a",
        "/runs/none",
        "/runs/team-a/policy",
    ]
    page = CHECKPOINT.removeprefix("/v1")
    pages += [page, *(f"{page}/{part}" for part in ("tensors", "files", "map", "restore"))]
    return [*api, *pages, CHECKPOINT, f"{CHECKPOINT}/manifest", "/docs", "/redoc", "/openapi.json", "/nothing"]


def test_no_page_loads_anything_from_elsewhere(guard: Guarded) -> None:
    """Whatever is HTML has the pages' policy and names this service alone; the rest may load and run nothing."""
    pages = 0
    for path in paths(guard):
        if path == "/v1/events":
            continue  # a stream, which does not end
        answer = guard.ask("GET", path, headers={"Accept": "text/html,application/json"}, follow_redirects=True)
        policy = answer.headers.get("content-security-policy", "")
        assert policy.startswith("default-src 'none'") and "frame-ancestors 'none'" in policy, path
        assert "unsafe" not in policy and not NAMED.search(policy), path
        assert answer.headers["x-content-type-options"] == "nosniff", path
        if "html" not in answer.headers["content-type"]:
            continue
        pages += 1
        found = Addresses(answer.text)
        assert found.inline == 0, path
        assert [address for address in found.loaded if urlsplit(address).netloc or urlsplit(address).scheme] == [], path
    assert pages > 10


def test_the_interactive_pages_of_the_framework_are_gone(guard: Guarded) -> None:
    """They load scripts of a CDN, unpinned; the description itself stays, for tools."""
    for path in ("/docs", "/redoc", "/docs/oauth2-redirect"):
        assert guard.ask("GET", path).status_code == 404
    described = guard.ask("GET", "/openapi.json")
    assert described.status_code == 200 and "/v1/runs" in described.json()["paths"]


def test_refusals_have_a_policy_too(guard: Guarded) -> None:
    """What is refused, or asks for what is not there, is an answer like others."""
    for answer in (
        guard.ask("GET", "/v1/runs", headers={"Authorization": "Bearer no"}),
        guard.ask("GET", "/v1/runs", headers={"Host": "rebound.example"}),
        guard.ask("PUT", "/healthz"),
    ):
        assert isinstance(answer, httpx.Response) and answer.is_error
        assert answer.headers["content-security-policy"].startswith("default-src 'none'")
