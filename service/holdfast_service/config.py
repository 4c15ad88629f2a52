"""The service's configuration, and its only reader of the environment.

Every setting is a flag of `holdfast serve`; its default can be set as HOLDFAST_<FLAG>, e.g. HOLDFAST_ROOT.
"""

from __future__ import annotations

import argparse
import os
import platform
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal, NamedTuple

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from holdfast_formats.errors import InvalidRequest

ENVIRONMENT_PREFIX = "HOLDFAST_"
ROOT = Path("holdfast-data")
LISTEN = "127.0.0.1:8420"
NO_LISTENER = "none"
FIRST_INHERITED = 3  # the first descriptor that a service manager passes (sd_listen_fds)
_DESCRIPTION = "Run the checkpoint daemon of this machine, until it is interrupted."
_EPILOG = (
    "Every flag can be set in the environment instead: HOLDFAST_ROOT, HOLDFAST_LISTEN, and so on. "
    "Exit status: 0 done, 1 failed, 2 a flag is wrong, 4 root, socket or address is taken, 6 storage cannot be used."
)


class Config(BaseModel):
    """What one daemon needs to know. `listen` is None when there is no REST listener (an embedded daemon)."""

    model_config = ConfigDict(frozen=True)

    root: Path = ROOT
    listen: tuple[str, int] | None = ("127.0.0.1", 8420)
    socket: Path
    node: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,62}$")
    keep: int | None = Field(default=None, ge=1)
    catalog: str | None = None
    arena_bytes_max: int | None = Field(default=None, ge=0)
    spill: Literal["auto", "never"] = "auto"
    write_bytes_per_second: int | None = Field(default=None, ge=1)
    silence_max: float = Field(default=60.0, gt=0)
    exit_when_idle: float | None = Field(default=None, gt=0)
    log_level: str = "info"

    @field_validator("listen", mode="before")
    @classmethod
    def _parse_listen(cls, value: object) -> object:
        if value == NO_LISTENER:
            return None
        if isinstance(value, str):
            host, colon, port = value.rpartition(":")
            if not colon or not host or not port.isdigit() or int(port) > 65_535:
                raise ValueError(f"{value!r} is not HOST:PORT")
            return host.strip("[]"), int(port)
        return value

    @property
    def catalog_url(self) -> str:
        return self.catalog or f"sqlite:///{self.root.resolve() / 'catalog.sqlite'}"


def default_socket(environment: Mapping[str, str]) -> Path:
    """A socket in the user's runtime directory, or in a directory of the user's own under /tmp."""
    runtime = environment.get("XDG_RUNTIME_DIR")
    return (Path(runtime) / "holdfast" if runtime else Path(f"/tmp/holdfast-{os.getuid()}")) / "holdfast.sock"


class StoredDescriptors(NamedTuple):
    """The service manager's fd store: where to talk to it, and what it kept of the last start, by name."""

    notify: str
    inherited: tuple[tuple[str, int], ...]


def fd_store(environment: Mapping[str, str] | None = None) -> StoredDescriptors | None:
    """The fd store if this process is a service that has one (systemd with FileDescriptorStoreMax=), else None."""
    known = os.environ if environment is None else environment
    notify, room = known.get("NOTIFY_SOCKET", ""), known.get("FDSTORE", "")
    if not notify or not room.isdigit() or int(room) == 0:
        return None
    if known.get("LISTEN_PID") != str(os.getpid()):
        return StoredDescriptors(notify, ())
    names = known.get("LISTEN_FDNAMES", "").split(":")
    return StoredDescriptors(notify, tuple((name, FIRST_INHERITED + i) for i, name in enumerate(names) if name))


def default_node() -> str:
    name = "".join(c if c.isalnum() or c in "._-" else "-" for c in platform.node())[:63].lstrip("._-")
    return name or "node"


def parse(arguments: Sequence[str], environment: Mapping[str, str] | None = None) -> Config:
    """The configuration from flags and environment; `InvalidRequest` names the flag that is wrong."""
    known = dict(os.environ if environment is None else environment)
    given = vars(_parser().parse_args(arguments))
    settings: dict[str, object] = {
        "socket": default_socket(known),
        "node": default_node(),
    }
    for flag, value in given.items():
        chosen = value if value is not None else known.get(ENVIRONMENT_PREFIX + flag.upper())
        if chosen is not None:
            settings[flag] = chosen
    try:
        return Config.model_validate(settings)
    except ValidationError as error:
        first = error.errors()[0]
        flag = "--" + str(first["loc"][0]).replace("_", "-")
        raise InvalidRequest(f"{flag}: {first['msg']}", hint="see `holdfast serve --help`") from error


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="holdfast serve", description=_DESCRIPTION, epilog=_EPILOG)
    parser.add_argument("--root", metavar="DIR", help=f"where checkpoints rest (default: ./{ROOT})")
    parser.add_argument("--listen", metavar="HOST:PORT", help=f"REST address, or 'none' (default: {LISTEN})")
    parser.add_argument("--socket", metavar="PATH", help="unix socket for ranks (default: in the user's runtime directory)")
    parser.add_argument("--node", metavar="NAME", help="this machine's name in receipts (default: the host name)")
    parser.add_argument("--keep", metavar="N", help="keep the newest N verified checkpoints of a run (default: all)")
    parser.add_argument("--catalog", metavar="URL", help="SQLAlchemy URL of the catalog (default: SQLite under --root)")
    parser.add_argument(
        "--arena-bytes-max", metavar="BYTES", help="limit on shared memory (default: 90%% of what machine and cgroup have)"
    )
    parser.add_argument(
        "--spill", metavar="auto|never", help="stage on the root's disk what memory has no room for (default: auto)"
    )
    parser.add_argument("--write-bytes-per-second", metavar="BYTES", help="write no faster than this (default: no limit)")
    parser.add_argument("--silence-max", metavar="SECONDS", help="give up remote ranks silent for this long (default: 60)")
    parser.add_argument("--exit-when-idle", metavar="SECONDS", help="end when nobody used the daemon for this long")
    parser.add_argument("--log-level", metavar="LEVEL", help="debug, info, warning or error (default: info)")
    return parser
