"""Every button of every page: each is pressed by a test and does what it says, with a mouse, without scripts, and with the
keyboard alone; each stop of the keyboard is seen and has a name.
"""

from __future__ import annotations

import pytest

pytest.importorskip("playwright")

from playwright.sync_api import Browser

from tests.wings.console.chromium import MODES, window

from . import about_runs, about_service, controls
from .hands import hand
from .places import PLACES
from .pressing import PRESSES, Press
from .scene import WAYS, Scene

pytestmark = pytest.mark.browser
assert about_runs and about_service  # whose functions are on the list
# Their alerts take hours, or a storage that fails halfway; tests/wings/console/pages/test_overview.py sends these forms.
ELSEWHERE = {
    "POST /runs/{run}/mend remedy=verify",
    "POST /runs/{run}/mend remedy=retry-replicas",
}
found: dict[str, str] = {}  # buttons, and a page that has them


@pytest.mark.parametrize("name", PLACES)
def test_keyboard_reaches_everything_and_shows_where_it_is(browser: Browser, at: Scene, name: str) -> None:
    """Tab stops at everything that can be used, each stop has a ring and is in view, and everything has a name."""
    with window(browser, at.url, MODES["light"]) as shown:
        page = PLACES[name](at, shown)
        found.update({button: name for button in controls.buttons(page)})
        met = controls.walk(page)
        assert met.stops > 0 or name == "link-refused"
        assert (met.missed, met.unseen, controls.nameless(page)) == ([], [], [])


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("press", PRESSES, ids=lambda press: press.act.__name__)
def test_pressed(browser: Browser, at: Scene, press: Press, way: str) -> None:
    """It does what it says."""
    if press.scripted and way == "plain":
        pytest.skip("it is not there without scripts")
    if press.act.__name__ == "forget_nodes" and not at.shared:
        pytest.skip("nodes share a catalog on PostgreSQL alone, which is not here")
    with hand(browser, at, way) as user:
        press.act(user)


def test_every_button_is_pressed() -> None:
    """What the pages have, and every route that a form can be sent to, is on the list; the list has nothing else."""
    if len(found) < len(PRESSES):
        pytest.skip("needs the tests above")
    pressed = {button for press in PRESSES for button in press.buttons}
    assert set(found) - pressed - ELSEWHERE == set(), {button: found[button] for button in set(found) - pressed}
    posted = {template for _, template, methods in controls.routes() if "POST" in methods}
    assert posted == {button.split()[1] for button in pressed if button.startswith("POST")}
