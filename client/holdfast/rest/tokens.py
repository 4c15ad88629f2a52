"""Bearer tokens, over REST or, if no service runs, in a root's catalog."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple, Protocol
from urllib.parse import quote

from holdfast.rest.api import Api
from holdfast_formats.errors import CheckpointError, InvalidRequest, from_problem
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

    root: Path
    catalog: str | None = None

    def create(self, wanted: TokenRequest) -> NewToken:
        asked = ["create", "--scope", wanted.scope, "--runs", wanted.runs]
        for flag in ("expires_s", "requests_per_s", "bytes_per_s"):
            asked += _flag(flag, getattr(wanted, flag))
        return NewToken.model_validate(self._tool([*asked, "--", wanted.name]))

    def rotate(self, name: str, wanted: RotationRequest) -> NewToken:
        asked = ["rotate", *_flag("grace_s", wanted.grace_s), *_flag("expires_s", wanted.expires_s)]
        return NewToken.model_validate(self._tool([*asked, "--", name]))

    def all(self) -> list[Token]:
        return [Token.model_validate(item) for item in self._tool(["ls"])]

    def revoke(self, name: str) -> None:
        self._tool(["revoke", "--", name])

    def _tool(self, arguments: list[str]) -> Any:
        if importlib.util.find_spec("holdfast_service") is None:  # checked here because the client may not import it
            raise InvalidRequest(
                "changing a root's tokens needs the service's dependencies",
                hint="pip install 'holdfast-checkpoint[service]'",
            )
        catalog = [] if self.catalog is None else ["--catalog", self.catalog]
        program = [sys.executable, "-m", "holdfast_service.offline", "tokens"]
        command = [*program, "--root", str(self.root), *catalog, *arguments]
        done = subprocess.run(command, stdout=subprocess.PIPE, check=False)
        try:
            answer = json.loads(done.stdout)
        except ValueError:
            raise CheckpointError(
                f"the token tool exited with status {done.returncode}", hint="see its output above"
            ) from None
        if done.returncode != 0:
            raise from_problem(answer)
        return answer


def _flag(name: str, value: int | None) -> list[str]:
    return [] if value is None else [f"--{name.replace('_', '-')}", str(value)]
