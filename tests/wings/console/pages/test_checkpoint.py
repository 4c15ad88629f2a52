"""A checkpoint's page of a run with very many of them."""

from __future__ import annotations

import httpx
import pytest

from holdfast_service.wings.console.pages import checkpoint
from tests.serving import Served
from tests.wings.console.reading import Page

STEP = "/runs/tiny/checkpoints/10"


def test_many_checkpoints_are_not_judged_for_a_page(
    service: Served, browser: httpx.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The page comes without the verdict, and asks for it afterwards; pin and labels are there at once."""
    browser.post(f"{STEP}/pin")
    browser.post(f"{STEP}/labels", data={"label": "release-1"})
    monkeypatch.setattr(checkpoint, "VERDICTS_UP_TO", 2)
    judged = []
    verdicts = service.services.control.rotation.verdicts
    preview = verdicts.preview
    monkeypatch.setattr(verdicts, "preview", lambda *a, **k: judged.append(k) or preview(*a, **k))
    page = Page(browser.get(STEP).text)
    assert judged == []
    assert "Kept:" not in page.text and "Unpin" in page.text and "release-1" in page.text and "Compare with 5" in page.text
    later = Page(browser.get(next(one for one in page.addresses() if "why=" in one)).text)
    assert "Kept: it is pinned" in later.text
    assert judged == [{"step": 10}]


def test_one_verdict(browser: httpx.Client) -> None:
    """The API answers with the verdict on one step, and with the sums of all."""
    every, one = browser.get("/v1/runs/tiny/retention").json(), browser.get("/v1/runs/tiny/retention?step=10").json()
    assert [verdict["step"] for verdict in every["verdicts"]] == [15, 10, 5]
    assert one["verdicts"] == [verdict for verdict in every["verdicts"] if verdict["step"] == 10]
    assert {k: v for k, v in one.items() if k != "verdicts"} == {k: v for k, v in every.items() if k != "verdicts"}
    assert browser.get("/v1/runs/tiny/retention?step=999").json()["verdicts"] == []
