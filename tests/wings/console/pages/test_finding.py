"""The search: what it finds, for whom, and the page behind its form."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.checkpoints import build_root
from tests.serving import served
from tests.wings.console.reading import Page


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    root: Path = tmp_path_factory.mktemp("root")
    build_root(root, {"llama-7b": (5, 50, 1200), "llama-70b": (5, 1201), "7b": (70,), "mixtral": (1,)})
    with served(root) as running, httpx.Client(base_url=running.url, trust_env=False, follow_redirects=True) as client:
        client.put("/v1/runs/llama-70b/checkpoints/1201/labels/Best-Loss").raise_for_status()
        yield client


def found(browser: httpx.Client, q: str, **more: int) -> list[str]:
    answer = browser.get("/v1/search", params={"q": q, **more}).raise_for_status().json()
    return [hit["run"] + ("" if hit["step"] is None else f"@{hit['step']}") for hit in answer["items"]]


@pytest.mark.parametrize(
    ("q", "hits"),
    [
        ("", []),
        ("   ", []),
        ("nothing", []),
        ("7b", ["7b", "llama-7b"]),  # the run of that very name first
        ("LLAMA", ["llama-70b", "llama-7b"]),
        ("mix", ["mixtral"]),
        ("llama-7b@5", ["llama-7b@5", "llama-7b@50"]),  # that very step first, then the newest with its digits
        ("llama@120", ["llama-70b@1201", "llama-7b@1200"]),
        ("mixtral@", ["mixtral@1"]),
        ("7b@", ["7b@70", "llama-7b@1200", "llama-7b@50", "llama-7b@5"]),  # of the run of that very name first
        ("@1201", ["llama-70b@1201"]),
        ("1201", ["llama-70b@1201"]),
        ("best", ["llama-70b@1201"]),
        ("llama best", ["llama-70b@1201"]),
        ("llama@best", ["llama-70b@1201"]),
        ("llama 1200", ["llama-7b@1200"]),
        ("mixtral best", []),
        ("%", []),
        ("_", []),
        ("' OR 1=1 --", []),
        ("llama@99999999999999999999999", []),
    ],
)
def test_search(browser: httpx.Client, q: str, hits: list[str]) -> None:
    """Parts of names, steps and labels; wildcards of SQL are text."""
    assert found(browser, q) == hits


def test_limit(browser: httpx.Client) -> None:
    """No more than was asked for, and whether there is more."""
    assert found(browser, "l", limit=1) == ["llama-70b"]
    assert browser.get("/v1/search?q=l&limit=1").json()["more"] is True
    assert browser.get("/v1/search?q=llama").json()["more"] is False
    assert browser.get("/v1/search?q=l&limit=101").status_code == 400


def test_rights(browser: httpx.Client) -> None:
    """A token of some runs finds those alone, by name, by step and by label."""
    made = browser.post("/v1/tokens", json={"name": "seven", "scope": "read", "runs": "llama-7b"}).json()["token"]
    headers = {"Authorization": f"Bearer {made}"}
    for q, hits in (("llama", ["llama-7b"]), ("best", []), ("@", []), ("70", []), ("5", ["llama-7b@5", "llama-7b@50"])):
        answer = httpx.get(f"{browser.base_url}/v1/search", params={"q": q}, headers=headers, trust_env=False)
        names = [hit["run"] + ("" if hit["step"] is None else f"@{hit['step']}") for hit in answer.json()["items"]]
        assert names == hits or (q == "5" and names == hits) or (q == "@" and names == []), (q, names)


def test_page(browser: httpx.Client) -> None:
    """Every page has the form; one hit is gone to, several are listed, none is said."""
    assert 'action="/find"' in browser.get("/runs/mixtral").text
    assert browser.get("/find?q=mixt").url.path == "/runs/mixtral"
    assert browser.get("/find?q=llama-7b@1200").url.path == "/runs/llama-7b/checkpoints/1200"
    several = Page(browser.get("/find?q=llama").text)
    assert several.faults() == [] and "/runs/llama-70b" in several.addresses()
    assert "Nothing has “<b>”" in Page(browser.get("/find", params={"q": "<b>"}).text).text
    assert "Type a part" in Page(browser.get("/find").text).text
