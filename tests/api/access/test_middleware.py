"""The access check: who comes in, who sees what, what other sites' pages cannot do, and which bodies are not looked at."""

from __future__ import annotations

import base64
import json
import logging
import socket
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import pytest

from holdfast_formats.errors import StorageFailed
from holdfast_formats.rest.operations import Scope
from holdfast_service.api.access.admission import CredentialWatch
from holdfast_service.api.access.authentication import Policy
from holdfast_service.api.access.request_head import COOKIE
from holdfast_service.control.database.schema import JobRow
from tests.api.guarded import CHECKPOINT, Guarded, code, guarded
from tests.attack.sockets import ask
from tests.checkpoints import build_root
from tests.serving import served


@pytest.fixture(scope="module")
def closed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Guarded]:
    with guarded(tmp_path_factory.mktemp("closed"), Policy(tokens=True)) as made:
        yield made


@pytest.fixture(scope="module")
def behind_tls(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Guarded]:
    with guarded(tmp_path_factory.mktemp("tls"), Policy(tokens=True, tls=True, metrics_open=True)) as made:
        yield made


@pytest.fixture(scope="module")
def ajar(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Guarded]:
    with guarded(tmp_path_factory.mktemp("open"), Policy(hosts=frozenset({"node-7.example"}))) as made:
        yield made


@pytest.mark.parametrize(
    "path",
    ["/v1/runs", "/v1/tokens", "/metrics", "/openapi.json", "/", "/nothing", CHECKPOINT, "//healthz", "/healthz/"],
)
def test_nothing_without_a_token(closed: Guarded, path: str) -> None:
    """Whatever is asked for, listed or not, is 401 with a challenge and a hint."""
    for method in ("GET", "HEAD", "PUT", "POST", "DELETE", "OPTIONS", "TRACE"):
        answer = closed.ask(method, path)
        assert answer.status_code == 401 and answer.headers["www-authenticate"].startswith("Bearer")
        if method != "HEAD":
            assert code(answer) == (401, "unauthenticated") and "HOLDFAST_TOKEN" in answer.json()["hint"]


def test_probes_need_none(closed: Guarded, behind_tls: Guarded) -> None:
    """Health and readiness are everybody's; metrics are where that was said."""
    assert [closed.ask("GET", path).status_code for path in ("/healthz", "/readyz", "/metrics")] == [200, 200, 401]
    assert behind_tls.ask("GET", "/metrics").status_code == 200
    assert closed.ask("GET", "/metrics", closed.token()).status_code == 200


@pytest.mark.parametrize(
    "header", ["Bearer", "Basic aGY6aGY=", "Bearer hf_", "bearer \xff\xfe", "Bearer " + "A" * 20_000, "Token x"]
)
def test_headers_that_are_no_token(closed: Guarded, header: str) -> None:
    """401, however it is spelt."""
    assert code(closed.ask("GET", "/v1/runs", headers={"Authorization": header.encode("latin-1")}))[0] == 401


def test_a_token_ends_at_once(closed: Guarded) -> None:
    """Revoked, it is refused with the next request."""
    token = closed.token()
    assert closed.ask("GET", "/v1/runs", token).status_code == 200
    name = closed.running.services.tokens.verify(token).name
    assert closed.ask("DELETE", f"/v1/tokens/{name}", closed.token("admin")).status_code == 204
    assert code(closed.ask("GET", "/v1/runs", token)) == (401, "unauthenticated")


@pytest.mark.parametrize(
    ("method", "path", "scope"),
    [
        ("GET", "/v1/runs", "read"),
        ("GET", "/metrics", "read"),
        ("GET", "/openapi.json", "read"),
        ("PUT", f"{CHECKPOINT}/pin", "write"),
        ("DELETE", f"{CHECKPOINT}/pin", "write"),
        ("PUT", f"{CHECKPOINT}/labels/good", "write"),
        ("PUT", f"/v1/ranks/{'0' * 32}", "write"),
        ("POST", "/v1/jobs", "write"),
        ("DELETE", "/v1/jobs/1", "write"),
        ("GET", "/v1/tokens", "admin"),
        ("POST", "/v1/tokens", "admin"),
        ("DELETE", "/v1/tokens/x", "admin"),
        ("PUT", "/v1/runs/team-a/policy", "admin"),
        ("DELETE", "/v1/runs/team-a/checkpoints/4", "admin"),
        ("POST", "/v1/what-nobody-has-thought-of", "admin"),
        ("PATCH", "/v1/runs/team-a", "write"),
        ("POST", "/runs/team-a/pin", "read"),  # a page, which asks the API as its viewer
    ],
)
def test_scopes(closed: Guarded, method: str, path: str, scope: str) -> None:
    """Each may what those before it may, and nothing that is not listed is open by oversight."""
    for number, held in enumerate(("read", "write", "admin")):
        answer = closed.ask(method, path, closed.token(held))  # type: ignore[arg-type]
        if number < ("read", "write", "admin").index(scope):
            assert code(answer) == (403, "forbidden") and answer.json()["needed"] == scope
        else:
            assert answer.status_code not in (401, 403), answer.text


def test_a_token_for_some_runs_sees_no_others(closed: Guarded) -> None:
    """Lists have its runs alone, in full pages; another run is as one that is not there."""
    token = closed.token("admin", "team-*")
    page = closed.ask("GET", "/v1/runs?limit=1", token).json()
    assert [run["name"] for run in page["items"]] == ["team-a"]
    page = closed.ask("GET", f"/v1/runs?limit=1&cursor={page['next']}", token).json()
    assert ([run["name"] for run in page["items"]], page["next"]) == (["team-b"], None)
    hidden, none = ("/v1/runs/other", "/v1/runs/team-none")
    for behind in ("", "/checkpoints", "/checkpoints/1", "/checkpoints/1/files/manifest.json", "/policy"):
        answers = [closed.ask("GET", path + behind, token) for path in (hidden, none)]
        bodies_ = [json.loads(answer.text.replace("other", "X").replace("team-none", "X")) for answer in answers]
        assert bodies_[0] == bodies_[1] and answers[0].status_code == 404, behind
    assert code(closed.ask("GET", "/v1/rounds?run=other", token)) == (404, "no-such-run")
    assert code(closed.ask("GET", "/v1/rounds?run=team-a&run=other", token)) == (404, "no-such-run")
    assert code(closed.ask("DELETE", "/v1/runs/other/checkpoints/1", token)) == (403, "forbidden")
    assert code(closed.ask("DELETE", "/v1/runs/%6fther/checkpoints/1", token)) == (403, "forbidden")
    assert code(closed.ask("GET", "/v1/runs/team-a/compare?a=5&b=1&run_b=other", token)) == (404, "no-such-run")
    assert code(closed.ask("GET", "/v1/catalog/check", token)) == (403, "forbidden")
    theirs = closed.ask("POST", "/v1/jobs", closed.token("write"), json={"kind": "verify", "run": "other", "step": 1})
    for method in ("GET", "DELETE"):
        assert code(closed.ask(method, theirs.headers["location"], token)) == (404, "no-such-resource")
    assert code(closed.ask("GET", "/v1/tokens", token)) == (403, "forbidden")
    wider = {"name": "wider", "scope": "admin"}
    assert code(closed.ask("POST", "/v1/tokens", token, json=wider)) == (403, "forbidden")
    assert "other" not in closed.ask("GET", "/", token).text


@pytest.mark.parametrize(
    ("runs", "scope", "body", "allowed"),
    [
        ("team-*", "write", {"kind": "verify", "run": "team-a"}, True),
        ("team-*", "write", {"kind": "verify", "run": "other"}, False),
        ("team-*", "write", {"kind": "scrub"}, False),
        ("team-*", "admin", {"kind": "compare", "run": "team-a", "arguments": {"with": "other@1"}}, False),
        ("*", "write", {"kind": "scrub"}, True),
        ("*", "write", {"kind": "rebuild"}, False),
        ("*", "write", {"kind": "export", "run": "other"}, False),
        ("*", "admin", {"kind": "rebuild"}, True),
    ],
)
def test_jobs_are_judged_by_what_they_do(closed: Guarded, runs: str, scope: Scope, body: dict, allowed: bool) -> None:
    """A job is about a run, or about all of them; some are for admins."""
    answer = closed.ask("POST", "/v1/jobs", closed.token(scope, runs), json=body)
    assert (answer.status_code != 403) is allowed, answer.text


def test_a_job_about_two_runs_names_the_other_to_nobody_else(closed: Guarded) -> None:
    """Whoever sees one of them alone is told that the job is there; event and answers name the second run to nobody else."""
    body = {"kind": "compare", "run": "team-a", "step": 5, "arguments": {"with": "other@1"}}
    submitted = closed.ask("POST", "/v1/jobs", closed.token("write"), json=body)
    where, every, some = submitted.headers["location"], closed.token(), closed.token("read", "team-*")
    assert closed.ask("GET", f"{where}?wait_s=20", every).json()["arguments"]["with"] == "other@1"
    for path in (where, "/v1/jobs", "/v1/events"):
        answer = closed.ask("GET", path, some)
        assert answer.status_code == 200 and "other@" not in answer.text, answer.text
    assert closed.ask("GET", "/v1/events?kind=job-ended", every).json()["items"]


def test_a_rank_of_another_run_may_not_say_hello(closed: Guarded) -> None:
    """Uploads begin with the run's name, and that has to be one of the token's."""
    hello = {"run": "other", "rank": 0, "world": 1, "launch": "l", "protocol": 0}
    path = f"/v1/ranks/{'a' * 32}"
    assert code(closed.ask("PUT", path, closed.token("write", "team-*"), json=hello)) == (403, "forbidden")
    answer = closed.ask("PUT", path, closed.token("write", "oth*"), json=hello)
    assert code(answer) == (400, "invalid-request") and "protocol 0" in answer.text  # the daemon's own refusal


def test_pages_by_attention_are_full_and_tell_of_nobody_else(tmp_path: Path) -> None:
    """Between two runs of a team stand many others: its pages skip them, and their cursors name none."""
    steps = {f"a-{n:02d}-other": (1,) for n in range(20)} | {"team-a": (5,), "team-z": (5,)}
    build_root(tmp_path, steps)
    with served(tmp_path, access=Policy(tokens=True)) as running:
        guard = Guarded(running)
        assert len(guard.ask("GET", "/v1/summaries?sort=attention&limit=50", guard.token()).json()["items"]) == 22
        token, cursor, seen = guard.token("read", "team-*"), "", []
        while True:
            page = guard.ask("GET", f"/v1/summaries?sort=attention&limit=1{cursor}", token).json()
            seen.append([item["run"] for item in page["items"]])
            if page["next"] is None:
                break
            assert b"other" not in base64.urlsafe_b64decode(page["next"])
            cursor = f"&cursor={page['next']}"
        assert sorted(seen) == [["team-a"], ["team-z"]]
        assert "no run has been saved here yet" not in guard.ask("GET", "/", token).text.lower()
        forged = base64.urlsafe_b64encode(b"summary-attention:zz").decode()
        assert code(guard.ask("GET", f"/v1/summaries?sort=attention&cursor={forged}", token)) == (400, "invalid-request")


def test_metrics_of_some_runs(closed: Guarded) -> None:
    """A token for some runs is told of each of these, and nothing that is counted of all together."""
    closed.running.services.control.catalog.rounds.open("other", 2, 1, 1, "2026-01-02T00:00:00Z")
    closed.running.services.control.catalog.rounds.open("team-a", 6, 1, 1, "2026-01-02T00:00:00Z")
    every, some = (closed.ask("GET", "/metrics", closed.token("admin", runs)).text for runs in ("*", "team-*"))
    lines = [line for line in some.splitlines() if line and not line.startswith("#")]
    assert lines and all('run="team-' in line for line in lines)
    assert "holdfast_checkpoints{" in every and "process_" in every and 'run="other"' in every


def test_health_tells_anybody_no_more_than_that(closed: Guarded, ajar: Guarded) -> None:
    """Version and root are for a token that is in force, and for everybody where nobody needs one."""
    for path, status in (("/healthz", "ok"), ("/readyz", "ready")):
        for headers in ({}, {"Authorization": "Bearer hf_wrong"}):
            answer = closed.ask("GET", path, headers=headers)
            assert answer.status_code == 200 and answer.json() == {"status": status, "version": None, "root": None}
        assert closed.ask("GET", path, closed.token()).json()["version"] == "9.9"
        assert ajar.ask("GET", path).json()["version"] == "9.9"


def test_what_is_wrong_is_not_told_to_anybody(closed: Guarded, monkeypatch: pytest.MonkeyPatch) -> None:
    """A probe hears that the service is not ready; where its storage is and why, a token hears."""

    def fails() -> None:
        raise StorageFailed("/secret/place cannot be read")

    monkeypatch.setattr(closed.running.services.control.catalog.rounds, "counts", fails)
    answer = closed.ask("GET", "/readyz")
    assert code(answer) == (503, "storage-failed") and "secret" not in answer.text
    assert "secret" in closed.ask("GET", "/readyz", closed.token()).text


def test_tokens_over_rest(closed: Guarded) -> None:
    """Made, listed without their text, and never twice under one name."""
    admin = closed.token("admin")
    made = closed.ask("POST", "/v1/tokens", admin, json={"name": "viewer", "runs": "team-a"})
    assert made.status_code == 201 and made.headers["cache-control"] == "no-store"
    assert closed.ask("GET", "/v1/runs", made.json()["token"]).json()["items"][0]["name"] == "team-a"
    listed = closed.ask("GET", "/v1/tokens?limit=1", admin)
    assert listed.json()["items"][0]["name"] == "viewer" and made.json()["token"] not in listed.text
    assert code(closed.ask("POST", "/v1/tokens", admin, json={"name": "viewer"})) == (400, "invalid-request")
    assert code(closed.ask("DELETE", "/v1/tokens/nobody", admin)) == (404, "no-such-resource")


def test_an_open_door_checks_what_it_is_shown(ajar: Guarded) -> None:
    """Nobody needs a token, but a wrong one is refused and a small one gives little."""
    assert ajar.ask("GET", "/v1/runs").status_code == 200
    assert code(ajar.ask("GET", "/v1/runs", "hf_wrong")) == (401, "unauthenticated")
    assert code(ajar.ask("PUT", f"{CHECKPOINT}/pin", ajar.token("read"))) == (403, "forbidden")
    assert ajar.ask("PUT", f"{CHECKPOINT}/pin").status_code == 204


@pytest.mark.parametrize(
    ("host", "allowed"),
    [
        ("127.0.0.1", True),
        ("127.0.0.1:9", True),
        ("[::1]:8420", True),
        ("localhost:8420", True),
        ("LOCALHOST", True),
        ("holdfast.localhost:1", True),
        ("node-7.example", True),
        ("rebound.attacker.example", False),
        ("rebound.attacker.example:8420", False),
        ("127.0.0.1.attacker.example", False),
        ("localhost.attacker.example", False),
    ],
)
def test_every_door_is_asked_by_names_that_are_its_own(ajar: Guarded, closed: Guarded, host: str, allowed: bool) -> None:
    """A name that somebody else made to point here is refused: a browser would believe its pages. That holds for probes and
    for a cookie as well; a token in the header needs no name.
    """
    cookie = {"Cookie": f"holdfast_token={closed.token()}"}
    for guard, path, shown in (
        (ajar, "/v1/runs", {}),
        (ajar, "/healthz", {}),
        (closed, "/v1/runs", cookie),
        (closed, "/login", {}),
    ):
        if guard is closed and host == "node-7.example":
            continue
        answer = guard.ask("GET", path, headers={"Host": host, **shown})
        assert (answer.status_code == 200) is allowed, (path, answer.text)
        if not allowed:
            assert code(answer) == (403, "forbidden")
    assert ajar.ask("GET", "/v1/runs", ajar.token(), headers={"Host": host}).status_code == 200


@pytest.mark.parametrize(
    ("headers", "allowed"),
    [
        ({}, True),
        ({"Sec-Fetch-Site": "same-origin"}, True),
        ({"Sec-Fetch-Site": "none"}, True),
        ({"Sec-Fetch-Site": "cross-site"}, False),
        ({"Sec-Fetch-Site": "same-site"}, False),
        ({"Origin": "https://attacker.example"}, False),
        ({"Origin": "null"}, False),
        ({"Origin": "http://[bad"}, False),
        ({"Origin": "OWN"}, True),
        ({"Origin": "OWN", "Sec-Fetch-Site": "cross-site"}, False),
    ],
)
def test_other_sites_pages_change_nothing(ajar: Guarded, headers: dict[str, str], allowed: bool) -> None:
    """Where no token is needed, a browser's word is asked for where there is one; reading is not affected."""
    headers = {name: value.replace("OWN", ajar.running.url) for name, value in headers.items()}
    answer = ajar.ask("PUT", f"{CHECKPOINT}/labels/good", headers=headers)
    assert (answer.status_code == 204) is allowed, answer.text
    assert ajar.ask("GET", CHECKPOINT, headers=headers).status_code == 200


@pytest.mark.parametrize(
    ("headers", "allowed"),
    [
        ({}, False),
        ({"Sec-Fetch-Site": "same-origin"}, True),
        ({"Origin": "OWN"}, True),
        ({"Origin": "http://127.0.0.1:1"}, False),
        ({"Sec-Fetch-Site": "cross-site"}, False),
    ],
)
def test_a_cookie_changes_things_for_our_own_pages_alone(closed: Guarded, headers: dict[str, str], allowed: bool) -> None:
    """It is as good as the header for reading; a change needs the browser's word that the page is ours."""
    headers = {name: value.replace("OWN", closed.running.url) for name, value in headers.items()}
    headers["Cookie"] = f"theme=dark; holdfast_token={closed.token('write')}; x=y"
    assert (closed.ask("PUT", f"{CHECKPOINT}/pin", headers=headers).status_code == 204) is allowed
    assert closed.ask("GET", CHECKPOINT, headers=headers).status_code == 200


@pytest.mark.parametrize("shown", ["Bearer", "Bearer ", "bearer   "])
def test_an_empty_bearer_is_a_wrong_one(closed: Guarded, shown: str) -> None:
    """Whoever says nothing there is not let in by a cookie beside it, without the page being asked for."""
    cookie = ("Cookie", f"holdfast_token={closed.token('write')}")
    headers = [("Authorization", shown), cookie, ("Sec-Fetch-Site", "cross-site")]
    answer = ask(closed.running.url, "PUT", f"{CHECKPOINT}/pin", headers)
    assert (answer.status, answer.code) == (401, "unauthenticated")


def test_a_cookie_is_one(closed: Guarded) -> None:
    """With two tokens in it, the access check would believe one and a page the other: neither is."""
    headers = {"Cookie": f"holdfast_token={closed.token()}; holdfast_token={closed.token('admin')}"}
    assert code(closed.ask("GET", "/v1/runs", headers=headers)) == (400, "invalid-request")


def test_the_login_page(closed: Guarded, behind_tls: Guarded) -> None:
    """A browser is led to it; a token that is in force becomes a cookie that scripts and other sites do not get."""
    sent = closed.ask("GET", "/", headers={"Accept": "text/html,*/*"})
    assert (sent.status_code, sent.headers["location"]) == (303, "/login")
    deeper = closed.ask("GET", "/runs/team-a", headers={"Accept": "text/html"})
    assert deeper.headers["location"] == "/login?next=%2Fruns%2Fteam-a"
    assert "password" in closed.ask("GET", "/login").text
    assert [closed.ask(method, "/static/x").status_code for method in ("GET", "PUT")] == [404, 401]
    wrong = closed.ask("POST", "/login", data={"token": "hf_no"}, headers={"Sec-Fetch-Site": "same-origin"})
    assert wrong.status_code == 401 and "set-cookie" not in wrong.headers
    for guard, secure in ((closed, False), (behind_tls, True)):
        token = guard.token()
        taken = guard.ask("POST", "/login", data={"token": token}, headers={"Sec-Fetch-Site": "same-origin"})
        cookie = taken.headers["set-cookie"]
        assert taken.status_code == 303 and ("Secure" in cookie) is secure
        assert "HttpOnly" in cookie and "SameSite=strict" in cookie
        assert guard.ask("GET", "/v1/runs", headers={"Cookie": cookie.partition(";")[0]}).status_code == 200


@pytest.mark.parametrize(
    ("origin", "site", "at_tls", "in_clear"),
    [
        ("http://HOST", None, 403, 303),
        ("https://HOST", None, 303, 303),
        ("https://HOST:444", None, 403, 403),
        ("https://evil.example", "cross-site", 403, 403),
        ("null", None, 403, 403),
        (None, "cross-site", 403, 403),
        (None, None, 303, 303),
    ],
)
def test_nobody_is_signed_in_by_a_page_of_another_site(
    closed: Guarded, behind_tls: Guarded, origin: str | None, site: str | None, at_tls: int, in_clear: int
) -> None:
    """Nor, behind TLS, by one that came without it: the token has travelled in clear then. A program states neither."""
    for guard, status in ((closed, in_clear), (behind_tls, at_tls)):
        host = "localhost"
        headers = {"Host": host} | ({"Origin": origin.replace("HOST", host)} if origin else {})
        headers |= {"Sec-Fetch-Site": site} if site else {}
        answer = guard.ask("POST", "/login", data={"token": guard.token()}, headers=headers)
        assert (answer.status_code, "set-cookie" in answer.headers) == (status, status == 303)


def test_behind_tls_no_redirect_leads_past_it(closed: Guarded, behind_tls: Guarded) -> None:
    """The framework makes an absolute address of the request, which reaches us in clear."""
    for guard, scheme in ((closed, "http"), (behind_tls, "https")):
        headers = {"Host": "localhost", "Authorization": f"Bearer {guard.token()}"}
        sent = guard.ask("GET", "/v1/runs/", headers=headers)
        assert (sent.status_code, sent.headers["location"]) == (307, f"{scheme}://localhost/v1/runs")


def test_nothing_that_depends_on_the_caller_is_kept_by_a_cache(closed: Guarded) -> None:
    """Whatever is answered, refused or not found; only style and scripts are everybody's."""
    token = {"Authorization": f"Bearer {closed.token()}"}
    for path in ("/v1/runs", "/v1/nothing", CHECKPOINT, f"{CHECKPOINT}/manifest", "/metrics", "/", "/healthz", "/login"):
        for headers in (token, {}):
            answer = closed.ask("GET", path, headers=headers)
            assert answer.headers["cache-control"] == "no-store", path
            assert {"Authorization", "Cookie"} <= {one.strip() for one in answer.headers["vary"].split(",")}, path
    style = closed.ask("GET", "/static/base.css")
    assert "immutable" in style.headers["cache-control"] and "vary" not in style.headers


LASTING = {
    "an event stream": b"GET /v1/events HTTP/1.1\r\nAccept: text/event-stream\r\n",
    "a job waited for": b"GET /v1/jobs/JOB?wait_s=20 HTTP/1.1\r\n",
    "a body that trickles": b"PUT /v1/runs/team-a/policy HTTP/1.1\r\nContent-Type: application/json\r\n"
    b"Content-Length: 9\r\n",
}


@pytest.fixture
def let_in(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Set once a request was let in by its token, and is being answered."""
    happened, serve = threading.Event(), CredentialWatch.serve

    async def seen(*arguments: Any) -> None:
        happened.set()
        await serve(*arguments)

    monkeypatch.setattr(CredentialWatch, "serve", seen)
    return happened


@pytest.mark.parametrize("what", LASTING)
@pytest.mark.parametrize("how", ["revoked", "expired"])
def test_what_lasts_ends_with_its_token(
    closed: Guarded, what: str, how: str, caplog: pytest.LogCaptureFixture, let_in: threading.Event
) -> None:
    """A request that is being answered ends when its token does: refused where no answer has begun, cut behind that. The
    log has a line of it, and no traceback: nothing has failed.
    """
    caplog.set_level(logging.INFO)
    caplog.set_level(logging.INFO, "uvicorn.error")
    services = closed.running.services
    token = closed.token("admin", **({"expires_s": 5} if how == "expired" else {}))
    with services.control.catalog.database.write() as session:
        job = JobRow(kind="verify", key=what + how, state="running", run="team-a", step=5, request={"kind": "verify"})
        job.cancel, job.done_bytes, job.total_bytes, job.node, job.tries = False, 0, 0, "another", 1
        job.created = job.seen = services.control.events.now()
        session.add(job)
        session.flush()
        number = str(job.id)
    head = (
        LASTING[what].replace(b"JOB", number.encode()) + f"Authorization: Bearer {token}\r\nHost: localhost\r\n\r\n".encode()
    )
    host, _, port = closed.running.url.removeprefix("http://").partition(":")
    with socket.create_connection((host, int(port)), timeout=180) as connection:
        connection.sendall(head + (b"{" if "body" in what else b""))
        if "stream" in what:
            assert connection.recv(65_536).startswith(b"HTTP/1.1 200")
        if how == "revoked":
            assert let_in.wait(180)  # revoked before that, it is refused at once, which is another case
            services.tokens.revoke(services.tokens.verify(token).name)
        answer = b""
        with suppress(ConnectionError):
            while part := connection.recv(65_536):
                answer += part
    if "stream" not in what:
        assert b" 401 " in answer.partition(b"\r\n")[0], answer
    assert not answer.endswith(b"0\r\n\r\n")  # the end of a body that is whole
    assert [record.levelname for record in caplog.records if "was ended together with its token" in record.getMessage()] == [
        "INFO"
    ]
    assert not [record.getMessage() for record in caplog.records if record.exc_info]


def test_streams_of_a_browser_that_keeps_a_token_end_when_it_signs_out(tmp_path: Path) -> None:
    """The token stays in force, for programs and for whoever shows it again."""
    with guarded(tmp_path / "root", Policy(tokens=True)) as closed:
        token = closed.token("read", "team-a")
        there, head = {"Cookie": f"{COOKIE}={token}", "Sec-Fetch-Site": "same-origin"}, {"Accept": "text/event-stream"}
        url = f"{closed.running.url}/v1/events"
        with (
            httpx.Client(trust_env=False, timeout=180) as client,
            client.stream("GET", url, headers={**head, **there}) as tab,
            client.stream("GET", url, headers={**head, "Authorization": f"Bearer {token}"}) as program,
        ):
            assert (tab.status_code, program.status_code) == (200, 200)
            assert closed.ask("POST", "/logout", headers=there).status_code == 303
            with pytest.raises(httpx.RemoteProtocolError):
                tab.read()
            closed.running.services.control.events.add("token-changed", "still here", "team-a")
            assert any("still here" in line for line in program.iter_lines())
            with client.stream("GET", url, headers={**head, **there}) as again:
                assert again.status_code == 200


@pytest.mark.parametrize("whose", ["a token", "the owner"])
def test_a_session_s_streams_end_with_it(tmp_path: Path, whose: str) -> None:
    """Who signs out leaves no tab behind that goes on reading; the same holder's other sessions go on."""
    with guarded(tmp_path / "root", Policy(tokens=True)) as closed:
        owner = closed.running.services.owner
        token = owner.token if whose == "the owner" else closed.token("read", "team-a")
        left, stays = (owner.links.redeem(owner.links.offer(token)) for _ in range(2))
        head = {"Accept": "text/event-stream"}
        url = f"{closed.running.url}/v1/events"
        with (
            httpx.Client(trust_env=False, timeout=180) as client,
            client.stream("GET", url, headers={**head, "Cookie": f"{COOKIE}={left}"}) as first,
            client.stream("GET", url, headers={**head, "Cookie": f"{COOKIE}={stays}"}) as second,
        ):
            assert (first.status_code, second.status_code) == (200, 200)
            there = {"Cookie": f"{COOKIE}={left}", "Sec-Fetch-Site": "same-origin"}
            assert closed.ask("POST", "/logout", headers=there).status_code == 303
            with pytest.raises(httpx.RemoteProtocolError):  # cut: it never looks complete
                first.read()
            closed.running.services.control.events.add("token-changed", "still here", "team-a")
            assert any("still here" in line for line in second.iter_lines())


def test_refusals_are_told_and_counted(closed: Guarded, caplog: pytest.LogCaptureFixture) -> None:
    """Each one counts, one a minute and peer is logged and becomes an event, and none of it has the token."""
    refusals, events = closed.running.services.refusals, closed.running.services.control.events
    refusals._throttle.reset()
    before, newest = refusals.counts["unauthenticated"], events.bounds()[1]
    other = "hf_" + "s3cret" * 8
    with caplog.at_level(logging.INFO):
        for _ in range(20):
            closed.ask("GET", "/v1/runs", other)
    assert refusals.counts["unauthenticated"] == before + 20
    told = events.after(newest, 99)
    assert [event.kind for event in told] == ["request-refused"] and told[0].detail["peer"] == "127.0.0.1"
    assert sum("refused" in record.message for record in caplog.records) == 1
    assert "s3cret" not in caplog.text + told[0].model_dump_json()
    metrics = closed.ask("GET", "/metrics", closed.token()).text
    assert f'holdfast_requests_refused_total{{code="unauthenticated"}} {before + 20:.1f}' in metrics


def test_many_peers_cost_no_more_than_a_few_lines(ajar: Guarded, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever comes from many addresses fills neither memory nor the log."""
    from holdfast_formats.errors import Unauthenticated
    from holdfast_service.api.access import refusals as module

    refusals = module.Refusals(ajar.running.services.control.events)
    newest = ajar.running.services.control.events.bounds()[1]
    for number in range(2 * module.KEYS_MAX):
        refusals.add(f"10.0.{number // 256}.{number % 256}", "GET", "/" * 10_000, Unauthenticated("no"))
    assert len(refusals._throttle) == module.KEYS_MAX
    assert len(ajar.running.services.control.events.after(newest, 999)) == module.REPORTS_A_MINUTE_MAX
