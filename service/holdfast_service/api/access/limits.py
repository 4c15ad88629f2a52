"""How much the holder of a token, or a person that a login proxy lets in, may ask for: requests a second, and bytes a
second of what is sent to them.

Requests are counted as they come, with room for a burst. Bytes are counted as they go, so that an answer that has begun is
never slowed; the next requests have to wait. Ranks are never limited: nothing of saving or restoring as a rank is.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable
from threading import Lock

from starlette.types import Message, Send

from holdfast_formats.errors import TooManyRequests
from holdfast_service.api.access import scopes
from holdfast_service.control.access.tokens import Principal

UNLIMITED = ("/v1/ranks/", *scopes.PROBES)  # how paths begin
BURST_S = 5.0  # so many seconds' worth may come at once
HOLDERS_MAX = 4096
_Key = tuple[str, str]


class _Holder:
    """What one token has left, at a time."""

    def __init__(self, requests: float, size: float, now: float) -> None:
        self.requests, self.bytes, self.at = requests, size, now


class Limiter:
    """The limits of one process. Thread-safe."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock, self._lock = clock, Lock()
        self._holders: OrderedDict[_Key, _Holder] = OrderedDict()

    def admit(self, principal: Principal, path: str) -> None:
        """Count a request; `TooManyRequests` with the seconds to wait, where its token's limit is reached."""
        requests_per_s, bytes_per_s = principal.requests_per_s, principal.bytes_per_s
        if path.startswith(UNLIMITED) or (requests_per_s is None and bytes_per_s is None):
            return
        with self._lock:
            holder = self._at_present(_key(principal), requests_per_s or 0, bytes_per_s or 0)
            if bytes_per_s is not None and holder.bytes < 0:
                raise _refused(principal, f"{bytes_per_s} bytes a second", -holder.bytes / bytes_per_s)
            if requests_per_s is not None:
                if holder.requests < 1:
                    limit = f"{requests_per_s} request{'s' if requests_per_s > 1 else ''} a second"
                    raise _refused(principal, limit, (1 - holder.requests) / requests_per_s)
                holder.requests -= 1

    def counting(self, principal: Principal, path: str, send: Send) -> Send:
        """The same, of whose bytes its token has fewer afterwards."""
        key = _key(principal)
        if principal.bytes_per_s is None or path.startswith(UNLIMITED):
            return send

        async def counted(message: Message) -> None:
            await send(message)
            with self._lock:
                holder = self._holders.get(key)
                if holder is not None:
                    holder.bytes -= len(message.get("body", b""))

        return counted

    def _at_present(self, key: _Key, requests_per_s: int, bytes_per_s: int) -> _Holder:
        now = self._clock()
        requests_max, bytes_max = max(requests_per_s * BURST_S, 1.0), bytes_per_s * BURST_S
        holder = self._holders.get(key)
        if holder is None:
            holder = self._holders[key] = _Holder(requests_max, bytes_max, now)
        passed, holder.at = now - holder.at, now
        holder.requests = min(holder.requests + passed * requests_per_s, requests_max)
        holder.bytes = min(holder.bytes + passed * bytes_per_s, bytes_max)
        self._holders.move_to_end(key)
        if len(self._holders) > HOLDERS_MAX:
            self._holders.popitem(last=False)
        return holder


def _key(principal: Principal) -> _Key:
    """Who it is that has the limit: an old secret in its grace has none of its own, and a person may be called as a token
    is."""
    return principal.by, principal.name


def _refused(principal: Principal, limit: str, wait_s: float) -> TooManyRequests:
    seconds = max(int(wait_s) + 1, 1)
    person = principal.by == "login"
    higher = "set a higher limit in the file of --logins" if person else "make a token with a higher limit"
    return TooManyRequests(
        f"{'' if person else 'the token '}{principal.name} may have {limit}",
        hint=f"wait {seconds} s, ask less often, or have an admin {higher}",
        retry_after_s=seconds,
    )
