"""Events by save, warnings first; and a run's table in the order that its columns link to."""

from __future__ import annotations

import httpx

from tests.serving import Served
from tests.wings.console.reading import Page


def test_grouped(service: Served, browser: httpx.Client) -> None:
    """What was said of a save is in one place; the worst is above what is newer; details are words."""
    events = service.services.control.events
    events.add("checkpoint-committed", "step 5 is committed", "tiny", 5)
    events.add("save-aborted", "the disk is full", "tiny", 20, level="error", detail={"missing": [1, 2], "bytes": 2000})
    events.add("checkpoint-verified", "step 5 was read back", "tiny", 5)
    events.add("checkpoint-committed", "step 10 is committed", "tiny", 10)
    page = Page(browser.get("/events").text)
    assert page.faults() == []
    order = [page.text.index(text) for text in ("disk is full", "step 10 is committed", "step 5 was read", "step 5 is comm")]
    assert order == sorted(order)
    assert "missing 1; 2" in page.text.lower().replace("missing1", "missing 1") and "2.0 kB" in page.text
    assert "disk is full" not in Page(browser.get("/events?kind=checkpoint-committed").text).text
    counted = Page(browser.get("/events?order=kind").text)
    assert counted.faults() == [] and "/events?kind=save-aborted" in counted.addresses()
    table = counted.text.partition("What it said")[2]
    assert table.index("checkpoint-committed 2") < table.index("save-aborted error 1")
    timed = browser.get("/events?order=time").text
    assert 'data-stream="/v1/events' in timed
    assert timed.index("step 10 is committed") < timed.index("disk is full")


def test_a_save_with_many_events_is_folded(service: Served, browser: httpx.Client) -> None:
    """Its newest ones are read at once, the others after a click; all are on the page."""
    for number in range(10):
        service.services.control.events.add("save-dropped", f"dropped number {number}", "tiny", 5, level="warning")
    page = Page(browser.get("/events").text)
    assert page.faults() == [] and "7 earlier" in page.text
    order = [page.text.index(f"dropped number {number}") for number in range(10)]
    assert order == sorted(order, reverse=True)
    assert order[7] < page.text.index("7 earlier") < order[6]


def test_sorted_by_a_column(browser: httpx.Client) -> None:
    """The heading says the order and links to the other one; filters stay."""
    page = Page(browser.get("/runs/tiny?step_min=6").text)
    assert [one.attributes["aria-sort"] for one in page.all("th") if "aria-sort" in one.attributes] == [
        "descending",
        "none",
        "none",
    ]
    link = next(one for one in page.addresses() if "sort=step" in one)
    assert "step_min=6" in link
    ascending = Page(browser.get(link).text)
    assert [one.attributes["value"] for one in ascending.all("input") if one.attributes.get("name") == "step"] == [
        "10",
        "15",
    ]
