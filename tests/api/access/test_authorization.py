"""What routes declare, and how a request is judged by its path, query and body alone; each route checks it once more."""

from __future__ import annotations

from typing import Any

import pytest
from fastapi import FastAPI
from fastapi.routing import APIRoute, iter_route_contexts

from holdfast_formats.errors import Forbidden, NoSuchRun
from holdfast_service.api.access import bodies
from holdfast_service.api.access.authorization import Declarations, needs
from holdfast_service.api.app import RestApi
from holdfast_service.control.access.tokens import Principal
from tests.attack.matrix import OWN, ROUTES
from tests.serving import WINGS, services

TEAM = Principal("ci", "admin", "team-*", 1)


@pytest.fixture(scope="module")
def app(tmp_path_factory: pytest.TempPathFactory) -> FastAPI:
    with services(tmp_path_factory.mktemp("root")) as made:
        return RestApi(made, WINGS)


@pytest.fixture(scope="module")
def declarations(app: FastAPI) -> Declarations:
    return Declarations(app.routes)


def test_every_route_declares_what_it_needs(app: FastAPI, declarations: Declarations) -> None:
    """And the middleware finds that of the route which serves a request, as the table that was written by hand has it."""
    served = [route for route in iter_route_contexts(app.routes) if isinstance(route.original_route, APIRoute)]
    assert len(served) == len(ROUTES)
    for route in ROUTES:
        declared = declarations.of(route.method, route.target(OWN).partition("?")[0], b"").needs
        expected = (
            "read" if route.is_page and route.scope != "open" else route.scope
        )  # what a page does, it asks the API for
        assert (declared.scope or "open") == expected, route
        assert (declared.runs == "all") == (route.about == "all" and not route.is_page), route
        assert (declared.runs == "rank") == route.path.startswith("/v1/ranks/"), route
        assert not route.body or declared.body == route.body, route


@pytest.mark.parametrize(
    ("dependencies", "refusal"),
    [
        ([], "0 declarations"),
        ([*needs("read"), *needs("admin")], "2 declarations"),
        (needs("write", body=bodies.OCTETS), "reads JSON and declares octets"),
    ],
)
def test_a_route_that_declares_nothing_or_two_things_is_refused(dependencies: list[Any], refusal: str) -> None:
    """At the start of the service, with its path."""
    app = FastAPI(openapi_url=None, docs_url=None, redoc_url=None)

    @app.put("/v1/new", dependencies=dependencies)
    def put_new(body: dict[str, int]) -> None: ...

    with pytest.raises(TypeError, match=f"/v1/new .*{refusal}|/v1/new {refusal}"):
        Declarations(app.routes)


def test_a_route_of_another_kind_changes_nothing() -> None:
    """What is added past the declarations may only be read."""
    app = FastAPI()
    app.add_route("/hook", lambda request: None, methods=["POST"])
    with pytest.raises(TypeError, match="/hook changes something"):
        Declarations(app.routes)


def test_an_act_is_described() -> None:
    with pytest.raises(TypeError, match="AUDITED"):
        needs("write", act="pin-sett")


@pytest.mark.parametrize(
    ("method", "path", "scope", "runs"),
    [
        ("POST", "/v1/what-nobody-has-thought-of", "admin", "all"),
        ("POST", "/v1/runs", "admin", "all"),
        ("GET", "/v1/what-nobody-has-thought-of", "read", "seen"),
        ("POST", "/v1/runs/team-a/checkpoints/5/pin", "write", "seen"),
        ("PUT", "/v1/runs/team-a", "admin", "seen"),
        ("HEAD", "/v1/tokens", "admin", "all"),
        ("PUT", "/v1/jobs", "write", "job"),
        ("PUT", "/healthz", "read", "viewer"),
        ("PUT", "/static/x", "read", "viewer"),
    ],
)
def test_what_no_route_serves(declarations: Declarations, method: str, path: str, scope: str, runs: str) -> None:
    """Closed until it is opened: a change needs what other changes at its path need, or else an admin."""
    found = declarations.of(method, path, b"").needs
    assert (found.scope, found.runs, found.act) == (scope, runs, None)


@pytest.mark.parametrize(
    ("path", "query"),
    [
        ("/v1/runs/other", b""),
        ("/v1/runs/other/checkpoints/1", b""),
        ("/v1/runs/other/checkpoints/1", b"run=team-a"),
        ("/v1/runs/team-a/checkpoints/1", b"run=other"),
        ("/v1/rounds", b"run=team-a&run=other"),
    ],
)
def test_other_runs_are_refused_before_the_body(declarations: Declarations, path: str, query: bytes) -> None:
    """Wherever a request names one: to read it is as if there were none, to change it is forbidden."""
    with pytest.raises(NoSuchRun):
        declarations.of("GET", path, query).check(TEAM)
    with pytest.raises(Forbidden):
        declarations.of("DELETE", path, query).check(TEAM)


def test_own_runs_pass(declarations: Declarations) -> None:
    declarations.of("GET", "/v1/runs/team-a/checkpoints/1", b"").check(TEAM)
    declarations.of("DELETE", "/v1/runs/team-a/checkpoints/1", b"run=team-b").check(TEAM)
