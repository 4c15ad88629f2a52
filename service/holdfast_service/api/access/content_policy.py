"""What a browser may do with an answer: nothing, unless the answer has a policy of its own, as pages do. And what a cache
may keep: only style and scripts, because all else depends on the caller.
"""

from __future__ import annotations

from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

OPEN_FILES = "/static/"  # style and scripts
CALLER = "Authorization, Cookie"  # the headers that name the caller
POLICY = "default-src 'none'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"


class ContentPolicy:
    """ASGI middleware. A page without a policy, such as a library's, loads and runs nothing."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def with_policy(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                headers.setdefault("Content-Security-Policy", POLICY)
                headers.setdefault("X-Content-Type-Options", "nosniff")
                if not scope["path"].startswith(OPEN_FILES):
                    headers.setdefault("Cache-Control", "no-store")
                    headers.add_vary_header(CALLER)
            await send(message)

        await self._app(scope, receive, with_policy)
