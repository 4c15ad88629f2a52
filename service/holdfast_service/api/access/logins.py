"""People authenticated by a proxy, by the headers that it sends: oauth2-proxy's, or any other's with the same contract.

Headers are trusted from the configured addresses only, and only with the secret that the proxy adds: a program that reaches
this service past the proxy is not authenticated. Such headers from another sender are refused, so that a mistake in the
set-up is seen.
"""

from __future__ import annotations

import hmac
import logging
import stat
from collections.abc import Mapping
from ipaddress import IPv4Network, IPv6Address, IPv6Network, ip_address, ip_network
from pathlib import Path
from typing import Annotated, Literal, NamedTuple

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from holdfast_formats.body import first_mistake
from holdfast_formats.errors import Forbidden, InvalidRequest, LimitExceeded
from holdfast_formats.rest.access import Grant
from holdfast_formats.rest.operations import RATE_MAX
from holdfast_service.api.access import bodies
from holdfast_service.api.access.request_head import IDENTITY
from holdfast_service.control.access.tokens import Principal, check_pattern, of_person

log = logging.getLogger(__name__)

SECRET_HEADER = "x-holdfast-proxy-secret"
SECRET_CHARS_MIN = 32
FILE_BYTES_MAX = 2**20
NAME_CHARS_MAX = 128
GROUPS_MAX = 1000  # of one person
_EXAMPLE = (
    '{"proxies": ["10.0.0.5"], "secret_file": "proxy.secret", "groups": {"team-a": {"scope": "write", "runs": "a-*"}}}'
)

_Rate = Annotated[int, Field(ge=1, le=RATE_MAX, strict=True)] | None


class LoginsFile(BaseModel):
    model_config = ConfigDict(extra="forbid")

    proxies: list[str] = Field(min_length=1, description="addresses or networks of the proxy: 10.0.0.5, 172.18.0.0/16")
    secret_file: Path = Field(description="file of the secret that the proxy adds; relative to this file")
    groups: dict[str, Grant] = Field(default_factory=dict, description="what members of a group may do")
    everybody: Grant | None = Field(default=None, description="what any user that the proxy lets in may do")
    headers: Literal["X-Forwarded", "X-Auth-Request"] = "X-Forwarded"
    logout: str | None = Field(default=None, description="path where the proxy ends the session")
    requests_per_s: _Rate = Field(default=None, description="requests per second for each person; None: no limit")
    bytes_per_s: _Rate = Field(default=None, description="bytes of responses per second for each person; None: no limit")

    @field_validator("proxies")
    @classmethod
    def _check_proxies(cls, value: list[str]) -> list[str]:
        for one in value:
            if ip_network(one, strict=False).prefixlen == 0:
                raise ValueError(f"{one} matches every address: give the proxy's own")
        return value

    @field_validator("groups")
    @classmethod
    def _check_groups(cls, value: dict[str, Grant]) -> dict[str, Grant]:
        for name in value:
            if not name or "," in name or name != name.strip() or not name.isprintable():
                raise ValueError(f"{name!r} is not a valid group name: remove commas and surrounding spaces")
        return value

    @field_validator("logout")
    @classmethod
    def _check_logout(cls, value: str | None) -> str | None:
        if value is not None and (not value.startswith("/") or value.startswith(("//", "/\\")) or not value.isprintable()):
            raise ValueError("a path of this site, such as /oauth2/sign_out")
        return value


class Logins(NamedTuple):
    """The trusted proxies, and the grants of their groups."""

    proxies: tuple[IPv4Network | IPv6Network, ...]
    secret: str
    groups: Mapping[str, Grant]
    everybody: Grant | None
    family: str
    logout: str | None
    requests_per_s: int | None = None
    bytes_per_s: int | None = None

    def read(self, headers: Mapping[str, str], peer: str) -> Principal | None:
        """The authenticated person; None without such headers. `Forbidden` for headers that are not the proxy's, and for
        people in no group with a grant; `InvalidRequest` for an invalid name.
        """
        values = {name: headers.get(f"{self.family}-{name}".lower()) for name in IDENTITY}
        secret = headers.get(SECRET_HEADER)
        if secret is None and not any(values.values()):
            return None
        if secret is None or not hmac.compare_digest(secret.encode(), self.secret.encode()) or not self._is_proxy(peer):
            raise Forbidden(
                f"{self.family}-User and the like are trusted only from the login proxy",
                hint="the proxy must be at an address in `proxies` of --logins, and add the secret",
            )
        name = values["Email"] or values["Preferred-Username"] or values["User"]
        if not name:
            return None  # a path that the proxy opens to all
        return self._person(_name(name), _names(values["Groups"] or ""))

    def _person(self, name: str, groups: list[str]) -> Principal:
        grants = [self.groups[group] for group in groups if group in self.groups]
        grants += [] if self.everybody is None else [self.everybody]
        if not grants:
            hint = "ask an admin to add one of your groups to the file of --logins"
            raise Forbidden(f"no group of {name} may use this service", hint=hint)
        return of_person(name, grants)._replace(requests_per_s=self.requests_per_s, bytes_per_s=self.bytes_per_s)

    def _is_proxy(self, peer: str) -> bool:
        try:
            address = ip_address(peer.partition("%")[0])
        except ValueError:
            return False
        if isinstance(address, IPv6Address) and address.ipv4_mapped is not None:
            address = address.ipv4_mapped
        return any(address in network for network in self.proxies)


def load(path: Path) -> Logins:
    """Read the file of `--logins`; `InvalidRequest` names what is wrong in it."""
    text = _text(path)
    try:
        read = LoginsFile.model_validate(bodies.parse(text))
    except ValidationError as error:
        raise InvalidRequest(f"--logins {path}: {first_mistake(error)}", hint=f"for example {_EXAMPLE}") from error
    except (InvalidRequest, LimitExceeded) as error:
        raise InvalidRequest(f"--logins {path} is not JSON: {error.detail}", hint=f"for example {_EXAMPLE}") from error
    if not read.groups and read.everybody is None:
        raise InvalidRequest(
            f"--logins {path} allows no person to sign in", hint="name a group in `groups`, or give `everybody` a scope"
        )
    for grant in (*read.groups.values(), *([read.everybody] if read.everybody else [])):
        check_pattern(grant.runs)
    proxies = tuple(ip_network(one, strict=False) for one in read.proxies)
    secret = _secret(path.parent / read.secret_file)
    return Logins(
        proxies,
        secret,
        read.groups,
        read.everybody,
        read.headers,
        read.logout,
        requests_per_s=read.requests_per_s,
        bytes_per_s=read.bytes_per_s,
    )


def _secret(path: Path) -> str:
    secret = _text(path).decode(errors="replace").strip()
    if len(secret) < SECRET_CHARS_MIN or not (secret.isascii() and secret.isprintable()):
        hint = f"write at least {SECRET_CHARS_MIN} printable characters there: openssl rand -hex 32"
        raise InvalidRequest(f"the secret in {path} is too short, or not plain text", hint=hint)
    if path.stat().st_mode & 0o007:
        log.warning("every user of this machine can read %s and could sign in as any person: chmod 600", path)
    return secret


def _text(path: Path) -> bytes:
    try:
        if not stat.S_ISREG(path.stat().st_mode):  # a FIFO without a writer would block
            raise InvalidRequest(f"{path} is not a file", hint="check --logins and `secret_file`")
        with path.open("rb") as file:
            text = file.read(FILE_BYTES_MAX + 1)
    except OSError as error:
        raise InvalidRequest(f"cannot read {path}: {error.strerror}", hint="check --logins and `secret_file`") from error
    if len(text) > FILE_BYTES_MAX:
        raise InvalidRequest(f"{path} is over {FILE_BYTES_MAX} bytes", hint="check --logins and `secret_file`")
    return text


def _name(text: str) -> str:
    name = _decoded(text)
    if len(name) > NAME_CHARS_MAX or not name.isprintable():
        raise InvalidRequest("the login proxy has sent an invalid name", hint="check its claims for user and email")
    return name


def _names(text: str) -> list[str]:
    """The groups in a header, separated by commas."""
    return [group for part in _decoded(text).split(",")[:GROUPS_MAX] if (group := part.strip())]


def _decoded(text: str) -> str:
    """Header values are bytes: proxies send UTF-8 in them. `InvalidRequest`."""
    try:
        return text.encode("latin-1").decode()
    except UnicodeError as error:
        raise InvalidRequest("the login proxy has sent a name that is not UTF-8", hint="check its claims") from error
