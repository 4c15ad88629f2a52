"""Turn errors into RFC 9457 problems. Unexpected errors are logged with an ID and their cause is not sent."""

from __future__ import annotations

import logging
import uuid
from collections.abc import Mapping
from typing import Any

from fastapi import Request
from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse, Response

from holdfast_formats.body import first_mistake
from holdfast_formats.errors import CheckpointError, Damaged, InvalidRequest, NoSuchResource, Unavailable
from holdfast_service.api.read_protection import met
from holdfast_service.wing import absent, installed

log = logging.getLogger(__name__)

MEDIA_TYPE = "application/problem+json"
MESSAGE_MAX = 500


class Problem(BaseModel):
    """RFC 9457. Members beyond these depend on the code, such as `file`, `tensor`, `offset` and `length` of damage."""

    type: str
    title: str
    status: int
    detail: str
    code: str
    retryable: bool
    hint: str


_DESCRIBED: dict[str, Any] = {
    "description": "A problem: `code` identifies it, `hint` is the remedy, `retryable` is true if a retry may succeed",
    "content": {MEDIA_TYPE: {"schema": {"$ref": "#/components/schemas/Problem"}}},
    "model": Problem,
}
# 422 replaces FastAPI's own description: a request that does not validate is answered with invalid-request, 400.
RESPONSES: dict[int | str, dict[str, Any]] = {"default": _DESCRIBED, 422: _DESCRIBED}


class TransferAborted(Exception):
    """A response fails after its first bytes were sent, so the connection is cut. The raiser has logged the cause; the
    server logs nothing more.
    """


def problem_response(error: CheckpointError, status: int = 0, headers: Mapping[str, str] | None = None) -> JSONResponse:
    """The response for this error, with its own status unless HTTP has a more precise one."""
    body = error.problem()
    body["status"] = status or error.members.get("status", error.status)
    return JSONResponse(body, body["status"], dict(headers or {}), MEDIA_TYPE)


async def _ours(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, CheckpointError)
    if isinstance(error, Damaged):
        met(error)
    if error.status >= 500:  # a dropped save, or a disk that is full, is no mistake of the program
        level = logging.WARNING if isinstance(error, Unavailable) else logging.ERROR
        log.log(level, "%s %s: %s", request.method, request.url.path, error)
    return problem_response(error)


async def _invalid(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, RequestValidationError)
    what = first_mistake(error)[:MESSAGE_MAX]  # which may quote the body
    return problem_response(InvalidRequest(what, hint="/openapi.json describes every parameter"))


async def _http(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    if error.status_code == 404:
        missing = f"the path {request.url.path} does not exist"
        page = next((wing.problem_page for wing in installed() if wing.problem_page is not None), None)
        is_browser = not request.url.path.startswith("/v1/") and "text/html" in request.headers.get("accept", "")
        if page is not None and is_browser:
            return page(request, NoSuchResource(missing, hint="go to the overview, or search for a run by name"))
        wings = ", ".join(absent())
        lacks = f"; the wings {wings} are not installed" if wings else ""
        return problem_response(NoSuchResource(missing, hint=f"/openapi.json lists every route{lacks}"))
    refused = InvalidRequest(f"{request.method} {request.url.path}: {error.detail}", hint="/openapi.json lists every route")
    headers = dict(error.headers or {})
    if error.status_code == 405:
        headers["Allow"] = ", ".join(request.app.state.declarations.methods(request.url.path))
    return problem_response(refused, error.status_code, headers)


async def _unknown(request: Request, error: Exception) -> JSONResponse:
    reference = uuid.uuid4().hex
    if not isinstance(error, TransferAborted):
        log.error("%s %s failed, reference %s", request.method, request.url.path, reference, exc_info=error)
    hint = "search the service's log for this reference to find the cause"
    return problem_response(CheckpointError(f"internal error, reference {reference}", hint=hint, reference=reference))


HANDLERS: dict[Any, Any] = {
    CheckpointError: _ours,
    RequestValidationError: _invalid,
    HTTPException: _http,
    Exception: _unknown,
}
