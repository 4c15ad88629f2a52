"""What each route needs, declared where the route is defined: scope, runs, body and its name in the audit log.

The middleware finds the declaration by method and path, and checks it before the body is read and after it is parsed. The
route checks it again on the framework's parsed request, so a request that gets past one check meets the other. A route
without a declaration prevents the start. A path without a route needs an admin, except for reading.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple, get_args
from urllib.parse import parse_qs

from fastapi import Depends, Request
from fastapi.routing import APIRoute, RouteContext, iter_route_contexts
from starlette.routing import BaseRoute

from holdfast_formats.errors import NoSuchRun
from holdfast_formats.rest.access import AUDITED
from holdfast_formats.rest.operations import Scope
from holdfast_service.api.access import bodies
from holdfast_service.control.access.tokens import Principal

# Which runs a route is about. seen: the one that its path names, or else those that the caller may see, as the catalog says.
# rank: the rank's, and job: the job's; the body names it, or the route finds out. all: everything. none: no run.
# health: no run, and asked by probes. viewer: those of the API requests that a page sends in its viewer's name.
Runs = Literal["seen", "rank", "job", "all", "none", "health", "viewer"]

API = "/v1/"
SAFE = frozenset({"GET", "HEAD", "OPTIONS"})
SCOPE_EXTENSION = "x-scope"  # of an operation in the API's description: read, write or admin; none where no token is needed
_SCOPES: tuple[Scope, ...] = get_args(Scope)  # each may what those before it may
_ADMIN_JOBS = frozenset({"rebuild", "import", "export", "merge"})  # they change the catalog, or files that no run has
_RUN_JOBS = frozenset({"verify", "scrub"})  # they are about the run that they name, and nothing else


@dataclass(frozen=True)
class Needs:
    """The declaration of a route. `scope` None: no token is needed. `act`: its kind in the audit log, if it is recorded."""

    scope: Scope | None
    runs: Runs = "seen"
    body: bodies.Kind = bodies.JSON
    act: str | None = None

    def __post_init__(self) -> None:
        if self.act is not None and self.act not in AUDITED:
            raise TypeError(f"the act {self.act!r} is not described in AUDITED")

    @property
    def limited(self) -> bool:
        """Whether the limits of tokens apply. Saves and restores of ranks are never limited."""
        return self.runs not in ("rank", "health")

    def check_before_body(self, principal: Principal, safe: bool, run: str | None) -> None:
        """`Forbidden`, or `NoSuchRun` for reading a run that the caller may not see; `run` is that of the path."""
        if self.scope is not None:
            principal.require(self.scope)
        if self.runs == "all":
            principal.require_run(None)
        if run is not None and self.runs != "viewer":
            check_run(principal, safe, run)

    async def check_in_route(self, request: Request) -> None:
        """The check of the framework's request, and `InvalidRequest` where the body is of another kind."""
        principal = request.state.principal
        assert isinstance(principal, Principal)
        self.check_before_body(principal, request.method in SAFE, request.path_params.get("run"))
        given = getattr(request.state, "body", None)  # what the middleware has taken the body for; None: there is none
        if given is not None:
            bodies.check_kind(given, self.body)


def needs(scope: Scope | None, runs: Runs = "seen", body: bodies.Kind = bodies.JSON, act: str | None = None) -> list[Any]:
    """A declaration, as the `dependencies` of a route."""
    return [Depends(Needs(scope, runs, body, act).check_in_route)]


class Required(NamedTuple):
    """What one request needs: a declaration, and what the request's path and query name."""

    needs: Needs
    safe: bool
    path: Mapping[str, str]  # the parameters of the path
    queried: Sequence[str]  # runs

    @property
    def run(self) -> str | None:
        return self.path.get("run") if self.needs.runs != "viewer" else None

    def counted(self, whole: Principal) -> Principal:
        """This principal's rights that count in this request, before its body is known."""
        return whole.for_request(self.needs.scope or "read", [*self.queried, *([self.run] if self.run is not None else [])])

    def check(self, principal: Principal) -> None:
        """Before the body: `Forbidden` or `NoSuchRun`."""
        if self.needs.scope is None:
            return
        self.needs.check_before_body(principal, self.safe, self.run)
        for run in self.queried:
            check_run(principal, self.safe, run)

    def check_body(self, whole: Principal, body: Any) -> Principal:
        """After the body was parsed: the rights that count for the run that it names. `Forbidden`."""
        if not isinstance(body, dict):
            return whole
        run, kind = (value if isinstance(value := body.get(name), str) else None for name in ("run", "kind"))
        is_job = self.needs.runs == "job"
        if run is None and not is_job:
            return whole
        about = run if not is_job or kind in _RUN_JOBS else None
        principal = whole.for_request(self.needs.scope or "read", [about])
        if is_job:
            check_job(principal, kind, run)
        else:
            principal.require_run(run)
        return principal


def check_run(principal: Principal, safe: bool, run: str) -> None:
    """`Forbidden`, or for reading `NoSuchRun`, so that callers cannot find out which runs others have."""
    if not safe:
        principal.require_run(run)
    elif not principal.sees(run):
        raise NoSuchRun(f"the run {run!r} does not exist", hint="`holdfast ls` lists the runs")


def check_job(principal: Principal, kind: str | None, run: str | None) -> None:
    """`Forbidden` unless the principal may submit such a job, and so cancel it."""
    if kind in _ADMIN_JOBS:
        principal.require("admin")
    principal.require_run(run if kind in _RUN_JOBS else None)


class Declarations:
    """The declarations of all routes of an application; `TypeError` names a route that has none, or contradicts it."""

    def __init__(self, routes: Sequence[BaseRoute]) -> None:
        self._routes: list[tuple[frozenset[str], re.Pattern[str], Needs]] = []
        for route in iter_route_contexts(routes):
            methods = frozenset(route.methods or ())
            if isinstance(route.original_route, APIRoute):
                declared = _declared(route)
                route.original_route.openapi_extra = {} if declared.scope is None else {SCOPE_EXTENSION: declared.scope}
                self._routes.append((methods, route.path_regex, declared))
            elif not methods <= SAFE:
                raise TypeError(f"{route.path} changes something and does not declare what it needs")

    def of(self, method: str, path: str, query: bytes) -> Required:
        """What a request needs: the declaration of its route. Without one, the largest of those that read (or change)
        something at this path, or else `read` for reading, and an admin for anything else of the API.
        """
        safe = method in SAFE
        others: list[Required] = []
        queried = parse_qs(query.decode("latin-1"), keep_blank_values=True).get("run", [])
        for methods, pattern, declared in self._routes:
            found = pattern.match(path)
            if found is None:
                continue
            required = Required(declared, safe, found.groupdict(), queried)
            if method in methods:
                return required
            if (not methods.isdisjoint(SAFE)) == safe:
                others.append(required)
        if others:
            largest = max(others, key=lambda one: -1 if one.needs.scope is None else _SCOPES.index(one.needs.scope))
            return largest._replace(needs=replace(largest.needs, act=None))
        return Required(_unserved(safe, path), safe, {}, queried)

    def methods(self, path: str) -> list[str]:
        """The methods of a path, of all its routes."""
        return sorted({method for methods, pattern, _ in self._routes if pattern.match(path) for method in methods})


def _unserved(safe: bool, path: str) -> Needs:
    if path.startswith(API):
        return Needs("read") if safe else Needs("admin", "all")
    return Needs("read", "viewer", bodies.FORM)


def _declared(route: RouteContext) -> Needs:
    found = [of for one in route.dependencies if isinstance(of := getattr(one.dependency, "__self__", None), Needs)]
    path = str(route.path)
    if len(found) != 1:
        raise TypeError(f"{path} has {len(found)} declarations of what it needs, not one: add `dependencies=needs(…)`")
    declared = found[0]
    if route.body_field is not None and declared.body != bodies.JSON:
        raise TypeError(f"{path} reads JSON and declares {declared.body}")
    return declared
