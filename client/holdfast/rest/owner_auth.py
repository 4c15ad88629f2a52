"""Sends the token that this user's own daemon left for this user's programs."""

from __future__ import annotations

from collections.abc import Generator

import httpx

from holdfast.rest import owner_token
from holdfast.rest.owner_token import FoundToken


class OwnersToken(httpx.Auth):
    """Sends the token of this user's daemon, and reads it again when it is refused, because each start has a new one."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._found = owner_token.owners(url)

    @property
    def token(self) -> bool:
        return self._found is not None

    def auth_flow(self, request: httpx.Request) -> Generator[httpx.Request, httpx.Response, None]:
        if self._found is None:
            self._found = owner_token.owners(self._url)
        shown = self._show(request)
        answer = yield request
        if answer.status_code == httpx.codes.UNAUTHORIZED:
            self._found = owner_token.owners(self._url)
            if self._found is not None and self._found != shown:
                self._show(request)
                yield request

    def _show(self, request: httpx.Request) -> FoundToken | None:
        token = self._found
        if token is not None:
            url = httpx.URL(token.url)
            request.url = request.url.copy_with(host=url.host, port=url.port)
            request.headers["Authorization"] = f"Bearer {token.token}"
        return token
