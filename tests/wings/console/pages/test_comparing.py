"""Every byte of two checkpoints compared by a job, from the page on which its result appears."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import httpx
import numpy as np
import pytest

from holdfast_formats import naming
from tests.checkpoints import build, varied_arrays
from tests.daemons import running, wait_until
from tests.serving import served
from tests.wings.console.reading import Page

COMPARE = "/runs/tiny/compare"


@pytest.fixture
def changed(tmp_path: Path) -> Iterator[httpx.Client]:
    """Two checkpoints of which every tensor differs."""
    for seed, step in ((0, 5), (1, 10)):
        build(tmp_path / naming.checkpoint_path("tiny", step), varied_arrays(seed), step=step)
    with served(tmp_path) as running, httpx.Client(base_url=running.url, trust_env=False, follow_redirects=True) as client:
        yield client


def test_job(changed: httpx.Client) -> None:
    """The button submits it; the page says how far it is, then the result, and has the exact values in its table."""
    before = Page(changed.get(f"{COMPARE}?a=5&b=10").text)
    assert "Compare every byte" in before.text and before.faults() == []
    after = changed.post(COMPARE, data={"a": "5", "b": "latest"})
    assert after.url.path == COMPARE and dict(after.url.params)["b"] == "10"
    wait_until(lambda: "Every changed byte was compared" in changed.get(f"{COMPARE}?a=5&b=10").text)
    page = Page(changed.get(f"{COMPARE}?a=5&b=10").text)
    assert page.faults() == []
    job = changed.get("/v1/jobs?kind=compare").json()["items"][0]
    assert (job["step"], job["arguments"], job["done_bytes"]) == (5, {"with": "10"}, job["total_bytes"])
    most = job["result"]["most"][0]
    assert f"{100 * most['relative']:.3g} %" in page.text
    assert "Compare every byte" in Page(changed.get(f"{COMPARE}?a=10&b=5").text).text  # another pair


def test_what_moved_most_comes_first(tmp_path: Path) -> None:
    """By change without being asked; then reshaped tensors, missing ones, and the random generators of processes."""
    first = {name: np.ones(50, np.float32) for name in ("a_little", "b_much", "c_same", "d_old")}
    second = {"a_little": first["a_little"] * 1.1, "b_much": first["b_much"] * 3, "c_same": first["c_same"]}
    for step, (model, seed) in enumerate(((first, 0), (second, 1))):
        arrays = {"model": model, "extra": {"ranks/0/rng/torch": np.full(50, seed, np.uint8)}}
        build(tmp_path / naming.checkpoint_path("r", step), arrays, run="r", step=step)
    with served(tmp_path) as running, httpx.Client(base_url=running.url, trust_env=False, follow_redirects=True) as client:
        client.post("/runs/r/compare", data={"a": "0", "b": "1"})
        wait_until(lambda: "Every changed byte was compared" in client.get("/runs/r/compare").text)
        page = Page(client.get("/runs/r/compare").text)
    table = page.text.partition("Changed by")[2]
    places = [table.index(name) for name in ("b_much", "a_little", "c_same", "d_old", "ranks/0/rng/torch")]
    assert places == sorted(places)
    assert {"/runs/r/compare?a=0&b=1&state=missing-in-b", "/runs/r/compare?a=0&b=1&state=equal"} <= set(page.addresses())


def test_nan_is_not_compared(tmp_path: Path) -> None:
    """Without being asked, the last healthy step is compared with the first that has NaN; the values that are not finite are
    counted, also where both steps hold the same bytes.
    """
    sound, ill = np.ones(50, np.float32), np.ones(50, np.float32)
    ill[:3] = np.nan
    for step, values in ((0, sound), (1, sound), (2, ill), (3, ill)):
        build(tmp_path / naming.checkpoint_path("r", step), {"model": {"w": values}}, run="r", step=step)
    with running(tmp_path, listen="127.0.0.1:0") as daemon, httpx.Client(base_url=daemon.url, trust_env=False) as client:
        listed = "/v1/runs/r/checkpoints"
        wait_until(lambda: [one["healthy"] for one in client.get(listed).json()["items"]] == [False, False, True, True])
        first = Page(client.get("/runs/r/compare").text).text
        wait_until(lambda: client.get("/v1/runs/r/summary").json()["newest_verified"] == 3)
        run = Page(client.get("/runs/r").text).text
        same = Page(client.get("/runs/r/compare?a=2&b=3").text).text
    assert "Compare step 1 with 2" in first and "not comparable NaN or infinite: 0 → 3" in first
    assert "Newest verified 3 has NaN or infinite values" in run and "Newest healthy 1" in run
    assert "Norm at 1" in first and "Norm at 2" in first
    assert "not comparable NaN or infinite: 3 → 3" in same


def test_what_is_refused(changed: httpx.Client) -> None:
    """A step that is not there, and a viewer who may only read."""
    assert changed.post(COMPARE, data={"a": "5", "b": "999"}).status_code == 404
    made = changed.post("/v1/tokens", json={"name": "reader", "scope": "read", "runs": "*"}).json()["token"]
    refused = changed.post(COMPARE, data={"a": "5", "b": "10"}, headers={"Authorization": f"Bearer {made}"})
    assert refused.status_code == 403
    assert changed.get("/v1/jobs").json()["items"] == []
