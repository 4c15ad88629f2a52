"""Limits of a token: refused with how long to wait, never in the middle of an answer, and never what ranks ask."""

from __future__ import annotations

import asyncio
import http.client
import json
import time
from contextlib import closing
from pathlib import Path

import httpx
import pytest

from holdfast import Api
from holdfast.rest.patience import Patient
from holdfast_formats.errors import TooManyRequests
from holdfast_service.api.access.limits import BURST_S, HOLDERS_MAX, Limiter
from holdfast_service.api.access.middleware import Policy
from holdfast_service.control.access.tokens import OWNER, Principal
from tests.api.guarded import CHECKPOINT, code, guarded
from tests.attack.sockets import read

LIMITED = Principal("ci", "read", "*", 7, requests_per_s=2)
BULK = Principal("ci", "read", "*", 8, bytes_per_s=1000)


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def admitted(limiter: Limiter, principal: Principal, path: str = "/v1/runs", most: int = 1000) -> int:
    """How many requests come through at once, of so many at most."""
    for number in range(most):
        try:
            limiter.admit(principal, path)
        except TooManyRequests:
            return number
    return most


def test_requests_a_second() -> None:
    """A burst, then so many a second; the wait that is told is enough."""
    clock = Clock()
    limiter = Limiter(clock)
    assert admitted(limiter, LIMITED) == 2 * BURST_S
    with pytest.raises(TooManyRequests) as caught:
        limiter.admit(LIMITED, "/v1/runs")
    assert caught.value.status == 429 and caught.value.retryable
    clock.now += caught.value.members["retry_after_s"]
    assert 1 <= admitted(limiter, LIMITED) <= 2
    clock.now += 1000
    assert admitted(limiter, LIMITED) == 2 * BURST_S


def test_bytes_a_second() -> None:
    """An answer that has begun goes out whole; who is in debt then waits until it is paid."""
    clock, sent = Clock(), []
    limiter = Limiter(clock)
    limiter.admit(BULK, "/v1/runs")

    async def send(message: object) -> None:
        sent.append(message)

    counted = limiter.counting(BULK, "/v1/runs", send)
    for _ in range(20):
        asyncio.run(counted({"type": "http.response.body", "body": b"x" * 1000, "more_body": True}))
    assert len(sent) == 20
    with pytest.raises(TooManyRequests) as caught:
        limiter.admit(BULK, "/v1/runs")
    assert caught.value.members["retry_after_s"] == 20 - BURST_S + 1
    clock.now += caught.value.members["retry_after_s"]
    limiter.admit(BULK, "/v1/runs")


@pytest.mark.parametrize("principal", [OWNER, Principal("free", "read", "*", 9), Principal("ann", "read", by="login")])
def test_whoever_has_no_limit_has_none(principal: Principal) -> None:
    """The owner, and tokens and people for whom none was set."""
    assert admitted(Limiter(), principal) == 1000


def test_a_person_is_not_a_token_of_the_same_name() -> None:
    """Each has what was set for it; one of them used up takes nothing from the other."""
    clock, person = Clock(), LIMITED._replace(token=None, by="login")
    limiter = Limiter(clock)
    assert admitted(limiter, LIMITED) == admitted(limiter, person) == 2 * BURST_S


def test_ranks_are_never_limited() -> None:
    """What a rank asks for to save and to restore is not counted at all."""
    limiter = Limiter(Clock())
    assert admitted(limiter, LIMITED, f"/v1/ranks/{'a' * 32}/uploads/0/data") == 1000
    assert admitted(limiter, LIMITED) == 2 * BURST_S


def test_a_new_secret_is_no_new_limit() -> None:
    """The old one in its grace and the new one count together."""
    limiter = Limiter(Clock())
    assert admitted(limiter, LIMITED) == 2 * BURST_S
    assert admitted(limiter, LIMITED._replace(token=99)) == 0


@pytest.mark.parametrize("path", ["/healthz", "/readyz"])
def test_health_is_never_limited(path: str) -> None:
    """Who looks after the service would take it for ill."""
    assert admitted(Limiter(Clock()), LIMITED, path) == 1000


def test_many_tokens_cost_little() -> None:
    """So many are remembered, those that asked last."""
    limiter = Limiter(Clock())
    for token in range(HOLDERS_MAX + 50):
        limiter.admit(LIMITED._replace(name=f"t{token}"), "/v1/runs")
    assert len(limiter._holders) == HOLDERS_MAX


def test_over_rest(tmp_path: Path) -> None:
    """429 with Retry-After and a problem; the client's reading requests wait and succeed; a page's own questions are one."""
    with guarded(tmp_path, Policy(tokens=True)) as door:
        token = door.token("read", requests_per_s=1)
        answers = [door.ask("GET", "/v1/runs", token) for _ in range(30)]
        refused = [answer for answer in answers if answer.status_code == 429]
        assert refused and code(refused[0]) == (429, "too-many-requests")
        assert int(refused[0].headers["retry-after"]) == refused[0].json()["retry_after_s"] >= 1
        with Api(door.running.url, token=token) as api:
            assert len(list(api.runs())) == 3
        bulk = door.token("read", bytes_per_s=1)
        assert door.ask("GET", f"{CHECKPOINT}/manifest", bulk).status_code == 200
        assert door.ask("GET", "/v1/runs", bulk).status_code == 429
        paged = door.token("read", requests_per_s=1)
        assert [door.ask("GET", "/runs/team-a", paged).status_code for _ in range(3)] == [200, 200, 200]


def test_a_client_waits_where_it_is_told_for_how_long(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not for a change, not for a limit without an end, and not for ever."""
    waits: list[float] = []
    monkeypatch.setattr(time, "sleep", waits.append)
    heads = iter([{"Retry-After": "3"}, {"Retry-After": "0"}, {}])
    answers = [httpx.Response(429, headers=head) for head in heads]
    transport = Patient(httpx.MockTransport(lambda request: answers.pop(0)))
    assert transport.handle_request(httpx.Request("GET", "http://x/")).headers.get("Retry-After") is None
    assert waits == [3.0, 0.1]
    for head in ({"Retry-After": "Thu, 01 Jan 2026 00:00:00 GMT"}, {"Retry-After": "99999"}):
        limited = Patient(httpx.MockTransport(lambda request, head=head: httpx.Response(429, headers=head)))
        assert limited.handle_request(httpx.Request("GET", "http://x/")).status_code == 429
    limited = Patient(httpx.MockTransport(lambda request: httpx.Response(429, headers={"Retry-After": "1"})))
    assert limited.handle_request(httpx.Request("POST", "http://x/")).status_code == 429
    assert waits == [3.0, 0.1]


def test_nobody_has_what_came_before_on_the_connection(tmp_path: Path) -> None:
    """A request from the pipeline, or after a body that made the connection wait, is judged and told of as any other: its
    task has the context of an earlier one, by which pages ask the API in their viewer's name.
    """
    with guarded(tmp_path, Policy(tokens=True)) as door:
        admin, limited = door.token("admin"), door.token("read", requests_per_s=1)
        host, _, port = door.running.url.removeprefix("http://").partition(":")
        shown = f"Host: localhost\r\nAuthorization: Bearer {limited}\r\n"
        many = read(door.running.url, f"GET /v1/runs HTTP/1.1\r\n{shown}\r\n".encode() * 30)
        assert many.status == 200 and b"HTTP/1.1 429" in many.body
        connection = http.client.HTTPConnection(host, int(port), timeout=60)
        with closing(connection):
            bearer = {"Authorization": f"Bearer {admin}", "Content-Type": "application/json"}
            connection.request("POST", "/v1/jobs", json.dumps({"kind": "x" * 500_000}), bearer)
            first = connection.getresponse()
            assert (first.status, len(first.read()) > 0) == (400, True)
            connection.request("PUT", f"{CHECKPOINT}/pin", headers={"Cookie": f"holdfast_token={admin}"})
            second = connection.getresponse()
            assert second.status == 403
        told = door.ask("GET", "/v1/audit", admin, params={"limit": "2"}).json()["items"]
        assert {(one["kind"], one["via"]) for one in told} == {("job-submitted", "http"), ("pin-set", "http")}
        assert told[0]["request"] == second.headers["x-request-id"] != told[1]["request"]
