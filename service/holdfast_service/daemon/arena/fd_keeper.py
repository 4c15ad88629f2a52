"""Keepers of shared memory when the daemon dies: a holder process, or the service manager's fd store."""

from __future__ import annotations

import array
import logging
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from holdfast_formats.errors import CheckpointError
from holdfast_formats.staging.socket_paths import addressable
from holdfast_service.daemon.arena import holder
from holdfast_service.daemon.arena.callers import Caller, Callers, prepare_directory

log = logging.getLogger(__name__)

ANSWER_TIMEOUT_S = 10.0


class DescriptorKeeper(Protocol):
    """Keeps named descriptors after this process has died. Every call may raise `OSError`."""

    def keep(self, name: str, fd: int) -> None: ...
    def drop(self, name: str) -> None: ...
    def take(self) -> list[tuple[str, int]]: ...
    def close(self) -> None: ...


class OfRoot:
    """A keeper that tags descriptors with their root, because another root may have been served at the same place."""

    def __init__(self, keeper: DescriptorKeeper, root_id: str) -> None:
        self._keeper, self._prefix = keeper, f"{root_id}-"
        self._unmarked: set[str] = set()  # kept by a daemon from before roots had ids

    def keep(self, name: str, fd: int) -> None:
        self._keeper.keep(self._prefix + name, fd)

    def drop(self, name: str) -> None:
        self._keeper.drop(name if name in self._unmarked else self._prefix + name)

    def take(self) -> list[tuple[str, int]]:
        """The descriptors kept for this root. Those of other roots stay kept."""
        found = []
        for name, fd in self._keeper.take():
            if "-" not in name:
                self._unmarked.add(name)
            elif not name.startswith(self._prefix):
                log.warning("shared memory %s belongs to another root and is left alone", name)
                continue  # open: the keeper may have to hand it to another holder
            found.append((name.removeprefix(self._prefix), fd))
        return found

    def close(self) -> None:
        self._keeper.close()


class HolderProcess:
    """A holder process at a socket: an existing one, or a new one that starts with the first descriptor to keep."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lock = threading.Lock()
        self._connection: socket.socket | None = None
        self._kept: dict[str, int] = {}  # so that a holder that was killed can be replaced

    def keep(self, name: str, fd: int) -> None:
        with self._lock:
            try:
                self._ask(self._connect(), f"keep {name}", fd)
            except OSError:
                self._replace()
                self._ask(self._connect(), f"keep {name}", fd)
            self._kept[name] = fd

    def drop(self, name: str) -> None:
        with self._lock:
            self._kept.pop(name, None)
            if self._connection is not None:
                self._ask(self._connection, f"drop {name}")

    def take(self) -> list[tuple[str, int]]:
        """Own copies of all kept descriptors; empty without a holder process."""
        with self._lock:
            try:
                connection = self._connection = self._connection or _connected(self._path)
            except (FileNotFoundError, ConnectionRefusedError):
                return []
            connection.send(b"list")
            found = []
            while True:
                packet, fds, _, _ = socket.recv_fds(connection, holder.PACKET_BYTES_MAX, 1)
                if not packet.startswith(b"held "):
                    break
                os.set_inheritable(fds[0], False)
                found.append((packet.decode().removeprefix("held "), fds[0]))
            if packet != b"end":
                raise ConnectionError(f"the holder process at {self._path} closed the connection")
            self._kept = dict(found)
            return found

    def close(self) -> None:
        """Disconnect from the holder process, which exits by itself when it keeps nothing."""
        with self._lock:
            if self._connection is not None:
                self._connection.close()
                self._connection = None

    def _connect(self) -> socket.socket:
        if self._connection is None:
            try:
                self._connection = _connected(self._path)
            except (FileNotFoundError, ConnectionRefusedError):
                _start(self._path)
                self._connection = _connected(self._path)
        return self._connection

    def _replace(self) -> None:
        """The holder is gone, and with it what it kept: start another and give it everything again."""
        if self._connection is not None:
            self._connection.close()
        _start(self._path)
        self._connection = _connected(self._path)
        for name, fd in self._kept.items():
            self._ask(self._connection, f"keep {name}", fd)

    def _ask(self, connection: socket.socket, request: str, *fds: int) -> None:
        socket.send_fds(connection, [request.encode()], list(fds))
        answer = connection.recv(holder.PACKET_BYTES_MAX)
        if answer != b"done":
            raise ConnectionError(f"the holder process at {self._path} answered {answer!r} to {request!r}")


class FdStore:
    """The service manager's fd store: kept descriptors are inherited at the next start (sd_notify)."""

    def __init__(self, notify: str, inherited: Sequence[tuple[str, int]]) -> None:
        self._address = "\0" + notify[1:] if notify.startswith("@") else notify
        self._inherited = list(inherited)

    def keep(self, name: str, fd: int) -> None:
        self._notify(f"FDSTORE=1\nFDNAME={name}", fd)

    def drop(self, name: str) -> None:
        self._notify(f"FDSTOREREMOVE=1\nFDNAME={name}")

    def take(self) -> list[tuple[str, int]]:
        taken, self._inherited = self._inherited, []
        for _, fd in taken:
            os.set_inheritable(fd, False)
        return taken

    def close(self) -> None:
        """Nothing: the store is the service manager's."""

    def _notify(self, message: str, *fds: int) -> None:
        ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
            sender.sendmsg([message.encode()], ancillary, 0, self._address)


def _connected(path: Path) -> socket.socket:
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    connection.settimeout(ANSWER_TIMEOUT_S)
    try:
        with addressable(path) as name:
            connection.connect(name)
        Callers().check(Caller.of(connection))  # memory of ranks is not for somebody who only took the holder's place
    except CheckpointError as error:
        connection.close()
        raise PermissionError(f"the holder process at {path} belongs to another user: {error.detail}") from error
    except OSError:
        connection.close()
        raise
    return connection


def _start(path: Path) -> None:
    """Start a holder in a session of its own. The socket is ours until it takes over, so nobody waits for its start."""
    prepare_directory(path)
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        mask = os.umask(0o177)
        try:
            path.unlink(missing_ok=True)
            with addressable(path) as name:
                listener.bind(name)
        finally:
            os.umask(mask)
        listener.listen(8)
        number = listener.fileno()
        command = [sys.executable, "-I", "-S", holder.__file__, "--socket", str(path), "--listener", str(number)]
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            cwd="/",
            pass_fds=(number,),
            start_new_session=True,
        )
    process.returncode = 0  # it outlives us by design: keep Popen from warning that we did not wait for it
