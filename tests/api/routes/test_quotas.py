"""Quotas of teams over REST: set by admins of all runs, seen by whoever sees all runs of the team."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from holdfast_formats.errors import CatalogUnavailable
from holdfast_service.api.access.authentication import Policy
from tests.api.guarded import code, guarded


def test_quotas_over_rest(tmp_path: Path) -> None:
    """Set, listed with what is used, and removed; a pattern that is none is refused; another team's is not seen."""
    with guarded(tmp_path, Policy(tokens=True)) as guard:
        admin = guard.token("admin")
        made = guard.ask("PUT", "/v1/quotas/team-*", admin, json={"quota_bytes": 10**9})
        assert made.status_code == 200 and made.json()["runs"] == 2 and made.json()["used_bytes"] > 0
        assert guard.ask("PUT", "/v1/quotas/other", admin, json={"quota_bytes": 5}).status_code == 200
        for pattern, body in (
            ("*-x", {"quota_bytes": 5}),
            ("a*", {"quota_bytes": 0}),
            ("a*", {"quota_bytes": True}),
            ("a*", {}),
        ):
            assert code(guard.ask("PUT", f"/v1/quotas/{pattern}", admin, json=body)) == (400, "invalid-request")
        seen = {
            runs: [one["pattern"] for one in guard.ask("GET", "/v1/quotas", guard.token("read", runs)).json()["items"]]
            for runs in ("*", "team-*", "team-a", "other")
        }
        assert seen == {"*": ["other", "team-*"], "team-*": ["team-*"], "team-a": [], "other": ["other"]}
        assert guard.ask("GET", "/v1/quotas", guard.token("read", "team-*")).json()["items"] == [made.json()]
        assert code(guard.ask("PUT", "/v1/quotas/team-*", guard.token("admin", "team-*"), json={"quota_bytes": 1}))[0] == 403
        assert guard.ask("DELETE", "/v1/quotas/other", admin).status_code == 204
        assert code(guard.ask("DELETE", "/v1/quotas/other", admin)) == (404, "no-such-resource")


def test_whoever_is_refused_has_changed_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """While the catalog is away nobody can be told what is used: the quota is what it was."""
    with guarded(tmp_path, Policy(tokens=True)) as guard:
        admin, services = guard.token("admin"), guard.running.services
        assert guard.ask("PUT", "/v1/quotas/team-*", admin, json={"quota_bytes": 7}).status_code == 200

        @contextmanager
        def away() -> Iterator[None]:
            raise CatalogUnavailable("away", hint="wait")
            yield

        with monkeypatch.context() as patch:
            patch.setattr(services.control.catalog.database, "read", away)
            assert code(guard.ask("PUT", "/v1/quotas/team-*", admin, json={"quota_bytes": 8}))[0] == 503
        assert services.team_quotas.all() == {"team-*": 7}
