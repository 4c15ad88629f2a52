"""The access check before every route: size and form of the head, authentication, authorization, admission, and the body."""

from __future__ import annotations

import logging
from contextlib import ExitStack
from functools import partial
from urllib.parse import quote

import anyio
import anyio.to_thread
from starlette.responses import RedirectResponse, Response
from starlette.types import ASGIApp, Receive, Scope, Send

from holdfast_formats.errors import CheckpointError, Denied, TooManyRequests, Unauthenticated
from holdfast_service.api.access import bodies, connections, request_head
from holdfast_service.api.access.admission import Credentials, CredentialWatch, RequestAdmission
from holdfast_service.api.access.audit import AuditTrail, RequestRecord
from holdfast_service.api.access.authentication import Authentication, Policy, peer_of
from holdfast_service.api.access.authorization import Declarations
from holdfast_service.api.access.refusals import Refusals
from holdfast_service.api.problems import problem_response
from holdfast_service.control.access.tokens import Principal, Tokens
from holdfast_service.control.database.visible import limited_to

log = logging.getLogger(__name__)

CHALLENGE = {"WWW-Authenticate": 'Bearer realm="holdfast"'}
THREADS_MAX = 4  # of these checks alone: a refusal is answered also while requests keep all other threads busy


class AccessMiddleware:
    """ASGI middleware; leaves the principal in `scope["state"]` and limits queries to its runs."""

    def __init__(
        self,
        app: ASGIApp,
        declarations: Declarations,
        policy: Policy,
        tokens: Tokens,
        refusals: Refusals,
        trail: AuditTrail,
    ) -> None:
        self._app, self._declarations, self._tls, self._refusals, self._trail = (
            app,
            declarations,
            policy.tls,
            refusals,
            trail,
        )
        self._threads = anyio.CapacityLimiter(THREADS_MAX)
        self._authentication = Authentication(policy, tokens, self._threads)
        self._admission = RequestAdmission(lambda: connections.connections_max())
        self._watch = CredentialWatch(tokens.in_force, tokens.sessions_in_force)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        if self._tls:  # else an absolute address that is made of the request would lead past TLS
            scope["scheme"] = "https"
        required = self._declarations.of(scope["method"], scope["path"], scope["query_string"])
        with ExitStack() as held:
            record = held.enter_context(self._trail.recorded(scope, send, required))
            send = record.send
            try:
                headers = request_head.read(scope)
                principal = required.counted(await self._authentication.principal(scope, headers, record))
                required.check(principal)
                if not record.inside:  # an API request of a page is part of the page's
                    send = held.enter_context(self._admission.admitted(principal, required.needs, peer_of(scope), send))
                answer = partial(self._answer, headers, principal, record)
                # What signs out is not cut by that.
                credentials = Credentials(principal.token, principal.session if required.safe else None)
                if credentials == Credentials():
                    await answer(scope, receive, send)
                else:
                    await self._watch.serve(answer, scope, receive, send, credentials)
            except CheckpointError as error:
                if isinstance(error, Denied):
                    record.deny(error)
                await (await self._refusal(scope, error))(scope, receive, send)
            except bodies.Gone:
                log.debug("%s disconnected in the middle of its request body", peer_of(scope))

    async def _answer(
        self,
        headers: dict[str, str],
        principal: Principal,
        record: RequestRecord,
        scope: Scope,
        receive: Receive,
        send: Send,
    ) -> None:
        """From the body on: raises errors of these checks only; the application has handlers for its own."""
        required = record.required
        if not required.safe:
            body = await bodies.checked(scope, headers, receive, required.needs.body)
            receive, principal = body.receive, required.check_body(principal, body.document)
            record.note_body(body.document)
        scope.setdefault("state", {}).update(principal=principal, whole=record.principal)
        with limited_to(principal.runs):
            await self._app(scope, receive, send)

    async def _refusal(self, scope: Scope, error: CheckpointError) -> Response:
        add = partial(self._refusals.add, peer_of(scope), scope["method"], scope["path"], error)
        await anyio.to_thread.run_sync(add, limiter=self._threads)
        refused = isinstance(error, Unauthenticated)
        if refused and scope["method"] == "GET" and b"text/html" in dict(scope["headers"]).get(b"accept", b""):
            wanted = scope["path"] if scope["path"] != "/" else ""
            return RedirectResponse("/login" + (f"?next={quote(wanted, safe='')}" if wanted else ""), 303)
        # The connection is closed: the rest of the body is not read.
        wait = {"Retry-After": str(error.members["retry_after_s"])} if isinstance(error, TooManyRequests) else {}
        return problem_response(error, headers={"Connection": "close", **(CHALLENGE if refused else {}), **wait})
