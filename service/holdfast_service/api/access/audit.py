"""One entry of the audit log for every request that changes something, and for every refused one, made at the door when its
answer has begun. An attempt that failed is told of once a minute, with how many there were like it.

Every answer says by `X-Request-Id` which request it was; what a page asks of the API has the page's.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from starlette.datastructures import MutableHeaders
from starlette.types import Message, Scope, Send

from holdfast_formats.errors import Denied
from holdfast_formats.rest.access import By, Via
from holdfast_service.api.access import acts, scopes
from holdfast_service.api.access.places import NOBODY, asking
from holdfast_service.api.access.throttle import Throttle
from holdfast_service.api.problems import MEDIA_TYPE
from holdfast_service.control.access.audit import Act, Audit
from holdfast_service.control.access.tokens import Principal, without_secrets

ID_HEADER = "X-Request-Id"
CLIENT = b"holdfast/"  # how User-Agent of our own client begins
PROBLEM_BYTES_MAX = 64 * 1024
_REFUSED = (401, 403)
_request_id: ContextVar[str] = ContextVar("holdfast_request_id", default="")


class Trail:
    """Tells the audit log of requests."""

    def __init__(self, audit: Audit) -> None:
        self._audit, self._throttle = audit, Throttle()

    @contextmanager
    def following(self, scope: Scope, send: Send) -> Iterator[Footprint]:
        """Within the block a request is answered; at its end an entry is made of it, if it is one to be recorded."""
        inside = asking() is not NOBODY
        made = Footprint(scope, send, (inside and _request_id.get()) or secrets.token_hex(8), inside, self._note)
        before = _request_id.set(made.id)
        try:
            yield made
        finally:
            _request_id.reset(before)
            made.end()

    def _note(self, made: Footprint) -> None:
        found, refused = acts.named(made.method, made.path), made.status in _REFUSED
        if refused:
            if made.principal is not None and not acts.is_api(made.path):
                return  # a page shows what the API has refused, which is recorded
            kind = found.kind or (acts.READ if made.method in scopes.SAFE else acts.OTHER)
        elif found.kind is None or made.principal is None or made.rehearsed:
            return
        else:
            kind = found.kind
        untold = 0
        if made.status >= 400:
            due = self._throttle.due((made.who, made.address, kind, str(made.code)), made.who)
            if due is None:
                return
            untold = due
        self._audit.add(made.act(found, kind, untold))


class Footprint:
    """What is known of one request when it has been answered."""

    def __init__(self, scope: Scope, send: Send, request_id: str, inside: bool, ended: Callable[[Footprint], None]) -> None:
        self._scope, self._send, self.inside, self._ended = scope, send, inside, ended
        self._open = True
        self.showed = False  # a token, or that somebody is logged in
        self.id = request_id
        self.method, self.path = str(scope["method"]), str(scope["path"])
        self.principal: Principal | None = None
        self.subject: Mapping[str, Any] = {}  # members of the body that say what it is about
        self.status = 0
        self.code: str | None = None
        self.denied: Denied | None = None
        self._problem = b""
        self._is_problem = False

    async def send(self, message: Message) -> None:
        """Hand on a message of the answer, and remember what it says of the result. Who has it all can see the entry."""
        if message["type"] == "http.response.start":
            self.status = message["status"]
            headers = MutableHeaders(scope=message)
            headers[ID_HEADER] = self.id
            self._is_problem = headers.get("content-type") == MEDIA_TYPE
            if self.status == 204 or self.method == "HEAD" or headers.get("content-length") == "0":
                self.end()  # the head is the whole answer
        elif self._is_problem and len(self._problem) < PROBLEM_BYTES_MAX:
            self._problem += message.get("body", b"")
        if message["type"] == "http.response.body" and not message.get("more_body", False):
            self.code = _code(self._problem) if self._is_problem else None
            self.end()
        await self._send(message)

    def deny(self, error: Denied) -> None:
        """It is refused, whatever the answer looks like: a browser is led to the sign-in page instead. Whoever has shown
        nothing has attempted nothing.
        """
        self.denied = error if self.showed else None

    def end(self) -> None:
        """No more is to be known of it; safe to repeat."""
        if not self._open:
            return
        self._open = False
        if self.denied is not None:
            self.status, self.code = self.denied.status, self.denied.code
        self._ended(self)

    @property
    def signed_in(self) -> str | None:
        """The principal that a browser was just let in as, which the route has left here."""
        found = self._scope.get("state", {}).get("signed_in")
        return found if isinstance(found, str) else None

    @property
    def who(self) -> str:
        if self.principal is None or not self.principal.known:
            return self.signed_in or ""
        return self.principal.name

    @property
    def address(self) -> str:
        client = self._scope.get("client")
        return str(client[0]) if client else ""

    @property
    def rehearsed(self) -> bool:
        """Whether it was only asked what would happen, as the route has said."""
        return self._scope.get("state", {}).get("rehearsed") is True

    def act(self, about: acts.NamedAct, kind: str, untold: int) -> Act:
        """The entry of this request."""
        said = self.subject
        return Act(
            who=self.who,
            by=self._by(),
            address=self.address,
            via=self._via(),
            kind=kind,
            method=self.method,
            path=without_secrets(self.path),
            status=self.status,
            request=self.id,
            run=about.run or _text(said.get("run")),
            step=about.step if about.step is not None else _number(said.get("step")),
            target=without_secrets(about.target or _text(said.get("kind")) or _text(said.get("name")) or "") or None,
            code=self.code,
            untold=untold,
        )

    def _by(self) -> By:
        if self.principal is None or not self.principal.known:
            return "nobody" if self.signed_in is None else "token"
        return self.principal.by

    def _via(self) -> Via:
        if self.inside:
            return "dashboard"
        agent: bytes = next((value for name, value in self._scope["headers"] if name == b"user-agent"), b"")
        return "client" if agent.startswith(CLIENT) else "http"


def _code(problem: bytes) -> str | None:
    try:
        found = json.loads(problem).get("code")
    except (ValueError, AttributeError):
        return None
    return found[:64] if isinstance(found, str) else None


def _text(value: Any) -> str | None:
    return value if isinstance(value, str) and value else None


def _number(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None
