"""Presses every button that is about a run or a checkpoint."""

from __future__ import annotations

import re

import pytest
from playwright.sync_api import expect

from .hands import Hand
from .pressing import presses
from .scene import FINISHED, ILL, LONG, MANY, STEPS, alerts

_MARKS = "POST /runs/{run}/marks"
_OF_WAY = {"mouse": 50, "plain": 40, "keyboard": 30}  # the step that is compared with another
_LIFE = "POST /runs/{run}/life"
_PIN = "POST /runs/{run}/checkpoints/{step}/pin"
_LABEL = "POST /runs/{run}/checkpoints/{step}/labels"


@presses(*(f"POST /runs/{{run}}/alerts/{{code}} do={do}" for do in ("acknowledge", "snooze", "take-back")))
def answer_alerts_of_a_run(hand: Hand) -> None:
    run = hand.own("full")
    page = hand.go("/")
    alert = page.locator(f"[id='alert-{run}.quota-nearly-full.']")
    for button, says in (("Snooze 1 h", "Snoozed for an hour"), ("Acknowledge", "Acknowledged")):
        hand.press(alert.get_by_role("button", name=button))
        hand.says(says)
        assert (run, "quota-nearly-full") not in alerts(hand.at)
        hand.press(page.locator("details.seen > summary"))
        hand.press(alert.get_by_role("button", name="Count it again"))
        hand.says("counts again")
        assert (run, "quota-nearly-full") in alerts(hand.at)


@presses("POST /runs/{run}/mend remedy=raise-quota", "POST /runs/{run}/mend remedy=repair")
def mend(hand: Hand) -> None:
    run = hand.own("full")
    hand.go(f"/runs/{run}")
    hand.button("Raise the quota by half", exact=False)
    hand.says("The quota was raised by half")
    assert hand.at.ask(f"/v1/runs/{run}/policy")["quota_bytes"] >= 10**6
    hand.go(f"/runs/{hand.own('damaged')}")
    hand.button("Repair step 10", exact=False)
    hand.heads(f"verify of {hand.own('damaged')} step 10")


@presses(f"{_LIFE} what=archive", f"{_LIFE} what=unarchive")
def change_the_life_of_a_run(hand: Hand) -> None:
    page = hand.go(f"/runs/{hand.own('dead')}")
    hand.press(page.locator("[id$='.run-died.']").get_by_role("button", name="Acknowledge"))
    hand.says("Acknowledged")
    assert (hand.own("dead"), "run-died") not in alerts(hand.at)
    page = hand.go(f"/runs/{hand.own('care')}")
    hand.button("Archive")
    hand.says("Archived")
    assert hand.at.ask(f"/v1/runs/{hand.own('care')}")["life"] == "archived"
    hand.button("Unarchive")
    hand.says("Unarchived")
    expect(page.get_by_role("button", name="Archive", exact=True)).to_be_visible()


@presses("POST /runs/{run}/about", "POST /runs/{run}/rename", "POST /login", "POST /logout")
def sign_in_describe_and_rename_a_run(hand: Hand) -> None:
    """On the daemon that asks for tokens: where daemons share a root, no run is renamed."""
    hand.window.url = hand.at.closed.url
    page = hand.go(f"/runs/{hand.own('named')}/about")
    hand.heads("Sign in")
    hand.fill("Token", hand.at.token)
    hand.button("Sign in")
    hand.says("Signed in")
    hand.fill("Owner", "ana")
    hand.fill("Notes", "of which she thinks a lot")
    hand.button("Save")
    hand.says("Saved")
    expect(page.get_by_label("Owner")).to_have_value("ana")
    hand.go(f"/runs/{hand.own('named')}")
    hand.press(page.get_by_role("link", name="Rename…"))
    hand.fill("New name", hand.own("called"))
    hand.fill("Type the present name to confirm", hand.own("named"))
    hand.button("Rename the run")
    hand.says("The run was renamed")
    hand.heads(hand.own("called"))
    hand.press(page.locator(".tools > summary"))
    hand.button("Sign out")
    hand.heads("Sign in")
    assert page.context.cookies() == []


@presses("POST /runs/{run}/delete", "POST /runs/{run}/undelete", "POST /runs/{run}/purge")
def delete_and_bring_back_runs(hand: Hand) -> None:
    page = hand.go(f"/runs/{hand.own('going')}")
    hand.press(page.get_by_role("link", name="Delete…"))
    hand.fill("Type the run’s name to confirm", hand.own("going"))
    hand.button("Delete the run")
    hand.says("The run was deleted")
    hand.button(f"Bring {hand.own('back')} back")
    hand.says("The run was brought back from the trash")
    hand.heads(hand.own("back"))
    hand.go("/trash")
    hand.press(page.get_by_role("link", name=f"Remove {hand.own('gone')} for good"))
    hand.fill("Type the run’s name to confirm", hand.own("gone"))
    hand.button("Remove for good")
    hand.says("Removed for good")
    assert hand.own("gone") not in [one["run"] for one in hand.at.ask("/v1/trash")["items"]]


@presses("POST /runs/{run}/policy/preview", "POST /runs/{run}/policy")
def set_a_policy(hand: Hand) -> None:
    run = hand.own("kept")
    page = hand.go(f"/runs/{run}/policy")
    hand.fill("The newest", "50")
    hand.fill("Metric", "loss")
    hand.choose("Best is", "max")
    hand.button("Preview")
    expect(page.get_by_role("heading", name="What this would keep and remove")).to_be_visible()
    hand.button("Apply")
    hand.says("The policy was set")
    policy = hand.at.ask(f"/v1/runs/{run}/policy")
    assert policy["last"] == 50 and policy["best"][0]["mode"] == "max"
    expect(page.get_by_label("The newest")).to_have_value("50")


@presses(_PIN, f"{_PIN} pinned=no", f"{_MARKS} act=pin", f"{_MARKS} act=unpin", f"{_MARKS} act=label")
def mark_checkpoints_of_a_run(hand: Hand) -> None:
    run = hand.own("marks")
    page = hand.go(f"/runs/{run}")
    hand.button("Pin step 10")
    hand.says("Pinned. This checkpoint")
    hand.button("Unpin step 10")
    hand.says("Unpinned. The retention policy applies again")
    form = page.get_by_role("form", name="Chosen checkpoints")
    for button, says in (("Pin", "Pinned. These"), ("Unpin", "applies to them again"), ("Label", "Labelled. Checkpoints")):
        for step in (15, 20):
            hand.tick(page.get_by_label(f"Choose step {step}", exact=True))
        if button == "Label":
            hand.write(form.get_by_label("Label"), "good")
        hand.press(form.get_by_role("button", name=button, exact=True))
        hand.says(says)
    assert hand.at.ask(f"/v1/runs/{run}/checkpoints?label=good")["items"][0]["step"] == 20


@presses(f"{_MARKS} act=remove", _MARKS)
def remove_checkpoints_of_a_run(hand: Hand) -> None:
    run = hand.own("marks")
    hand.at.send("PUT", f"/v1/runs/{run}/checkpoints/20/labels/stays")
    page = hand.go(f"/runs/{run}")
    hand.tick(page.get_by_label("Choose step 10", exact=True))
    hand.tick(page.get_by_label("Choose step 20", exact=True))
    hand.button("Remove …")
    expect(page.get_by_role("heading", name="These stay")).to_be_visible()
    hand.fill("Type their number to confirm", "1")
    hand.button("Remove permanently")
    hand.says("The checkpoints were removed")
    assert hand.at.ask(f"/v1/runs/{run}/checkpoints/10") is None


@presses(_LABEL, f"{_LABEL}/{{label}}/remove", "POST /runs/{run}/checkpoints/{step}/remove")
def mark_and_remove_a_checkpoint(hand: Hand) -> None:
    run = hand.own("marks")
    page = hand.go(f"/runs/{run}/checkpoints/5")
    hand.button("Pin")
    hand.says("Pinned. This checkpoint")
    hand.button("Unpin")
    hand.says("Unpinned. The retention policy")
    hand.fill("Label", "golden")
    hand.button("Add")
    hand.says("Labelled")
    hand.button("Remove label golden")
    hand.says("Label removed")
    hand.press(page.get_by_role("link", name="Remove this checkpoint"))
    hand.fill("Type the step to confirm", "5")
    hand.button("Remove permanently")
    hand.says("The checkpoint was removed")
    assert hand.at.ask(f"/v1/runs/{run}/checkpoints/5") is None


_JOBS = "POST /runs/{run}/checkpoints/{step}/jobs"


@presses(f"{_JOBS} kind=verify", f"{_JOBS} kind=export")
def verify_and_export_a_checkpoint(hand: Hand) -> None:
    page = hand.go(f"/runs/{hand.own('kept')}/checkpoints/15")
    hand.button("Verify now")
    hand.heads(f"verify of {hand.own('kept')} step 15")
    page = hand.go(f"/runs/{FINISHED}/checkpoints/60")
    hand.fill("Export, below --export-root, to", hand.own("exported"))
    hand.press(page.locator("#elsewhere ~ form details > summary"))
    hand.choose("as", "hf")
    hand.choose("Convert to", "float16")
    hand.button("Export")
    hand.heads(f"export of {FINISHED} step 60")


@presses("GET /runs/{run}/compare", "POST /runs/{run}/compare", "GET /runs/{run}")
def find_and_compare_checkpoints(hand: Hand) -> None:
    page = hand.go(f"/runs/{FINISHED}")
    hand.fill("Steps from", "20")
    hand.press(page.locator(".filtering form button").first)
    expect(page).to_have_url(re.compile("step_min=20"))
    for step in (30, 60):
        hand.tick(page.get_by_label(f"Choose step {step}", exact=True))
    hand.press(page.get_by_role("form", name="Chosen checkpoints").get_by_role("button", name="Compare"))
    hand.heads("Compare step 30 with 60")
    hand.fill("Name contains", "lm_head")
    hand.choose("What", "equal")
    hand.button("Compare")
    expect(page.get_by_role("rowheader", name="lm_head.weight")).to_be_visible()
    hand.go(f"/runs/{FINISHED}/compare?a={_OF_WAY[hand.way]}&b=60")  # once they are compared, the button is gone
    hand.button("Compare every byte")
    hand.says("The comparison is queued")


@presses("GET /runs/{run}/checkpoints/{step}/histogram")
def draw_a_histogram(hand: Hand) -> None:
    page = hand.go(f"/runs/{FINISHED}/compare?a=50&b=60&q=lm_head")
    hand.press(page.get_by_role("link", name="lm_head.weight", exact=True).first)
    hand.heads("lm_head.weight")
    expect(page.locator("svg.bars")).to_have_count(2)
    expect(page.locator("figure").first).to_contain_text("All 512 values are 0.")  # both steps have the same values
    hand.fill("Change since step", "")
    hand.button("Show")
    expect(page.locator("svg.bars")).to_have_count(1)


@presses("GET /runs/{run}/checkpoints/{step}/tensors", "GET /runs/{run}/checkpoints/{step}/restore")
def look_for_tensors_and_shards(hand: Hand) -> None:
    page = hand.go(f"/runs/{FINISHED}/checkpoints/60/tensors")
    hand.fill("Name contains", "layers.0")
    hand.button("Show")
    expect(page.locator("#found tbody tr")).to_have_count(1)
    page = hand.go(f"/runs/{FINISHED}/checkpoints/60/restore")
    hand.press(page.locator("details.advanced > summary"))
    hand.fill("Data parallel", "4")
    hand.fill("Sharded over", "")
    hand.choose("Sharding stage", "")
    hand.button("Show the shards")
    expect(page.get_by_role("heading", name="4 ranks, group model")).to_be_visible()
    expect(page.locator("#line-all-ranks")).to_contain_text("--layout dp=4 --all-ranks")


@presses("GET /runs/{run}/health")
def look_at_the_health_of_a_run(hand: Hand) -> None:
    page = hand.go(f"/runs/{ILL}/health")
    if hand.way != "plain":
        hand.choose("Colour shows", "rms")
    hand.button("Show")
    expect(page.locator("tr.sick").first).to_contain_text("lm_head")
    hand.press(page.locator("tr.sick a").last)
    expect(page.locator("tr.sick").first).to_contain_text("lm_head.weight")


@presses(*(f"script zoom={move}" for move in ("in", "out", "earlier", "later", "all")), scripted=True)
def zoom_the_timeline(hand: Hand) -> None:
    page = hand.go(f"/runs/{FINISHED}")
    span = "() => { const s = uPlot.sync('saves').plots[0].scales.x; return [s.min, s.max]; }"
    expect(page.locator("#lanes canvas")).to_be_visible()
    whole = page.evaluate(span)
    hand.button("Zoom in")
    low, high = page.evaluate(span)
    assert whole[0] < low < high < whole[1]
    hand.button("← Earlier")
    assert page.evaluate(span)[0] < low
    hand.button("Later →")
    assert abs(page.evaluate(span)[0] - low) < 0.1
    hand.button("Zoom out")
    hand.button("All")
    assert page.evaluate(span) == whole
    if hand.way == "mouse":
        box = page.locator("#lanes .u-over").bounding_box()
        assert box is not None
        left, width, y = box["x"], box["width"], box["y"] + box["height"] / 2
        page.mouse.move(left + width * 0.2, y)
        page.mouse.down()
        page.mouse.move(left + width * 0.6, y, steps=5)
        page.mouse.up()
        low, high = page.evaluate(span)
        assert high - low == pytest.approx(0.4 * (whole[1] - whole[0]), rel=0.05)
        page.mouse.move(left + width * 0.5, y)
        expect(page.locator("#pointed")).to_contain_text("step")


@presses("script copy", scripted=True)
def copy_a_command(hand: Hand) -> None:
    page = hand.go(f"/runs/{LONG}/checkpoints/{STEPS[0]}/restore")
    hand.press(page.get_by_role("button", name="Copy").first)
    expect(page.get_by_role("button", name="Copied").or_(page.get_by_role("button", name="Selected"))).to_be_visible()


@presses("GET /compare", "GET /")
def find_and_compare_runs(hand: Hand) -> None:
    page = hand.go("/")
    hand.fill("Run contains", FINISHED[:5])
    hand.choose("Order", "name")
    hand.press(page.locator("form.filters").get_by_role("button", name="Show", exact=True))
    expect(page.locator("table.board tbody tr")).to_have_count(2)
    hand.tick(page.get_by_label(f"Choose {FINISHED}", exact=True))
    hand.button("Compare metrics and cost")
    hand.heads("Compare runs")
    expect(page.get_by_role("region", name="Runs compared").get_by_role("row")).to_have_count(2)
    hand.tick(page.get_by_label(ILL, exact=True))
    hand.button("Compare")
    expect(page.get_by_role("region", name="Runs compared").get_by_role("row")).to_have_count(3)
    if hand.way != "plain":
        expect(page.locator("#overlay canvas")).to_be_visible()
    assert MANY not in page.get_by_role("region", name="Runs compared").inner_text()
