"""A reverse proxy that logs people in as oauth2-proxy does: a cookie says who it is; what the browser says of that is
dropped, and what the proxy knows is added, beside the secret.
"""

from __future__ import annotations

import socket
import ssl
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import NamedTuple

import httpx
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response
from starlette.routing import Route

_NO_TLS = ssl.create_default_context()
HOPS = {"connection", "transfer-encoding", "content-length", "keep-alive"}


class Person(NamedTuple):
    email: str
    groups: str = ""
    user: str = "sub-1"


@contextmanager
def login_proxy(upstream: str, people: Mapping[str, Person], secret: str, family: str = "X-Forwarded") -> Iterator[str]:
    """The address of a proxy before `upstream`; the cookie `_oauth2_proxy` names one of the people."""

    async def forward(request: Request) -> Response:
        if request.url.path == "/oauth2/sign_out":
            answer = RedirectResponse("/oauth2/sign_in", 302)
            answer.delete_cookie("_oauth2_proxy")
            return answer
        who = people.get(request.cookies.get("_oauth2_proxy", ""))
        if who is None:
            return RedirectResponse("/oauth2/sign_in", 302)
        dropped = ("x-forwarded-", "x-auth-request-", "x-holdfast-proxy-")
        headers = [
            (name, value) for name, value in request.headers.items() if name not in HOPS and not name.startswith(dropped)
        ]
        added = {"User": who.user, "Email": who.email, "Groups": who.groups}
        headers += [(f"{family}-{name}", value.encode().decode("latin-1")) for name, value in added.items() if value]
        headers.append(("X-Holdfast-Proxy-Secret", secret))
        target = upstream + request.url.path + (f"?{request.url.query}" if request.url.query else "")
        raw = [(name.encode(), value.encode("latin-1")) for name, value in headers if name != "accept-encoding"]
        async with httpx.AsyncClient(trust_env=False, timeout=180, verify=_NO_TLS) as client:
            raw.append((b"accept-encoding", b"identity"))
            got = await client.request(request.method, target, headers=raw, content=await request.body())
        return Response(got.content, got.status_code, {k: v for k, v in got.headers.items() if k not in HOPS})

    methods = ["GET", "HEAD", "PUT", "POST", "DELETE"]
    app = Starlette(routes=[Route("/{path:path}", forward, methods=methods)])
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP) as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        server = uvicorn.Server(uvicorn.Config(app, lifespan="off", log_level="critical", log_config=None))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, name="test-login-proxy")
        thread.start()
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            server.should_exit = True
            thread.join(timeout=180)
