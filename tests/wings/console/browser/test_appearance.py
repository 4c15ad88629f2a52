"""What is seen on every page: axe-core finds nothing, in light, dark and on a phone; nothing is cut off at any width."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("playwright")

from playwright.sync_api import Browser

from tests.wings.console.chromium import MODES, WIDE, Window, look, window

from . import controls, fitting
from .places import PLACES
from .scene import Scene

pytestmark = pytest.mark.browser
WIDTHS = (MODES["phone"], MODES["light"], WIDE)
# Colours are all that is different in the dark.
_LOOKS = (("light", {}), ("dark", {"runOnly": ["color-contrast"]}), ("phone", {}))
_FOUND = Path(__file__).with_name("violations.js").read_text()


@pytest.mark.parametrize("name", PLACES)
def test_axe_finds_nothing(browser: Browser, at: Scene, axe: str, name: str) -> None:
    """No violation of any rule in light, dark and on a phone, with everything open that can be opened."""
    with window(browser, at.url) as shown:
        page = PLACES[name](at, shown)
        controls.unfold(page)
        page.evaluate(axe)
        found = {}
        for mode, options in _LOOKS:
            look(page, MODES[mode])
            found[mode] = page.evaluate(_FOUND, options)
        assert found == {mode: [] for mode in found}


def test_axe_finds_what_is_wrong(browser: Browser, at: Scene, axe: str) -> None:
    """Put onto a page: a button without a name, and a text that is hardly seen."""
    with window(browser, at.url) as shown:
        page = shown.go("/jobs")
        page.evaluate("""() => {
          document.querySelector("main").append(document.createElement("button"), "faint");
          document.querySelector("main").style.color = "#ddd";
        }""")
        page.evaluate(axe)
        found = " ".join(page.evaluate(_FOUND, {}))
        assert "button-name" in found and "color-contrast" in found


@pytest.mark.parametrize("name", PLACES)
def test_nothing_is_cut_off(browser: Browser, at: Scene, name: str) -> None:
    """At 390, 1280 and 1920 pixels nothing is wider than its place, no text is hidden, and no number or word is broken."""
    with window(browser, at.url) as shown:
        page = PLACES[name](at, shown)
        controls.unfold(page)
        found = {}
        for mode in WIDTHS:
            look(page, mode)
            found[mode.width] = fitting.misfits(page)
        assert found == {mode.width: [] for mode in WIDTHS}
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
    ("width: 2rem; overflow-wrap: anywhere", "a verification"),
)
_SPOIL = """([style, text, title]) => {
  const made = document.createElement("div");
  made.style.cssText = style;
  made.textContent = text;
  if (title) made.title = title;
  document.querySelector("main").append(made);
}"""
