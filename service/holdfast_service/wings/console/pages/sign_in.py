"""Sign-in for browsers: a token, kept in a cookie that no script can read and no other site can send."""

from __future__ import annotations

from contextlib import suppress
from typing import Annotated

import httpx
from fastapi import Query, Request
from starlette.responses import Response

from holdfast_formats.errors import CheckpointError
from holdfast_formats.rest.access import Whoami
from holdfast_service.wings.console.rendering import page, see, viewer_of
from holdfast_service.wings.console.routing import Posted, page_router
from holdfast_service.wings.console.viewer_api import COOKIE, Asked, SignInNeeded, ViewerApi

router, sign_in_router = page_router(), page_router()  # the second needs no token

COOKIE_AGE_S = 30 * 86_400
TOKEN_CHARACTERS_MAX = 512


@sign_in_router.get("/login")
async def show_sign_in(request: Request, api: Asked, next: Annotated[str, Query(max_length=2000)] = "/") -> Response:
    return page(request, "login.html", next=next, refused=False, open_to_all=await _who(api, None) is not None)


@sign_in_router.post("/login")
async def sign_in(request: Request, api: Asked, form: Posted) -> Response:
    """Store a token that the API accepts in the cookie."""
    token = form.text("token")
    fits = 0 < len(token) <= TOKEN_CHARACTERS_MAX and token.isascii() and token.isprintable()
    who = await _who(api, token) if fits else None
    if who is None:
        return page(request, "login.html", 401, next=form.text("next"), refused=True, open_to_all=False)
    request.state.signed_in = who.name  # for the audit log
    answer = see(_own(form.text("next")), "signed-in")
    secure = request.url.scheme == "https" or bool(getattr(request.app.state, "behind_tls", False))
    answer.set_cookie(COOKIE, token, COOKIE_AGE_S, path="/", secure=secure, httponly=True, samesite="strict")
    return answer


@router.post("/logout")
async def sign_out(request: Request, api: Asked, _: Posted) -> Response:
    """End the session and delete the cookie; for a proxy login, redirect to the proxy's logout."""
    with suppress(CheckpointError, SignInNeeded):  # it has ended by itself
        await api.request("DELETE", "/v1/links")
    viewer, logout = viewer_of(request), getattr(request.app.state, "logout", None)
    answer = see(logout if logout is not None and viewer is not None and viewer.by == "login" else "/login")
    answer.delete_cookie(COOKIE, path="/", httponly=True, samesite="strict")
    return answer


async def _who(api: ViewerApi, token: str | None) -> Whoami | None:
    """The identity of this token, or of a request without one; None if the API refuses it."""
    headers: dict[str, str] = {"Authorization": f"Bearer {token}"} if token else {"Authorization": ""}
    try:
        answer: httpx.Response = await api.request("GET", "/v1/whoami", headers=headers)
    except SignInNeeded:
        return None
    return Whoami.model_validate_json(answer.content)


def _own(path: str) -> str:
    """A path of this service, whatever a link contains: an address elsewhere begins with

    or a scheme.
    """
    inside = path.startswith("/") and not path.startswith(("//", "/\\")) and path.isprintable()
    return path if inside else "/"
