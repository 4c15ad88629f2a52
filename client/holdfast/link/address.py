"""Where a checkpointer's daemon and directory are, from what its caller gave as `at`."""

from __future__ import annotations

import os
import re
import stat
from pathlib import Path
from typing import NamedTuple
from urllib.parse import urlsplit

from holdfast.config import DEFAULT_ROOT
from holdfast_formats.errors import InvalidRequest

SOCKET_SUFFIX = ".sock"
_SCHEME = re.compile(r"[^/]*:/")
_HOST = re.compile(r"(\[[^/]*\]|[^/:]+):\d+(/.*)?|(localhost|\d+(\.\d+){3})/?")  # an address that lacks its scheme
_CHOICES = "a directory, the path of a daemon's socket, or an address such as http://HOST:PORT"


class DaemonAddress(NamedTuple):
    """At most one of these is set; with none, the user's daemon is tried first, then an embedded one on ./holdfast-data."""

    root: Path | None
    socket: Path | None
    url: str | None

    @property
    def directory(self) -> Path | None:
        """The root that can be read, or served by an embedded daemon, with no daemon answering."""
        if self.root is not None:
            return self.root
        return DEFAULT_ROOT if self.socket is None and self.url is None else None


def place(at: str | os.PathLike[str] | None) -> DaemonAddress:
    """An address, a socket or a directory, by what stands at the path; where nothing does yet, a socket ends in ".sock".

    `InvalidRequest` for what is none of them, and for text that could be an address or a path.
    """
    if at is None:
        return DaemonAddress(None, None, None)
    text = os.fspath(at) if isinstance(at, str | os.PathLike) else None
    if not isinstance(text, str):
        raise InvalidRequest(f"at= must be a path or an address, not {type(at).__name__}", hint=f"write {_CHOICES}")
    if not text.strip():
        raise InvalidRequest(f"at={text!r} names no place", hint=f"leave at= out for your own daemon, or write {_CHOICES}")
    if _SCHEME.match(text):
        return DaemonAddress(None, None, _url(text))
    if isinstance(at, str) and _HOST.fullmatch(text):
        raise InvalidRequest(
            f"at={text!r} could be an address or a directory",
            hint='write "http://" in front of an address, with its port, or "./" in front of a directory',
        )
    path = Path(text)
    return DaemonAddress(None, path, None) if _is_socket(path) else DaemonAddress(path, None, None)


def _url(text: str) -> str:
    """The address; `InvalidRequest` for one that no daemon listens at."""
    try:
        parts = urlsplit(text)
        whole = text.isprintable() and " " not in text  # what the parser drops in silence, a connection would not
        usable = whole and parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # a port that is no number, brackets without an end
        usable = False
    if not usable:
        raise InvalidRequest(
            f"at={text!r} is not the address of a daemon",
            hint='write "http://HOST:PORT" or "https://HOST", as text; a directory or a socket as a path without a scheme',
        )
    return text


def _is_socket(path: Path) -> bool:
    try:
        mode = path.stat().st_mode
    except OSError:  # nothing yet, or nothing that we may see
        return path.suffix == SOCKET_SUFFIX
    except ValueError as error:
        raise InvalidRequest(f"at={str(path)!r} is not a path: {error}", hint=f"write {_CHOICES}") from None
    if not stat.S_ISDIR(mode) and not stat.S_ISSOCK(mode):
        raise InvalidRequest(
            f"at={str(path)!r} is neither a directory nor a socket", hint=f"there is a file of that name; write {_CHOICES}"
        )
    return stat.S_ISSOCK(mode)
