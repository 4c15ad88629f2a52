"""Renders templates. Everything is escaped, nothing is loaded from elsewhere, and the browser enforces that (CSP)."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlencode

from fastapi import Request
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from starlette.responses import HTMLResponse, RedirectResponse, Response

from holdfast_formats.errors import CheckpointError

from . import words
from .asking import COOKIE, SignInNeeded
from .static import address

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
SAID = {
    "pinned": "Pinned. This checkpoint is not removed until you unpin it.",
    "unpinned": "Unpinned. The retention policy applies again.",
    "labelled": "Labelled. A checkpoint with a label is not removed.",
    "unlabelled": "Label removed.",
    "removed": "The checkpoint was removed.",
    "pinned-all": "Pinned. These checkpoints are not removed until you unpin them.",
    "unpinned-all": "Unpinned. The retention policy applies to them again.",
    "labelled-all": "Labelled. Checkpoints with a label are not removed.",
    "removed-all": "The checkpoints were removed.",
    "comparing": "The comparison is queued. Its progress is shown here, and its result when it is done.",
    "policy": "The policy was set.",
    "job": "The job is queued. Its progress is shown here.",
    "cancelled": "The job was asked to stop.",
    "revoked": "The token was revoked. It is no longer accepted.",
    "forgotten": "The node is listed no more. It may join again at any time.",
    "signed-in": "Signed in.",
}


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
        "bytes": words.size,
        "seconds": words.seconds,
        "number": words.number,
        "percent": words.percent,
        "when": words.when,
        "prose": words.prose,
        "facts": words.facts,
        "part": lambda text: quote(str(text), safe=""),
    }
    made.globals |= {"static": address, "link": link, "bytes_text": words.bytes_text, "seconds_text": words.seconds_text}
    return made


def link(path: str, **params: Any) -> str:
    """One of our addresses with the parameters that are not empty."""
    said = {name: value for name, value in params.items() if value not in (None, "", False)}
    return f"{path}?{urlencode(said)}" if said else path


def page(request: Request, template: str, status: int = 200, **values: Any) -> HTMLResponse:
    """A whole page. `said` in the address picks one of the sentences above."""
    said = SAID.get(request.query_params.get("said", ""))
    signed_in = COOKIE in request.cookies
    text = environment().get_template(template).render(path=request.url.path, said=said, signed_in=signed_in, **values)
    return HTMLResponse(text, status, HEADERS)


def see(path: str, said: str | None = None, **params: str) -> RedirectResponse:
    """Redirect to the page that shows the result of an action."""
    return RedirectResponse(link(path, **params, said=said), 303, {"Cache-Control": "no-store"})


def problem_page(request: Request, error: CheckpointError) -> HTMLResponse:
    return page(request, "problem.html", error.status, error=error)


async def as_page(request: Request, error: Exception) -> Response:
    """The page for an error of the API: the sign-in page, or the problem in words."""
    if isinstance(error, SignInNeeded):
        back = request.url.path + (f"?{request.url.query}" if request.url.query else "")
        return see(link("/login", next=back if request.method == "GET" else None))
    assert isinstance(error, CheckpointError)
    return problem_page(request, error)
