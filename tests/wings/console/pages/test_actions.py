"""What forms do: each action over a real root, what it changes, and what it refuses."""

from __future__ import annotations

import httpx
import pytest
from sqlalchemy import update

from holdfast_formats import naming
from holdfast_formats.rest.runs import RunLaunch
from holdfast_service.control.database.schema import CheckpointRow
from holdfast_service.control.insight.facts import RunActivity
from tests.control.published import mark_verified
from tests.serving import Served
from tests.wings.console.reading import Page

STEP = "/runs/tiny/checkpoints/5"


def verdict(browser: httpx.Client, step: int) -> dict:
    """What the API says of a checkpoint of the run."""
    return next(v for v in browser.get("/v1/runs/tiny/retention").json()["verdicts"] if v["step"] == step)


def field(page: Page, name: str) -> str:
    """The value of a form's field."""
    return next(e.attributes["value"] for e in page.all("input") if e.attributes.get("name") == name)


def test_pin(browser: httpx.Client) -> None:
    """Pinned and unpinned from the checkpoint's page and from the run's table."""
    page = Page(browser.post(f"{STEP}/pin").text)
    assert verdict(browser, 5)["pinned"]
    assert "Unpin" in page.text
    assert "Pinned. This checkpoint is not removed" in page.text
    table = browser.post(f"{STEP}/pin", data={"pinned": "no", "back": "run"})
    assert table.url.path == "/runs/tiny"
    assert not verdict(browser, 5)["pinned"]


def test_label(browser: httpx.Client) -> None:
    """Labels are added and taken away; one that is not allowed is refused by name."""
    page = Page(browser.post(f"{STEP}/labels", data={"label": "release-1"}).text)
    assert verdict(browser, 5)["labels"] == ["release-1"]
    assert "Remove label release-1" in page.text
    refused = browser.post(f"{STEP}/labels", data={"label": "<script>"})
    assert (refused.status_code, "<script>" in refused.text.replace("<script src", "")) == (400, False)
    browser.post(f"{STEP}/labels/release-1/remove")
    assert verdict(browser, 5)["labels"] == []


def test_remove(service: Served, browser: httpx.Client) -> None:
    """Nothing goes before the step was typed; then the checkpoint is gone, and the run's page says so."""
    wrong = browser.post(f"{STEP}/remove", data={"confirm": "10"})
    assert wrong.status_code == 400
    assert (service.root / naming.checkpoint_path("tiny", 5)).exists()
    done = browser.post(f"{STEP}/remove", data={"confirm": "5"})
    assert (done.status_code, done.url.path) == (200, "/runs/tiny")
    assert not (service.root / naming.checkpoint_path("tiny", 5)).exists()
    assert "The checkpoint was removed" in Page(done.text).text


def test_remove_is_explained_when_it_may_not_be(service: Served, browser: httpx.Client) -> None:
    """A pinned one has no form, only the reason; the newest sound one wants a second yes."""
    browser.post(f"{STEP}/pin")
    page = Page(browser.get(f"{STEP}/remove").text)
    assert "It may not be removed" in page.text
    assert "confirm" not in [e.attributes.get("name") for e in page.all("input")]
    mark_verified(service.services.control.catalog, "tiny", 15)
    page = Page(browser.get("/runs/tiny/checkpoints/15/remove").text)
    assert "force" in [e.attributes.get("name") for e in page.all("input")]
    assert browser.post("/runs/tiny/checkpoints/15/remove", data={"confirm": "15"}).status_code == 409
    assert (
        browser.post("/runs/tiny/checkpoints/15/remove", data={"confirm": "15", "force": "newest-verified"}).status_code
        == 200
    )


def test_the_newest_healthy_one_wants_a_second_yes(service: Served, browser: httpx.Client) -> None:
    """Where a newer one is unhealthy, the form asks for that very yes; another one removes nothing."""
    for step in (5, 15):
        mark_verified(service.services.control.catalog, "tiny", step)
    with service.services.control.catalog.database.write() as session:
        session.execute(update(CheckpointRow).where(CheckpointRow.step == 15).values(healthy=False))
    form = Page(browser.get(f"{STEP}/remove").text)
    asked = next(e for e in form.all("input") if e.attributes.get("name") == "force")
    assert (asked.attributes["value"], "newest healthy one" in form.text) == ("newest-healthy", True)
    for force, status in (("newest-verified", 409), ("newest-healthy", 200)):
        done = browser.post(f"{STEP}/remove", data={"confirm": "5", "force": force})
        assert done.status_code == status
        assert (service.root / naming.checkpoint_path("tiny", 5)).exists() == (status != 200)


def test_a_check_that_has_not_run_is_said(service: Served, browser: httpx.Client) -> None:
    """Until somebody has read a checkpoint back its page says so, in words; then what was found, and tried."""
    text = Page(browser.get(STEP).text).text
    for part in ("not checked yet", "until then it replaces no older checkpoint", "not tested yet"):
        assert text.count(part) == 1
    assert "Last checked" not in text
    said = {"verified": True, "checked": "2030-01-01T00:00:00.000Z"}
    for layouts, told in ((["tp=2 rank 1"], "tp=2 rank 1"), ([], "none of the test layouts fits")):
        with service.services.control.catalog.database.write() as session:
            at = update(CheckpointRow).where(CheckpointRow.run == "tiny", CheckpointRow.step == 5)
            session.execute(at.values(**said, check={"seconds": 1.5, "layouts": layouts}))
        text = Page(browser.get(STEP).text).text
        assert "yes, every byte matches its digest" in text and told in text
        assert not any(part in text for part in ("not checked yet", "until then", "not tested yet"))


def test_policy_is_previewed_then_set(service: Served, browser: httpx.Client) -> None:
    """The preview changes nothing and says what would go and why; what it carries on is the policy that was typed."""
    mark_verified(service.services.control.catalog, "tiny", 15)
    tag = field(Page(browser.get("/runs/tiny/policy").text), "tag")
    said = {
        "tag": tag,
        "last": "1",
        "every_steps": "",
        "within_hours": "",
        "steps": "5",
        "keep_full": "2",
        "optim": "int8",
        "optim_full": "1",
        "quota_gigabytes": "1.5",
        "metric": ["accuracy", ""],
        "mode": ["max", "min"],
        "count": ["2", "1"],
        "unmeasured": ["", "keep"],
    }
    shown = Page(browser.post("/runs/tiny/policy/preview", data=said).text)
    assert "1 checkpoint with" in shown.text
    (confirm,) = [e.attributes["data-confirm"] for e in shown.all("button") if "data-confirm" in e.attributes]
    assert confirm.startswith("Remove 1 checkpoint with") and confirm.endswith("They cannot be restored.")
    assert "would be removed" in shown.text
    assert browser.get("/v1/runs/tiny/policy").json()["last"] is None
    form = [e for e in shown.all("input") if e.inside.count("form") == 1]
    apply = [(e.attributes["name"], e.attributes.get("value", "")) for e in form if e.attributes.get("type") == "hidden"]
    sent = {name: [v for n, v in apply if n == name] for name, _ in apply}
    sent["tag"] = [tag]
    done = browser.post("/runs/tiny/policy", data=sent)
    assert "The policy was set" in Page(done.text).text
    assert "1 checkpoint with" in Page(done.text).text and "at the rotation that now begins" in Page(done.text).text
    policy = browser.get("/v1/runs/tiny/policy").json()
    assert (policy["last"], policy["steps"], policy["quota_bytes"]) == (1, [5], 1_500_000_000)
    assert (policy["keep_full"], policy["optim"], policy["optim_full"]) == (2, "int8", 1)
    assert policy["best"] == [{"metric": "accuracy", "mode": "max", "count": 2, "keep_unmeasured": False}]


def test_a_stale_policy_is_not_overwritten(browser: httpx.Client) -> None:
    """Who previewed before another policy was set is told so, and sets nothing."""
    tag = field(Page(browser.get("/runs/tiny/policy").text), "tag")
    browser.post("/runs/tiny/policy", data={"tag": tag, "last": "7"})
    for path in ("/runs/tiny/policy", "/runs/tiny/policy/preview"):
        late = browser.post(path, data={"tag": tag, "last": "1"})
        assert (late.status_code, "precondition-failed" in late.text) == (412, True)
    assert browser.get("/v1/runs/tiny/policy").json()["last"] == 7


@pytest.mark.parametrize(
    "said",
    [
        {"last": "-1"},
        {"last": "many"},
        {"last": "0"},
        {"every_hours": "soon"},
        {"steps": "5 x"},
        {"quota_gigabytes": "-1"},
        {"optim": "int8"},
    ],
)
def test_a_policy_that_is_none(browser: httpx.Client, said: dict[str, str]) -> None:
    """A field that says nothing possible is named, and nothing changes."""
    tag = field(Page(browser.get("/runs/tiny/policy").text), "tag")
    refused = browser.post("/runs/tiny/policy", data={"tag": tag, **said})
    assert refused.status_code == 400
    assert browser.get("/v1/runs/tiny/policy").headers["etag"] == tag


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"Origin": "http://evil.example"}, 403),
        ({"Sec-Fetch-Site": "cross-site"}, 403),
        ({"Sec-Fetch-Site": "same-site"}, 403),
        ({"Sec-Fetch-Site": "same-origin"}, 200),
        ({}, 200),
    ],
)
def test_forms_of_other_sites_do_nothing(browser: httpx.Client, headers: dict[str, str], status: int) -> None:
    """A page elsewhere cannot make a visitor's browser act here."""
    got = browser.post(f"{STEP}/pin", headers=headers)
    assert (got.status_code in (400, 403)) == (status == 403)
    assert verdict(browser, 5)["pinned"] == (status == 200)


def test_a_form_has_a_limit(browser: httpx.Client) -> None:
    """Nobody fills the service's memory by a form."""
    assert browser.post(f"{STEP}/labels", data={"label": "x" * 3_000_000}).status_code == 413


def test_jobs_and_tokens_answer_as_the_api_does(browser: httpx.Client) -> None:
    """A form ends in what the API says: the job's own page, the token's text once, or the problem in words."""
    job = browser.post(f"{STEP}/jobs", data={"kind": "verify"})
    there = browser.get("/v1/jobs")
    assert (job.status_code == 200) == (there.status_code == 200)
    token = browser.post("/tokens", data={"name": "ci", "scope": "read", "days": "3"})
    assert (token.status_code == 200) == (browser.get("/v1/tokens").status_code == 200)
    assert Page(job.text).faults() == Page(token.text).faults() == []
    assert browser.post(f"{STEP}/jobs", data={"kind": "rebuild"}).status_code == 400


def test_archive_and_take_back(browser: httpx.Client) -> None:
    """By buttons of the run's page, which say what they did; what is no action is refused."""
    page = Page(browser.post("/runs/tiny/life", data={"what": "archive"}).text)
    assert browser.get("/v1/runs/tiny").json()["life"] == "archived"
    assert "Archived. A new launch unarchives the run." in page.text and "Unarchive" in page.text
    page = Page(browser.post("/runs/tiny/life", data={"what": "unarchive"}).text)
    assert browser.get("/v1/runs/tiny").json()["life"] == "idle" and "Archive" in page.text
    assert browser.post("/runs/tiny/life", data={"what": "acknowledge"}).status_code == 400
    assert browser.post("/runs/tiny/life", data={"what": "explode"}).status_code == 400


def test_acknowledge(service: Served, browser: httpx.Client) -> None:
    """A run that died has the button, with its alert; one that was dealt with can be counted again."""
    decisions = service.services.control.run_metadata
    decisions.launched("tiny", RunLaunch(attempt=1, at="2030-01-31T12:00:00Z", world=2, info={"git": {"commit": "c0ffee"}}))
    lives = {"tiny": RunActivity("died", "2026-01-02T00:00:00Z")}
    service.services.summaries._lives = lambda runs: lives
    assert "Acknowledge" in Page(browser.get("/runs/tiny").text).text
    page = Page(browser.post("/runs/tiny/alerts/run-died", data={"do": "acknowledge", "back": "run"}).text)
    assert "Acknowledged by anybody here" in page.text and "It died, and anybody here acknowledged that" in page.text
    assert "acknowledge" not in [e.attributes.get("value") for e in page.all("button")]
    assert "c0ffee" in Page(browser.get("/runs/tiny/about").text).text
    odd = {"git": "v1", "command": {"a": [1]}, "host": ["<b>"], "items": {"keys": None}, "config": {"lr": 1}}
    decisions.launched("tiny", RunLaunch(attempt=2, at="then", world=1, info=odd))
    shown = Page(browser.get("/runs/tiny/about").text)
    assert "v1" in shown.text and "<b>" in shown.text and shown.faults() == []


def test_owner_and_notes(browser: httpx.Client) -> None:
    """As text and not as markup."""
    page = Page(browser.post("/runs/tiny/about", data={"owner": "ana", "notes": "<b>bold</b>"}).text)
    about = browser.get("/v1/runs/tiny/about").json()
    assert (about["owner"], about["notes"]) == ("ana", "<b>bold</b>") and "<b>bold</b>" in page.text
    assert "Owner ana" in Page(browser.get("/runs/tiny").text).text


def test_delete_bring_back_and_remove_for_good(service: Served, browser: httpx.Client) -> None:
    """Nothing goes before the run's name was typed; what keeps it is said, and the pinned ones want a second yes."""
    assert browser.post("/runs/tiny/delete", data={"confirm": "other"}).status_code == 400
    browser.post(f"{STEP}/pin")
    assert "marked" in [e.attributes.get("name") for e in Page(browser.get("/runs/tiny/delete").text).all("input")]
    assert browser.post("/runs/tiny/delete", data={"confirm": "tiny"}).status_code == 409
    done = browser.post("/runs/tiny/delete", data={"confirm": "tiny", "marked": "yes"})
    assert done.url.path == "/trash" and "You can bring it back" in Page(done.text).text
    assert browser.get("/runs/tiny").status_code == 404 and not (service.root / "tiny").exists()
    back = browser.post("/runs/tiny/undelete", data={"entry": field(Page(done.text), "entry")})
    assert back.url.path == "/runs/tiny" and verdict(browser, 5)["pinned"]
    browser.post("/runs/tiny/delete", data={"confirm": "tiny", "marked": "yes"})
    assert browser.post("/runs/tiny/purge", data={"confirm": "x"}).status_code == 400
    assert "This cannot be undone" in Page(browser.get("/runs/tiny/purge").text).text
    done = browser.post("/runs/tiny/purge", data={"confirm": "tiny"})
    assert "Removed for good" in Page(done.text).text and "The trash is empty" in Page(done.text).text


def test_rename(browser: httpx.Client) -> None:
    """Nothing happens before its name was typed, or to a name that is taken."""
    assert browser.post("/runs/tiny/rename", data={"name": "better", "confirm": "other"}).status_code == 400
    assert browser.post("/runs/tiny/rename", data={"name": "other", "confirm": "tiny"}).status_code == 409
    done = browser.post("/runs/tiny/rename", data={"name": "better", "confirm": "tiny"})
    assert done.url.path == "/runs/better" and "The run was renamed" in Page(done.text).text
    assert browser.get("/runs/tiny").status_code == 404
    assert browser.get("/v1/runs/better").json()["checkpoints"] == 3
