"""Parses `at=` of a checkpointer: where its daemon and directory are."""

from __future__ import annotations

import errno
import os
import re
import stat
from pathlib import Path
from typing import NamedTuple
from urllib.parse import urlsplit

from holdfast.config import DEFAULT_ROOT, state_directory
from holdfast.read.bucket_root import BucketRoot
from holdfast.read.checkpoint_root import CheckpointRoot
from holdfast.read.directory_root import DirectoryRoot
from holdfast_files.objects import address
from holdfast_files.objects.address import BucketAddress
from holdfast_formats.errors import InvalidRequest
from holdfast_formats.root_files import check_root_place

SOCKET_SUFFIX = ".sock"
_SCHEME = re.compile(r"[^/]*:/")
_HOST = re.compile(r"(\[[^/]*\]|[^/:]+):\d+(/.*)?|(localhost|\d+(\.\d+){3})/?")  # an address that lacks its scheme
_CHOICES = "a directory, s3://BUCKET/PREFIX, the path of a daemon's socket, or an address such as http://HOST:PORT"


class DaemonAddress(NamedTuple):
    """One of these is set; paths are absolute. With `fallback`, the user's daemon is tried first. With `bucket`, the root is
    there, and `root` is the directory for what its daemon keeps on this machine.
    """

    root: Path | None = None
    socket: Path | None = None
    url: str | None = None
    fallback: Path | None = None
    bucket: BucketAddress | None = None

    @property
    def directory(self) -> Path | None:
        """The root to read, or to serve by an embedded daemon, if no daemon answers."""
        return self.root or self.fallback

    @property
    def readable(self) -> CheckpointRoot | None:
        """The root, if it is read without a daemon."""
        if self.bucket is not None:
            return BucketRoot(self.bucket)
        return None if self.directory is None else DirectoryRoot(self.directory)


def place(at: str | os.PathLike[str] | None) -> DaemonAddress:
    """An address, a socket or a directory, by what exists at the path; if nothing does, a socket ends in ".sock".

    Paths become absolute here, because a program may change its directory later. `InvalidRequest` for text that is none
    of them, or could be an address or a path.
    """
    if at is None:
        return DaemonAddress(fallback=_absolute(DEFAULT_ROOT))
    text = os.fspath(at) if isinstance(at, str | os.PathLike) else None
    if not isinstance(text, str):
        raise InvalidRequest(f"at= must be a path or an address, not {type(at).__name__}", hint=f"write {_CHOICES}")
    if not text.strip():
        raise InvalidRequest(f"at={text!r} is empty", hint=f"leave at= out for your own daemon, or write {_CHOICES}")
    if address.is_address(text):
        bucket = address.parse(text)
        return DaemonAddress(root=state_directory() / address.state_name(bucket), bucket=bucket)
    if _SCHEME.match(text):
        return DaemonAddress(url=_url(text))
    if isinstance(at, str) and _HOST.fullmatch(text):
        raise InvalidRequest(
            f"at={text!r} could be an address or a directory",
            hint='write "http://" in front of an address, with its port, or "./" in front of a directory',
        )
    path = _path(text)
    if not _is_socket(path):
        return DaemonAddress(root=_directory(path))
    if not text.endswith(os.sep):
        return DaemonAddress(socket=path)
    if path.exists():
        raise InvalidRequest(f"at={text!r} is a socket, not a directory", hint="remove the slash at the end")
    return DaemonAddress(root=_directory(path))


def _path(text: str) -> Path:
    if text != text.strip():
        raise InvalidRequest(f"at={text!r} begins or ends with a space", hint='write "./" in front of such a name')
    try:
        return _absolute(Path(text).expanduser())
    except RuntimeError as error:  # no such user
        raise InvalidRequest(f"at={text!r}: {error}", hint='write "./" in front of a name that begins with "~"') from None


def _absolute(path: Path) -> Path:
    try:
        return Path(os.path.abspath(path))
    except FileNotFoundError:
        raise InvalidRequest(
            f"{str(path)!r} is relative to the current directory, which was removed", hint="write an absolute path"
        ) from None


def _directory(path: Path) -> Path:
    """The directory; `InvalidRequest` if none can be made, and inside a run or a checkpoint."""
    for above in (path, *path.parents):
        if above.is_symlink() and not above.exists():
            raise InvalidRequest(
                f"at={str(path)!r}: {above} is a link to a missing directory", hint="create the directory to which it leads"
            )
    check_root_place(path)
    return path


def _url(text: str) -> str:
    """The address; `InvalidRequest` if no daemon can listen there."""
    try:
        parts = urlsplit(text)
        whole = text.isprintable() and " " not in text  # what the parser drops in silence, a connection would not
        usable = whole and parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
        usable = usable and not (parts.query or parts.fragment or "@" in parts.netloc)  # a URL must not contain a token
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
    except OSError as error:
        if error.errno in (errno.ENOTDIR, errno.ENAMETOOLONG, errno.ELOOP):
            raise InvalidRequest(f"at={str(path)!r} cannot exist: {error.strerror}", hint=f"write {_CHOICES}") from None
        return path.suffix == SOCKET_SUFFIX  # nothing yet, or nothing that we may see
    except ValueError as error:
        raise InvalidRequest(f"at={str(path)!r} is not a path: {error}", hint=f"write {_CHOICES}") from None
    if not stat.S_ISDIR(mode) and not stat.S_ISSOCK(mode):
        raise InvalidRequest(
            f"at={str(path)!r} is neither a directory nor a socket", hint=f"a file has that name; write {_CHOICES}"
        )
    return stat.S_ISSOCK(mode)
