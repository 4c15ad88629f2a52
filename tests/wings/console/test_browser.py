"""Every page and action in a real Chromium, against a real daemon, while real training runs save."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

pytest.importorskip("playwright")

from playwright.sync_api import Browser, expect

from . import screenshots
from .chromium import MODES, PATIENCE_MS, PROGRAM, Window, window
from .live import FAULT_AT, FAULTY, RUN, Live, live

pytestmark = [pytest.mark.browser, pytest.mark.skipif(PROGRAM is None, reason="there is no Chromium")]
PAGES = (
    *("overview", "run", "checkpoint", "files", "map", "tensors", "restore", "compare"),
    *("retention", "health", "nodes", "jobs", "import", "events", "audit", "quotas", "tokens", "api", "login"),
)


@pytest.fixture(scope="module")
def at(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    """A daemon with two runs that go on saving."""
    with live(tmp_path_factory.mktemp("live")) as found:
        yield found


@pytest.fixture
def browser(drawing: Browser) -> Browser:
    return drawing


@pytest.fixture
def shown(browser: Browser, at: Live) -> Iterator[Window]:
    """A window of which the browser must not complain, whatever the test does."""
    with window(browser, at.url) as found:
        yield found
        assert found.complaints == []


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", PAGES)
def test_page_is_drawn(browser: Browser, at: Live, name: str, mode: str) -> None:
    """In light, dark and phone width: no error, no refusal of the CSP, no request to elsewhere, nothing too wide."""
    picture, wrong = screenshots.take(browser, at, name, mode)
    assert wrong == []
    assert len(picture) > 5000


def test_overview_goes_on_by_itself(shown: Window, at: Live) -> None:
    """New checkpoints appear without a reload, and the focus stays where it is."""
    page = shown.go("/")
    row = page.locator("tr", has=page.get_by_role("link", name=RUN, exact=True))
    before = row.locator("[data-checkpoints]").inner_text()
    row.get_by_role("link", name=RUN, exact=True).focus()
    expect(row.locator("[data-checkpoints]")).not_to_have_text(before, timeout=20_000)
    assert page.evaluate("document.activeElement.textContent") == RUN


def test_a_run_goes_on_by_itself(shown: Window, at: Live) -> None:
    """Its table, its plots and its sentence follow without a reload, and the range that was zoomed to stays."""
    page = shown.go(f"/runs/{RUN}")
    before = page.locator("#checkpoints ~ .table-box tbody tr").first.get_attribute("id") or ""
    drawn = "() => document.querySelectorAll('#lanes canvas').length"
    assert page.evaluate(drawn) == 1
    expect(page.locator("#checkpoints ~ .table-box tbody tr").first).not_to_have_attribute("id", before, timeout=30_000)
    assert page.evaluate(drawn) == 1
    expect(page.locator("#verdict")).to_contain_text("The last good checkpoint is step")
    expect(page.locator("[data-metric='loss'] canvas")).to_be_visible()


def test_an_alert_is_acknowledged_and_taken_back(shown: Window) -> None:
    """By its buttons; the title and the icon have the number of those that are left."""
    page = shown.go("/")
    mark = page.get_by_role("button", name=f"Acknowledge checkpoint-unhealthy of {FAULTY}")
    expect(mark).to_be_visible(timeout=60_000)
    mark.click()
    expect(page.get_by_role("status")).to_contain_text("Acknowledged")
    page.locator("details.seen summary").click()
    page.get_by_role("button", name=f"Count it again checkpoint-unhealthy of {FAULTY}").click()
    expect(page.get_by_role("status")).to_contain_text("counts again")
    expect(page.get_by_role("link", name="Restore step").first).to_be_visible()
    assert page.title().startswith("(") and "icon-error-" in (page.locator("#icon").get_attribute("href") or "")


def test_runs_are_found_sorted_and_measured(shown: Window, at: Live) -> None:
    """By any part of a name, by the heads of columns, and by a metric, which becomes a column."""
    page = shown.go("/")
    page.get_by_role("link", name="Run", exact=True).click()
    expect(page.locator("th[aria-sort='ascending']")).to_have_text("Run")
    names = page.locator(".board tbody th a")
    expect(names).to_have_text([RUN, FAULTY])
    page.get_by_role("link", name="Run", exact=True).click()
    expect(names).to_have_text([FAULTY, RUN])
    page.get_by_label("Metric").select_option("loss")
    page.get_by_role("button", name="Show").click()
    page.get_by_role("link", name="loss", exact=True).click()
    expect(page.locator("th[aria-sort='ascending']")).to_have_text("loss")
    assert "sort=metric%3Aloss" in page.url
    page.get_by_label("Run contains").fill("NAN")
    page.get_by_role("button", name="Show").click()
    expect(names).to_have_text([FAULTY])


def test_a_teams_quota_is_set_and_removed(shown: Window) -> None:
    """Its use is shown; with the keyboard alone."""
    page = shown.go("/quotas")
    row = page.locator("tr", has=page.get_by_role("rowheader", name="speech-*"))
    page.get_by_label("Runs").fill("speech-*")
    page.get_by_label("May hold").fill("1.5")
    page.keyboard.press("Enter")
    expect(page.get_by_role("status")).to_contain_text("The quota was set")
    expect(row).to_contain_text("1.5 GB")
    page.on("dialog", lambda dialog: dialog.accept())
    row.get_by_role("button", name="Remove").click()
    expect(page.get_by_role("status")).to_contain_text("removed")
    expect(row).to_have_count(0)


def test_runs_are_overlaid(shown: Window) -> None:
    """Two runs are chosen and drawn over each other."""
    page = shown.go("/compare")
    page.get_by_label(RUN, exact=True).check()
    page.get_by_label(FAULTY, exact=True).check()
    page.get_by_role("button", name="Compare").click()
    expect(page.locator("#overlay canvas")).to_be_visible()


def test_from_the_overview_to_a_tensor(shown: Window, at: Live) -> None:
    """By links alone: run, checkpoint, tensors, one tensor, its place in the file."""
    page = shown.go("/")
    page.get_by_role("link", name=RUN, exact=True).last.click()
    step = str(at.steps()[2])
    page.get_by_role("link", name=step, exact=True).click()
    page.get_by_label("Pages of this checkpoint").get_by_role("link", name="Tensors").click()
    page.get_by_role("link", name="lm_head.weight").first.click()
    expect(page.get_by_role("heading", level=1)).to_have_text("lm_head.weight")
    page.get_by_role("link", name="model.safetensors").click()
    expect(page.locator("svg.map rect").first).to_be_visible()


def test_timeline_zooms(shown: Window) -> None:
    """By buttons, by dragging across it, and back; pointing at a save says what it is."""
    page = shown.go(f"/runs/{RUN}")
    over = page.locator("#lanes .u-over")
    expect(over).to_be_visible()
    span = "() => { const s = uPlot.sync('saves').plots[0].scales.x; return s.max - s.min; }"
    whole = page.evaluate(span)
    page.get_by_role("button", name="Zoom in").click()
    assert page.evaluate(span) < whole * 0.75
    page.get_by_role("button", name="All").click()
    assert page.evaluate(span) >= whole * 0.999  # the run goes on, and so does its timeline
    whole = page.evaluate(span)
    box = over.bounding_box()
    assert box is not None
    y = box["y"] + box["height"] / 2
    page.mouse.move(box["x"] + box["width"] * 0.2, y)
    page.mouse.down()
    page.mouse.move(box["x"] + box["width"] * 0.6, y, steps=5)
    page.mouse.up()
    assert page.evaluate(span) == pytest.approx(whole * 0.4, rel=0.05)
    page.mouse.move(box["x"] + box["width"] * 0.5, y)
    expect(page.locator("#pointed")).to_contain_text("step")


def test_search_goes_on_while_typing(shown: Window, at: Live) -> None:
    """The list follows what is typed; sorting says which way it goes."""
    page = shown.go(f"/runs/{RUN}/checkpoints/{at.steps()[1]}/tensors")
    page.get_by_label("Name contains").press_sequentially("down_proj exp_avg_sq")
    expect(page.locator("#found tbody tr")).to_have_count(6)
    page.goto(f"{at.url}/runs/{RUN}/checkpoints/{at.steps()[1]}/tensors")
    page.get_by_role("link", name="Bytes").click()
    expect(page.locator("th[aria-sort='descending']")).to_have_text("Bytes")
    expect(page.locator("#found tbody tr").first).to_contain_text("131 kB")


def test_pin_label_and_remove(shown: Window, at: Live) -> None:
    """A checkpoint is pinned, labelled, freed again, and removed after its step was typed."""
    step = at.steps()[-1]
    page = shown.go(f"/runs/{RUN}/checkpoints/{step}")
    page.get_by_role("button", name="Pin", exact=True).click()
    expect(page.get_by_role("status")).to_contain_text("Pinned")
    page.get_by_label("Label", exact=True).fill("golden")
    page.get_by_role("button", name="Add").click()
    page.get_by_role("link", name="Remove this checkpoint").click()
    expect(page.get_by_role("alert")).to_contain_text("may not be removed")
    page.get_by_role("link", name=f"step {step}", exact=True).click()
    page.get_by_role("button", name="Remove label golden").click()
    expect(page.get_by_role("status")).to_contain_text("Label removed")
    page.get_by_role("button", name="Unpin").click()
    expect(page.get_by_role("status")).to_contain_text("Unpinned")
    page.get_by_role("link", name="Remove this checkpoint").click()
    for _ in range(PATIENCE_MS // 500):
        if not page.get_by_text("is being read").is_visible():  # by who verifies it, just now
            break
        page.wait_for_timeout(500)
        page.reload()
    page.get_by_label("Type the step to confirm").fill(str(step))
    page.get_by_role("button", name="Remove permanently").click()
    expect(page.get_by_role("status")).to_contain_text("was removed")
    assert step not in at.steps()


def test_the_palette_finds_a_step(shown: Window, at: Live) -> None:
    """Ctrl-K on any page; what is typed is looked for, arrows choose, Enter goes there, Escape leaves."""
    step = at.steps()[0]
    page = shown.go("/jobs")
    page.keyboard.press("Control+k")
    box = page.get_by_role("combobox", name="Find a run")
    expect(box).to_be_focused()
    page.keyboard.type(f"{RUN}@")
    hits = page.get_by_role("listbox", name="Found").get_by_role("option")
    expect(hits.first).to_contain_text(f"{RUN}@")
    box.fill(f"{RUN}@{step}")
    expect(hits.first).to_contain_text(f"{RUN}@{step}")
    page.keyboard.press("Enter")
    page.wait_for_url(f"**/runs/{RUN}/checkpoints/{step}")
    page.keyboard.press("Control+k")
    page.keyboard.press("Escape")
    expect(box).to_be_hidden()


def test_checkpoints_are_chosen_together(shown: Window, at: Live) -> None:
    """Ticked, pinned, unpinned; removal says first what it frees."""
    page = shown.go(f"/runs/{RUN}")
    for step in at.steps()[:2]:
        page.get_by_label(f"Choose step {step}", exact=True).check()
    marks = page.get_by_role("form", name="Chosen checkpoints")
    marks.get_by_role("button", name="Pin", exact=True).click()
    expect(page.get_by_role("status")).to_contain_text("Pinned")
    for step in at.steps()[:2]:
        page.get_by_label(f"Choose step {step}", exact=True).check()
    marks.get_by_role("button", name="Remove").click()
    expect(page.get_by_role("heading", name="These stay")).to_be_visible()
    page.go_back()
    for step in at.steps()[:2]:
        page.get_by_label(f"Choose step {step}", exact=True).check()
    marks.get_by_role("button", name="Unpin").click()
    expect(page.get_by_role("status")).to_contain_text("Unpinned")


def test_policy_is_seen_before_it_is_set(shown: Window, at: Live) -> None:
    """The preview names what would go and why; only then the policy is put in force."""
    page = shown.go(f"/runs/{FAULTY}/policy")
    page.get_by_label("The newest").fill("50")
    page.get_by_label("Quota").fill("5")
    page.get_by_role("button", name="Preview").click()
    expect(page.get_by_role("heading", name="What this would keep and remove")).to_be_visible()
    page.get_by_role("button", name="Apply").click()
    expect(page.get_by_role("status")).to_contain_text("policy was set")
    expect(page.get_by_label("The newest")).to_have_value("50")
    expect(page.get_by_label("Quota")).to_have_value("5.0")


def test_two_checkpoints_are_chosen_and_compared(shown: Window, at: Live) -> None:
    """From the run's table: a, b, compare; what training changed is changed, by how much it says once it has read it."""
    page = shown.go(f"/runs/{RUN}")
    page.get_by_role("button", name="Compare a with b").click()
    expect(page.locator("tbody tr").first).to_be_visible()
    page.get_by_label("read the bytes").check()
    page.get_by_role("button", name="Compare", exact=True).click()
    row = page.locator("tr", has=page.get_by_role("rowheader", name="lm_head.weight", exact=True)).first
    expect(row).to_contain_text("changed")
    expect(row).to_contain_text("%")


def test_a_layout_is_picked_and_copied(shown: Window, at: Live) -> None:
    """What each rank would hold comes with the lines that restore it."""
    page = shown.go(f"/runs/{RUN}/checkpoints/{at.steps()[1]}/restore")
    page.get_by_label("Tensor parallel").fill("2")
    page.get_by_label("Data parallel").fill("2")
    page.get_by_role("button", name="Show the shards").click()
    expect(page.get_by_role("heading", name="4 ranks, group model")).to_be_visible()
    expect(page.locator("#line-1")).to_contain_text("--layout tp=2,dp=2 --all-ranks")
    page.get_by_role("button", name="Copy").first.click()
    expect(page.get_by_role("button", name="Copied").or_(page.get_by_role("button", name="Selected"))).to_be_visible()


def test_the_planted_nan_is_named(shown: Window, at: Live) -> None:
    """The layer with values that are not finite stands on the page of health, its tensor on that of the tensors."""
    if not at.has(f"/v1/runs/{FAULTY}/layers"):
        expect(shown.go(f"/runs/{FAULTY}/health").get_by_text("not available here")).to_be_visible()
        return
    page = shown.go(f"/runs/{FAULTY}/health")
    expect(page.locator("tr.sick").first).to_contain_text("layers.2")
    page.locator("tr.sick a").last.click()
    expect(page.locator("tr.sick").first).to_contain_text("model.layers.2.scale")
    assert FAULT_AT > 0


def test_a_job_is_asked_for_and_watched(shown: Window, at: Live) -> None:
    """Verify from the checkpoint's page; the job's page shows how it ends."""
    page = shown.go(f"/runs/{RUN}/checkpoints/{at.steps()[1]}")
    if not at.has("/v1/jobs"):
        expect(shown.go("/jobs").get_by_text("not available here")).to_be_visible()
        return
    page.get_by_role("button", name="Verify now").click()
    expect(page.get_by_role("heading", level=1)).to_contain_text("done", timeout=30_000)


def test_events_come_by_themselves(shown: Window, at: Live) -> None:
    """What happens while the page is open is prepended to it; a pause holds it back."""
    page = shown.go("/events?order=time")
    if not at.has("/v1/events"):
        expect(page.get_by_text("not available here")).to_be_visible()
        return
    expect(page.locator("#stream")).to_have_text("live")
    newest = page.locator("#events li").first.get_attribute("data-id")
    expect(page.locator("#events li").first).not_to_have_attribute("data-id", newest or "", timeout=15_000)
    page.get_by_role("button", name="Pause").click()
    expect(page.locator("#pause")).to_contain_text("new)", timeout=15_000)


def test_a_token_is_shown_once_and_revoked(shown: Window, at: Live) -> None:
    """The text of a new token stands on one page and never again; revoking asks once more."""
    page = shown.go("/tokens")
    if not at.has("/v1/tokens"):
        expect(page.get_by_text("not available here")).to_be_visible()
        return
    page.get_by_label("Name", exact=True).fill("ci")
    page.get_by_role("button", name="Create token").click()
    text = page.locator("#token").inner_text()
    assert len(text) > 20
    assert text not in shown.go("/tokens").content()
    page.on("dialog", lambda asked: asked.accept())
    page.get_by_role("button", name="Revoke ci").click()
    expect(page.get_by_role("status")).to_contain_text("revoked")


def test_the_keyboard_is_enough(shown: Window) -> None:
    """The first stop leads past the navigation, every stop is seen, and colours are switched without a mouse."""
    page = shown.go("/")
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.textContent") == "Skip to content"
    page.keyboard.press("Enter")
    assert page.evaluate("document.activeElement.id") == "main"
    toggle = page.get_by_role("button", name="Switch to dark colours")
    toggle.focus()
    assert page.evaluate("getComputedStyle(document.activeElement).outlineStyle") != ""
    page.keyboard.press("Enter")
    assert page.evaluate("getComputedStyle(document.documentElement).colorScheme") == "dark"
    page.reload()
    assert page.evaluate("document.documentElement.dataset.theme") == "dark"


def test_pages_are_read_without_scripts(browser: Browser, at: Live) -> None:
    """Tables, forms and links need none."""
    context = browser.new_context(java_script_enabled=False)
    page = context.new_page()
    page.goto(f"{at.url}/runs/{RUN}")
    page.get_by_role("button", name="Compare a with b").click()
    expect(page.get_by_role("rowheader", name="lm_head.weight", exact=True).first).to_be_visible()
    context.close()
