"""Routes: bearer tokens, for admins of all runs."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Path
from starlette.responses import Response

from holdfast_formats.rest import bodies, operations
from holdfast_service.api import problems
from holdfast_service.api.access.authorization import needs
from holdfast_service.api.services import Cursor, Limit, Wired

router = APIRouter(prefix="/v1", tags=["tokens"], responses=problems.RESPONSES)


@router.get("/tokens", dependencies=needs("admin", "all"), summary="Tokens, newest first, without their text")
def list_tokens(services: Wired, cursor: Cursor = None, limit: Limit = 100) -> bodies.Page[operations.Token]:
    return services.tokens.page(cursor, limit)


@router.post(
    "/tokens",
    dependencies=needs("admin", "all", act="token-created"),
    status_code=201,
    summary="Create a token; its text is only in this response",
)
def create_token(services: Wired, wanted: operations.TokenRequest, response: Response) -> operations.NewToken:
    response.headers["Cache-Control"] = "no-store"
    return services.tokens.create(wanted)


@router.post(
    "/tokens/{name}/rotate",
    dependencies=needs("admin", "all", act="token-rotated"),
    status_code=201,
    summary="Give a token a new secret; the old one works for a while longer",
)
def rotate_token(
    services: Wired,
    name: Annotated[str, Path(max_length=63)],
    wanted: operations.RotationRequest,
    response: Response,
) -> operations.NewToken:
    """Name, scope, runs and limits stay. The old secret ends after `grace_s`, which is a day unless you say otherwise."""
    response.headers["Cache-Control"] = "no-store"
    return services.tokens.rotate(name, wanted)


@router.delete(
    "/tokens/{name}",
    dependencies=needs("admin", "all", act="token-revoked"),
    status_code=204,
    summary="Revoke a token with all its secrets, immediately and permanently",
)
def revoke_token(services: Wired, name: Annotated[str, Path(max_length=63)]) -> None:
    services.tokens.revoke(name)
