"""Renders templates. Everything is escaped, no external resources are loaded, and a CSP enforces that."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import quote, urlencode

from fastapi import Request
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from starlette.responses import HTMLResponse, RedirectResponse, Response

from holdfast_files.objects import costs
from holdfast_formats.errors import CheckpointError
from holdfast_formats.rest import lists, replica_lags
from holdfast_formats.rest.operations import Job
from holdfast_service.wings.console import formatting, run_status
from holdfast_service.wings.console.static import address
from holdfast_service.wings.console.viewer_api import COOKIE, SignInNeeded

CSP = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self' data:; "
    "base-uri 'none'; form-action 'self'; frame-ancestors 'none'"
)
HEADERS = {
    "Content-Security-Policy": CSP,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "same-origin",
    "Cache-Control": "no-store",
}
# The messages of a page after an action that ended in a redirect; an address can choose only one of these.
MESSAGES = {
    "pinned": "Pinned. This checkpoint is not removed until you unpin it.",
    "unpinned": "Unpinned. The retention policy applies again.",
    "labelled": "Labelled. A checkpoint with a label is not removed.",
    "unlabelled": "Label removed.",
    "removed": "The checkpoint was removed.",
    "noted": "Saved.",
    "archived": "Archived. A new launch unarchives the run.",
    "unarchived": "Unarchived.",
    "renamed": "The run was renamed. Change the name in your trainer too.",
    "deleted": "The run was deleted. You can bring it back from the trash here.",
    "undeleted": "The run was brought back from the trash and is being verified.",
    "purged": "Removed for good.",
    "pinned-all": "Pinned. These checkpoints are not removed until you unpin them.",
    "unpinned-all": "Unpinned. The retention policy applies to them again.",
    "labelled-all": "Labelled. Checkpoints with a label are not removed.",
    "removed-all": "The checkpoints were removed.",
    "comparing": "The comparison is queued. Its progress is shown here, and its result when it is done.",
    "policy": "The policy was set.",
    "job": "The job is queued. Its progress is shown here.",
    "cancelled": "The job was asked to stop.",
    "rotated": "The token has a new secret.",
    "revoked": "The token was revoked. It is no longer accepted.",
    "forgotten": "The node is no longer listed. It may join again at any time.",
    "signed-in": "Signed in.",
    "acknowledged": "Acknowledged. If the alert clears and returns, it counts again.",
    "snoozed": "Snoozed for an hour.",
    "alert-back": "The alert counts again.",
    "retried": "Failed copies are being retried.",
    "quota": "The quota was raised by half.",
    "team-quota": "The quota was set. It applies from the next save on.",
    "team-quota-removed": "The quota was removed.",
    "view-saved": "The view was saved.",
    "view-removed": "The view was removed.",
}
_OF_A_RUN, _OF_ADMINS = ("verify", "scrub"), ("rebuild", "import", "export", "merge")  # kinds of jobs
_ENOUGH = {"read": ("read", "write", "admin"), "write": ("write", "admin"), "admin": ("admin",)}


class Viewer(Protocol):
    """The viewer of a page, and their rights by the API: buttons that would be refused are hidden."""

    name: str
    by: str
    scope: str
    runs: str
    known: bool
    expires: str | None

    @property
    def granted(self) -> Any: ...
    def allows(self, scope: Any, run: str | None) -> bool: ...


@lru_cache(1)
def environment() -> Environment:
    made = Environment(
        loader=FileSystemLoader(Path(__file__).parent / "templates"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        auto_reload=False,
    )
    made.filters |= {
        "bytes": formatting.size,
        "seconds": formatting.seconds,
        "number": formatting.number,
        "percent": formatting.percent,
        "when": formatting.when,
        "prose": formatting.prose,
        "name": formatting.name,
        "steps_at_risk": run_status.steps_at_risk,
        "life": lambda summary: run_status.standing(summary.life).word,
        "facts": formatting.facts,
        "part": lambda text: quote(str(text), safe=""),
    }
    made.globals |= {
        "static": address,
        "lists": lists,
        "table": formatting.table,
        "link": link,
        "may_stop": may_stop,
        "favicon": favicon,
        "bytes_text": formatting.bytes_text,
        "seconds_text": formatting.seconds_text,
        "told_lag": replica_lags.told,
        "copy_cost": costs.of_copy,
    }
    return made


def favicon(count: int, errors: int) -> str:
    """The address of the icon with the number of alerts on it; of the plain one without alerts."""
    return address(f"icon-{'error' if errors else 'warning'}-{min(count, 99)}.svg" if count else "icon.svg")


def link(path: str, **params: Any) -> str:
    """One of our addresses with the parameters that are not empty."""
    query = {name: value for name, value in params.items() if value not in (None, "", False)}
    return f"{path}?{urlencode(query)}" if query else path


def page(request: Request, template: str, status: int = 200, **values: Any) -> HTMLResponse:
    """A whole page. `message` in the URL selects one of the sentences above."""
    message = MESSAGES.get(request.query_params.get("said", ""))
    viewer = viewer_of(request)
    in_proxy = viewer is not None and viewer.by == "login"
    signed_in = getattr(request.app.state, "logout", None) is not None if in_proxy else COOKIE in request.cookies
    values |= {"path": request.url.path, "said": message, "signed_in": signed_in, "viewer": viewer, "may": may_of(request)}
    values["configured"] = _configured(request)
    return HTMLResponse(environment().get_template(template).render(values), status, HEADERS)


def _configured(request: Request) -> set[str]:
    """The pages that are of use only with a flag of `holdfast serve`, and have it; the header leaves out the others."""
    notify = getattr(request.app.state, "wings", {}).get("notify")
    needs = {"daemons": "watched", "notifications": "notifier"}
    return {page for page, part in needs.items() if getattr(notify, part, None) is not None}


def viewer_of(request: Request) -> Viewer | None:
    """The viewer of the page, from the middleware; None without authentication, on /login."""
    viewer: Viewer | None = getattr(request.state, "whole", None)
    return viewer if viewer is not None and viewer.known else None


def may_stop(may: Callable[..., bool], job: Job) -> bool:
    """Whether to offer to cancel a job: for viewers that may submit it."""
    if job.kind in _OF_A_RUN:
        return may("write", job.run)
    return may("admin" if job.kind in _OF_ADMINS else "write", None)


def may_of(request: Request) -> Callable[..., bool]:
    """Whether to show an element that needs a scope for a run, for all runs (None), or for any (no argument)."""
    viewer = viewer_of(request)

    def may(scope: str, run: str | None = "") -> bool:
        if viewer is None:
            return False
        return any(one.scope in _ENOUGH[scope] for one in viewer.granted) if run == "" else viewer.allows(scope, run)

    return may


def see(path: str, text: str | None = None, **params: str) -> RedirectResponse:
    """Redirect to the page that shows the result of an action."""
    return RedirectResponse(link(path, **params, said=text), 303, {"Cache-Control": "no-store"})


def problem_page(request: Request, error: CheckpointError) -> HTMLResponse:
    return page(request, "problem.html", error.status, error=error)


async def as_page(request: Request, error: Exception) -> Response:
    """The page for an error of the API: the sign-in page, or the problem in words."""
    if isinstance(error, SignInNeeded):
        back = request.url.path + (f"?{request.url.query}" if request.url.query else "")
        return see(link("/login", next=back if request.method == "GET" else None))
    assert isinstance(error, CheckpointError)
    return problem_page(request, error)
