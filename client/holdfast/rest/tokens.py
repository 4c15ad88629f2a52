"""Bearer tokens, over REST or, if no service runs, in a root's catalog."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any, NamedTuple, Protocol
from urllib.parse import quote

from holdfast.rest import service_jobs
from holdfast.rest.api import Api
from holdfast_formats.errors import InvalidRequest
from holdfast_formats.installing import install
from holdfast_formats.rest.offline import TokenWork
from holdfast_formats.rest.operations import NewToken, RotationRequest, Token, TokenRequest

_PATH = "/v1/tokens"


class TokenStore(Protocol):
    """A place where tokens are created. Raises refusals; REST admits only admins of all runs."""

    def create(self, wanted: TokenRequest) -> NewToken: ...
    def rotate(self, name: str, wanted: RotationRequest) -> NewToken: ...
    def all(self) -> list[Token]: ...
    def revoke(self, name: str) -> None: ...


class ServiceTokens(NamedTuple):
    api: Api

    def create(self, wanted: TokenRequest) -> NewToken:
        return self.api.parsed(self.api.request("POST", _PATH, json=wanted.model_dump()).content, NewToken)

    def all(self) -> list[Token]:
        """All tokens, newest first, including revoked and expired ones."""
        return list(self.api.pages(_PATH, Token))

    def rotate(self, name: str, wanted: RotationRequest) -> NewToken:
        """Make a new secret; the old one is accepted for the grace."""
        path = f"{_PATH}/{quote(name, safe='')}/rotate"
        return self.api.parsed(self.api.request("POST", path, json=wanted.model_dump()).content, NewToken)

    def revoke(self, name: str) -> None:
        self.api.request("DELETE", f"{_PATH}/{quote(name, safe='')}")


class RootTokens(NamedTuple):
    """The tokens of a root, served or not, changed by the service's tool, so a user with write access can make the first."""

    root: str | Path  # as `--root` takes it
    catalog: str | None = None

    def create(self, wanted: TokenRequest) -> NewToken:
        return NewToken.model_validate(self._done(act="token-create", create=wanted))

    def rotate(self, name: str, wanted: RotationRequest) -> NewToken:
        return NewToken.model_validate(self._done(act="token-rotate", name=name, rotate=wanted))

    def all(self) -> list[Token]:
        return [Token.model_validate(item) for item in self._done(act="token-list")["items"]]

    def revoke(self, name: str) -> None:
        self._done(act="token-revoke", name=name)

    def _done(self, **work: Any) -> Any:
        if importlib.util.find_spec("holdfast_service") is None:  # checked here because the client may not import it
            raise InvalidRequest(
                "changing a root's tokens needs the service's dependencies",
                hint=install("service"),
            )
        return service_jobs.offline(TokenWork(root=str(self.root), catalog=self.catalog, **work))
