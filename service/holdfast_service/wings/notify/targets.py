"""The targets of alerts: the file of `--notify`, in TOML. Unknown keys are rejected and listed.

The file is the only place for targets: it alone determines where this machine connects to, and no API changes that. Secrets
are in separate files, read at each delivery, so that they can be replaced at any time.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import Annotated, Literal
from urllib.parse import urlsplit

import msgspec
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from holdfast_formats.body import first_mistake
from holdfast_formats.errors import InvalidRequest
from holdfast_formats.rest.notifications import AlertLevel

TARGETS_MAX = 32
FILE_BYTES_MAX = 256 * 1024
SECRET_BYTES_MIN, SECRET_BYTES_MAX = 16, 4096
REPEAT_S = 4 * 3600.0
AFTER_S = 30.0
DAY_S = 86_400.0
_HINT = "docs/telling.md describes the file"
_ADDRESS = r"^[^\s@<>,;:\"\\]+@[^\s@<>,;:\"\\]+$"

Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,62}$")]
Address = Annotated[str, Field(pattern=_ADDRESS, max_length=254)]


class _Target(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    name: Name
    runs: str = Field(default="*", pattern=r"^(?:[A-Za-z0-9][A-Za-z0-9._-]{0,127}\*?|\*)$")
    level: AlertLevel = "warning"
    after_s: float = Field(default=AFTER_S, ge=0, le=DAY_S)
    repeat_s: float = Field(default=REPEAT_S, ge=0, le=30 * DAY_S)  # 0: never
    recovery: bool = True


class HttpTarget(_Target):
    """A webhook: this program's own JSON, signed, or Slack's, whose address is the secret."""

    kind: Literal["webhook", "slack"]
    url: str | None = None
    url_file: Path | None = None
    secret_file: Path | None = None
    proxy: str | None = None
    ca_file: Path | None = None

    @field_validator("url", "proxy")
    @classmethod
    def _check_url(cls, value: str | None) -> str | None:
        return None if value is None else check_url(value)

    @model_validator(mode="after")
    def _check_whole(self) -> HttpTarget:
        if (self.url is None) == (self.url_file is None):
            raise ValueError("give one of url and url_file")
        if self.kind == "slack" and self.secret_file is not None:
            raise ValueError("secret_file is for the kind webhook: Slack checks no signature")
        return self

    def address(self) -> str:
        """The address; `InvalidRequest` if its file cannot be read."""
        if self.url is not None:
            return self.url
        assert self.url_file is not None
        try:
            return check_url(read_secret(self.url_file, 1).decode("ascii"))
        except ValueError:  # no cause: it would show the address
            raise InvalidRequest(f"{self.url_file} does not contain an http:// or https:// address", hint=_HINT) from None

    @property
    def shown(self) -> str:
        """The address without secrets: only scheme, host and port."""
        if self.url is None:
            return f"the address in {self.url_file}"
        parts = urlsplit(self.url)
        host = parts.hostname or ""
        port = f":{parts.port}" if parts.port else ""
        return f"{parts.scheme}://{f'[{host}]' if ':' in host else host}{port}" + ("/…" if parts.path.strip("/") else "")


class MailTarget(_Target):
    kind: Literal["mail"]
    server: str = Field(pattern=r"^[A-Za-z0-9._:\[\]-]{1,255}$")
    sender: Address
    to: tuple[Address, ...] = Field(min_length=1, max_length=20)
    tls: Literal["starttls", "tls", "none"] = "starttls"
    user: str | None = Field(default=None, min_length=1, max_length=254)
    password_file: Path | None = None
    ca_file: Path | None = None

    @model_validator(mode="after")
    def _check_whole(self) -> MailTarget:
        if (self.user is None) != (self.password_file is None):
            raise ValueError("user and password_file belong together")
        host, _ = self.place
        if self.tls == "none" and self.user is not None and host not in ("localhost", "127.0.0.1", "::1"):
            raise ValueError('tls = "none" would send the password in clear text: use "starttls" or "tls"')
        return self

    @property
    def place(self) -> tuple[str, int]:
        """Host and port of the server; without a port, that of the kind of encryption."""
        default = {"starttls": 587, "tls": 465, "none": 25}[self.tls]
        host, colon, port = self.server.rpartition(":")
        if not colon or (":" in host and not host.endswith("]")):  # a host alone, or an IPv6 address alone
            return self.server.strip("[]"), default
        if not port.isdigit() or not 0 < int(port) < 65_536:
            raise ValueError(f"server: {self.server!r} is not HOST:PORT")
        return host.strip("[]"), int(port)

    @property
    def shown(self) -> str:
        host, port = self.place
        return f"{', '.join(self.to)} by {host}:{port}"


Target = Annotated[HttpTarget | MailTarget, Field(discriminator="kind")]


class NotifyFile(BaseModel):
    """The whole file. `dashboard` is the dashboard's public address, for links in messages."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    dashboard: str | None = None
    target: tuple[Target, ...] = Field(default=(), max_length=TARGETS_MAX)

    @field_validator("dashboard")
    @classmethod
    def _check_dashboard(cls, value: str | None) -> str | None:
        return None if value is None else check_url(value).rstrip("/")

    @model_validator(mode="after")
    def _check_names(self) -> NotifyFile:
        names = [one.name for one in self.target]
        twice = next((name for name in names if names.count(name) > 1), None)
        if twice is not None:
            raise ValueError(f"two targets have the name {twice!r}")
        return self


def check_url(url: str) -> str:
    """An http or https address without user, password and fragment; `ValueError`, without the address."""
    if not url.isascii() or not url.isprintable():
        raise ValueError("it is not an http:// or https:// address")
    try:
        parts = urlsplit(url)
        _ = parts.port
    except ValueError:  # no cause: it would show what may be secret
        raise ValueError("its host or port is invalid") from None
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ValueError("it is not an http:// or https:// address")
    if " " in url or "#" in url or "@" in parts.netloc:
        raise ValueError("an address cannot contain a space, a user or a fragment")
    return url


def read_targets(path: Path) -> NotifyFile:
    """The targets in a file; `InvalidRequest` with the mistake, but without possible secrets."""
    try:
        with open(path, "rb", opener=_at_once) as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                raise InvalidRequest(f"--notify: {path} is not a file", hint=_HINT)
            text = file.read(FILE_BYTES_MAX + 1)
    except OSError as error:
        raise InvalidRequest(f"--notify: cannot read {path}: {error.strerror}", hint=_HINT) from error
    if len(text) > FILE_BYTES_MAX:
        raise InvalidRequest(f"--notify: {path} has more than {FILE_BYTES_MAX} bytes", hint=_HINT)
    try:
        document = msgspec.toml.decode(text)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise InvalidRequest(f"--notify: {path} is not TOML: {error}", hint=_HINT) from None
    try:
        return NotifyFile.model_validate(document)
    except ValidationError as error:
        raise InvalidRequest(f"--notify: {path}: {first_mistake(error, 'the file')}", hint=_HINT) from None


def _at_once(path: str, flags: int) -> int:
    """Open a pipe without waiting for its writer."""
    return os.open(path, flags | os.O_NONBLOCK)


def read_secret(path: Path, bytes_min: int = SECRET_BYTES_MIN) -> bytes:
    """The content of a secret's file, without surrounding white space; `InvalidRequest`."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        try:
            mode = os.fstat(descriptor).st_mode
            if not stat.S_ISREG(mode):
                raise InvalidRequest(f"{path} is not a file", hint=_HINT)
            if stat.S_IMODE(mode) & 0o007:
                raise InvalidRequest(f"every user can read {path}", hint=f"chmod 600 {path}")
            secret = os.read(descriptor, SECRET_BYTES_MAX + 1).strip()
        finally:
            os.close(descriptor)
    except OSError as error:
        raise InvalidRequest(
            f"cannot read {path}: {error.strerror}", hint="make it readable by the daemon's user"
        ) from error
    if not bytes_min <= len(secret) <= SECRET_BYTES_MAX:
        raise InvalidRequest(f"{path} must have {bytes_min} to {SECRET_BYTES_MAX} bytes", hint=_HINT)
    return secret
