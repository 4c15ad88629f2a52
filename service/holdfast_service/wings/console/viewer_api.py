"""Calls the public API for the pages: through the app itself, with the viewer's own token, typed by the formats."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable
from dataclasses import dataclass
from functools import lru_cache
from typing import Annotated, Any, Generic, TypeVar
from urllib.parse import quote

import httpx
from fastapi import Depends, Request
from pydantic import BaseModel

from holdfast_formats.errors import CheckpointError, NotFound, from_problem
from holdfast_formats.rest import bodies
from holdfast_formats.rest.columns import Listing
from holdfast_formats.rest.jobs import JobRequest
from holdfast_formats.rest.operations import Job

COOKIE = "holdfast_token"
LIMIT_MAX = 1000  # of a page of the API
_OF_A_LOGIN = (b"x-forwarded-", b"x-auth-request-", b"x-holdfast-proxy-")  # headers by which a proxy names the user
QUOTED_KEPT = 4096
AT_ONCE = 8  # concurrent requests for one page

Model = TypeVar("Model", bound=BaseModel)
Value = TypeVar("Value")


class SignInNeeded(Exception):
    """The API requires a valid token; the viewer is sent to /login."""


@dataclass(frozen=True)
class PagePart(Generic[Value]):
    """A part of a page: its value, or why there is none. `absent`: this service does not have it at all.

    No NamedTuple: before Python 3.11 these cannot be generic.
    """

    value: Value | None
    error: CheckpointError | None = None

    @property
    def absent(self) -> bool:
        return isinstance(self.error, NotFound)


class ViewerApi:
    """The API, called as one viewer. Errors of the API are raised as their own classes, 401 as `SignInNeeded`."""

    def __init__(self, client: httpx.AsyncClient) -> None:
        self._client = client
        self._turns = asyncio.Semaphore(AT_ONCE)

    async def request(
        self, method: str, path: str, *, headers: dict[str, str] | None = None, body: BaseModel | None = None, **params: Any
    ) -> httpx.Response:
        """One request, without empty parameters. Raises the API's errors, and `SignInNeeded`."""
        query = {name: value for name, value in params.items() if value is not None and value != ""}
        content = None if body is None else body.model_dump_json().encode()
        sent = dict(headers or {}) | ({} if body is None else {"Content-Type": "application/json"})
        async with self._turns:
            answer = await self._client.request(method, path, params=query, headers=sent, content=content)
        if answer.status_code == 401:
            raise SignInNeeded
        if answer.status_code >= 400:
            raise _error(answer)
        return answer

    async def submit(self, wanted: JobRequest) -> str:
        """Submit a job; the address of its page."""
        answer = await self.request("POST", "/v1/jobs", body=wanted)
        return f"/jobs/{Job.model_validate_json(answer.content).id}"

    async def get(self, model: type[Model], path: str, **params: Any) -> Model:
        answer = await self.request("GET", path, headers={"Accept": "application/json"}, **params)
        return model.model_validate_json(answer.content)

    async def page(self, model: type[Model], path: str, **params: Any) -> bodies.Page[Model]:
        return await self.get(bodies.Page[model], path, **params)  # type: ignore[valid-type]

    async def walk(self, model: type[Model], path: str, most: int, **params: Any) -> tuple[list[Model], bool]:
        """Up to `most` items of a list, page by page; True if these are all."""
        items: list[Model] = []
        cursor = None
        while True:
            page = await self.page(model, path, cursor=cursor, limit=min(LIMIT_MAX, most - len(items)), **params)
            items += page.items
            cursor = page.next
            if cursor is None or len(items) >= most:
                return items, cursor is None


async def shown(asked: Awaitable[Value]) -> PagePart[Value]:
    """A request's result as a part of a page; an error becomes its text, and does not end the page."""
    try:
        return PagePart(await asked)
    except CheckpointError as error:
        return PagePart(None, error)


async def listed(
    api: ViewerApi, model: type[Model], listing: Listing[Any], cursor: str | None, limit: int, **asked: str
) -> dict[str, Any]:
    """What a page shows of a list that the API filters: values for its template."""
    found = await shown(api.page(model, listing.path, cursor=cursor, limit=limit, **asked))
    part = found.value or bodies.Page[Any](items=[])
    more = {"first": cursor is None, "asked": asked, "listing": listing}
    return {"found": found, "listed": part.items, "next": part.next, **more}


def at(run: str, step: int | str | None = None, *more: str) -> str:
    """The API's path of a run, or of a checkpoint and its parts."""
    parts = [run] + ([] if step is None else ["checkpoints", str(step)]) + list(more)
    return "/v1/runs/" + "/".join(_quoted(part) for part in parts)


@lru_cache(QUOTED_KEPT)  # an overview builds the same few hundred paths every other second
def _quoted(part: str) -> str:
    return quote(part, safe="")


def to(run: str, step: int | str | None = None, *more: str) -> str:
    """The page of the same run or checkpoint as `at`."""
    return at(run, step, *more).removeprefix("/v1")


async def _api(request: Request) -> AsyncIterator[ViewerApi]:
    # The peer's address and the requested host are passed on, so the API's access checks see the original ones.
    peer = request.client or ("127.0.0.1", 0)
    transport = httpx.ASGITransport(request.app, raise_app_exceptions=False, client=(peer[0], peer[1]))
    base = f"{request.url.scheme}://{request.url.netloc}"
    async with httpx.AsyncClient(transport=transport, base_url=base, headers=_as_viewer(request), trust_env=False) as client:
        yield ViewerApi(client)


def _as_viewer(request: Request) -> dict[bytes, bytes]:
    """The headers that identify the user, as raw bytes, because a person's name is UTF-8 in them."""
    if getattr(getattr(request.state, "principal", None), "by", "") == "login":
        return {name: value for name, value in request.headers.raw if name.startswith(_OF_A_LOGIN)}
    given = request.headers.get("authorization")
    token = request.cookies.get(COOKIE)
    if given is None and token and token.isascii() and token.isprintable():
        given = f"Bearer {token}"
    return {} if given is None else {b"Authorization": given.encode("latin-1")}


def _error(answer: httpx.Response) -> CheckpointError:
    try:
        problem = answer.json()
    except ValueError:
        problem = None
    if not isinstance(problem, dict):
        problem = {"detail": f"the service answered {answer.status_code}"}
    return from_problem(problem)


Asked = Annotated[ViewerApi, Depends(_api)]
