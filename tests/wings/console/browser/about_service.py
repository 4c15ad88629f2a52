"""Presses every button that is about the service: its nodes, jobs, tokens, people and pages, and what is found on them."""

from __future__ import annotations

import re

from playwright.sync_api import expect

from tests.daemons import wait_until

from .hands import Hand
from .pressing import presses
from .scene import FINISHED, LIMIT_S, MANY, alerts

_OTHER = "POST /alerts/{code}/{subject} do="


@presses(*(f"{_OTHER}{do}" for do in ("acknowledge", "snooze", "take-back")), "POST /alerts/{code}/{subject}")
def answer_alerts_of_the_service(hand: Hand) -> None:
    page = hand.go("/")
    alert = page.locator("[id='alert-.replica-lost.far']")
    hand.press(alert.get_by_role("button", name="Copy again now"))
    hand.says("being retried")
    for button, says in (("Snooze 1 h", "Snoozed for an hour"), ("Acknowledge", "Acknowledged")):
        hand.press(alert.get_by_role("button", name=button))
        hand.says(says)
        assert ("far", "replica-lost") not in alerts(hand.at)
        hand.press(page.locator("details.seen > summary"))
        hand.press(alert.get_by_role("button", name="Count it again"))
        hand.says("counts again")


@presses("POST /nodes/{name}/forget")
def forget_nodes(hand: Hand) -> None:
    page = hand.go("/nodes")
    hand.button(f"Forget node nodes-{hand.way}")
    hand.says("The node is no longer listed")
    page = hand.go("/")
    alert = page.locator(f"[id='alert-.node-lost.overview-{hand.way}']")
    if not alert.is_visible():
        hand.press(page.locator("#group-node-lost > details > summary"))
    hand.press(alert.get_by_role("button", name="Forget the node"))
    hand.says("The node is no longer listed")
    assert not {f"{where}-{hand.way}" for where in ("overview", "nodes")} & {
        one["name"] for one in hand.at.ask("/v1/nodes")["items"]
    }


@presses("POST /jobs/{job_id}/cancel", "GET /jobs")
def cancel_jobs(hand: Hand) -> None:
    numbers = [hand.at.running_job(f"{hand.way}-{number}") for number in range(2)]
    hand.go("/jobs")
    hand.choose("Kind", "export")
    hand.button("Show")
    hand.button(f"Cancel job {numbers[0]}")
    hand.says("The job was asked to stop")
    hand.go(f"/jobs/{numbers[1]}")
    hand.button("Cancel")
    hand.says("The job was asked to stop")


@presses("POST /import dry_run=yes", "POST /import")
def import_a_checkpoint(hand: Hand) -> None:
    page = hand.go("/jobs")
    hand.press(page.get_by_role("link", name="Import a checkpoint"))
    for press, step in (("Dry run", "0"), ("Import", "1")):
        hand.fill("Directory", "model")
        hand.fill("Run", hand.own("imported"))
        hand.fill("Step", step)
        hand.press(page.locator("form.panel details > summary"))
        hand.tick(page.get_by_label("Keep the names and layouts of the source"))
        hand.button(press)
        hand.heads(f"import of {hand.own('imported')} step {step}")
        if press == "Dry run":
            _do_what_was_tried(hand, "import", hand.own("imported"))
            hand.go("/import")


@presses("POST /merge dry_run=yes", "POST /merge")
def merge_checkpoints(hand: Hand) -> None:
    recipe = f"merge_method: linear\nmodels:\n  - {{model: {FINISHED}@50, parameters: {{weight: 1}}}}\n"
    page = hand.go("/jobs")
    hand.press(page.get_by_role("link", name="Merge checkpoints"))
    for press, step in (("Dry run", "0"), ("Merge", "1")):
        hand.fill("Recipe", recipe)
        result = page.get_by_role("group", name="The result")
        for field, text in (("Run", hand.own("merged")), ("Step", step)):
            hand.write(result.get_by_label(field, exact=True), text)
        hand.button(press)
        hand.heads(f"merge of {hand.own('merged')} step {step}")
        if press == "Dry run":
            _do_what_was_tried(hand, "merge", hand.own("merged"))
            hand.go("/merge")


def _do_what_was_tried(hand: Hand, what: str, run: str) -> None:
    """From the page of a dry run."""
    _until_done(hand)
    hand.button(f"{what.capitalize()} it")
    hand.heads(f"{what} of {run} step 0")
    _until_done(hand)
    assert hand.at.ask(f"/v1/runs/{run}/checkpoints/0")


def _until_done(hand: Hand) -> None:
    """The page of a job follows by itself with scripts, and is loaded again without."""
    job = hand.page.url.partition("/jobs/")[2].partition("?")[0]
    wait_until(lambda: hand.at.ask(f"/v1/jobs/{job}")["state"] not in ("queued", "running"), LIMIT_S)
    if hand.way == "plain":
        hand.page.reload()
    expect(hand.page.locator("h1 .badge")).to_have_text("done")


@presses("POST /tokens", "POST /tokens/{name}/rotate", "POST /tokens/{name}/revoke")
def make_rotate_and_revoke_tokens(hand: Hand) -> None:
    page = hand.go("/tokens")
    hand.fill("Name", hand.own("ci"))
    hand.choose("Scope", "write")
    hand.button("Create token")
    expect(page.locator("#token")).to_contain_text("hf_")
    made = page.locator("#token").inner_text()
    hand.button(f"Rotate {hand.own('rotate')}")
    expect(page.get_by_role("status")).to_contain_text(f"Token {hand.own('rotate')} has this secret")
    assert made not in page.content(), "it is shown once"
    hand.button(f"Revoke {hand.own('revoke')}")
    hand.says("The token was revoked")


@presses("POST /quotas", "POST /quotas/{pattern}/remove")
def set_and_remove_quotas_of_teams(hand: Hand) -> None:
    page, team = hand.go("/quotas"), f"team-{hand.way}-*"
    hand.fill("Runs", team)
    hand.fill("May hold", "1.5")
    hand.button("Set the quota")
    hand.says("The quota was set")
    row = page.locator("tr", has=page.get_by_role("rowheader", name=team))
    expect(row).to_contain_text("1.5 GB")
    hand.write(row.get_by_role("textbox"), "2.5")
    hand.button(f"Set the quota of {team}")
    expect(row).to_contain_text("2.5 GB")
    hand.button(f"Remove the quota of {team}")
    hand.says("removed")
    expect(row).to_have_count(0)


@presses("POST /views", "POST /views/{name}/remove")
def save_and_remove_views(hand: Hand) -> None:
    page, view = hand.go("/?sort=-storage"), f"largest {hand.way}"
    hand.press(page.locator("#views summary"))
    hand.fill("Name", view)
    hand.button("Save for all people")
    hand.says("The view was saved")
    hand.go("/")
    link = page.get_by_role("link", name=view, exact=True)
    hand.press(link)
    expect(page).to_have_url(re.compile(r"/\?sort=-storage$"))
    hand.press(page.locator("#views summary"))
    hand.button(f"Remove {view}")
    hand.says("The view was removed")
    expect(link).to_have_count(0)


@presses("POST /notifications/{name}/test")
def send_a_test_to_people(hand: Hand) -> None:
    before = len(hand.at.web.got)
    hand.go("/notifications")
    hand.button(f"Send a test to {hand.way}")
    hand.says(f"The test message was accepted by {hand.way}")
    assert f"/{hand.way}" in [got.path for got in hand.at.web.got[before:]]


@presses("GET /find")
def find_a_run(hand: Hand) -> None:
    page = hand.go("/jobs")
    hand.fill("Find a run, RUN@STEP, a step or a label", FINISHED[:5])
    page.keyboard.press("Enter")
    hand.heads("Find")
    hand.write(page.get_by_role("main").get_by_role("searchbox"), f"{FINISHED}@60")
    hand.press(page.get_by_role("main").get_by_role("button", name="Find"))
    expect(page).to_have_url(re.compile(rf"/runs/{FINISHED}/checkpoints/60$"))  # the only one that it can be


@presses("GET /storage")
def look_at_the_storage(hand: Hand) -> None:
    page = hand.go("/storage")
    hand.fill("Run contains", FINISHED)
    hand.button("Show")
    expect(page.get_by_role("region", name="Storage by run").get_by_role("row")).to_have_count(2)
    expect(page.locator("svg.held rect").first).to_be_visible()


@presses("GET /events", "GET /audit", "GET /daemons")
def filter_what_happened(hand: Hand) -> None:
    page = hand.go("/events?order=kind")
    hand.press(page.get_by_role("link", name="run-died", exact=True))
    expect(page).to_have_url(re.compile("kind=run-died"))
    page = hand.go("/events")
    hand.choose("Kind", "run-died")
    hand.button("Show")
    expect(page).to_have_url(re.compile("kind=run-died"))
    expect(page.locator(".events .badge").first).to_have_text("run-died")
    page = hand.go("/audit")
    hand.choose("Result", "false")
    hand.button("Show")
    expect(page).to_have_url(re.compile("refused=false"))
    expect(page.locator("table tbody tr").first).to_be_visible()
    page = hand.go("/daemons")
    hand.fill("Run contains", "elsewhere")
    hand.button("Show")
    expect(page.get_by_role("region", name="Runs").get_by_role("link", name="elsewhere")).to_be_visible()


@presses("script #pause", scripted=True)
def hold_events_back(hand: Hand) -> None:
    page = hand.go("/events?order=time")
    expect(page.locator("#stream")).to_have_text("live")
    hand.button("Pause")
    hand.at.send("PUT", f"/v1/runs/{MANY}/checkpoints/1/labels/{hand.own('seen')}")
    expect(page.locator("#pause")).to_contain_text("1 new")
    hand.button("Resume (1 new)")
    expect(page.locator("#events li").first).to_contain_text(MANY)


@presses("script themeToggle", "script densityToggle", scripted=True)
def switch_colours_and_rows(hand: Hand) -> None:
    page = hand.go("/")
    scheme = "getComputedStyle(document.documentElement).colorScheme"
    height = "document.querySelector('.board tbody tr').offsetHeight"
    other = "light" if hand.way == "keyboard" else "dark"
    low = page.evaluate(height)
    hand.press(page.locator(".tools > summary"))
    hand.button(f"Switch to {other} colours")
    hand.button("Switch to roomy rows")
    assert page.evaluate(scheme) == other
    page.reload()
    assert page.evaluate(scheme) == other
    assert page.evaluate(height) > low + 5
    if hand.way != "keyboard":
        hand.press(page.locator(".tools > summary"))
        hand.press(page.get_by_role("heading", name="Needs attention"))
        expect(page.get_by_role("button", name="Switch to compact rows")).to_be_hidden()
