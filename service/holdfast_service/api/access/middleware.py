"""The door: who asks, whether that may be, and whether what comes is of a size and form to be looked at. Before every
route.

Everybody needs a token, unless it was said at the start that nobody does. A token that is shown is checked either way.
Browsers are the reason for two checks more: a page of another site may neither reach any door by a name that it had made
to point here (DNS rebinding: the Host has to be an address, `localhost`, the machine's name, or one that was allowed), nor
have the viewer's browser change anything.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from ipaddress import ip_address
from typing import Any, NamedTuple
from urllib.parse import quote, urlsplit

import anyio.to_thread
from starlette.responses import RedirectResponse, Response
from starlette.types import ASGIApp, Receive, Scope, Send

from holdfast_formats.errors import CheckpointError, DaemonGone, Denied, Forbidden, TooManyRequests, Unauthenticated
from holdfast_service.api.access import bodies, connections, request_head, scopes
from holdfast_service.api.access.audit import Footprint, Trail
from holdfast_service.api.access.lasting import Lasting, Stay
from holdfast_service.api.access.limits import Limiter
from holdfast_service.api.access.logins import Logins
from holdfast_service.api.access.places import NOBODY, Places, RequestPeer, asked_by, asking
from holdfast_service.api.access.refusals import Refusals
from holdfast_service.api.problems import problem_response
from holdfast_service.control.access.tokens import OWNER, Principal, Tokens, missing
from holdfast_service.control.database.visible import limited_to

log = logging.getLogger(__name__)

CHALLENGE = {"WWW-Authenticate": 'Bearer realm="holdfast"'}
ANYBODY = Principal("anybody here", "admin", by="anybody")
PROBE = Principal("a probe", "read", known=False, by="nobody")
THREADS_MAX = 4  # the door's own: who asks is told also while requests keep all the others busy


@dataclass(frozen=True)
class Policy:
    """Who may come in: `tokens` says whether everybody needs one, `tls` that a proxy before us speaks TLS.

    `hosts` are names beside addresses and `localhost` by which it may be asked without a token in the Authorization header.
    `logins` are the people that a proxy before us has let in.
    """

    tokens: bool = False
    tls: bool = False
    metrics_open: bool = False
    hosts: frozenset[str] = field(default_factory=frozenset)
    logins: Logins | None = None


class Doors:
    """ASGI middleware; leaves who asks in `scope["state"]["principal"]` and lets queries see that one's runs alone."""

    def __init__(self, app: ASGIApp, policy: Policy, tokens: Tokens, refusals: Refusals, trail: Trail) -> None:
        self._app, self._policy, self._tokens, self._refusals, self._trail = app, policy, tokens, refusals, trail
        self._threads = anyio.CapacityLimiter(THREADS_MAX)
        self._lasting = Lasting(tokens.in_force, tokens.sessions_in_force)
        self._limiter = Limiter()
        self._places = Places(lambda: connections.connections_max())

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        if self._policy.tls:  # else an absolute address that is made of the request would lead past TLS
            scope["scheme"] = "https"
        with ExitStack() as held:
            noted = held.enter_context(self._trail.following(scope, send))
            send = noted.send
            try:
                headers = request_head.read(scope)
                principal = await self._admit(scope, headers, noted)
                self._seat(held, principal, scope)
                if not noted.inside:  # what a page asks for is its own affair
                    self._limiter.admit(principal, scope["path"])
                    send = self._limiter.counting(principal, scope["path"], send)
                answer = partial(self._answer, headers, principal, noted)
                # What signs out is not cut by that.
                stay = Stay(principal.token, principal.session if scope["method"] in scopes.SAFE else None)
                if stay == Stay():
                    await answer(scope, receive, send)
                else:
                    await self._lasting.serve(answer, scope, receive, send, stay)
            except CheckpointError as error:
                if isinstance(error, Denied):
                    noted.deny(error)
                await (await self._refusal(scope, error))(scope, receive, send)
            except bodies.Gone:
                log.debug("%s disconnected in the middle of its request body", _peer(scope))

    async def _answer(
        self,
        headers: dict[str, str],
        principal: Principal,
        noted: Footprint,
        scope: Scope,
        receive: Receive,
        send: Send,
    ) -> None:
        """From the body on: raises errors of the door alone, the application has handlers for its own."""
        asked = await _checked_body(scope, headers, receive, principal)
        receive, principal, noted.subject = asked.receive, asked.principal, asked.subject
        scope.setdefault("state", {}).update(principal=principal, whole=noted.principal)
        with limited_to(principal.runs):
            await self._app(scope, receive, send)

    def _seat(self, held: ExitStack, principal: Principal, scope: Scope) -> None:
        """Take a place for this request; `DaemonGone` where none is left for who asks. What a page asks has the page's."""
        if asking() is not NOBODY:
            return
        first = (
            scope["path"] in scopes.PROBES
            or (principal.token is not None and principal.scope == "admin")
            or principal.by == OWNER.by
            or (principal.by == "login" and principal.scope == "admin")
        )
        name = _peer(scope) if principal.token is None else f"token {principal.token}"
        name = f"login {principal.name}" if principal.by == "login" else name  # their address is the proxy's
        name = principal.name if principal.by == OWNER.by else name  # it shares with nobody at its address
        peer = RequestPeer(f"probe {name}" if scope["path"] in scopes.PROBES else name, first)
        held.enter_context(asked_by(peer))
        if not held.enter_context(self._places.held(peer)):
            raise DaemonGone("too many requests are in progress", hint="try again in a moment")

    async def _admit(self, scope: Scope, headers: dict[str, str], noted: Footprint) -> Principal:
        method, path = scope["method"], scope["path"]
        login = self._policy.logins.read(headers, _peer(scope)) if self._policy.logins is not None else None
        if scopes.is_open(method, path) or (path == scopes.METRICS and self._policy.metrics_open and method in scopes.SAFE):
            noted.principal = principal = await self._prober(headers, _peer(scope))
            if principal in (PROBE, ANYBODY):
                self._check_host(headers)
            if method not in scopes.SAFE:  # a page of another site, or one without TLS, signs no one in
                self._check_origin(headers, told=False)
            return principal
        bearer = request_head.bearer(headers.get("authorization", ""))
        cookie = next(iter(request_head.cookies(headers.get("cookie", ""))), None) or None
        shown = cookie if bearer is None else bearer  # an empty one is shown, too: it is wrong
        if bearer is None:  # a browser adds none by itself, and nobody can make it
            self._check_host(headers)
        noted.showed = shown is not None or login is not None
        if bearer is None and login is not None:
            principal = login
        elif shown is not None:
            verify = self._tokens.verify_kept if bearer is None else self._tokens.verify
            principal = await anyio.to_thread.run_sync(verify, shown, _peer(scope), limiter=self._threads)
        elif self._policy.tokens:
            raise missing()
        else:
            principal = ANYBODY
        noted.principal = principal
        if bearer is None and method not in scopes.SAFE and asking() is NOBODY:  # what a page asks was asked for by a form
            self._check_origin(headers, told=cookie is not None or login is not None)
        principal = scopes.as_asked(principal, method, path, scope["query_string"])
        scopes.check(principal, method, path, scope["query_string"])
        return principal

    async def _prober(self, headers: dict[str, str], peer: str) -> Principal:
        """Who looks after the service's health: anybody may, and hears no more than that of it without a good token."""
        bearer = request_head.bearer(headers.get("authorization", ""))
        try:
            if bearer is not None:
                return await anyio.to_thread.run_sync(self._tokens.verify, bearer, peer, limiter=self._threads)
            if not self._policy.tokens:
                return ANYBODY
        except CheckpointError as error:
            log.debug("treated as a request without a token: %s", error.detail)
        return PROBE

    def _check_host(self, headers: dict[str, str]) -> None:
        """`Forbidden` for a name that anybody could have made to point here: a browser would take its pages for ours."""
        named = headers.get("host")
        if named is None:  # no browser
            return
        host = _host_name(named)
        if not (_is_address(host) or host == "localhost" or host.endswith(".localhost") or host in self._policy.hosts):
            hint = "use the IP address or localhost, allow the name with --allowed-hosts, or send a token"
            raise Forbidden(f"the host name {host[:80]!r} is not allowed here", hint=hint)

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
            raise Forbidden("changes must come from a page of this service", hint="use Authorization: Bearer …")

    async def _refusal(self, scope: Scope, error: CheckpointError) -> Response:
        add = partial(self._refusals.add, _peer(scope), scope["method"], scope["path"], error)
        await anyio.to_thread.run_sync(add, limiter=self._threads)
        refused = isinstance(error, Unauthenticated)
        if refused and scope["method"] == "GET" and b"text/html" in dict(scope["headers"]).get(b"accept", b""):
            wanted = scope["path"] if scope["path"] != "/" else ""
            return RedirectResponse("/login" + (f"?next={quote(wanted, safe='')}" if wanted else ""), 303)
        # What is left of a body is nobody's to wait for.
        wait = {"Retry-After": str(error.members["retry_after_s"])} if isinstance(error, TooManyRequests) else {}
        return problem_response(error, headers={"Connection": "close", **(CHALLENGE if refused else {}), **wait})


class _Asked(NamedTuple):
    """A request whose body was looked at: the body once more, who asks as it says, and what it is about."""

    receive: Receive
    principal: Principal
    subject: Mapping[str, Any] = {}


async def _checked_body(scope: Scope, headers: dict[str, str], receive: Receive, principal: Principal) -> _Asked:
    """The body, looked at by what the door takes it for; what reads it later is told that, and nothing else."""
    method, path = scope["method"], scope["path"]
    if method in scopes.SAFE:
        return _Asked(receive, principal)
    given, read = bodies.kind_of(headers.get("content-type")), scopes.body_of(method, path)
    if given is not None:
        bodies.check_kind(given, read)
    if read == bodies.OCTETS:
        _tell(scope, read)
        return _Asked(receive, principal)
    if headers.get("content-encoding", "identity").lower() != "identity":
        raise bodies.unknown("this route does not take an encoded body", "leave Content-Encoding out")
    body = await bodies.read(scope, receive)
    if not body:
        _tell(scope, None)
        return _Asked(bodies.replay(body, receive), principal)
    bodies.check_kind(given, read)
    _tell(scope, read)
    again = bodies.replay(body, receive)
    if read != bodies.JSON:
        return _Asked(again, principal)
    said = bodies.parse(body)
    principal = scopes.as_body_says(principal, method, path, said)
    scopes.check_body(principal, path, said)
    return _Asked(again, principal, said if isinstance(said, dict) else {})


def _tell(scope: Scope, kind: bodies.Kind | None) -> None:
    """Leave the one Content-Type that the framework is to read a body by, and for the route what it was taken for."""
    others = [(name, value) for name, value in scope["headers"] if name != b"content-type"]
    scope["headers"] = others if kind is None else [*others, (b"content-type", bodies.media_type(kind).encode())]
    scope.setdefault("state", {})["body"] = kind


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
