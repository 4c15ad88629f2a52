"""Saved views over REST: saved by admins of all runs, seen by all, and in a file of the root."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from urllib.parse import quote

import pytest

from holdfast_formats import naming
from holdfast_service.api.access.authentication import Policy
from holdfast_service.control.insight import saved_views
from holdfast_service.storage import PosixTier
from tests.api.guarded import code, guarded

USUAL = {"q": "", "sort": "training", "metric": "", "tag": "", "group": ""}


def test_views_over_rest(tmp_path: Path) -> None:
    """Saved, replaced, listed by name for a token of any run, and removed; and recorded in the audit log."""
    with guarded(tmp_path, Policy(tokens=True)) as guard:
        admin = guard.token("admin")
        for name in ("sweep of lr", "全部", "alpha: β"):
            made = guard.ask("PUT", f"/v1/views/{quote(name)}", admin, json={"tag": "sweep:lr", "sort": "-metric:loss"})
            assert made.json() == {**USUAL, "name": name, "tag": "sweep:lr", "sort": "-metric:loss"}
        assert guard.ask("PUT", "/v1/views/sweep%20of%20lr", admin, json={"group": "tag"}).status_code == 200
        listed = guard.ask("GET", "/v1/views", guard.token("read", "other")).json()
        assert [one["name"] for one in listed["items"]] == ["alpha: β", "sweep of lr", "全部"] and listed["next"] is None
        assert listed["items"][1] == {**USUAL, "name": "sweep of lr", "group": "tag"}
        assert guard.ask("GET", "/v1/views").status_code == 401
        for scope, runs in (("admin", "other"), ("write", "*")):
            token = guard.token(scope, runs)  # type: ignore[arg-type]
            assert guard.ask("PUT", "/v1/views/mine", token, json={}).status_code == 403
            assert guard.ask("DELETE", "/v1/views/sweep%20of%20lr", token).status_code == 403
        assert guard.ask("DELETE", "/v1/views/sweep%20of%20lr", admin).status_code == 204
        assert code(guard.ask("DELETE", "/v1/views/sweep%20of%20lr", admin)) == (404, "no-such-resource")
        entries = guard.ask("GET", "/v1/audit", admin).json()["items"]
        done = [(one["kind"], one["target"]) for one in entries if "view" in one["kind"] and one["status"] < 400]
        assert done[:2] == [("view-removed", "sweep of lr"), ("view-set", "sweep of lr")] and len(done) == 5
        stored = json.loads((tmp_path / naming.VIEWS).read_text())
        assert stored["version"] == 1 and list(stored["views"]) == ["alpha: β", "全部"]


@pytest.mark.parametrize(
    ("name", "query"),
    [
        ("x" * 65, {}),
        ("a\nb", {}),
        ("a\u202eb", {}),
        (" a", {}),
        ("a ", {}),
        ("a", {"limit": "5"}),
        ("a", {"sort": "beauty"}),
        ("a", {"sort": ""}),
        ("a", {"sort": "metric:"}),
        ("a", {"tag": "two words"}),
        ("a", {"group": "run"}),
        ("a", {"q": "x" * 129}),
        ("a", {"q": "\x1b[2J"}),
        ("a", {"q": 5}),
        ("a", []),
    ],
)
def test_what_is_no_view_is_refused(tmp_path: Path, name: str, query: object) -> None:
    with guarded(tmp_path, Policy(tokens=True)) as guard:
        admin = guard.token("admin")
        assert code(guard.ask("PUT", f"/v1/views/{quote(name)}", admin, json=query)) == (400, "invalid-request")
        assert guard.ask("GET", "/v1/views", admin).json()["items"] == [] and not (tmp_path / naming.VIEWS).exists()


def test_there_is_an_end_to_how_many_there_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of two that are saved at once both stay; one too many is refused, and one that exists may still be replaced."""
    monkeypatch.setattr(saved_views, "VIEWS_MAX", 8)
    with guarded(tmp_path, Policy(tokens=True)) as guard:
        admin = guard.token("admin")
        daemons = [saved_views.SavedViews(PosixTier(tmp_path)) for _ in range(2)]
        query = saved_views.ViewRequest(q="a")
        with ThreadPoolExecutor(8) as pool:
            list(pool.map(lambda number: daemons[number % 2].put(f"v{number}", query), range(8)))
        assert len(guard.ask("GET", "/v1/views", admin).json()["items"]) == 8
        assert code(guard.ask("PUT", "/v1/views/v8", admin, json={})) == (413, "limit-exceeded")
        assert guard.ask("PUT", "/v1/views/v7", admin, json={}).status_code == 200


@pytest.mark.parametrize(
    "written", [b"{", b'{"views": {"a/b": {}}}', b'{"views": {"a": {"limit": 5}}}', b'{"version": 2}', b'{"quotas": {}}']
)
def test_a_damaged_file_is_named_and_left(tmp_path: Path, written: bytes) -> None:
    with guarded(tmp_path, Policy(tokens=True)) as guard:
        (tmp_path / naming.VIEWS).write_bytes(written)
        admin = guard.token("admin")
        for answer in (guard.ask("GET", "/v1/views", admin), guard.ask("PUT", "/v1/views/a", admin, json={})):
            assert answer.json()["code"] == "corrupt-manifest" and naming.VIEWS in answer.json()["detail"]
        assert (tmp_path / naming.VIEWS).read_bytes() == written
