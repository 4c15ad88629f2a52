"""The overview and what it does: the sentence, alerts with their buttons, the board of runs; and runs compared."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from holdfast_formats import naming, timestamps
from holdfast_formats.rest import bodies
from holdfast_formats.rest.measurements import Alert, Overview, Trend
from holdfast_formats.rest.retention import RetentionPolicy
from holdfast_service.control.checkpoints.run_files import RunFile, write_run_file
from holdfast_service.control.insight.facts import RunActivity
from holdfast_service.storage import PosixTier
from holdfast_service.wings.console import alert_actions, formatting, run_status, sparkline
from holdfast_service.wings.console.pages.overview import grouped
from tests.checkpoints import build_root
from tests.serving import Served, served
from tests.wings.console.reading import Page
from tests.wings.notify.test_alerts import summary

LONG = "a-run-of-which-the-name-is-longer-than-any-column-" + "x" * 70
AT = "2026-01-02T00:00:00Z"


@pytest.fixture
def service(tmp_path: Path) -> Iterator[Served]:
    """A run that died and one that has nearly used up its quota, which trains; and a replica that is lost."""
    build_root(tmp_path / "root", {"tiny": (5, 10), LONG: (1,)})
    write_run_file(PosixTier(tmp_path / "root"), "tiny", RunFile(policy=RetentionPolicy(quota_bytes=70_000)))
    lives = {LONG: RunActivity("died", AT), "tiny": RunActivity("running")}

    def node() -> bodies.Node:
        told = {"name": "node-1", "version": "9", "socket": None, "started": "now", "arena_bytes": 0, "ranks": 1}
        return bodies.Node.model_validate({**told, "replicas": {"far": "its <disk> is gone"}})

    with served(tmp_path / "root", lives=lambda runs: lives, node=node, replicas={"far": lambda: True}) as running:
        yield running


def test_it_says_how_everything_stands(browser: httpx.Client) -> None:
    """In a sentence first, then what needs a person, each with a button; the title has their number, and so has the icon."""
    got = browser.get("/")
    page = Page(got.text)
    assert page.faults() == []
    assert "1 run training , 1 died" in page.text and "Oldest unprotected work:" in page.text
    assert "<title>(3) Overview" in got.text
    assert "icon-error-3.svg" in got.text and browser.get("/static/icon-error-3.svg").status_code == 200
    for said in ("Died", "Resume from step 1", "A quota is nearly used up", "Raise the quota by half", "A replica is lost"):
        assert said in page.text
    assert "its <disk> is gone" in page.text and "<disk>" not in got.text
    assert "not verified yet" in page.text and "A crash now would cost" in page.text


def test_training_runs_come_first(browser: httpx.Client) -> None:
    """Then what needs attention, what is lost first, then the other runs. A column that most runs of a table have nothing in
    is not there. In an order of one's own there is one table.
    """
    page = Page(browser.get("/").text)
    said = ("Training 1", "Needs attention 3", "Died", "A quota is nearly used up", "A replica is lost", "Other runs")
    places = [page.text.index(one) for one in said]
    assert places == sorted(places)
    heads = [e.inside for e in page.all("th") if e.attributes["scope"] == "col"]
    assert len(heads) == 4 + 4, "run, good, crash, storage; run, state, good, storage"
    ordered = Page(browser.get("/?sort=-exposed").text).text
    assert "Other runs" not in ordered and ordered.index("A crash now would cost") < ordered.index("Needs attention")


def test_long_names_are_cut_in_the_middle(browser: httpx.Client) -> None:
    """Their end stays, and the whole name is what a pointer and a screen reader get."""
    page = Page(browser.get("/").text)
    links = [e for e in page.all("a") if e.attributes.get("class") == "cut" and e.attributes.get("title") == LONG]
    assert len(links) == 2 and all(link.attributes["aria-label"] == LONG for link in links), "its alert and its line"
    short = [e for e in page.all("a") if e.attributes.get("class") == "cut" and "title" not in e.attributes]
    assert short and all("aria-label" not in link.attributes for link in short), "a whole name is not said twice"
    assert formatting.name(LONG).endswith(f'<span class="end">{LONG[-14:]}</span>') and formatting.name("short") == "short"


def test_a_sparkline_of_many_saves_is_short() -> None:
    """Fifty runs of a hundred saves each: an element for each save made the overview 300 kB."""
    count = 100
    states = ["aborted" if number == 7 else "committed" for number in range(count)]
    stalls, goodput = [0.001 * number for number in range(count)], [0.9 + 0.001 * number for number in range(count)]
    drawn = str(sparkline.sparkline(Trend(steps=list(range(count)), states=states, stall_s=stalls, goodput=goodput)))
    assert drawn.count("<path") == 2 and drawn.count("v-") == count
    assert 'class="bad"' in drawn and "M7 0v-12" in drawn and len(drawn) < 2300
    flat = str(
        sparkline.sparkline(Trend(steps=[1, 2, 3, 4], states=["committed"] * 4, stall_s=[1.0] * 4, goodput=[0.9] * 4))
    )
    assert 'points="0-14 3-14"' in flat, "a straight line has two points"


def test_a_sparkline_has_a_scale() -> None:
    """What the tallest bar and the lowest point stand for; of one save there is none."""
    trend = Trend(steps=[1, 2, 3], states=["committed"] * 3, stall_s=[0.5, None, 0.25], goodput=[None, 0.9, 0.95])
    assert sparkline.scale(trend) == "≤ 500\u00a0ms · ≥ 90 %" and sparkline.newest(trend) == "250\u00a0ms · 95 %"
    assert sparkline.scale(Trend(steps=[1], states=["committed"], stall_s=[0.5], goodput=[None])) == ""


def test_the_header_has_what_is_configured(browser: httpx.Client) -> None:
    """A daemon that watches no other one and sends no notifications links to neither page. Both pages exist."""
    addresses = Page(browser.get("/").text).addresses()
    assert "/tokens" in addresses and not {"/daemons", "/notifications"} & set(addresses)
    assert browser.get("/daemons").status_code == browser.get("/notifications").status_code == 200


def test_an_alert_is_acknowledged_snoozed_and_taken_back(browser: httpx.Client) -> None:
    """By forms alone; what is acknowledged is still there, with who has done it."""
    page = Page(browser.post("/runs/tiny/alerts/quota-nearly-full", data={"do": "acknowledge"}).text)
    assert "Acknowledged. If the alert clears" in page.text and "1 acknowledged" in page.text
    assert "<title>(2) " in browser.get("/").text
    browser.post("/alerts/replica-lost/far", data={"do": "snooze"})
    shown = Page(browser.get("/").text).text
    assert "2 acknowledged" in shown and "Acknowledged by anybody here" in shown
    back = browser.post("/runs/tiny/alerts/quota-nearly-full", data={"do": "take-back", "back": "run"})
    assert back.url.path == "/runs/tiny" and "The alert counts again" in Page(back.text).text
    assert browser.post("/runs/tiny/alerts/run-died", data={"do": "acknowledge"}).status_code == 404
    assert browser.post("/runs/tiny/alerts/quota-nearly-full", data={"do": "explode"}).status_code == 400


def test_buttons_mend(service: Served, browser: httpx.Client) -> None:
    """The quota is raised by half, a replica is copied to again, a checkpoint is verified or repaired as a job."""
    browser.post("/runs/tiny/mend", data={"remedy": "raise-quota"})
    assert browser.get("/v1/runs/tiny/policy").json()["quota_bytes"] == 10**6
    assert "being retried" in Page(browser.post("/alerts/replica-lost/far", data={"do": "retry"}).text).text
    assert (
        "being retried"
        in Page(browser.post("/runs/tiny/mend", data={"remedy": "retry-replicas", "subject": "far"}).text).text
    )
    for remedy in ("verify", "repair"):
        got = browser.post("/runs/tiny/mend", data={"remedy": remedy, "step": "5"})
        assert got.url.path.startswith("/jobs/")
    assert browser.post("/runs/tiny/mend", data={"remedy": "pray"}).status_code == 400
    assert browser.post(f"/runs/{LONG}/mend", data={"remedy": "raise-quota"}).status_code == 400


def test_a_run_says_its_verdict_first(browser: httpx.Client) -> None:
    """One sentence, then how to resume, figures, alerts and checkpoints; nothing is said twice, and one button resumes."""
    got = browser.get(f"/runs/{LONG}")
    page = Page(got.text)
    assert page.faults() == []
    said = ("The last good checkpoint is step 1", "checkpointer.restore()", "Last commit", "ranks were killed", "Filter")
    places = [page.text.index(one) for one in (*said, "no rule limits what is kept", "Saves by step")]
    assert places == sorted(places)
    for once in ("ranks were killed", "The last good checkpoint is", "Resume from step 1", "no rule limits", ">Acknowledge"):
        assert (got.text if once[0] == ">" else page.text).count(once) == 1


def test_the_plots_fetch_the_saves(browser: httpx.Client) -> None:
    """So the page itself has none of them, however many there are."""
    page = browser.get("/runs/tiny").text
    assert 'data-saves="/runs/tiny/saves"' in page and "application/json" not in page
    drawn = browser.get("/runs/tiny/saves").json()
    assert drawn["saves"]["step"] == [5, 10] and drawn["all"] is True and drawn["marks"] == []
    assert drawn["metrics"] == [{"name": "loss", "low": 2.5, "low_step": 5, "high": 2.5, "high_step": 10}]
    assert browser.get("/runs/nope/saves").status_code == 404


def test_runs_are_compared(browser: httpx.Client) -> None:
    """A metric by step, and what each run pays; one that is not there is an error; the newest are chosen beforehand."""
    page = Page(browser.get("/compare", params=[("run", "tiny"), ("run", LONG)]).text)
    assert page.faults() == []
    assert "loss of each checkpoint, by step" in page.text and "Goodput lost" in page.text
    assert {LONG, "tiny"} <= {e.attributes.get("value") for e in page.all("input") if "checked" in e.attributes}
    page = Page(browser.get("/compare").text)
    assert "tiny" in {e.attributes.get("value") for e in page.all("input") if "checked" in e.attributes}
    assert "choose runs first" in Page(browser.get("/compare?q=nobody").text).text
    assert browser.get("/compare?run=nope").status_code == 404


def test_every_alert_has_a_title_and_a_button() -> None:
    """Of whatever code and remedy, with what it needs or without."""
    for remedy in (
        "resume",
        "restore-healthy",
        "raise-quota",
        "raise-team-quota",
        "keep-fewer",
        "verify",
        "repair",
        "retry-replicas",
        "look",
    ):
        for step in (None, 5):
            for run in (None, "a b"):
                one = Alert(level="error", code="new-kind", text="t", hint="h", remedy=remedy, step=step, run=run)
                made = alert_actions.button(one)
                assert made.label and made.address.startswith("/") and " " not in made.address
    assert alert_actions.title("new-kind") == "New kind"
    alerts = [Alert(level=level, code=code, text="t", hint="h", run="r") for level, code in _CODES]
    assert [(group.level, group.code) for group in grouped(alerts)] == [("error", "run-died"), ("warning", "saves-dropped")]


_CODES = (("warning", "saves-dropped"), ("error", "run-died"), ("error", "run-died"))


def test_sentences() -> None:
    """What the strip and the verdict say, and for a state that is not known yet."""
    none = Overview(runs=0, states={}, errors=0, warnings=0, acknowledged=0, checkpoints=0, bytes=0, free_bytes=None)
    assert [clause.text for clause in run_status.strip(none)] == ["No runs training"]
    busy = none.model_copy(update={"states": {"training": 3, "died": 2}, "exposed_s": 360.0, "cost": 0.009})
    assert [clause.text for clause in run_status.strip(busy)] == [
        "3 runs training",
        "2 died",
        "Oldest unprotected work: 6\u00a0min",
        "Checkpointing costs 0.9 %",
    ]
    assert run_status.standing("archived").word == "archived" and run_status.standing("odd").word == "odd"
    assert run_status.ago_text("2999-01-31T12:00:00Z") == "2999-01-31T12:00:00Z"  # a clock was set back since
    assert run_status.ago_text(timestamps.utc_now()).endswith("s ago") and run_status.ago_text("never") == "never"
    calm = run_status.verdict(summary("calm"))
    assert calm.level == "fine" and calm.text.startswith("Training. ") and "would cost 45\u00a0s" in calm.text
    assert run_status.verdict(summary("dead", life="died")).level == "error"
    assert run_status.cost_of_a_crash(summary("over", life="finished")) is None
    early = summary("early").model_copy(
        update={"exposed_s": 9.0, "exposed_steps": 0, "interval_s": 30.0, "interval_steps": 10}
    )
    assert run_status.steps_at_risk(early) == "about 3 steps" and "9\u00a0s, about 3 steps" in run_status.verdict(early).text
    assert run_status.steps_at_risk(early.model_copy(update={"exposed_s": 3.0})) == "about 1 step"
    assert run_status.steps_at_risk(early.model_copy(update={"exposed_s": None})) == ""


def lines(page: Page) -> list[str]:
    """The lines of the tables of runs."""
    return [found for one in page.all("tr") if (found := one.attributes.get("id", "")).startswith("run-")]


def test_runs_by_tag(browser: httpx.Client) -> None:
    """A tag is set on the page About; the overview lists its runs, with what differs in their configs, or all groups."""
    assert 'name="tag"' not in browser.get("/").text  # before there is one
    form = {"tags": "sweep:lr big", "tags_before": "", "owner": "", "notes": ""}
    headers = {"Sec-Fetch-Site": "same-origin"}
    for run in ("tiny", LONG):
        assert browser.post(f"/runs/{run}/about", data=form, headers=headers).url.query == b"said=noted"
    dropped = {**form, "tags": "sweep:lr", "tags_before": "sweep:lr big"}
    browser.post("/runs/tiny/about", data=dropped, headers=headers)
    refused = browser.post("/runs/tiny/about", data={**dropped, "tags": "sweep:lr a,b"}, headers=headers)
    assert "tag &#39;a,b&#39; is not allowed" in refused.text
    for address in ("/runs/tiny", "/runs/tiny/about"):
        assert "sweep:lr" in browser.get(address).text and "big" not in Page(browser.get(address).text).text
    chosen = Page(browser.get("/?tag=big").text)
    assert chosen.faults() == [] and f"/runs/{LONG}" in chosen.addresses() and lines(chosen) == [f"run-{LONG}"]
    assert "big 1 run" in chosen.text and "No config keys differ." in chosen.text
    groups = Page(browser.get("/?group=tag").text)
    assert groups.faults() == [] and lines(groups) == []
    assert "/?tag=sweep%3Alr" in groups.addresses() and "by tag" in groups.text
    assert browser.get("/?tag=none").status_code == browser.get("/?tag=%00&group=x").status_code == 200
    assert "No run has the tag none" in Page(browser.get("/?tag=none").text).text
    assert browser.get("/csv/groups").text.splitlines()[0] == "tag,runs,states,metric,best,last,differs"
    assert browser.get("/csv/runs?tag=big").text.count("\n") == 2


def test_views_are_saved_and_removed(browser: httpx.Client) -> None:
    """What the page shows, under a name that is a link to it; the link of what is shown is marked."""
    asked = {"q": "ti", "sort": "-storage", "metric": "loss"}
    page = Page(browser.get("/", params=asked).text)
    hidden = [e for e in page.all("input") if e.attributes.get("type") == "hidden"]
    sent = {e.attributes["name"]: e.attributes["value"] for e in hidden if e.attributes["name"] in (*asked, "tag", "group")}
    assert sent == asked
    page = Page(browser.post("/views", data={**sent, "name": "大 & <big>"}).text)
    assert "The view was saved" in page.text and page.faults() == []
    (link,) = [e for e in page.all("a") if e.attributes.get("aria-current") == "page" and "q=ti" in e.attributes["href"]]
    assert link.attributes["href"] == "/?q=ti&sort=-storage&metric=loss"
    (link,) = [
        e
        for e in Page(browser.get("/").text).all("a")
        if "q=ti" in e.attributes["href"] and "-storage" in e.attributes["href"]
    ]
    assert "aria-current" not in link.attributes
    for name in ("", "a/b", "x" * 65):
        assert browser.post("/views", data={**sent, "name": name}).status_code == 400
    assert [one["name"] for one in browser.get("/v1/views").json()["items"]] == ["大 & <big>"]
    page = Page(browser.post("/views/%E5%A4%A7%20%26%20%3Cbig%3E/remove").text)
    assert "The view was removed" in page.text and browser.get("/v1/views").json()["items"] == []


def test_a_damaged_file_of_views_is_named(service: Served, browser: httpx.Client) -> None:
    """And the page has everything else."""
    (service.services.root.directory / naming.VIEWS).write_text("{")
    page = Page(browser.get("/").text)
    assert naming.VIEWS in page.text and "Training 1" in page.text and "Save this view" not in page.text
