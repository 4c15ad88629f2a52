"""Finds the token that this user's own daemon left for this user's programs, by the daemon's address. No httpx."""

from __future__ import annotations

import os
import pwd
import stat
from pathlib import Path
from typing import NamedTuple
from urllib.parse import urlsplit

import msgspec

from holdfast import config
from holdfast_formats import owner_key
from holdfast_formats.owner_key import OwnerKey, read_key


class FoundToken(NamedTuple):
    """A token, and the address at which it is valid: never another one."""

    url: str
    token: str


def owners(url: str) -> FoundToken | None:
    """The token that the daemon at `url` left for this user; None if there is none, or if that could be another daemon."""
    try:
        parts = urlsplit(url)
        host, port = parts.hostname, parts.port or 80
    except ValueError:
        return None
    if parts.scheme != "http" or host is None or parts.path.strip("/"):
        return None
    for directory in (config.runtime_directory(), *_system_directories()):
        key = _read(directory / owner_key.file_name(port))
        address = key.address(host, port) if key is not None else None
        if key is not None and address is not None:
            return FoundToken(address, key.token)
    return None


def _system_directories() -> list[Path]:
    """Of the units `holdfast` and `holdfast@USER`."""
    system = Path(owner_key.SYSTEM_DIRECTORY)
    try:
        user = pwd.getpwuid(os.geteuid()).pw_name
    except KeyError:  # such as in a container
        return [system]
    return [system, system.with_name(f"{system.name}-{user}")]


def _read(path: Path) -> OwnerKey | None:
    """Read a key from a file that only this user can read; None for anything else. Root may read every user's."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        status = os.fstat(descriptor)
        ours = status.st_uid == os.geteuid() or os.geteuid() == 0
        if not stat.S_ISREG(status.st_mode) or not ours or stat.S_IMODE(status.st_mode) & 0o077:
            return None
        return read_key(os.read(descriptor, owner_key.BYTES_MAX))
    except (OSError, msgspec.DecodeError):
        return None
    finally:
        os.close(descriptor)
