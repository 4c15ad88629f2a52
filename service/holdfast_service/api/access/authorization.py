"""What a route needs, declared on the route and checked there once more: how large a scope, which runs, what kind of body.

The door judges by method and path before anything is read, and so closes what nobody thought of; this judges what the
framework has made of the request. What gets past one of them meets the other. A route that declares nothing, or
something else than the door believes, keeps the service from starting.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from fastapi import Depends, Request
from fastapi.routing import APIRoute, RouteContext, iter_route_contexts
from starlette.routing import BaseRoute

from holdfast_formats.errors import NoSuchRun
from holdfast_formats.rest.operations import Scope
from holdfast_service.api.access import bodies, scopes
from holdfast_service.control.access.tokens import Principal

# path: the run of the path. seen: whatever runs the asker may see, the catalog's rows say which. stated: the run that the
# body names, or the rank's; the route's own parameters judge it. all: everything there is. none: no run at all.
Runs = Literal["path", "seen", "stated", "all", "none"]


SCOPE_EXTENSION = "x-scope"  # of an operation in the API's description: read, write or admin; none where anybody may


@dataclass(frozen=True)
class Needs:
    """What one route needs. `scope` None: nobody is asked who they are."""

    scope: Scope | None
    runs: Runs
    body: bodies.Kind | None

    def check(self, request: Request) -> None:
        """`Forbidden`, `NoSuchRun` or `InvalidRequest` where the door should have been shut."""
        principal = request.state.principal
        assert isinstance(principal, Principal)
        if self.scope is not None:
            principal.require(self.scope)
        if self.runs == "all":
            principal.require_run(None)
        elif self.runs == "path":
            run = request.path_params["run"]
            if request.method not in scopes.SAFE:
                principal.require_run(run)
            elif not principal.sees(run):
                raise NoSuchRun(f"the run {run!r} does not exist", hint="`holdfast ls` lists the runs")
        given = getattr(request.state, "body", None)  # what the door has taken the body for; None: there is none
        if given is not None and self.body is not None:
            bodies.check_kind(given, self.body)


def needs(scope: Scope | None, runs: Runs = "seen", body: bodies.Kind | None = None) -> Any:
    """A declaration, for a route's `dependencies`."""
    declared = Needs(scope, runs, body)

    async def check(request: Request) -> None:
        declared.check(request)

    check.needs = declared  # type: ignore[attr-defined]
    return Depends(check)


READS = [needs("read")]
READS_RUN = [needs("read", "path")]
WRITES_RUN = [needs("write", "path")]
WRITES_RUN_JSON = [needs("write", "path", bodies.JSON)]
READS_OWN = [needs("read", "none")]
READS_AUDIT = [needs("admin", "seen")]
READS_STATED = [needs("read", "stated")]
WRITES_STATED = [needs("write", "stated")]
WRITES_STATED_JSON = [needs("write", "stated", bodies.JSON)]
WRITES_CHUNKS = [needs("write", "stated", bodies.OCTETS)]
ADMINS_RUN = [needs("admin", "path")]
ADMINS_RUN_JSON = [needs("admin", "path", bodies.JSON)]
ADMINS = [needs("admin", "all")]
ADMINS_JSON = [needs("admin", "all", bodies.JSON)]
OPEN = [needs(None, "none")]
PAGES = [needs("read", "seen", bodies.FORM)]


def verify(routes: Sequence[BaseRoute]) -> None:
    """Every route says what it needs, and the door believes the same; `TypeError` naming the route that does not. The API's
    description says it too.
    """
    for route in iter_route_contexts(routes):
        if isinstance(route.original_route, APIRoute):
            stated = declared(route)
            _verify(route, stated)
            route.original_route.openapi_extra = {} if stated.scope is None else {SCOPE_EXTENSION: stated.scope}
        elif not set(route.methods or ()) <= scopes.SAFE:
            raise TypeError(f"{route.path} changes something and does not say what it needs")


def declared(route: RouteContext) -> Needs:
    """What a route declares; `TypeError` where that is not one thing."""
    found = [stated for one in route.dependencies if (stated := getattr(one.dependency, "needs", None)) is not None]
    if len(found) != 1:
        raise TypeError(
            f"{route.path} has {len(found)} declarations of what it needs, and not one: see api/access/authorization.py"
        )
    assert isinstance(found[0], Needs)
    return found[0]


def _verify(route: RouteContext, stated: Needs) -> None:
    path = str(route.path)
    sample = re.sub(r"{[^}]*}", "x", path.replace("{part}", "data"))
    in_path = stated.runs == "path"
    if path.startswith(scopes.API) and in_path != path.startswith(f"{scopes.API}runs/{{run}}"):
        raise TypeError(f"{path} does not say that it is about the run of its path, or says so without one")
    if path.startswith(scopes.API) and (route.body_field is not None) != (stated.body == bodies.JSON):
        raise TypeError(f"{path} does not say which body it reads")
    for method in route.methods or ():
        believed = None if scopes.is_open(method, sample) else scopes.needed(method, sample)
        if believed is not None and stated.scope != believed:
            raise TypeError(f"{method} {path} needs {stated.scope!r}, and the door believes {believed!r}")
        if stated.body is not None and method not in scopes.SAFE and stated.body != scopes.body_of(method, sample):
            raise TypeError(f"{method} {path} reads {stated.body}, and the door believes {scopes.body_of(method, sample)}")
