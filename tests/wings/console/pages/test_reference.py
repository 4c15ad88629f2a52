"""The reference of the API."""

from __future__ import annotations

import httpx

from tests.serving import Served


def test_the_scope_that_is_said_is_the_one_that_is_asked_for(service: Served) -> None:
    """What anybody may read has none; what changes something has one."""
    said = httpx.get(service.url + "/openapi.json", trust_env=False).json()["paths"]
    assert "x-scope" not in said["/healthz"]["get"] and said["/v1/runs"]["get"]["x-scope"] == "read"
    assert said["/v1/jobs"]["post"]["x-scope"] == "write" and said["/v1/tokens"]["post"]["x-scope"] == "admin"
    assert all(
        one["x-scope"] for methods in said.values() for method, one in methods.items() if method not in ("get", "head")
    )
