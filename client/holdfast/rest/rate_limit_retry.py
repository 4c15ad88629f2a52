"""Waits when a token's rate limit is reached, so that a long restore over HTTP becomes slower instead of failing."""

from __future__ import annotations

import time

import httpx

from holdfast.rest.waiting_notice import awaited

WAIT_MAX_S = 120.0  # for one request, all waits together
_REPEATABLE = ("GET", "HEAD")


class RateLimitRetry(httpx.BaseTransport):
    """Repeats a reading request after the Retry-After of a 429 response; without one, the response is returned."""

    def __init__(self, transport: httpx.BaseTransport) -> None:
        self._transport = transport

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        waited = 0.0
        while True:
            with awaited(str(request.url.copy_with(raw_path=b"/")), "wait_s" in request.url.params):
                response = self._transport.handle_request(request)
            wait_s = _wait_s(response)
            if request.method not in _REPEATABLE or wait_s is None or waited + wait_s > WAIT_MAX_S:
                return response
            response.close()
            time.sleep(wait_s)
            waited += wait_s

    def close(self) -> None:
        self._transport.close()


def _wait_s(response: httpx.Response) -> float | None:
    """Seconds to wait for such a response, at least a moment; None for others."""
    retry_after = response.headers.get("Retry-After", "")
    if response.status_code != httpx.codes.TOO_MANY_REQUESTS or not (
        retry_after.isascii() and retry_after.isdigit() and len(retry_after) < 6
    ):
        return None
    return max(float(retry_after), 0.1)
