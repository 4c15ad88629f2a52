"""Tokens. The text of a new one is shown once, in the response to its creation."""

from __future__ import annotations

from urllib.parse import quote

from fastapi import Request
from starlette.responses import Response

from holdfast_formats.rest import lists
from holdfast_formats.rest.operations import NewToken, RotationRequest, Token, TokenRequest
from holdfast_formats.timestamps import utc_now
from holdfast_service.wings.console.rendering import page, see
from holdfast_service.wings.console.routing import Form, Posted, filled, page_router
from holdfast_service.wings.console.viewer_api import Asked, ViewerApi, listed

router = page_router()

TOKENS_SHOWN = 50
SCOPES = {
    "read": "read everything and restore",
    "write": "save, pin, label, submit jobs",
    "admin": "remove, set policies, create tokens",
}
DAY_S = 86_400


@router.get("/tokens")
async def show_tokens(request: Request, api: Asked, cursor: str | None = None) -> Response:
    return await _page(request, api, cursor, None)


@router.post("/tokens")
async def make_token(request: Request, api: Asked, form: Posted) -> Response:
    """Make a token. The response is not a redirect, because the text would be lost."""
    answer = await api.request("POST", "/v1/tokens", body=_wanted(form))
    return await _page(request, api, None, NewToken.model_validate_json(answer.content))


@router.post("/tokens/{name}/rotate")
async def rotate(request: Request, api: Asked, name: str, _: Posted) -> Response:
    """Give a token a new secret, which is shown once; the old one is accepted for a day."""
    answer = await api.request("POST", f"/v1/tokens/{quote(name, safe='')}/rotate", body=RotationRequest())
    return await _page(request, api, None, NewToken.model_validate_json(answer.content))


@router.post("/tokens/{name}/revoke")
async def revoke(api: Asked, name: str, _: Posted) -> Response:
    await api.request("DELETE", f"/v1/tokens/{quote(name, safe='')}")
    return see("/tokens", "revoked")


def _wanted(form: Form) -> TokenRequest:
    days = form.number("days")
    limits = {name: form.number(name) for name in ("requests_per_s", "bytes_per_s")}
    fields = {"name": form.text("name"), "scope": form.text("scope") or "read", "runs": form.text("runs") or "*"}
    wanted = {**fields, **limits, "expires_s": None if days is None else days * DAY_S}
    return filled(TokenRequest, wanted, hint="a name has letters, digits, dots and dashes")


async def _page(request: Request, api: ViewerApi, cursor: str | None, new_token: NewToken | None) -> Response:
    tokens = await listed(api, Token, lists.TOKENS, cursor, TOKENS_SHOWN)
    return page(request, "tokens.html", made=new_token, scopes=SCOPES, now=utc_now(), **tokens)
