"""Every page, and every state of one that only a form leads to: by name, with what a browser does to get there."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from urllib.parse import quote

from playwright.sync_api import Page

from tests.wings.console.chromium import Window

from .hands import labelled
from .scene import FINISHED, ILL, LONG, MANY, STEPS, Scene

_NUMBERS = itertools.count()
Go = Callable[[Scene, Window], Page]


def _address(path: str) -> Go:
    return lambda at, window: window.go(path)


def _job(**wanted: object) -> Go:
    """The page of a job that has ended."""
    return lambda at, window: window.go(f"/jobs/{at.done(dict(wanted))}")


def _form(path: str, button: str, fields: Mapping[str, str]) -> Go:
    """What a form answers."""

    def go(at: Scene, window: Window) -> Page:
        page = window.go(path)
        page.once("dialog", lambda asked: asked.accept())
        for label, text in fields.items():
            labelled(page, label).fill(text)
        page.get_by_role("button", name=button, exact=True).first.click()
        page.wait_for_load_state("load")
        return page

    return go


def _chosen(at: Scene, window: Window) -> Page:
    """The page that asks before checkpoints are removed: some may go, and one may not."""
    page = window.go(f"/runs/{LONG}")
    for box in page.locator("input[form=marks]").all():
        box.check()
    page.get_by_role("button", name="Remove …").click()
    page.wait_for_load_state("load")
    return page


def _exported(at: Scene, window: Window) -> Page:
    arguments = {"to": f"exported-{next(_NUMBERS)}", "as": "hf", "dtype": "float16"}
    return _job(kind="export", run=FINISHED, step=60, arguments=arguments)(at, window)


def _map(run: str, step: int) -> Go:
    """The map of the first file that has tensors."""

    def go(at: Scene, window: Window) -> Page:
        files = at.ask(f"/v1/runs/{run}/checkpoints/{step}/files")["items"]
        name = next(file["name"] for file in files if file["header_bytes"])
        return window.go(f"/runs/{run}/checkpoints/{step}/map/{name}")

    return go


def _running(at: Scene, window: Window) -> Page:
    return window.go(f"/jobs/{at.running_job(f'shown-{next(_NUMBERS)}')}")


def _inside(path: str) -> Go:
    """A page of the daemon that asks for tokens, which `Window.go` leads to where one is not signed in."""

    def go(at: Scene, window: Window) -> Page:
        window.url = at.closed.url
        return window.go(path)

    return go


def _refused(at: Scene, window: Window) -> Page:
    window.url = at.closed.url
    page = window.go("/login")
    page.get_by_label("Token").fill("wrong")
    page.get_by_role("button", name="Sign in").click()
    page.wait_for_load_state("load")
    window.complaints[:] = [said for said in window.complaints if "401" not in said]
    return page


def _palette(at: Scene, window: Window) -> Page:
    page = window.go("/jobs")
    page.keyboard.press("Control+k")
    page.keyboard.type("tiny")
    page.locator("#palette-hits [role=option]").first.wait_for()
    return page


def _problem(path: str) -> Go:
    def go(at: Scene, window: Window) -> Page:
        page = window.go(path)
        window.complaints[:] = [said for said in window.complaints if "404" not in said and "401" not in said]
        return page

    return go


_RUN = f"/runs/{LONG}"
_STEP = f"{_RUN}/checkpoints/{STEPS[-1]}"
_TINY = f"/runs/{FINISHED}/checkpoints/60"
_RECIPE = f"""merge_method: linear
models:
  - {{model: {FINISHED}@50, parameters: {{weight: 0.5}}}}
  - {{model: {FINISHED}@60, parameters: {{weight: 0.5}}}}
"""
PLACES: Mapping[str, Go] = {
    "overview": _address("/"),
    "overview-none": _address("/?q=nobody"),
    "overview-long": _address("/?q=a-run"),
    "run": _address(f"/runs/{FINISHED}"),
    "run-long": _address(_RUN),
    "run-many": _address(f"/runs/{MANY}"),
    "run-ill": _address(f"/runs/{ILL}"),
    "run-died": _address("/runs/dead-mouse"),
    "run-damaged": _address("/runs/damaged-mouse"),
    "run-full": _address("/runs/full-mouse"),
    "about": _address(f"/runs/{FINISHED}/about"),
    "about-long": _address(f"{_RUN}/about"),
    "rename": _address(f"{_RUN}/rename"),
    "delete": _address("/runs/going-mouse/delete"),
    "delete-kept": _address(f"{_RUN}/delete"),
    "policy": _address(f"{_RUN}/policy"),
    "policy-preview": _form(f"/runs/{MANY}/policy", "Preview", {"The newest": "5", "Whole": "1"}),
    "health": _address(f"/runs/{ILL}/health"),
    "compare": _address(f"/runs/{FINISHED}/compare?a=50&b=60"),
    "compare-exact": _address(f"/runs/{FINISHED}/compare?a=50&b=60&exact=yes"),
    "compare-long": _address(f"{_RUN}/compare?a={STEPS[0]}&b={STEPS[1]}"),
    "compare-runs": _address(f"/compare?run={FINISHED}&run={LONG}&run={ILL}"),
    "remove-many": _chosen,
    "checkpoint": _address(_TINY),
    "checkpoint-long": _address(f"{_RUN}/checkpoints/{STEPS[0]}"),
    "checkpoint-damaged": _address("/runs/damaged-mouse/checkpoints/10"),
    "checkpoint-ill": _address(f"/runs/{ILL}/checkpoints/50"),
    "remove": _address("/runs/kept-mouse/checkpoints/5/remove"),
    "remove-refused": _address(f"{_RUN}/checkpoints/{STEPS[0]}/remove"),
    "files": _address("/runs/kept-mouse/checkpoints/5/files"),
    "files-long": _address(f"{_STEP}/files"),
    "map": _map("kept-mouse", 5),
    "map-long": _map(LONG, STEPS[-1]),
    "tensors": _address(f"/runs/{ILL}/checkpoints/50/tensors"),
    "tensors-long": _address(f"{_STEP}/tensors"),
    "tensor": _address("/runs/kept-mouse/checkpoints/5/extents?group=model&name=embed.weight"),
    "histogram": _address(f"/runs/{FINISHED}/checkpoints/60/histogram?group=model&name=lm_head.weight&minus=50"),
    "resume": _address(f"{_TINY}/restore"),
    "resume-older": _address(f"{_RUN}/checkpoints/{STEPS[0]}/restore"),
    "resume-ill": _address(f"/runs/{ILL}/checkpoints/50/restore"),
    "restore": _address(f"{_TINY}/restore?dp=8"),
    "restore-refused": _address(f"{_TINY}/restore?tp=0"),
    "nodes": _address("/nodes"),
    "daemons": _address("/daemons"),
    "jobs": _address("/jobs"),
    "job": _job(kind="verify", run=FINISHED, step=60),
    "job-failed": _job(kind="verify", run="damaged-mouse", step=10),
    "job-running": _running,
    "job-import": _job(kind="import", run="imported", step=0, arguments={"from": "model", "dry_run": True}),
    "job-merge": _job(kind="merge", run="merged", step=0, arguments={"recipe": _RECIPE, "dry_run": True}),
    "job-export": _exported,
    "import": _address("/import"),
    "merge": _address("/merge"),
    "quotas": _address("/quotas"),
    "storage": _address("/storage"),
    "events-kinds": _address("/events?order=kind"),
    "events": _address("/events"),
    "events-timed": _address("/events?order=time"),
    "audit": _address("/audit"),
    "tokens": _address("/tokens"),
    "token-made": _form("/tokens", "Rotate spare", {}),
    "notifications": _address("/notifications"),
    "notified": _form("/notifications", "Send a test to mouse", {}),
    "trash": _address("/trash"),
    "purge": _address("/runs/gone-mouse/purge"),
    "find": _address("/find?q=tiny"),
    "find-nothing": _address(f"/find?q={quote('no such thing')}"),
    "palette": _palette,
    "sign-in": _inside("/login"),
    "sign-in-refused": _refused,
    "link-refused": _problem("/enter?code=old"),
    "problem": _problem("/runs/nobody"),
    "no-page": _problem("/no/such/page"),
}
