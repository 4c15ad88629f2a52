"""A real Chromium that opens pages of a service, and whatever it complains of."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

from playwright.sync_api import Browser, Page, sync_playwright

PROGRAM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
FLAGS = (
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)


class Mode(NamedTuple):
    """How somebody looks at a page."""

    width: int
    height: int
    colours: str


MODES = {"light": Mode(1280, 900, "light"), "dark": Mode(1280, 900, "dark"), "phone": Mode(390, 844, "light")}
WIDE = Mode(1920, 1080, "light")
PATIENCE_MS = 60_000  # a busy machine is no error
REDRAWN_MS = 300  # plots follow the width of the window
_REDRAWN = (
    "() => [...document.querySelectorAll('.uplot')].every((e) => Math.abs(e.clientWidth - e.parentElement.clientWidth) < 2)"
)


class Window:
    """A page in a browser; `complaints` are errors of scripts, refusals of the CSP, and requests to elsewhere."""

    def __init__(self, page: Page, url: str) -> None:
        self.page, self.url, self.complaints = page, url, list[str]()
        page.on("console", lambda said: self.complaints.append(said.text) if said.type in ("error", "warning") else None)
        page.on("pageerror", lambda error: self.complaints.append(str(error)))
        page.on("request", lambda asked: self._elsewhere(asked.url))

    def go(self, path: str) -> Page:
        """Open a page of the service, and wait until its scripts have run."""
        self.page.goto(f"{self.url}{path}")
        self.page.wait_for_load_state("load")
        return self.page

    def _elsewhere(self, address: str) -> None:
        if not address.startswith((self.url, "data:")):
            self.complaints.append(f"a request to {address}")


def look(page: Page, mode: Mode) -> None:
    """Look at a page that is open in another width or other colours."""
    page.set_viewport_size({"width": mode.width, "height": mode.height})
    page.emulate_media(color_scheme="dark" if mode.colours == "dark" else "light", reduced_motion="reduce")
    for _ in range(PATIENCE_MS // REDRAWN_MS):
        page.wait_for_timeout(REDRAWN_MS)
        if page.evaluate(_REDRAWN):
            return


@contextmanager
def chromium() -> Iterator[Browser]:
    """A headless browser for the length of a block."""
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=PROGRAM, headless=True, args=list(FLAGS))
        try:
            yield browser
        finally:
            browser.close()


@contextmanager
def window(browser: Browser, url: str, mode: Mode = MODES["light"], scripts: bool = True) -> Iterator[Window]:
    """A window of its own, without anything of another one; where pages may run no `scripts`, as in a browser without."""
    context = browser.new_context(
        viewport={"width": mode.width, "height": mode.height},
        color_scheme="dark" if mode.colours == "dark" else "light",
        reduced_motion="reduce",
        java_script_enabled=scripts,
    )
    context.set_default_timeout(PATIENCE_MS)
    try:
        yield Window(context.new_page(), url)
    finally:
        context.close()
