"""Pages in a real Chromium, against a real daemon, while real training runs save: what moves by itself, and the mouse."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

pytest.importorskip("playwright")

from playwright.sync_api import Browser, expect

from . import screenshots
from .chromium import MODES, PROGRAM, Window, window
from .live import FAULTY, RUN, Live, live

pytestmark = [pytest.mark.browser, pytest.mark.skipif(PROGRAM is None, reason="there is no Chromium")]


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
@pytest.mark.parametrize("name", ["run", "api"])  # browser/test_appearance.py looks at the others
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
    newest = page.locator("table.saved tbody tr").first
    before = newest.get_attribute("id") or ""
    expect(page.locator("#lanes canvas")).to_have_count(1)
    counted = page.locator("#pointed").inner_text()
    expect(newest).not_to_have_attribute("id", before, timeout=30_000)
    expect(page.locator("#pointed")).not_to_have_text(counted, timeout=30_000)
    expect(page.locator("#lanes canvas")).to_have_count(1)
    expect(page.locator("#verdict")).to_contain_text("The last good checkpoint is step")
    expect(page.locator("[data-metric='loss'] canvas")).to_be_visible()


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


def test_search_goes_on_while_typing(shown: Window, at: Live) -> None:
    """The list follows what is typed; sorting says which way it goes."""
    page = shown.go(f"/runs/{RUN}/checkpoints/{at.steps()[1]}/tensors")
    page.get_by_label("Name contains").press_sequentially("down_proj exp_avg_sq")
    expect(page.locator("#found tbody tr")).to_have_count(6)
    page.goto(f"{at.url}/runs/{RUN}/checkpoints/{at.steps()[1]}/tensors")
    page.get_by_role("link", name="Bytes").click()
    expect(page.locator("th[aria-sort='descending']")).to_have_text("Bytes")
    expect(page.locator("#found tbody tr").first).to_contain_text("131 kB")


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


def test_two_checkpoints_are_chosen_and_compared(shown: Window, at: Live) -> None:
    """Two ticks in the run's table; what training changed comes first, and random generators last."""
    page = shown.go(f"/runs/{RUN}")
    for box in page.locator("input[form=marks]").all()[:2]:
        box.check()
    page.get_by_role("form", name="Chosen checkpoints").get_by_role("button", name="Compare").click()
    expect(page.locator("tbody tr").first).to_contain_text("changed")
    page.get_by_label("Name contains").fill("lm_head.weight")  # tensors that changed more may fill the page
    page.get_by_label("read the bytes").check()
    page.get_by_role("button", name="Compare", exact=True).click()
    row = page.locator("tr", has=page.get_by_role("rowheader", name="lm_head.weight", exact=True)).first
    expect(row).to_contain_text("changed")
    expect(row).to_contain_text("%")


def test_the_first_stop_of_the_keyboard(shown: Window) -> None:
    """The first stop leads past the navigation."""
    page = shown.go("/")
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.textContent") == "Skip to content"
    page.keyboard.press("Enter")
    assert page.evaluate("document.activeElement.id") == "main"
