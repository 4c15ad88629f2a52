"""Every route, asked with every scope, about runs that are the token's and runs that are not, with bodies and heads that two
readers would take for different things: nothing is done, told or removed that the token is not for.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
from fastapi.routing import iter_route_contexts

from holdfast_formats.moments import utc_now
from holdfast_formats.rest.operations import Scope, TokenRequest
from holdfast_service.config import catalog_url
from holdfast_service.control.access.tokens import Tokens
from holdfast_service.control.catalog.events import Events
from holdfast_service.control.database.database import Database
from tests.attack import sockets
from tests.attack.matrix import CONTENT_TYPES, FOREIGN, OWN, RANKS, ROUTES, SCOPES, TWICE, Route, hello
from tests.attack.sockets import Answer, Header, as_json
from tests.checkpoints import build_root
from tests.daemons import running
from tests.serving import services

JSON = ("Content-Type", "application/json")
FINE_5XX = {503, 504, 507}
OURS, EVERYTHING = "team-a-*", "*"


class Target(NamedTuple):
    """A daemon that asks for tokens, tokens of every scope for some runs and for all, and the root it keeps."""

    url: str
    root: Path
    tokens: dict[tuple[str, str], str]

    def ask(
        self,
        key: tuple[str, str] | None,
        method: str,
        path: str,
        headers: list[Header] | None = None,
        body: bytes | None = None,
    ) -> Answer:
        shown = [] if key is None else [("Authorization", f"Bearer {self.tokens[key]}")]
        return sockets.ask(self.url, method, path, [*shown, *(headers or [])], body)

    def kept(self, run: str) -> dict[str, str]:
        """What stands below a run's directory, by its digest."""
        files = sorted(path for path in (self.root / run).rglob("*") if path.is_file())
        return {str(path): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Target]:
    root = tmp_path_factory.mktemp("attacked") / "root"
    build_root(root, {OWN: (5,), FOREIGN: (1, 5)})
    database = Database.open(catalog_url(root))
    store = Tokens(database, Events(database, "node", utc_now), utc_now)
    tokens = {(scope, runs): made(store, scope, runs) for scope in SCOPES for runs in (OURS, EVERYTHING)}
    database.close()
    with running(root, listen="127.0.0.1:0", closed=True) as daemon:
        found = Target(daemon.url, root, tokens)
        for run in (OWN, FOREIGN):
            answer = found.ask(("admin", EVERYTHING), "PUT", f"/v1/ranks/{RANKS[run]}", [JSON], as_json(hello(run)))
            assert answer.status == 200, answer
        yield found
        assert "Traceback" not in daemon.log.read_text()


def made(store: Tokens, scope: str, runs: str) -> str:
    wanted: Scope = next(known for known in SCOPES if known == scope)  # type: ignore[assignment]
    return store.create(TokenRequest(name=f"{scope}-{len(runs)}", scope=wanted, runs=runs)).token


@pytest.fixture(autouse=True)
def nothing_foreign_changes(target: Target) -> Iterator[None]:
    """Whatever was tried, all of the other team's files are as they were, and its checkpoints are listed."""
    before = target.kept(FOREIGN)
    yield
    assert target.kept(FOREIGN) == before
    listed = target.ask(("admin", EVERYTHING), "GET", f"/v1/runs/{FOREIGN}/checkpoints")
    assert listed.body.count(b'"step"') == 2, listed


def test_the_table_has_every_route(tmp_path: Path) -> None:
    """No route is left out of what is tried, and none is in it that there is not."""
    from holdfast_service.api.app import create_app

    with services(tmp_path) as made:
        app = create_app(made)
    there = {(method, str(route.path)) for route in iter_route_contexts(app.routes) for method in route.methods or ()}
    assert {key for key in there if "openapi" not in key[1]} == {route.key for route in ROUTES}


def let_in(route: Route, key: tuple[str, str] | None, run: str) -> bool:
    """Whether the door should let this through."""
    if route.scope == "open" or (route.path == "/logout" and key is not None):
        return True
    if key is None:
        return False
    scope, runs = key
    enough = SCOPES.index(scope) >= SCOPES.index(route.scope)
    return enough and (runs == EVERYTHING or (route.about != "all" and (run == OWN or route.about in ("seen", "none"))))


def check_answer(route: Route, answer: Answer, allowed: bool, about: object) -> None:
    assert answer.status and (answer.status < 500 or answer.status in FINE_5XX), (about, answer)
    if route.path in ("/login", "/enter"):
        assert answer.status in (200, 401), (about, answer)  # the page, whoever asks
    elif allowed:
        assert answer.status not in (401, 415) and answer.code != "forbidden", (about, answer)
    elif route.about == "rank" and route.method == "DELETE":
        assert answer.status in (204, 401, 403), (about, answer)  # parting twice is harmless, from whatever run
    elif route.is_page and route.method == "GET":
        assert answer.status in (200, 400, 401, 403, 404), (about, answer)  # a page that says so
    elif not answer.headers.get("location", "").endswith("no-such-job"):
        assert answer.status in (303, 400, 401, 403, 404), (about, answer)
        assert route.is_page or answer.status != 303, (about, answer)


def principals(full: bool, route: Route | None = None) -> list[tuple[str, str] | None]:
    every: list[tuple[str, str] | None] = [None, *((scope, runs) for runs in (OURS, EVERYTHING) for scope in SCOPES)]
    if route is not None and route.is_page and not full:
        return [("write", OURS)]  # a page asks the API for everything, as its viewer
    return every if full else [None, ("read", OURS), ("write", OURS), ("admin", OURS)]


# Who trains finds by these that the daemon is on its machine: its socket, and the directory of its root.
PLACES = {("PUT", "/v1/ranks/{rank_id}"), ("GET", "/v1/nodes"), ("GET", "/nodes")}


def try_all(target: Target, full: bool) -> int:
    """Every route as it should be asked, by everybody, about both runs; how many requests that was."""
    count = 0
    for route in ROUTES:
        headers, body = route.sent(OWN) or ([], None)
        for run in (FOREIGN,) if route.is_page and not full else (OWN, FOREIGN):
            if body is not None:
                headers, body = route.sent(run) or ([], None)
            for key in principals(full, route):
                if key is not None and key[1] == EVERYTHING and run == FOREIGN and route.method not in ("GET", "HEAD"):
                    continue  # that one may, and what it changes could not be told from what others did
                answer = target.ask(key, route.method, route.target(run), headers, body)
                check_answer(route, answer, let_in(route, key, run), (route, key, run))
                if key is not None and key[1] == OURS and route.about == "seen":
                    assert FOREIGN.encode() not in answer.body, (route, key, answer)
                if (key is None or key[1] == OURS) and route.key not in PLACES:
                    assert str(target.root.parent).encode() not in answer.body, (route, key, answer)
                count += 1
    return count


def try_content_types(target: Target, full: bool) -> int:
    """Every body as what it is not: nothing reads it, whatever it says, and for whomever."""
    count = 0
    for route in (route for route in ROUTES if route.body):
        for run in (OWN, FOREIGN) if full else (FOREIGN,):
            headers, body = route.sent(run) or ([], b"")
            others = [header for header in headers if header[0] != "Content-Type"]
            wrong = ("application/json",) if route.body == "form" else ("application/x-www-form-urlencoded",)
            for said in (*CONTENT_TYPES, *wrong):
                for key in principals(True)[1:] if full else [("write", OURS)]:
                    answer = target.ask(key, route.method, route.target(run), [*others, ("Content-Type", said)], body)
                    assert answer.status in (400, 401, 403, 404, 415), (route, key, said, answer)
                    if let_in(route, key, run):
                        assert answer.status in (400, 415), (route, key, said, answer)
                    count += 1
    return count


def try_headers_twice(target: Target, full: bool) -> int:
    """Every header that carries meaning, twice: refused, before anybody asks which of the two is meant."""
    count = 0
    host = target.url.removeprefix("http://")
    for route in ROUTES:
        run = OWN
        headers, body = route.sent(run) or ([], None)
        for key in principals(True)[1:] if full else [("admin", EVERYTHING)]:
            token = f"Bearer {target.tokens[key]}"
            for name, *both in TWICE if full else TWICE[:: 3 if route.is_page else 1]:
                told = [(name, value.replace("OWN", token).replace("HOST", host)) for value in both]
                first = [] if name == "Authorization" else [("Authorization", token)]
                others = [header for header in headers if header[0] != name]
                answer = sockets.ask(target.url, route.method, route.target(run), [*first, *others, *told], body)
                assert answer.status in (0, 400), (route, key, told, answer)
                count += 1
    return count


def test_who_may_do_what(target: Target) -> None:
    """Every route with every scope, about the token's own runs and about others."""
    assert try_all(target, full=False) > 380


def test_where_things_are(target: Target) -> None:
    """A token of some runs hears that the service answers, of its own ranks, and nothing of the machine: no root, no
    process; of the socket only one that may save, by which it finds shared memory.
    """
    for scope in SCOPES:
        mine, all_of_it = (json.loads(target.ask((scope, runs), "GET", "/v1/nodes").body) for runs in (OURS, EVERYTHING))
        (node,), (whole,) = mine["items"], all_of_it["items"]
        assert (node["pid"], node["root"]) == (None, None) and whole["pid"] and whole["root"] == str(target.root)
        assert (node["socket"] is None) is (scope == "read") and whole["socket"]
        assert node["name"] == whole["name"] and (node["ranks"], whole["ranks"]) == (1, 2)
        assert node["arena_bytes"] <= whole["arena_bytes"]
        for path in ("/healthz", "/readyz"):
            mine, all_of_it = (json.loads(target.ask((scope, runs), "GET", path).body) for runs in (OURS, EVERYTHING))
            assert (mine["root"], all_of_it["root"]) == (None, str(target.root)) and mine["version"]


def test_bodies_that_are_called_something_else(target: Target) -> None:
    """A Content-Type that nobody here knows is 415, and nothing of its body is read by anybody."""
    assert try_content_types(target, full=False) > 350


def test_headers_that_stand_there_twice(target: Target) -> None:
    """Refused with 400: two readers would have taken one each."""
    assert try_headers_twice(target, full=False) > 1000


@pytest.mark.parametrize("said", ["application/x-www-form-urlencoded+json", "BOTH"])
@pytest.mark.parametrize(
    ("path", "body"),
    [
        (f"/v1/ranks/{'d' * 32}", hello(FOREIGN, keep_last=1, take_over=True)),
        ("/v1/jobs", {"kind": "rebuild"}),
        ("/v1/jobs", {"kind": "export", "run": FOREIGN, "step": 5, "arguments": {"to": "out"}}),
    ],
)
def test_a_body_that_the_door_was_told_not_to_look_at(target: Target, path: str, body: dict, said: str) -> None:
    """A token for one team's runs takes no place among another's ranks, and `write` runs no job of an admin's."""
    types = [("Content-Type", said)] if said != "BOTH" else [JSON, ("Content-Type", "application/x-www-form-urlencoded")]
    method = "POST" if path == "/v1/jobs" else "PUT"
    for headers in (types, types[::-1]):
        answer = target.ask(("write", OURS), method, path, headers, as_json(body))
        assert answer.status in (400, 415), answer


def test_a_rank_is_its_own_teams(target: Target) -> None:
    """To a token of other runs, whoever it is, a rank is as one that has never said hello."""
    for key in (("write", OURS), ("admin", OURS)):
        known, unknown = (target.ask(key, "GET", f"/v1/ranks/{rank}/outcomes") for rank in (RANKS[FOREIGN], "e" * 32))
        assert (known.status, known.code) == (404, "no-such-resource")
        assert known.body.replace(b"b" * 32, b"") == unknown.body.replace(b"e" * 32, b"")
        assert target.ask(key, "DELETE", f"/v1/ranks/{RANKS[FOREIGN]}").status == 204
    assert target.ask(("admin", EVERYTHING), "GET", f"/v1/ranks/{RANKS[FOREIGN]}/outcomes").status == 200


@pytest.mark.attack
def test_the_whole_matrix(target: Target) -> None:
    """All of it for every token: scopes, runs, kinds of bodies, doubled headers."""
    counts = try_all(target, full=True), try_content_types(target, full=True), try_headers_twice(target, full=True)
    print(f"\n{sum(counts)} requests: {counts[0]} plain, {counts[1]} with other types, {counts[2]} with doubled headers")
