"""Routes: one-time sign-in links for browsers, so that no URL contains a token."""

from __future__ import annotations

import base64
import hashlib
import re
from typing import Annotated

from fastapi import APIRouter, Query, Request
from starlette.responses import HTMLResponse, Response

from holdfast_formats.errors import Unauthenticated
from holdfast_formats.rest.operations import Link
from holdfast_service.api import problems
from holdfast_service.api.access import request_head
from holdfast_service.api.access.authorization import needs
from holdfast_service.api.access.content_policy import POLICY
from holdfast_service.api.access.request_head import COOKIE
from holdfast_service.api.services import Wired

router = APIRouter(tags=["tokens"], responses=problems.RESPONSES)

ENTER = "/enter"
_SESSION_AGE_S = 7 * 86_400
# The only page of the core: its style comes with it, and a browser takes that by its hash.
_STYLE = """
:root { color-scheme: light dark; background: light-dark(#f6f7f9, #0e1116); color: light-dark(#1b2027, #e4e8ee); }
body { margin: 12vh auto 0; padding: 0 1rem; max-width: 28rem; font: 15px/1.5 system-ui, "DejaVu Sans", sans-serif; }
main { padding: .5rem 1.6rem; background: light-dark(#ffffff, #161b22); border: 1px solid light-dark(#d9dee4, #2b333d);
  border-radius: 8px; }
h1 { font-size: 1.5rem; }
a { color: light-dark(#0b5cd5, #6cb0ff); }
"""
_HASH = base64.b64encode(hashlib.sha256(_STYLE.encode()).digest()).decode()
_HEADERS = {
    "Cache-Control": "no-store",
    "Referrer-Policy": "no-referrer",
    "Content-Security-Policy": f"{POLICY}; style-src 'sha256-{_HASH}'",
}
# A page and no redirect: it loads / itself, so the browser sends the strict cookie wherever the link was clicked.
_REFRESH = '<meta http-equiv="refresh" content="0;url=/">'


def _page(heading: str, text: str, more: str = "") -> str:
    return (
        '<!doctype html><html lang="en"><meta charset="utf-8"><meta name="viewport" content="width=device-width">'
        f"{more}<title>Sign in · Holdfast</title><style>{_STYLE}</style><main><h1>{heading}</h1>{text}</main>"
    )


@router.post(
    "/v1/links",
    dependencies=needs("read", "none", act="link-made"),
    status_code=201,
    summary="Create a one-time sign-in link for a browser, valid for a minute",
)
def create_link(request: Request, services: Wired, response: Response) -> Link:
    """Needs a token in `Authorization`. The session has the rights of that token, and ends with it."""
    response.headers["Cache-Control"] = "no-store"
    scheme, _, token = request.headers.get("authorization", "").partition(" ")
    if scheme.lower() != "bearer" or not token.strip():
        return Link(path="/")  # without tokens every client is admitted
    return Link(path=f"{ENTER}?code={services.owner.links.offer(token.strip())}")


@router.delete(
    "/v1/links",
    dependencies=needs("read", "none", act="signed-out"),
    status_code=204,
    summary="Sign out: end the session of the requesting browser",
)
def end_session(request: Request, services: Wired) -> None:
    """A session that began with a sign-in link is accepted no more. A token stays in force."""
    bearer, cookie = request_head.bearer(request.headers.get("authorization", "")), request.headers.get("cookie", "")
    for shown in request_head.cookies(cookie) if bearer is None else [bearer]:
        services.owner.links.end(shown)


@router.get(ENTER, dependencies=needs(None, "none", act="signed-in"), include_in_schema=False)
def enter(request: Request, services: Wired, code: Annotated[str, Query(max_length=100)] = "") -> Response:
    """Exchange the code for the session's cookie."""
    try:
        session = services.owner.links.redeem(code)
        request.state.signed_in = services.tokens.verify(session).name  # for the audit log
    except Unauthenticated as error:
        hint = re.sub("`(.*?)`", r"<code>\1</code>", error.hint or "")
        text = f'<p>{error.detail.capitalize()}. {hint}.</p><p><a href="/login">Sign in with a token</a></p>'
        return HTMLResponse(_page("Not signed in", text), error.status, _HEADERS)
    answer = HTMLResponse(_page("Signed in", '<p><a href="/">To the overview</a></p>', _REFRESH), 200, _HEADERS)
    secure = services.access.tls
    answer.set_cookie(COOKIE, session, _SESSION_AGE_S, path="/", secure=secure, httponly=True, samesite="strict")
    return answer
