"""The form to import: a dry run whose report stands on the job's page, and from there the import itself."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import numpy as np
import pytest
from safetensors.numpy import save_file

from tests.checkpoints import build_root
from tests.serving import Served, served
from tests.wings.console.reading import Page


@pytest.fixture
def service(tmp_path: Path) -> Iterator[Served]:
    """A service that imports from a directory with a model, whose files have hostile names."""
    build_root(tmp_path / "root", {"tiny": (5,)})
    source = tmp_path / "place" / "model"
    source.mkdir(parents=True)
    save_file({"<b>w": np.ones((3, 4), np.float32)}, source / "model.safetensors")
    (source / "<script>.gguf").write_bytes(b"")
    with served(tmp_path / "root", tmp_path / "place") as running:
        yield running


def job_page(browser: httpx.Client, answer: httpx.Response) -> Page:
    """The page of the job that a form has submitted, once it has ended."""
    path = urlsplit(str(answer.url)).path
    assert answer.status_code == 200 and path.startswith("/jobs/"), Page(answer.text).text
    browser.get(f"/v1{path}", params={"wait_s": 20}).raise_for_status()
    page = Page(browser.get(path).text)
    assert page.faults() == []
    return page


def test_a_dry_run_and_then_the_import(service: Served, browser: httpx.Client) -> None:
    """The report names groups, and every file with its use; the page's own button imports the same."""
    fields = {"from": "model", "run": "mine", "step": "0", "kind": "hf", "as_is": "yes"}
    page = job_page(browser, browser.post("/import", data={**fields, "dry_run": "yes"}))
    for part in ("What would become of what", "<b>w", "<script>.gguf", "not compared, not imported", "So far nothing"):
        assert part in page.text
    assert not (service.root / "mine").exists()
    inputs = [element.attributes for element in page.all("input") if element.attributes.get("type") == "hidden"]
    sent = {one["name"]: one["value"] for one in inputs}
    assert sent == fields
    done = job_page(browser, browser.post("/import", data=sent))
    assert "What became of what" in done.text and "Go to the checkpoint" in done.text
    assert browser.get("/v1/runs/mine/checkpoints/0").json()["verified"]


def test_what_is_left_out(service: Served, browser: httpx.Client) -> None:
    """Patterns, one a line, and only the weights: the report lists them, and the import from it leaves out the same."""
    source = service.root.parent / "place" / "model"
    (source / "optimizer.pt").write_bytes(b"<b>")
    (source / "rng_state.pth").write_bytes(b"1")
    fields = {"from": "model", "run": "mine", "step": "0", "leave_out": "optimizer.pt\r\n\r\nrng_*", "weights_only": "yes"}
    page = job_page(browser, browser.post("/import", data={**fields, "dry_run": "yes"}))
    assert "--leave-out 'rng_*'" in page.text
    inputs = [element.attributes for element in page.all("input") if element.attributes.get("type") == "hidden"]
    sent = {one["name"]: one["value"] for one in inputs}
    assert sent["leave_out"] == "optimizer.pt\nrng_*" and sent["weights_only"] == "yes"
    done = job_page(browser, browser.post("/import", data=sent))
    assert "optimizer.pt" in done.text and browser.get("/v1/runs/mine/checkpoints/0").json()["verified"]


def test_what_is_missing_or_cannot_be_is_said(browser: httpx.Client) -> None:
    """A field that is empty, a directory that is not there, a kind that does not exist: no job, and a sentence."""
    fields = {"from": "model", "run": "mine", "step": "1"}
    for change, says in (
        ({"from": ""}, "'from' is empty"),
        ({"step": ""}, "'step' is empty"),
        ({"step": "one"}, "not a whole number"),
        ({"from": "nowhere"}, "below the export root"),
        ({"kind": "paper"}, "unknown kind 'paper'"),
    ):
        answer = browser.post("/import", data={**fields, **change})
        assert answer.status_code == 400 and says in Page(answer.text).text
    assert browser.get("/v1/jobs").json()["items"] == []
