"""Access control of unix sockets: their directory, and the peer that the kernel reports."""

from __future__ import annotations

import grp
import logging
import os
import socket
import stat
import struct
from pathlib import Path
from typing import NamedTuple

from holdfast_formats.errors import Forbidden, InvalidRequest, RootBusy

log = logging.getLogger(__name__)

SOCKET_NAME_BYTES_MAX = 100
_CREDENTIALS = struct.Struct("iII")  # SO_PEERCRED: process, user, group
_SO_PEERGROUPS = 59  # the groups besides; Python does not name it
_GROUPS_BYTES_MAX = 1024


class Caller(NamedTuple):
    pid: int
    uid: int
    gids: frozenset[int]

    @classmethod
    def of(cls, connection: socket.socket) -> Caller:
        pid, uid, gid = _CREDENTIALS.unpack(connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
        try:
            others = connection.getsockopt(socket.SOL_SOCKET, _SO_PEERGROUPS, _GROUPS_BYTES_MAX)
        except OSError as error:  # more groups than fit, or a kernel before 4.13
            log.debug("cannot read the groups of process %d: %s", pid, error)
            others = b""
        return cls(pid, uid, frozenset({gid, *struct.unpack(f"{len(others) // 4}I", others)}))

    @property
    def tenant(self) -> str:
        """The tenant whose share counts, besides the run's: "" for root and the daemon's own user."""
        return "" if self.uid in (0, os.geteuid()) else f"user {self.uid}"


class Callers(NamedTuple):
    """Allowed peers: this user, root, and the members of a group if one is given."""

    gid: int | None = None

    @classmethod
    def of_group(cls, name: str | None) -> Callers:
        """`InvalidRequest` if the group does not exist."""
        try:
            return cls(None if name is None else grp.getgrnam(name).gr_gid)
        except KeyError:
            raise InvalidRequest(
                f"the group {name!r} does not exist", hint="pass an existing group of this machine as --socket-group"
            ) from None

    def check(self, caller: Caller) -> None:
        """`Forbidden` for any other peer, whatever the file modes are."""
        if caller.uid in (0, os.geteuid()) or (self.gid is not None and self.gid in caller.gids):
            return
        hint = "run as the daemon's user, or start the daemon with --socket-group and a group that both users are in"
        raise Forbidden(f"process {caller.pid} of user {caller.uid} may not use this daemon", hint=hint)

    def warn_if_closed(self, root: Path) -> None:
        """Log a warning if the group may use the socket but cannot read restored files."""
        if self.gid is None:
            return
        status = root.stat()
        readable = (status.st_gid == self.gid and status.st_mode & 0o050 == 0o050) or status.st_mode & 0o005 == 0o005
        if not readable:
            name = grp.getgrgid(self.gid).gr_name
            log.warning(
                "members of %s can save but not restore: they cannot read %s; to let them read "
                "all checkpoints: chgrp %s %s; chmod 750 %s",
                *(name, root, name, root, root),
            )

    def admit(self, path: Path, created: bool) -> None:
        """Let the group reach the socket; its directory only if we `created` it."""
        if self.gid is None:
            return
        os.chown(path, -1, self.gid)
        path.chmod(0o660)
        if created:
            os.chown(path.parent, -1, self.gid)
            path.parent.chmod(0o750)


def prepare_directory(path: Path) -> bool:
    """Create the socket's directory for this user only; True if it did. `InvalidRequest` if others could replace the
    socket.
    """
    created = not path.parent.exists()
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    status = path.parent.stat()
    hint = "choose your own directory with --socket"
    if status.st_uid not in (0, os.geteuid()):
        raise InvalidRequest(f"the socket's directory {path.parent} belongs to user {status.st_uid}", hint=hint)
    if status.st_mode & stat.S_IWOTH and not status.st_mode & stat.S_ISVTX:
        raise InvalidRequest(f"the socket's directory {path.parent} is writable by every user", hint=hint)
    return created


def listen(path: Path, callers: Callers) -> socket.socket:
    """Open a socket at `path` for these callers; `RootBusy` if a daemon already answers there."""
    if len(os.fsencode(path)) > SOCKET_NAME_BYTES_MAX:
        hint = f"choose one with --socket, of at most {SOCKET_NAME_BYTES_MAX} bytes"
        raise InvalidRequest(f"the socket path {path} is too long for a unix socket", hint=hint)
    created = prepare_directory(path)
    _refuse_if_answered(path)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.settimeout(0.5)  # so that closing is noticed
    bind_privately(listener, path, str(path))
    callers.admit(path, created)
    listener.listen(128)
    return listener


def bind_privately(listener: socket.socket, path: Path, name: str) -> None:
    """Bind a socket to `path`, as `name` addresses it, for this user only. Linux takes the mode from the socket. A umask for
    it would be the whole process's: other threads would make directories meanwhile that cannot be entered.
    """
    os.fchmod(listener.fileno(), 0o600)
    path.unlink(missing_ok=True)
    listener.bind(name)


def _refuse_if_answered(path: Path) -> None:
    probe = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        probe.connect(str(path))
    except OSError:
        return
    finally:
        probe.close()
    raise RootBusy(f"another daemon answers at {path}", hint="stop it, or use another --socket")
