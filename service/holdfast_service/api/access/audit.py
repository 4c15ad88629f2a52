"""One entry of the audit log for every request that changes something, and for every refused one, made when its answer has
begun. Repeated failures of one kind are recorded once a minute, with their number.

Every answer has its request's id in `X-Request-Id`; API requests of a page have the page's.
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
from holdfast_service.api.access import bodies
from holdfast_service.api.access.admission import NO_PEER, current_peer
from holdfast_service.api.access.authorization import API, Required
from holdfast_service.api.access.refusals import Throttle
from holdfast_service.api.problems import MEDIA_TYPE
from holdfast_service.control.access.audit import Act, Audit
from holdfast_service.control.access.tokens import Principal, without_secrets

ID_HEADER = "X-Request-Id"
CLIENT = b"holdfast/"  # how User-Agent of our own client begins
PROBLEM_BYTES_MAX = 64 * 1024
READ, OTHER = "read", "other"  # what is only recorded when it is refused, and what has no name
_REFUSED = (401, 403)
_request_id: ContextVar[str] = ContextVar("holdfast_request_id", default="")


class AuditTrail:
    """Adds requests to the audit log."""

    def __init__(self, audit: Audit) -> None:
        self._audit, self._throttle = audit, Throttle()

    @contextmanager
    def recorded(self, scope: Scope, send: Send, required: Required) -> Iterator[RequestRecord]:
        """Make an entry of the request at the end of the block, if it is to be recorded."""
        inside = current_peer() is not NO_PEER
        request_id = (inside and _request_id.get()) or secrets.token_hex(8)
        record = RequestRecord(scope, send, required, request_id, self._add)
        before = _request_id.set(request_id)
        try:
            yield record
        finally:
            _request_id.reset(before)
            record.end()

    def _add(self, record: RequestRecord) -> None:
        kind, refused = act_of(record.required, record.path), record.status in _REFUSED
        if refused:
            if record.required.needs.runs == "viewer" and record.principal is not None and record.denied is None:
                return  # a page shows what the API has refused, which is recorded
            kind = kind or (READ if record.required.safe else OTHER)
        elif kind is None or record.principal is None or record.is_dry_run:
            return
        left_out = 0
        if record.status >= 400:
            due = self._throttle.due((record.who, record.address, kind, str(record.code)), record.who)
            if due is None:
                return
            left_out = due
        self._audit.add(record.act(kind, left_out))


def act_of(required: Required, path: str) -> str | None:
    """The kind of a request in the audit log; None: it changes nothing that is recorded. Of a form's page only its
    submission does. What ranks save is recorded as events instead.
    """
    needs = required.needs
    if needs.act is not None and (not required.safe or needs.body != bodies.FORM):
        return needs.act
    return OTHER if not required.safe and path.startswith(API) and needs.runs != "rank" else None


class RequestRecord:
    """The result of one request."""

    def __init__(
        self, scope: Scope, send: Send, required: Required, request_id: str, ended: Callable[[RequestRecord], None]
    ) -> None:
        self._scope, self._send, self.required, self.id, self._ended = scope, send, required, request_id, ended
        self.inside = current_peer() is not NO_PEER  # a page sends it
        self._open = True
        self.showed = False  # it has a token, or a login's headers
        self.method, self.path = str(scope["method"]), str(scope["path"])
        self.principal: Principal | None = None
        self.subject: Mapping[str, Any] = {}  # members of the body that say what it is about
        self.status = 0
        self.code: str | None = None
        self.denied: Denied | None = None
        self._problem = b""
        self._is_problem = False

    async def send(self, message: Message) -> None:
        """Pass on a message of the answer, and note the result. The entry is made before the last one is sent."""
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

    def note_body(self, document: Any) -> None:
        """Take what the request is about from its parsed body."""
        self.subject = document if isinstance(document, dict) else {}

    def deny(self, error: Denied) -> None:
        """Mark it as refused, whatever the answer looks like: a browser is redirected to the sign-in page instead. A request
        without credentials is no attempt.
        """
        self.denied = error if self.showed else None

    def end(self) -> None:
        """Make the entry; idempotent."""
        if not self._open:
            return
        self._open = False
        if self.denied is not None:
            self.status, self.code = self.denied.status, self.denied.code
        self._ended(self)

    @property
    def signed_in(self) -> str | None:
        """The principal of a new browser session, which the route has left here."""
        name = self._scope.get("state", {}).get("signed_in")
        return name if isinstance(name, str) else None

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
    def is_dry_run(self) -> bool:
        """Whether the route has marked it as a dry run."""
        return self._scope.get("state", {}).get("dry_run") is True

    def act(self, kind: str, untold: int) -> Act:
        """The entry of this request: its subject is in the path, or else in the body."""
        subject = self.subject
        path = dict(self.required.path) if kind == self.required.needs.act else {}
        run, step = path.pop("run", None), _step(path.pop("step", None))
        target = next(reversed(path.values()), None) or _text(subject.get("kind")) or _text(subject.get("name"))
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
            run=run or _text(subject.get("run")),
            step=step if step is not None else _number(subject.get("step")),
            target=without_secrets(target or "") or None,
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
        code = json.loads(problem).get("code")
    except (ValueError, AttributeError):
        return None
    return code[:64] if isinstance(code, str) else None


def _step(text: str | None) -> int | None:
    return int(text) if text is not None and text.isascii() and text.isdigit() and len(text) < 16 else None


def _text(value: Any) -> str | None:
    return value if isinstance(value, str) and value else None


def _number(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None
