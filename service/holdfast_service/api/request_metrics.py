"""Measures every request: duration by route and status, and bytes sent."""

from __future__ import annotations

import threading
import time

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from holdfast_service.observe.metrics import REQUEST_BOUNDS_S, Histogram
from holdfast_service.observe.tracing import span

UNKNOWN_ROUTE = "none"  # what no route answers: its paths are not labels, there may be any number of them
ROUTES_MAX = 300
_METHODS = {"GET", "HEAD", "PUT", "POST", "DELETE", "OPTIONS"}


class Requests:
    """Counts of one app's requests. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._seconds: dict[tuple[str, str, str], Histogram] = {}
        self._sent = 0

    def add(self, method: str, route: str, status: int, seconds: float, sent: int) -> None:
        """Count a request; `status` 0: its connection was cut before a response."""
        labels = (method if method in _METHODS else "other", route, f"{status // 100}xx" if status else "cut")
        with self._lock:
            if labels not in self._seconds and len(self._seconds) >= ROUTES_MAX:
                labels = (labels[0], UNKNOWN_ROUTE, labels[2])
            self._seconds.setdefault(labels, Histogram(REQUEST_BOUNDS_S)).add(seconds)
            self._sent += sent

    def all(self) -> tuple[dict[tuple[str, str, str], Histogram], int]:
        """The present histograms by method, route and class of status, and the bytes sent."""
        with self._lock:
            return {labels: histogram.copy() for labels, histogram in self._seconds.items()}, self._sent


class Observed:
    """Middleware, the outermost one: measures requests and, with tracing, makes each a span."""

    def __init__(self, app: ASGIApp, requests: Requests) -> None:
        self._app, self._requests = app, requests

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        status, sent = 0, 0

        async def noted(message: Message) -> None:
            nonlocal status, sent
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)
            sent += len(message.get("body", b""))

        began = time.monotonic()
        with span("holdfast.request", {"http.request.method": scope["method"]}, scope["headers"]) as note:
            try:
                await self._app(scope, receive, noted)
            finally:
                route = getattr(scope.get("route"), "path", UNKNOWN_ROUTE)
                note(**{"http.route": route, "http.response.status_code": status}, **_names(scope))
                self._requests.add(scope["method"], route, status, time.monotonic() - began, sent)


def _names(scope: Scope) -> dict[str, str]:
    """The run and step in a path."""
    parameters = scope.get("path_params") or {}
    return {f"holdfast.{name}": str(parameters[name]) for name in ("run", "step") if name in parameters}
