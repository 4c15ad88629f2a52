"""Every route, asked with every scope, about runs that are the token's and runs that are not, with bodies and heads that two
readers would take for different things: nothing is done, told or removed that the token is not for.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple
from urllib.parse import urlencode

import pytest
from fastapi.routing import iter_route_contexts

from holdfast_formats.rest.operations import Scope, TokenRequest
from holdfast_formats.timestamps import utc_now
from holdfast_service.config import catalog_url
from holdfast_service.control.access.tokens import Tokens
from holdfast_service.control.catalog.events import Events
from holdfast_service.control.database.database import Database
from tests.attack import sockets
from tests.attack.matrix import CONTENT_TYPES, FOREIGN, OWN, RANKS, ROUTES, SCOPES, TWICE, Route, hello
from tests.attack.sockets import Answer, Header, as_json
from tests.checkpoints import build_root
from tests.daemons import running
from tests.serving import WINGS, services

JSON = ("Content-Type", "application/json")
FINE_5XX = {503, 504, 507}
OURS, EVERYTHING = "team-a-*", "*"
ABSENT = f"{FOREIGN[:-1]}9"  # which nobody has, and as long


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
    from holdfast_service.api.app import RestApi

    with services(tmp_path) as made:
        app = RestApi(made, WINGS)
    there = {(method, str(route.path)) for route in iter_route_contexts(app.routes) for method in route.methods or ()}
    assert {key for key in there if "openapi" not in key[1]} == {route.key for route in ROUTES}


def let_in(route: Route, key: tuple[str, str] | None, run: str) -> bool:
    """Whether the access check should let this through."""
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


HOSTS = (
    "",
    ":1",
    "a b",
    "127.0.0.1:99999",
    "127.0.0.1:x",
    "127.0.0.1:-1",
    "user:pw@127.0.0.1",
    "127.0.0.1/..",
    "127.0.0.1?a",
    "127.0.0.1#a",
    "[::1",
    "[::g]",
    "[]",
    "caf\u00e9",
    "127.0.0.1\\",
    "a:1:2",
    "%31",
)


def test_a_host_that_is_none(target: Target) -> None:
    """Whoever shows a token may ask by any name, which stands in addresses of pages; by something else nobody asks."""
    for number, host in enumerate(HOSTS):
        path = ("/", "/healthz", "/login", "/v1/runs", f"/runs/{OWN}")[number % 5]
        answer = target.ask(("read", OURS), "GET", path, [("Host", host)])
        assert answer.status == 400, (path, host, answer)
    for fine in ("[::1]:80", "some_name:", "a.example", "127.0.0.1:65535"):
        assert target.ask(("read", OURS), "GET", "/", [("Host", fine)]).status == 200, fine


@pytest.mark.parametrize("said", ["application/x-www-form-urlencoded+json", "BOTH"])
@pytest.mark.parametrize(
    ("path", "body"),
    [
        (f"/v1/ranks/{'d' * 32}", hello(FOREIGN, keep_last=1, take_over=True)),
        ("/v1/jobs", {"kind": "rebuild"}),
        ("/v1/jobs", {"kind": "export", "run": FOREIGN, "step": 5, "arguments": {"to": "out"}}),
    ],
)
def test_a_body_that_the_access_check_was_told_not_to_look_at(target: Target, path: str, body: dict, said: str) -> None:
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
    heard = target.ask(("admin", EVERYTHING), "GET", f"/v1/ranks/{RANKS[FOREIGN]}/outcomes")
    assert heard.status == 200 or heard.code == "round-aborted", heard  # it has been silent for a minute: a busy machine


def told(answer: Answer, run: str) -> tuple[object, ...]:
    """What an answer tells, but for the name that was asked for, and ages, which grow."""
    text = re.sub(r"\d+(\.\d+)? (s|ms|min) ago", "AGE", answer.body.decode(errors="replace").replace(run, "RUN"))
    names = ("content-type", "etag", "location", "last-modified", "accept-ranges", "retry-after")
    return answer.status, text, *(answer.headers.get(name, "").replace(run, "RUN") for name in names)


@pytest.mark.parametrize(
    ("scope", "pages"), [("admin", False), *(pytest.param(scope, True, marks=pytest.mark.attack) for scope in SCOPES)]
)
def test_a_run_of_others_is_as_one_that_is_not_there(target: Target, scope: str, pages: bool) -> None:
    """To the byte, whatever is asked: which runs others have cannot be found out by asking for names."""
    key = (scope, OURS)
    for route in ROUTES:
        if route.about not in ("path", "body") or (route.is_page and not pages):
            continue
        each = []
        for run in (FOREIGN, ABSENT):
            headers, body = route.sent(run) or ([], None)
            path = route.target(run).replace("-gone", "")
            each.append(told(target.ask(key, route.method, path, headers, body), run))
        assert each[0] == each[1], (route, each)


FIELDS = [
    "a",
    "act",
    "averaged",
    "b",
    "bytes_per_s",
    "confirm",
    "count",
    "days",
    "do",
    "dry_run",
    "entry",
    "every_hours",
    "every_steps",
    "force",
    "from",
    "group",
    "keep_full",
    "kind",
    "label",
    "last",
    "layout",
    "marked",
    "metric",
    "mode",
    "name",
    "next",
    "notes",
    "optim",
    "optim_full",
    "owner",
    "pinned",
    "program",
    "q",
    "quota_gigabytes",
    "recipe",
    "remedy",
    "requests_per_s",
    "run",
    "runs",
    "scope",
    "sort",
    "step",
    "steps",
    "steps_apart",
    "subject",
    "tag",
    "to",
    "token",
    "unmeasured",
    "what",
    "within_hours",
]
ODD = ("\u202e\u00e9", "9" * 4400)
ODDER = ("", "nan", "-inf", "1e300", "-1", "0", "9" * 19, "\0\x1b[2J", "../..", "a\r\nb: c", "\U0001f4a3" * 200)
MEANT = {"act": "pin", "do": "snooze", "what": "archive", "remedy": "verify", "mode": "min", "metric": "loss", "from": "x"}
ATTACK = pytest.mark.attack


@pytest.mark.parametrize("odd", [*ODD, *(pytest.param(one, marks=ATTACK) for one in ODDER)], ids=range(len(ODD + ODDER)))
def test_a_form_with_anything_in_it(target: Target, odd: str) -> None:
    """Every form of every page answers, and never with a defect; in each field stands the same, or what is meant there."""
    for route in (route for route in ROUTES if route.body == "form" and route.path not in ("/login", "/logout")):
        headers, _ = route.sent(OWN) or ([], None)
        for meant in ({}, MEANT):
            body = urlencode({**dict.fromkeys(FIELDS, odd), **meant}).encode()
            answer = target.ask(("admin", EVERYTHING), "POST", route.target(OWN), headers, body)
            assert answer.status in (200, 303, *range(400, 500)), (route, meant, answer)


MESSAGES = ("run=NAME", "prefix=NAME", "q=NAME", "label=NAME", "who=NAME", "run=team-a-1&run=NAME", "run_b=NAME&a=5&b=5")


@pytest.mark.parametrize(("scope", "pages"), [("read", False), pytest.param("admin", True, marks=pytest.mark.attack)])
def test_a_run_of_others_that_a_query_names(target: Target, scope: str, pages: bool) -> None:
    """Neither a filter nor the other side of a comparison tells more of it than of one that is not there."""
    for route in ROUTES:
        if route.method != "GET" or route.about not in ("seen", "path") or (route.is_page and not pages):
            continue
        wanted = MESSAGES if pages else MESSAGES[-1:] if route.about == "path" else MESSAGES[-2:-1]
        for said in wanted if "events" not in route.path else ():
            path = route.target(OWN).partition("?")[0] + "?" + said
            each = [told(target.ask((scope, OURS), "GET", path.replace("NAME", run)), run) for run in (FOREIGN, ABSENT)]
            there, absent = ([re.sub(r"[0-9]+", "N", str(part)) for part in one] for one in each)  # ages grow
            if route.is_page and there[0] == absent[0]:  # in words of their own
                there, absent = ([str(part.count("RUN")) for part in one] for one in (there, absent))
            assert there == absent, (route, said, each)


def test_jobs_of_others_are_as_jobs_that_are_not_there(target: Target) -> None:
    wanted = as_json({"kind": "verify", "run": FOREIGN, "step": 5})
    made = target.ask(("admin", EVERYTHING), "POST", "/v1/jobs", [JSON], wanted)
    number = json.loads(made.body)["id"]
    form = [("Content-Type", "application/x-www-form-urlencoded"), ("Sec-Fetch-Site", "same-origin")]
    for method, path in (
        ("GET", "/v1/jobs/ID"),
        ("DELETE", "/v1/jobs/ID"),
        ("GET", "/jobs/ID"),
        ("POST", "/jobs/ID/cancel"),
    ):
        for scope in SCOPES:
            headers, body = (form, b"a=b") if method == "POST" else ([], None)
            there, absent = (
                target.ask((scope, OURS), method, path.replace("ID", str(one)), headers, body) for one in (number, 10**7)
            )
            same = [(one.status, one.code, one.headers.get("etag")) for one in (there, absent)]
            assert same[0] == same[1] and FOREIGN.encode() not in there.body, (method, path, scope, there)
            place = [one.headers.get("location", "").replace(str(number), str(10**7)) for one in (there, absent)]
            assert place[0] == place[1], (method, path, scope)


@pytest.mark.attack
def test_the_whole_matrix(target: Target) -> None:
    """All of it for every token: scopes, runs, kinds of bodies, doubled headers."""
    counts = try_all(target, full=True), try_content_types(target, full=True), try_headers_twice(target, full=True)
    print(f"\n{sum(counts)} requests: {counts[0]} plain, {counts[1]} with other types, {counts[2]} with doubled headers")
