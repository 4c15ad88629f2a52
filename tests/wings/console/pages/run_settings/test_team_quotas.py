"""The page of team quotas: how full each is, the fullest first; set, changed and removed by forms."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.checkpoints import build_root
from tests.serving import served
from tests.wings.console.reading import Page


@pytest.fixture
def browser(tmp_path: Path) -> Iterator[httpx.Client]:
    build_root(tmp_path, {"team-a": (1, 2), "other": (1,)})
    with served(tmp_path) as running, httpx.Client(base_url=running.url, trust_env=False, follow_redirects=True) as client:
        yield client


def test_use_against_each_quota(browser: httpx.Client) -> None:
    """In words where it is nearly full or full; what was typed is what the API has then."""
    used = browser.get("/v1/runs/team-a").json()["bytes"]
    for pattern, most in (("team-*", used), ("other", 10**12), ("*", round(2 * used * 0.8))):
        page = Page(browser.post("/quotas", data={"pattern": pattern, "gigabytes": repr(most / 1e9)}).text)
        assert "The quota was set" in page.text and page.faults() == []
    listed = {one["pattern"]: one["quota_bytes"] for one in browser.get("/v1/quotas").json()["items"]}
    assert listed == {"team-*": used, "other": 10**12, "*": round(2 * used * 0.8)}
    assert page.text.index("team-*") < page.text.index("other")
    assert "full: saves are refused" in page.text and "nearly full" in page.text
    assert browser.get("/csv/quotas").text.startswith("pattern,used_bytes,quota_bytes,runs")
    page = Page(browser.post("/quotas/team-*/remove").text)
    assert "The quota was removed" in page.text and "team-*" not in page.text
    assert browser.post("/quotas/team-*/remove").status_code == 404


def test_paged(browser: httpx.Client) -> None:
    """Fifty at once."""
    for number in range(52):
        browser.put(f"/v1/quotas/team-{number:02d}", json={"quota_bytes": 1000}).raise_for_status()
    first, second = (Page(browser.get(f"/quotas?first={first}").text) for first in (0, 50))
    assert "1–50 of 52" in first.text and "/quotas?first=50" in first.addresses() and "team-49" in first.text
    assert "51–52 of 52" in second.text and "team-49" not in second.text and "team-51" in second.text


@pytest.mark.parametrize(
    ("pattern", "gigabytes"),
    [("", "1"), ("*-x", "1"), ("a/b", "1"), ("a", ""), ("a", "0"), ("a", "-1"), ("a", "nan"), ("a", "1e99"), ("a", "1 GB")],
)
def test_what_is_no_quota_is_refused(browser: httpx.Client, pattern: str, gigabytes: str) -> None:
    got = browser.post("/quotas", data={"pattern": pattern, "gigabytes": gigabytes})
    assert got.status_code in (400, 404) and browser.get("/v1/quotas").json()["items"] == []
