"""Several checkpoints at once, by forms alone."""

from __future__ import annotations

import httpx

from holdfast_formats import naming
from tests.serving import Served
from tests.wings.console.reading import Page

MARKS = "/runs/tiny/marks"


def listed(browser: httpx.Client) -> dict[int, dict]:
    return {made["step"]: made for made in browser.get("/v1/runs/tiny/checkpoints").json()["items"]}


def test_pin_and_label(browser: httpx.Client) -> None:
    """The chosen ones and no others; the run's page follows and says it."""
    table = Page(browser.get("/runs/tiny").text)
    assert [one.attributes["value"] for one in table.all("input") if one.attributes.get("name") == "step"] == [
        "15",
        "10",
        "5",
    ]
    done = browser.post(MARKS, data={"step": ["5", "10"], "act": "pin"})
    assert done.url.path == "/runs/tiny" and "not removed until you unpin them" in Page(done.text).text
    browser.post(MARKS, data={"step": ["10", "15"], "act": "label", "label": "good"})
    browser.post(MARKS, data={"step": ["10"], "act": "unpin"})
    assert {step: (made["pinned"], made["labels"]) for step, made in listed(browser).items()} == {
        15: (False, ["good"]),
        10: (False, ["good"]),
        5: (True, []),
    }


def test_remove(service: Served, browser: httpx.Client) -> None:
    """A page says first what is freed and what stays and why; nothing goes without the right number."""
    browser.post("/runs/tiny/checkpoints/10/pin")
    asked = Page(browser.post(MARKS, data={"step": ["5", "10", "999"], "act": "remove"}).text)
    assert asked.faults() == []
    assert "Remove 1 checkpoint?" in asked.text and "These stay" in asked.text and "pinned" in asked.text
    size = listed(browser)[5]["bytes"]
    assert f"{size / 1000:.1f} kB" in asked.text
    assert set(listed(browser)) == {5, 10, 15}
    wrong = browser.post(MARKS, data={"step": ["5"], "act": "removed", "confirm": "2"})
    assert wrong.status_code == 400 and set(listed(browser)) == {5, 10, 15}
    both = Page(browser.post(MARKS, data={"step": ["5", "10"], "act": "removed", "confirm": "2"}).text)
    assert "1 of 2 checkpoints were removed" in both.text and "step 10" in both.text
    assert set(listed(browser)) == {10, 15}
    assert not (service.root / naming.checkpoint_path("tiny", 5)).exists()


def test_refusals(browser: httpx.Client) -> None:
    """Nothing ticked, no such act, a label that is not allowed, a step that is no number, more than a form may have."""
    for data in (
        {"act": "pin"},
        {"step": "5", "act": "format"},
        {"step": "5"},
        {"step": "5", "act": "label", "label": "=cmd()"},
        {"step": "five", "act": "pin"},
        {"step": [str(step) for step in range(201)], "act": "pin"},
    ):
        assert browser.post(MARKS, data=data).status_code in (400, 413), data
    assert browser.post(MARKS, data={"step": "999", "act": "pin"}).status_code == 404
    assert not any(made["pinned"] or made["labels"] for made in listed(browser).values())
