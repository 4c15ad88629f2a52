"""Limits of requests: at a time, a second, in bytes, and of clients that stall."""

from __future__ import annotations

import asyncio
import http.client
import json
import random
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager, closing
from pathlib import Path
from typing import Any

import httpx
import pytest

from holdfast import Api
from holdfast.rest.rate_limit_retry import RateLimitRetry
from holdfast_formats.errors import DeadlineExceeded, TooManyRequests
from holdfast_service.api.access import admission
from holdfast_service.api.access.admission import (
    BURST_S,
    HOLDERS_MAX,
    ByteBudget,
    ConcurrencyLimit,
    RateLimits,
    RequestAdmission,
    RequestPeer,
    StallLimit,
    answering,
)
from holdfast_service.api.access.authentication import Policy
from holdfast_service.api.access.authorization import Needs
from holdfast_service.api.problems import TransferAborted
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


def admitted(limiter: RateLimits, principal: Principal, most: int = 1000) -> int:
    """How many requests come through at once, of so many at most."""
    for number in range(most):
        try:
            limiter.admit(principal)
        except TooManyRequests:
            return number
    return most


def test_requests_a_second() -> None:
    """A burst, then so many a second; the wait that is told is enough."""
    clock = Clock()
    limiter = RateLimits(clock)
    assert admitted(limiter, LIMITED) == 2 * BURST_S
    with pytest.raises(TooManyRequests) as caught:
        limiter.admit(LIMITED)
    assert caught.value.status == 429 and caught.value.retryable
    clock.now += caught.value.members["retry_after_s"]
    assert 1 <= admitted(limiter, LIMITED) <= 2
    clock.now += 1000
    assert admitted(limiter, LIMITED) == 2 * BURST_S


def test_bytes_a_second() -> None:
    """An answer that has begun goes out whole; who is in debt then waits until it is paid."""
    clock, sent = Clock(), []
    limiter = RateLimits(clock)
    limiter.admit(BULK)

    async def send(message: object) -> None:
        sent.append(message)

    counted = limiter.counting(BULK, send)
    for _ in range(20):
        asyncio.run(counted({"type": "http.response.body", "body": b"x" * 1000, "more_body": True}))
    assert len(sent) == 20
    with pytest.raises(TooManyRequests) as caught:
        limiter.admit(BULK)
    assert caught.value.members["retry_after_s"] == 20 - BURST_S + 1
    clock.now += caught.value.members["retry_after_s"]
    limiter.admit(BULK)


@pytest.mark.parametrize("principal", [OWNER, Principal("free", "read", "*", 9), Principal("ann", "read", by="login")])
def test_whoever_has_no_limit_has_none(principal: Principal) -> None:
    """The owner, and tokens and people for whom none was set."""
    assert admitted(RateLimits(), principal) == 1000


def test_a_person_is_not_a_token_of_the_same_name() -> None:
    """Each has what was set for it; one of them used up takes nothing from the other."""
    clock, person = Clock(), LIMITED._replace(token=None, by="login")
    limiter = RateLimits(clock)
    assert admitted(limiter, LIMITED) == admitted(limiter, person) == 2 * BURST_S


@pytest.mark.parametrize("runs", ["rank", "health"])
def test_ranks_and_probes_are_never_limited(runs: Any) -> None:
    """What ranks ask for to save and to restore is not counted, and a refused probe would look like an ill service."""
    limits = RequestAdmission(lambda: 16)

    async def send(message: object) -> None: ...

    for _ in range(1000):
        with limits.admitted(LIMITED, Needs("read", runs), "127.0.0.1", send):
            pass
    with pytest.raises(TooManyRequests), ExitStack() as held:
        for _ in range(12):
            held.enter_context(limits.admitted(LIMITED, Needs("read"), "127.0.0.1", send))


def test_a_new_secret_is_no_new_limit() -> None:
    """The old one in its grace and the new one count together."""
    limiter = RateLimits(Clock())
    assert admitted(limiter, LIMITED) == 2 * BURST_S
    assert admitted(limiter, LIMITED._replace(token=99)) == 0


def test_many_tokens_cost_little() -> None:
    """So many are remembered, those that asked last."""
    limiter = RateLimits(Clock())
    for token in range(HOLDERS_MAX + 50):
        limiter.admit(LIMITED._replace(name=f"t{token}"))
    assert len(limiter._holders) == HOLDERS_MAX


def test_over_rest(tmp_path: Path) -> None:
    """429 with Retry-After and a problem; the client's reading requests wait and succeed; a page's own questions are one."""
    with guarded(tmp_path, Policy(tokens=True)) as guard:
        token = guard.token("read", requests_per_s=1)
        answers = [guard.ask("GET", "/v1/runs", token) for _ in range(30)]
        refused = [answer for answer in answers if answer.status_code == 429]
        assert refused and code(refused[0]) == (429, "too-many-requests")
        assert int(refused[0].headers["retry-after"]) == refused[0].json()["retry_after_s"] >= 1
        with Api(guard.running.url, token=token) as api:
            assert len(list(api.runs())) == 3
        bulk = guard.token("read", bytes_per_s=1)
        assert guard.ask("GET", f"{CHECKPOINT}/manifest", bulk).status_code == 200
        assert guard.ask("GET", "/v1/runs", bulk).status_code == 429
        paged = guard.token("read", requests_per_s=1)
        assert [guard.ask("GET", "/runs/team-a", paged).status_code for _ in range(3)] == [200, 200, 200]


def test_a_client_waits_where_it_is_told_for_how_long(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not for a change, not for a limit without an end, and not for ever."""
    waits: list[float] = []
    monkeypatch.setattr(time, "sleep", waits.append)
    heads = iter([{"Retry-After": "3"}, {"Retry-After": "0"}, {}])
    answers = [httpx.Response(429, headers=head) for head in heads]
    transport = RateLimitRetry(httpx.MockTransport(lambda request: answers.pop(0)))
    assert transport.handle_request(httpx.Request("GET", "http://x/")).headers.get("Retry-After") is None
    assert waits == [3.0, 0.1]
    for head in ({"Retry-After": "Thu, 01 Jan 2026 00:00:00 GMT"}, {"Retry-After": "99999"}):
        limited = RateLimitRetry(httpx.MockTransport(lambda request, head=head: httpx.Response(429, headers=head)))
        assert limited.handle_request(httpx.Request("GET", "http://x/")).status_code == 429
    limited = RateLimitRetry(httpx.MockTransport(lambda request: httpx.Response(429, headers={"Retry-After": "1"})))
    assert limited.handle_request(httpx.Request("POST", "http://x/")).status_code == 429
    assert waits == [3.0, 0.1]


def test_nobody_has_what_came_before_on_the_connection(tmp_path: Path) -> None:
    """A request from the pipeline, or after a body that made the connection wait, is judged and told of as any other: its
    task has the context of an earlier one, by which pages ask the API in their viewer's name.
    """
    with guarded(tmp_path, Policy(tokens=True)) as guard:
        admin, limited = guard.token("admin"), guard.token("read", requests_per_s=1)
        host, _, port = guard.running.url.removeprefix("http://").partition(":")
        shown = f"Host: localhost\r\nAuthorization: Bearer {limited}\r\n"
        many = read(guard.running.url, f"GET /v1/runs HTTP/1.1\r\n{shown}\r\n".encode() * 30)
        assert many.status == 200 and b"HTTP/1.1 429" in many.body
        connection = http.client.HTTPConnection(host, int(port), timeout=180)
        with closing(connection):
            bearer = {"Authorization": f"Bearer {admin}", "Content-Type": "application/json"}
            connection.request("POST", "/v1/jobs", json.dumps({"kind": "x" * 500_000}), bearer)
            first = connection.getresponse()
            assert (first.status, len(first.read()) > 0) == (400, True)
            connection.request("PUT", f"{CHECKPOINT}/pin", headers={"Cookie": f"holdfast_token={admin}"})
            second = connection.getresponse()
            assert second.status == 403
        told = guard.ask("GET", "/v1/audit", admin, params={"limit": "2"}).json()["items"]
        assert {(one["kind"], one["via"]) for one in told} == {("job-submitted", "http"), ("pin-set", "http")}
        assert told[0]["request"] == second.headers["x-request-id"] != told[1]["request"]


READER, OTHER, ADMIN = RequestPeer("reader", False), RequestPeer("other", False), RequestPeer("admin", True)


@asynccontextmanager
async def entered(limit: ConcurrencyLimit, peer: RequestPeer, wait_s: float = 0.01) -> AsyncIterator[None]:
    """A request of this peer counts."""
    with answering(peer):
        async with limit.awaited(wait_s, "too many", "wait"):
            yield


def test_one_peer_never_has_them_all() -> None:
    """Of 16 limit one reader has 12, all readers together 14, and an admin finds one of the last two."""

    async def story() -> None:
        limit = ConcurrencyLimit(lambda: 16)
        async with AsyncExitStack() as held:
            for _ in range(12):
                await held.enter_async_context(entered(limit, READER))
            with pytest.raises(DeadlineExceeded):
                await held.enter_async_context(entered(limit, READER))
            for _ in range(2):
                await held.enter_async_context(entered(limit, OTHER))
            with pytest.raises(DeadlineExceeded):
                await held.enter_async_context(entered(limit, OTHER))
            await held.enter_async_context(entered(limit, ADMIN))
        with limit.held(READER) as free:
            assert free

    asyncio.run(story())


def test_who_waits_is_given_what_becomes_free() -> None:
    """A place goes to whoever may have it; one who has given up waiting takes none along."""

    async def story() -> None:
        limit = ConcurrencyLimit(lambda: 1)

        async def wait(peer: RequestPeer, wait_s: float) -> str:
            async with entered(limit, peer, wait_s):
                return peer.name

        async with entered(limit, READER, 1):
            patient = asyncio.create_task(wait(OTHER, 30))
            gone = asyncio.create_task(wait(READER, 30))
            await asyncio.sleep(0)
            gone.cancel()
            with pytest.raises(asyncio.CancelledError):
                await gone
        assert await patient == "other"
        assert await wait(ADMIN, 1) == "admin"

    asyncio.run(story())


@pytest.mark.parametrize("seed", range(5))
def test_never_more_than_there_is(seed: int) -> None:
    """Whoever comes, and whoever gives up while waiting or inside, all others get their turn and all bytes come back."""
    chance, out, most, done = random.Random(seed), 0, 0, 0

    async def one(budget: ByteBudget, size: int) -> None:
        nonlocal out, most, done
        async with budget.taken(size):
            out += min(size, 100)
            most = max(most, out)
            try:
                for _ in range(chance.randrange(4)):
                    await asyncio.sleep(0)
            finally:
                out -= min(size, 100)
        done += 1

    async def all_of_them() -> None:
        budget = ByteBudget(100)
        tasks = [asyncio.create_task(one(budget, chance.choice((1, 30, 60, 100, 500)))) for _ in range(200)]
        ended = 0
        for task in chance.sample(tasks, 60):
            await asyncio.sleep(0)
            ended += task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        assert done >= 200 - ended
        async with budget.taken(100):  # everything came back
            pass

    asyncio.run(all_of_them())
    assert 0 < most <= 100


def test_first_come_first_served() -> None:
    """A large wish is not overtaken for ever by small ones."""
    order: list[str] = []

    async def one(budget: ByteBudget, size: int, name: str) -> None:
        async with budget.taken(size):
            order.append(name)
            await asyncio.sleep(0)

    async def all_of_them() -> None:
        budget = ByteBudget(10)
        await asyncio.gather(*(one(budget, size, name) for size, name in ((6, "a"), (10, "large"), (1, "b"), (1, "c"))))

    asyncio.run(all_of_them())
    assert order == ["a", "large", "b", "c"]


def run_stalled(sleep_s: float) -> list[Any]:
    """An app that sends one message to a client that needs `sleep_s` to take it; what the client got."""
    taken: list[Any] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start"})
        await send({"type": "http.response.body"})

    async def send(message: Any) -> None:
        await asyncio.sleep(sleep_s)
        taken.append(message)

    async def receive() -> Any:
        raise AssertionError("nobody asks")

    asyncio.run(StallLimit(app)({"type": "http", "path": "/v1/x"}, receive, send))
    return taken


def test_a_client_that_takes_its_bytes_is_left_alone() -> None:
    """Everything arrives in order."""
    assert [message["type"] for message in run_stalled(0)] == ["http.response.start", "http.response.body"]


def test_a_client_that_stalls_is_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who takes nothing for as long as the limit ends with an error, which cuts the connection."""
    monkeypatch.setattr(admission, "STALL_MAX_S", 0.05)
    with pytest.raises(TransferAborted, match="/v1/x"):
        run_stalled(10)
