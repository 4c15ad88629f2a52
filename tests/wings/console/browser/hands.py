"""Whoever uses a page: with a mouse, or with the keyboard alone."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager

from playwright.sync_api import Browser, Locator, Page, expect

from tests.wings.console.chromium import MODES, PATIENCE_MS, Mode, Window, window

from .scene import Scene

STOPS_MAX = 1500  # of a page
MODE = {"mouse": MODES["light"], "plain": MODES["phone"], "keyboard": MODES["dark"]}


def labelled(page: Page, label: str) -> Locator:
    """The first field of which the label begins with these words."""
    return page.get_by_label(re.compile(rf"^\s*{re.escape(label)}\b")).first


class Hand:
    """Presses, fills and chooses in its way: mouse; plain, a phone that runs no scripts; or keyboard, in the dark."""

    def __init__(self, at: Scene, shown: Window, way: str) -> None:
        self.at, self.window, self.way = at, shown, way
        self.page: Page = shown.page

    def own(self, name: str) -> str:
        """The run, node or whatever else of this name is for this way alone."""
        return f"{name}-{self.way}"

    def go(self, path: str) -> Page:
        return self.window.go(path)

    def button(self, name: str, exact: bool = True) -> None:
        """Press the first button of this name."""
        self.press(self.page.get_by_role("button", name=name, exact=exact).first)

    def press(self, target: Locator) -> None:
        """Press a button or a link."""
        if self.way == "keyboard":
            self._reach(target)
            self.page.keyboard.press("Enter")
        else:
            target.click()

    def fill(self, label: str, text: str) -> None:
        """Write into the first field of this label, in place of what is there."""
        self.write(labelled(self.page, label), text)

    def write(self, field: Locator, text: str) -> None:
        """Write into a field."""
        if self.way == "keyboard":
            self._reach(field)
            self.page.keyboard.press("ControlOrMeta+a")
            self.page.keyboard.insert_text(text)
        else:
            field.fill(text)

    def tick(self, target: Locator) -> None:
        """Tick a box, or choose one of several."""
        if self.way == "keyboard":
            self._reach(target)
            self.page.keyboard.press("Space")
        else:
            target.check()

    def choose(self, label: str, value: str) -> None:
        """Choose from a list."""
        field = self.page.get_by_role("combobox", name=label, exact=True).first
        if self.way == "keyboard":
            self._reach(field)
            self.page.keyboard.press("Home")
            for _ in range(STOPS_MAX):
                if field.input_value() == value:
                    return
                self.page.keyboard.press("ArrowDown")
            raise AssertionError(f"the keyboard does not reach {value}")
        field.select_option(value)

    def says(self, text: str) -> None:
        """The page that follows says this of what was done."""
        expect(self.page.get_by_role("status").filter(has_text=text)).to_be_visible()

    def heads(self, text: str) -> None:
        """The page that follows has this as its heading, or as a part of it."""
        expect(self.page.get_by_role("heading", level=1)).to_contain_text(text)

    def _reach(self, target: Locator) -> None:
        """Go from stop to stop until the target has the focus."""
        target.wait_for()
        for _ in range(STOPS_MAX):
            if target.evaluate("element => element === document.activeElement"):
                return
            self.page.keyboard.press("Tab")
        raise AssertionError(f"the keyboard does not reach {target}")


@contextmanager
def hand(browser: Browser, at: Scene, way: str, mode: Mode | None = None) -> Iterator[Hand]:
    """A window of which the browser does not complain, and whoever uses it; questions of scripts are answered with yes."""
    expect.set_options(timeout=PATIENCE_MS)
    with window(browser, at.url, mode or MODE[way], scripts=way != "plain") as shown:
        shown.page.on("dialog", lambda asked: asked.accept())
        yield Hand(at, shown, way)
        assert shown.complaints == []
