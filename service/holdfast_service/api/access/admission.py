"""Limits of requests: how many at a time, how many per second, how many bytes, and how long one may take.

Neither one reader with many connections nor many readers lock an admin out: a part of every limit is reserved for admins.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter, OrderedDict, deque
from collections.abc import AsyncIterator, Callable, Collection, Iterable, Iterator
from contextlib import asynccontextmanager, contextmanager
from contextvars import ContextVar
from math import inf
from threading import Lock
from typing import NamedTuple

import anyio
import anyio.to_thread
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from holdfast_formats.errors import CheckpointError, DaemonGone, DeadlineExceeded, TooManyRequests, Unauthenticated
from holdfast_service.api.access.authorization import Needs
from holdfast_service.api.problems import TransferAborted
from holdfast_service.control.access.tokens import OWNER, Principal

log = logging.getLogger(__name__)

BURST_S = 5.0  # so many seconds' worth of requests and bytes may come at once
HOLDERS_MAX = 4096
IN_FORCE_EVERY_S = 0.4
STALL_MAX_S = 120.0
_ENDED = "the token was revoked or expired during the request, or the session was signed out"
_Holder = tuple[str, str]


class RequestPeer(NamedTuple):
    """The sender of a request, by token or else by address; `first`: admins by token, and probes of health."""

    name: str
    first: bool


NO_PEER = RequestPeer("", True)
_peer: ContextVar[RequestPeer] = ContextVar("holdfast_request_peer", default=NO_PEER)


def current_peer() -> RequestPeer:
    """The sender of the request that is being answered; `NO_PEER` outside of one."""
    return _peer.get()


@contextmanager
def answering(peer: RequestPeer) -> Iterator[None]:
    """Attribute the block's request to this peer."""
    before = _peer.set(peer)
    try:
        yield
    finally:
        _peer.reset(before)


class RequestAdmission:
    """Admits requests: one peer has three quarters of all at a time, and a token so many a second. For one event loop."""

    def __init__(self, requests_max: Callable[[], int]) -> None:
        self._concurrency, self._rates = ConcurrencyLimit(requests_max), RateLimits()

    @contextmanager
    def admitted(self, principal: Principal, needs: Needs, address: str, send: Send) -> Iterator[Send]:
        """Count the request within the block; its bytes count if they are sent through what is returned. `DaemonGone` and
        `TooManyRequests` where a limit is reached.
        """
        peer = _peer_of(principal, needs.runs == "health", address)
        with answering(peer), self._concurrency.held(peer) as free:
            if not free:
                raise DaemonGone("too many requests are in progress", hint="try again in a moment")
            if needs.limited:
                self._rates.admit(principal)
                send = self._rates.counting(principal, send)
            yield send


def _peer_of(principal: Principal, probe: bool, address: str) -> RequestPeer:
    name = address if principal.token is None else f"token {principal.token}"
    if principal.by == "login":  # their address is the proxy's
        name = f"login {principal.name}"
    if principal.by == OWNER.by:  # shares with no one else at its address
        name = principal.name
    is_admin = principal.scope == "admin" and (principal.token is not None or principal.by == "login")
    return RequestPeer(f"probe {name}" if probe else name, probe or is_admin or principal.by == OWNER.by)


class ConcurrencyLimit:
    """So many at a time: three quarters for one peer, and an eighth reserved for `first` peers. For one event loop."""

    def __init__(self, total: Callable[[], int]) -> None:
        self._total = total
        self._held: Counter[str] = Counter()
        self._waiting: list[tuple[RequestPeer, asyncio.Future[None]]] = []

    @contextmanager
    def held(self, peer: RequestPeer) -> Iterator[bool]:
        """Hold one for the block; whether one was free."""
        taken = self._take(peer)
        try:
            yield taken
        finally:
            if taken:
                self._give_back(peer)

    @asynccontextmanager
    async def awaited(self, wait_max_s: float, refused: str, hint: str) -> AsyncIterator[None]:
        """Hold one for the present request within the block. `DeadlineExceeded` if none is free in time."""
        peer = current_peer()
        if not self._take(peer):
            try:
                await self._wait(peer, wait_max_s)
            except asyncio.TimeoutError:
                raise DeadlineExceeded(refused, hint=hint) from None
        try:
            yield
        finally:
            self._give_back(peer)

    async def _wait(self, peer: RequestPeer, wait_max_s: float) -> None:
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append((peer, turn))
        try:
            await asyncio.wait_for(asyncio.shield(turn), wait_max_s)
        except BaseException:
            if turn.done():  # it was admitted in the same moment
                self._give_back(peer)
            raise
        finally:
            self._waiting = [(other, theirs) for other, theirs in self._waiting if theirs is not turn]

    def _take(self, peer: RequestPeer) -> bool:
        total = self._total()
        for_all = total if peer.first else total - total // 8
        free = self._held.total() < for_all and self._held[peer.name] < total - total // 4
        if free:
            self._held[peer.name] += 1
        return free

    def _give_back(self, peer: RequestPeer) -> None:
        self._held[peer.name] -= 1
        if not self._held[peer.name]:
            del self._held[peer.name]
        for waiting, turn in self._waiting:
            if not turn.done() and self._take(waiting):
                turn.set_result(None)


class ByteBudget:
    """At most `bytes_max` are in use at a time, first come first served; a request for more than all is admitted alone. For
    one event loop.
    """

    def __init__(self, bytes_max: int) -> None:
        self._max = self._left = bytes_max
        self._waiting: deque[tuple[int, asyncio.Future[None]]] = deque()

    @asynccontextmanager
    async def taken(self, size: int) -> AsyncIterator[None]:
        """Hold `size` bytes for as long as the block runs."""
        size = min(size, self._max)
        await self._take(size)
        try:
            yield
        finally:
            self._give_back(size)

    async def _take(self, size: int) -> None:
        if not self._waiting and size <= self._left:
            self._left -= size
            return
        turn = asyncio.get_running_loop().create_future()
        self._waiting.append((size, turn))
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():  # its turn had come at this moment
                self._give_back(size)
            else:
                self._waiting.remove((size, turn))
                self._give_back(0)
            raise

    def _give_back(self, size: int) -> None:
        self._left += size
        while self._waiting and self._waiting[0][0] <= self._left:
            wanted, turn = self._waiting.popleft()
            self._left -= wanted
            turn.set_result(None)


class _Rate:
    def __init__(self, requests_per_s: int, bytes_per_s: int, now: float) -> None:
        self.requests, self.bytes, self.at = inf, inf, now
        self.refill(requests_per_s, bytes_per_s, now)

    def refill(self, requests_per_s: int, bytes_per_s: int, now: float) -> None:
        passed, self.at = now - self.at, now
        self.requests = min(self.requests + passed * requests_per_s, max(requests_per_s * BURST_S, 1.0))
        self.bytes = min(self.bytes + passed * bytes_per_s, bytes_per_s * BURST_S)


class RateLimits:
    """The requests and bytes a second of each token, or of a person that a login proxy lets in. Thread-safe.

    Requests are counted as they come, with room for a burst. Bytes are counted as they go, so that an answer that has begun
    is never slowed; the next requests have to wait.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock, self._lock = clock, Lock()
        self._holders: OrderedDict[_Holder, _Rate] = OrderedDict()

    def admit(self, principal: Principal) -> None:
        """Count a request; `TooManyRequests` with the seconds to wait, where a limit of its principal is reached."""
        requests_per_s, bytes_per_s = principal.requests_per_s, principal.bytes_per_s
        if requests_per_s is None and bytes_per_s is None:
            return
        with self._lock:
            rate = self._at_present(_holder(principal), requests_per_s or 0, bytes_per_s or 0)
            if bytes_per_s is not None and rate.bytes < 0:
                raise _refused(principal, f"{bytes_per_s} bytes a second", -rate.bytes / bytes_per_s)
            if requests_per_s is not None:
                if rate.requests < 1:
                    limit = f"{requests_per_s} request{'s' if requests_per_s > 1 else ''} a second"
                    raise _refused(principal, limit, (1 - rate.requests) / requests_per_s)
                rate.requests -= 1

    def counting(self, principal: Principal, send: Send) -> Send:
        """Count what is sent as bytes of this principal."""
        if principal.bytes_per_s is None:
            return send

        async def counted(message: Message) -> None:
            await send(message)
            with self._lock:
                rate = self._holders.get(_holder(principal))
                if rate is not None:
                    rate.bytes -= len(message.get("body", b""))

        return counted

    def _at_present(self, holder: _Holder, requests_per_s: int, bytes_per_s: int) -> _Rate:
        now = self._clock()
        rate = self._holders.setdefault(holder, _Rate(requests_per_s, bytes_per_s, now))
        rate.refill(requests_per_s, bytes_per_s, now)
        self._holders.move_to_end(holder)
        if len(self._holders) > HOLDERS_MAX:
            self._holders.popitem(last=False)
        return rate


def _holder(principal: Principal) -> _Holder:
    """An old secret in its grace has no limit of its own, and a person may have the name of a token."""
    return principal.by, principal.name


def _refused(principal: Principal, limit: str, wait_s: float) -> TooManyRequests:
    seconds = max(int(wait_s) + 1, 1)
    person = principal.by == "login"
    higher = "set a higher limit in the file of --logins" if person else "create a token with a higher limit"
    return TooManyRequests(
        f"{'' if person else 'the token '}{principal.name} may have {limit}",
        hint=f"wait {seconds} s, send fewer requests, or have an admin {higher}",
        retry_after_s=seconds,
    )


class Credentials(NamedTuple):
    """What authenticated a request: a token, and the browser's session for one. The owner has no token here."""

    token: int | None = None
    session: str | None = None


class CredentialWatch:
    """Ends requests within a second of their token or session. One query per interval covers all of them."""

    def __init__(
        self,
        tokens_in_force: Callable[[Collection[int]], set[int]],
        sessions_in_force: Callable[[Collection[str]], set[str]],
    ) -> None:
        self._tokens_in_force, self._sessions_in_force = tokens_in_force, sessions_in_force
        self._open: dict[anyio.CancelScope, Credentials] = {}
        self._watch: asyncio.Task[None] | None = None
        self._thread = anyio.CapacityLimiter(1)  # its own: it does not wait behind what it is there to end

    async def serve(self, app: ASGIApp, scope: Scope, receive: Receive, send: Send, credentials: Credentials) -> None:
        """Answer the request while its token and session are in force. Raises `Unauthenticated` if one ends before an answer
        has begun, and `TransferAborted`, which cuts the connection, after that.
        """
        begun = False

        async def noted(message: Message) -> None:
            nonlocal begun
            begun = True
            await send(message)

        with anyio.CancelScope() as limit:
            self._open[limit] = credentials
            if self._watch is None:
                self._watch = asyncio.get_running_loop().create_task(self._look())
            try:
                await app(scope, receive, noted)
            finally:
                del self._open[limit]
        if limit.cancelled_caught:
            log.info("%s %s was ended together with its token", scope["method"], scope["path"])
            if begun:
                raise TransferAborted(f"{scope['path']}: {_ENDED}")
            raise Unauthenticated(_ENDED, hint="sign in again, or use another token")

    async def _look(self) -> None:
        try:
            while self._open:
                await asyncio.sleep(IN_FORCE_EVERY_S)
                open_now = list(self._open.items())
                sessions = {held.session for _, held in open_now if held.session is not None}
                ended_sessions = sessions - self._sessions_in_force(sessions)
                _cancel(limit for limit, held in open_now if held.session in ended_sessions)
                tokens = {held.token for _, held in open_now if held.token is not None}
                if not tokens:
                    continue
                try:
                    ended = tokens - await anyio.to_thread.run_sync(self._tokens_in_force, tokens, limiter=self._thread)
                except CheckpointError as error:  # no token is revoked in a catalog that is away; asked again
                    log.warning("cannot check whether tokens are still valid: %s", error.detail)
                    continue
                _cancel(limit for limit, held in open_now if held.token in ended and limit in self._open)
        finally:
            self._watch = None


def _cancel(limits: Iterable[anyio.CancelScope]) -> None:
    for limit in limits:
        limit.cancel()


class StallLimit:
    """ASGI middleware: cuts the connection of a client that has not received any part of a body for so long."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def send_in_time(message: Message) -> None:
            with anyio.move_on_after(STALL_MAX_S) as limit:
                await send(message)
            if limit.cancelled_caught:
                why = f"{scope['path']}: the client read nothing for {STALL_MAX_S:.0f} s"
                log.info("transfer cut off: %s", why)
                raise TransferAborted(why)

        await self._app(scope, receive, send_in_time)
