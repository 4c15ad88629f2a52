"""What can be pressed on a page: each button by what it does, and each stop of the keyboard."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, NamedTuple

from fastapi.routing import iter_route_contexts
from playwright.sync_api import Page

from holdfast_service.wings.console.routes import pages

# What tells forms to one address apart; other fields are what is done it with.
TELLING = ("what", "remedy", "pinned", "kind")
_BUTTONS = Path(__file__).with_name("buttons.js").read_text()
_STOPS = Path(__file__).with_name("stops.js").read_text()
_MISSED = "() => window.stops.filter((e) => !window.reached.has(e) && e.isConnected).map((e) => e.outerHTML.slice(0, 160))"
NAMED = {
    "button",
    "link",
    "textbox",
    "searchbox",
    "combobox",
    "checkbox",
    "radio",
    "DisclosureTriangle",
    "listbox",
    "slider",
}


class Walk(NamedTuple):
    """What the keyboard met on a page, from its first to its last stop."""

    stops: int
    missed: list[str]  # where it does not stop
    unseen: list[str]  # where it stops and nobody sees that


def buttons(page: Page) -> set[str]:
    """The buttons of a page, each as what it does: method, route and what tells it apart, or the script that it is for."""
    return {_named(one) for one in page.evaluate(_BUTTONS)}


def walk(page: Page) -> Walk:
    """Press Tab as often as there are stops, and a few times more."""
    unfold(page)
    stops = page.evaluate(_STOPS)
    for _ in range(stops + 5):
        page.keyboard.press("Tab")
    return Walk(stops, page.evaluate(_MISSED), page.evaluate("() => window.unseen"))


def unfold(page: Page) -> None:
    """Open whatever can be opened, so that it is looked at too."""
    page.evaluate("() => document.querySelectorAll('details').forEach((one) => { one.open = true; })")


def nameless(page: Page) -> list[str]:
    """What can be used and has no name for those who do not see it."""
    session = page.context.new_cdp_session(page)
    nodes = session.send("Accessibility.getFullAXTree")["nodes"]
    session.detach()
    return [
        f"{node['role']['value']} {node.get('backendDOMNodeId')}"
        for node in nodes
        if not node.get("ignored") and node["role"]["value"] in NAMED and not node.get("name", {}).get("value", "").strip()
    ]


def routes() -> list[tuple[re.Pattern[str], str, set[str]]]:
    """Pattern, template and methods of every page."""
    found: list[Any] = list(iter_route_contexts(pages.router.routes))
    return [(route.path_regex, route.path, route.methods or set()) for route in found]


def _named(one: dict[str, Any]) -> str:
    if not one["submits"]:
        words = [f"{name}={value}" if value and name != "copy" else name for name, value in one["data"]]
        return " ".join(["script", *([f"#{one['id']}"] if one["id"] else []), *words])
    telling = [f"{name}={value}" for name, value in one["fields"] if name in TELLING and one["method"] == "POST"]
    telling = [] if one["path"] in ("/import", "/merge") else telling
    return " ".join(
        [one["method"], _template(one["method"], one["path"]), *telling, *([one["name"]] if one["name"] else [])]
    )


def _template(method: str, path: str) -> str:
    for pattern, template, methods in routes():
        if method in methods and pattern.match(path):
            return template
    raise AssertionError(f"{method} {path} leads nowhere")
