"""Authenticates a request: by a token, a browser's session, the headers of a login proxy, or as the policy allows.

Two more checks protect browsers: a page of another site may neither reach the service by a name that its owner pointed here
(DNS rebinding: the Host must be an address, `localhost`, the machine's name, or an allowed one), nor make the viewer's
browser change anything.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from ipaddress import ip_address
from urllib.parse import urlsplit

import anyio
import anyio.to_thread
from starlette.types import Scope

from holdfast_formats.errors import CheckpointError, Forbidden
from holdfast_service.api.access import request_head
from holdfast_service.api.access.audit import RequestRecord
from holdfast_service.api.access.authorization import SAFE
from holdfast_service.api.access.logins import Logins
from holdfast_service.control.access.tokens import Principal, Tokens, missing

log = logging.getLogger(__name__)

METRICS = "/metrics"
ANYBODY = Principal("anybody here", "admin", by="anybody")
PROBE = Principal("a probe", "read", known=False, by="nobody")
Headers = Mapping[str, str]


@dataclass(frozen=True)
class Policy:
    """Which requests may come in: `tokens`: they all need one; `tls`: a proxy in front terminates TLS.

    `hosts` are names, besides addresses and `localhost`, that may be used without a token in the Authorization header.
    `logins` are the people that a proxy in front authenticates.
    """

    tokens: bool = False
    tls: bool = False
    metrics_open: bool = False
    hosts: frozenset[str] = field(default_factory=frozenset)
    logins: Logins | None = None


class Authentication:
    """Finds the principal of a request, with all of its rights. A token is checked even where none is needed."""

    def __init__(self, policy: Policy, tokens: Tokens, threads: anyio.CapacityLimiter) -> None:
        self._policy, self._tokens, self._threads = policy, tokens, threads

    async def principal(self, scope: Scope, headers: Headers, record: RequestRecord) -> Principal:
        """Raises `Unauthenticated`, `Forbidden` and `InvalidRequest`, with what was found until then in the record."""
        safe, policy = scope["method"] in SAFE, self._policy
        login = None if policy.logins is None else policy.logins.read(headers, peer_of(scope))
        if record.required.needs.scope is None or (scope["path"] == METRICS and policy.metrics_open and safe):
            record.principal = principal = await self._of_open_route(headers, peer_of(scope))
            if principal in (PROBE, ANYBODY):
                self._check_host(headers)
            if not safe:  # a page of another site, or one without TLS, signs no one in
                self._check_origin(headers, required=False)
            return principal
        bearer = request_head.bearer(headers.get("authorization", ""))
        cookie = next(iter(request_head.cookies(headers.get("cookie", ""))), None) or None
        shown = cookie if bearer is None else bearer  # an empty one is shown, too: it is wrong
        if bearer is None:  # a browser adds none by itself, and no page can make it
            self._check_host(headers)
        record.showed = shown is not None or login is not None
        if bearer is None and login is not None:
            principal = login
        elif shown is not None:
            verify = self._tokens.verify_kept if bearer is None else self._tokens.verify
            principal = await anyio.to_thread.run_sync(verify, shown, peer_of(scope), limiter=self._threads)
        elif policy.tokens:
            raise missing()
        else:
            principal = ANYBODY
        record.principal = principal
        if bearer is None and not safe and not record.inside:  # an API request of a page was caused by a form
            self._check_origin(headers, required=cookie is not None or login is not None)
        return principal

    async def _of_open_route(self, headers: Headers, peer: str) -> Principal:
        """Without a valid token, a principal that sees only whether the service is well."""
        bearer = request_head.bearer(headers.get("authorization", ""))
        try:
            if bearer is not None:
                return await anyio.to_thread.run_sync(self._tokens.verify, bearer, peer, limiter=self._threads)
            if not self._policy.tokens:
                return ANYBODY
        except CheckpointError as error:
            log.debug("treated as a request without a token: %s", error.detail)
        return PROBE

    def _check_host(self, headers: Headers) -> None:
        """`Forbidden` for a name that any site could have pointed here: a browser would take this service's pages for the
        site's.
        """
        named = headers.get("host")
        if named is None:  # no browser
            return
        host = _host_name(named)
        if not (_is_address(host) or host == "localhost" or host.endswith(".localhost") or host in self._policy.hosts):
            hint = "use the IP address or localhost, allow the name with --allowed-hosts, or send a token"
            raise Forbidden(f"the host name {host[:80]!r} is not allowed here", hint=hint)

    def _check_origin(self, headers: Headers, required: bool) -> None:
        """`Forbidden` for a change caused by a page of another site; `required`: also without a header about it."""
        site, origin = headers.get("sec-fetch-site"), headers.get("origin")
        if site is None and origin is None and not required:
            return  # no browser
        schemes = ("https",) if self._policy.tls else ("http", "https")
        parts = urlsplit(origin) if origin else None
        same = parts is not None and parts.scheme in schemes and parts.netloc.lower() == headers.get("host", "").lower()
        if (
            (site is not None and site not in ("same-origin", "none"))
            or (origin is not None and not same)
            or not (site or origin)
        ):
            raise Forbidden(
                "requests that change something must come from a page of this service", hint="use Authorization: Bearer …"
            )


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


def peer_of(scope: Scope) -> str:
    client = scope.get("client")
    return client[0] if client else "unknown"
