"""The door: who asks, whether that may be, and whether what comes is of a size and form to be looked at. Before every
route.

On a loopback address nobody needs a token; elsewhere everybody does. A token that is shown is checked either way.
Browsers are the reason for two checks more: a page of another site may neither reach an open door by a name that it had
made to point here (DNS rebinding: the Host has to be an address, `localhost`, or a name that was allowed), nor have the
viewer's browser change anything.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from ipaddress import ip_address
from urllib.parse import quote, urlsplit

from starlette.concurrency import run_in_threadpool
from starlette.responses import RedirectResponse, Response
from starlette.types import ASGIApp, Receive, Scope, Send

from holdfast_formats.errors import CheckpointError, Forbidden, InvalidRequest, Unauthenticated
from holdfast_service.control.tokens import Principal, Tokens, missing
from holdfast_service.control.visible import limited_to

from . import bodies, rights
from .problems import problem_response
from .refusals import Refusals

log = logging.getLogger(__name__)

COOKIE = "holdfast_token"
CHALLENGE = {"WWW-Authenticate": 'Bearer realm="holdfast"'}
ANYBODY = Principal("anybody here", "admin")
PROBE = Principal("a probe", "read")


@dataclass(frozen=True)
class Policy:
    """Who may come in: `tokens` says whether everybody needs one, `tls` that a proxy before us speaks TLS.

    `hosts` are names beside addresses and `localhost` by which an open door may be asked; None: by any name.
    """

    tokens: bool = False
    tls: bool = False
    metrics_open: bool = False
    hosts: frozenset[str] | None = field(default_factory=frozenset)


class Doors:
    """ASGI middleware; leaves who asks in `scope["state"]["principal"]` and lets queries see that one's runs alone."""

    def __init__(self, app: ASGIApp, policy: Policy, tokens: Tokens, refusals: Refusals) -> None:
        self._app, self._policy, self._tokens, self._refusals = app, policy, tokens, refusals

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        try:
            principal = await self._admit(scope)
            receive = await _checked_body(scope, receive, principal)
        except CheckpointError as error:
            await (await self._refusal(scope, error))(scope, receive, send)
            return
        except bodies.Gone:
            log.debug("%s hung up in the middle of its body", _peer(scope))
            return
        scope.setdefault("state", {})["principal"] = principal
        with limited_to(principal.runs):
            await self._app(scope, receive, send)

    async def _admit(self, scope: Scope) -> Principal:
        method, path = scope["method"], scope["path"]
        headers = _headers(scope)
        if rights.is_open(method, path) or (path == rights.METRICS and self._policy.metrics_open and method in rights.SAFE):
            return PROBE
        bearer, cookie = _bearer(headers.get("authorization", "")), _cookie(headers.get("cookie", ""))
        shown = bearer or cookie
        if shown is not None:
            principal = await run_in_threadpool(self._tokens.verify, shown)
        elif self._policy.tokens:
            raise missing()
        else:
            self._check_host(headers)
            principal = ANYBODY
        if bearer is None and method not in rights.SAFE:
            self._check_origin(headers, told=cookie is not None)
        rights.check(principal, method, path, scope["query_string"])
        return principal

    def _check_host(self, headers: dict[str, str]) -> None:
        """`Forbidden` when an open door is asked by a name that anybody could have made to point here."""
        named = headers.get("host")
        if self._policy.hosts is None or named is None:
            return
        host = _host_name(named)
        if not (_is_address(host) or host == "localhost" or host.endswith(".localhost") or host in self._policy.hosts):
            hint = "ask by address or as localhost, allow the name with --allowed-hosts, or show a token"
            raise Forbidden(f"this door is not known as {host[:80]!r}", hint=hint)

    def _check_origin(self, headers: dict[str, str], told: bool) -> None:
        """`Forbidden` when a page of another site is behind a change; `told`: when the browser does not say that none is."""
        site, origin = headers.get("sec-fetch-site"), headers.get("origin")
        if site is None and origin is None and not told:
            return  # no browser
        schemes = ("https",) if self._policy.tls else ("http", "https")
        found = urlsplit(origin) if origin else None
        same = found is not None and found.scheme in schemes and found.netloc.lower() == headers.get("host", "").lower()
        if (
            (site is not None and site not in ("same-origin", "none"))
            or (origin is not None and not same)
            or not (site or origin)
        ):
            raise Forbidden("changes have to come from a page of this service", hint="use Authorization: Bearer …")

    async def _refusal(self, scope: Scope, error: CheckpointError) -> Response:
        await run_in_threadpool(self._refusals.add, _peer(scope), scope["method"], scope["path"], error)
        refused = isinstance(error, Unauthenticated)
        if refused and scope["method"] == "GET" and "text/html" in _headers(scope).get("accept", ""):
            wanted = scope["path"] if scope["path"] != "/" else ""
            return RedirectResponse("/login" + (f"?next={quote(wanted, safe='')}" if wanted else ""), 303)
        # What is left of a body is nobody's to wait for.
        return problem_response(error, headers={"Connection": "close", **(CHALLENGE if refused else {})})


async def _checked_body(scope: Scope, receive: Receive, principal: Principal) -> Receive:
    method, path = scope["method"], scope["path"]
    if method in rights.SAFE or (method == "PUT" and rights.CHUNK.fullmatch(path)):
        return receive
    body = await bodies.read(scope, receive)
    if body and not _headers(scope).get("content-type", "").startswith("application/x-www-form-urlencoded"):
        rights.check_body(principal, path, bodies.parse(body))
    elif path == rights.JOBS and not principal.sees_all:
        raise InvalidRequest("a job is asked for in JSON")
    return bodies.replay(body, receive)


def _headers(scope: Scope) -> dict[str, str]:
    return {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}


def _bearer(text: str) -> str | None:
    scheme, _, token = text.partition(" ")
    return token.strip() if scheme.lower() == "bearer" else None


def _cookie(text: str) -> str | None:
    pairs = (part.strip().partition("=") for part in text.split(";"))
    return next((value for name, _, value in pairs if name == COOKIE and value), None)


def _host_name(named: str) -> str:
    """Without its port: `[::1]:80` -> ::1."""
    if named.startswith("["):
        return named[1:].partition("]")[0].lower()
    return named.partition(":")[0].lower().rstrip(".")


def _is_address(host: str) -> bool:
    try:
        ip_address(host)
    except ValueError:
        return False
    return True


def _peer(scope: Scope) -> str:
    client = scope.get("client")
    return client[0] if client else "somebody"
