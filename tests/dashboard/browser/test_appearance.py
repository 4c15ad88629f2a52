"""What is seen on every page: axe-core finds nothing, in light, dark and on a phone; nothing is cut off at any width."""

from __future__ import annotations

import pytest
from playwright.sync_api import Browser

from tests.dashboard.chromium import MODES, WIDE, Window, window

from . import controls, fitting
from .places import PLACES
from .scene import Scene

pytestmark = pytest.mark.browser
WIDTHS = {"390": MODES["phone"], "1280": MODES["light"], "1920": WIDE}
_FOUND = """() => axe.run(document, { resultTypes: ["violations"] }).then(({ violations }) => violations.flatMap(
  (one) => one.nodes.map((node) => `${one.id}: ${node.target.join(" ")} ${(node.any[0] || node.all[0] || node.none[0] || {}).message}`)))"""


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", PLACES)
def test_axe_finds_nothing(browser: Browser, at: Scene, axe: str, name: str, mode: str) -> None:
    """No violation of any rule, with everything open that can be opened."""
    with window(browser, at.url, MODES[mode]) as shown:
        page = PLACES[name](at, shown)
        controls.unfold(page)
        page.evaluate(axe)
        assert page.evaluate(_FOUND) == []


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("name", PLACES)
def test_nothing_is_cut_off(browser: Browser, at: Scene, name: str, width: str) -> None:
    """No page, table or box is wider than its place, no text is hidden, and no number is broken."""
    with window(browser, at.url, WIDTHS[width]) as shown:
        page = PLACES[name](at, shown)
        controls.unfold(page)
        assert fitting.misfits(page) == []
        assert shown.complaints == []


def test_the_check_itself_finds_what_is_cut_off(browser: Browser, at: Scene) -> None:
    """Each of what it is to find, put onto a page."""
    with window(browser, at.url) as shown:
        for number, (style, text) in enumerate(_SPOILT):
            page = shown.go("/jobs")
            page.evaluate(_SPOIL, [style, text])
            assert fitting.misfits(page), number
        assert _spared(shown) == []


def _spared(shown: Window) -> list[str]:
    """A name may end in dots where the whole of it is its title."""
    page = shown.go("/jobs")
    page.evaluate(_SPOIL, [_DOTS, "n" * 300, "n" * 300])
    return fitting.misfits(page)


_DOTS = "width: 9rem; overflow: hidden; text-overflow: ellipsis; white-space: nowrap"
_SPOILT = (
    ("width: 3000px", "wide"),
    (_DOTS, "n" * 300),
    ("width: 9rem; overflow: hidden; white-space: nowrap", "n" * 300),
    ("height: 1rem; overflow: hidden; width: 9rem", "several words that take more than one line of it"),
    ("width: 4rem; overflow-wrap: anywhere", "1234567890123"),
)
_SPOIL = """([style, text, title]) => {
  const made = document.createElement("p");
  made.style.cssText = style;
  made.textContent = text;
  if (title) made.title = title;
  document.querySelector("main").append(made);
}"""
