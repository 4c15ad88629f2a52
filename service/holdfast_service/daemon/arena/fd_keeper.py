"""Keepers of shared memory when the daemon dies: a holder process, or the service manager's fd store."""

from __future__ import annotations

import fcntl
import hashlib
import json
import logging
import os
import select
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Protocol

from holdfast_formats.errors import CheckpointError, RootBusy
from holdfast_formats.staging.socket_paths import addressable
from holdfast_service.daemon.arena import holder
from holdfast_service.daemon.arena.callers import Caller, Callers, bind_privately, prepare_directory
from holdfast_service.observe import service_manager

log = logging.getLogger(__name__)

ANSWER_TIMEOUT_S = 10.0
PROBE = "holdfast-probe"


class DescriptorKeeper(Protocol):
    """Keeps named descriptors after this process has died. Every call may raise `OSError`."""

    @property
    def place(self) -> str: ...

    def keep(self, name: str, fd: int) -> None: ...
    def drop(self, name: str) -> None: ...
    def take(self) -> list[tuple[str, int]]: ...
    def close(self) -> None: ...


class OfRoot:
    """A keeper that tags descriptors with their root, because another root may have been served at the same place."""

    def __init__(self, keeper: DescriptorKeeper, root_id: str) -> None:
        self._keeper, self._prefix = keeper, f"{root_id}-"

    @property
    def place(self) -> str:
        return self._keeper.place

    def keep(self, name: str, fd: int) -> None:
        self._keeper.keep(self._prefix + name, fd)

    def drop(self, name: str) -> None:
        self._keeper.drop(self._prefix + name)

    def take(self) -> list[tuple[str, int]]:
        """The descriptors kept for this root. Those of other roots stay kept."""
        descriptors = []
        for name, fd in self._keeper.take():
            if not name.startswith(self._prefix):
                log.warning("shared memory %s belongs to another root and is left alone", name)
                continue  # open: the keeper may have to hand it to another holder
            descriptors.append((name.removeprefix(self._prefix), fd))
        return descriptors

    def close(self) -> None:
        self._keeper.close()


class HolderProcess:
    """A holder process at a socket: an existing one, or a new one that starts with the first descriptor to keep."""

    def __init__(self, path: Path, start: holder.Start | None = None) -> None:
        """`start` is how it starts a daemon if this one is killed and no other one comes."""
        self._path, self._start = path, start
        self._lock = threading.Lock()
        self._connection: socket.socket | None = None
        self._kept: dict[str, int] = {}  # so that a holder that was killed can be replaced

    @property
    def place(self) -> str:
        return "a holder process"

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
        """Duplicates of all kept descriptors; empty without a holder process."""
        with self._lock:
            try:
                connection = self._connection = self._connection or self._introduced()
            except (FileNotFoundError, ConnectionRefusedError):
                return []
            connection.send(b"list")
            descriptors = []
            while True:
                packet, fds, _, _ = socket.recv_fds(connection, holder.PACKET_BYTES_MAX, 1)
                if not packet.startswith(b"held "):
                    break
                os.set_inheritable(fds[0], False)
                descriptors.append((packet.decode().removeprefix("held "), fds[0]))
            if packet != b"end":
                raise ConnectionError(f"the holder process at {self._path} closed the connection")
            self._kept = dict(descriptors)
            return descriptors

    def close(self) -> None:
        """Disconnect from the holder process, which exits by itself when it keeps nothing."""
        with self._lock:
            if self._connection is not None:
                self._connection.close()
                self._connection = None

    def _connect(self) -> socket.socket:
        if self._connection is None:
            try:
                self._connection = self._introduced()
            except (FileNotFoundError, ConnectionRefusedError):
                _start(self._path)
                self._connection = self._introduced()
        return self._connection

    def _replace(self) -> None:
        """The holder died, with its descriptors: start another and give it all again."""
        if self._connection is not None:
            self._connection.close()
        _start(self._path)
        self._connection = self._introduced()
        for name, fd in self._kept.items():
            self._ask(self._connection, f"keep {name}", fd)

    def _introduced(self) -> socket.socket:
        """A connection to the holder, after sending it how to start a daemon."""
        connection = _connected(self._path)
        if self._start is not None:
            for start in (
                self._start,
                self._start._replace(environment=None),
            ):  # it has one of its own, of an earlier daemon
                request = f"serve {json.dumps(start._asdict())}"
                if len(request) < holder.PACKET_BYTES_MAX:
                    break
            self._ask(connection, request)
        return connection

    def _ask(self, connection: socket.socket, request: str, *fds: int) -> None:
        socket.send_fds(connection, [request.encode()], list(fds))
        answer = connection.recv(holder.PACKET_BYTES_MAX)
        if answer != b"done":
            raise ConnectionError(f"the holder process at {self._path} answered {answer!r} to {request[:80]!r}")


class FdStore:
    """The service manager's fd store: kept descriptors are inherited at the next start (sd_notify)."""

    def __init__(self, notify: str, inherited: Sequence[tuple[str, int]]) -> None:
        self._address = notify
        self._inherited = list(inherited)

    @property
    def place(self) -> str:
        return "the service manager's fd store"

    def has_room(self) -> bool:
        """Whether the service manager stores descriptors for this service; otherwise it closes them at once.

        Versions of systemd before 254 do not set $FDSTORE.
        """
        watched, given = os.pipe()
        try:
            self._notify(f"FDSTORE=1\nFDPOLL=0\nFDNAME={PROBE}", given)
            os.close(given)
            given = -1
            return self._heard() and not _closed(watched, 0.0)
        except OSError as error:
            log.warning("the service manager at %s cannot be notified: %s", self._address, error)
            return False
        finally:
            os.close(watched)
            if given >= 0:
                os.close(given)
            with suppress(OSError):
                self._notify(f"FDSTOREREMOVE=1\nFDNAME={PROBE}")

    def _heard(self) -> bool:
        """Whether the service manager has processed earlier messages: then it closes the descriptor of this one."""
        watched, given = os.pipe()
        try:
            self._notify("BARRIER=1", given)
        finally:
            os.close(given)
        try:
            return _closed(watched, ANSWER_TIMEOUT_S)
        finally:
            os.close(watched)

    def keep(self, name: str, fd: int) -> None:
        self._notify(f"FDSTORE=1\nFDNAME={name}", fd)

    def drop(self, name: str) -> None:
        self._notify(f"FDSTOREREMOVE=1\nFDNAME={name}")

    def take(self) -> list[tuple[str, int]]:
        taken, self._inherited = self._inherited, []
        for name, fd in taken:
            os.set_inheritable(fd, False)
            if name == PROBE:  # of a daemon that was killed while it tried
                os.close(fd)
        return [(name, fd) for name, fd in taken if name != PROBE]

    def close(self) -> None:
        """The store is the service manager's."""

    def _notify(self, message: str, *fds: int) -> None:
        service_manager.send(self._address, message, *fds)


def _closed(pipe: int, wait_s: float) -> bool:
    poll = select.poll()
    poll.register(pipe, select.POLLIN)
    return any(event & select.POLLHUP for _, event in poll.poll(wait_s * 1000))


def holder_path(socket: Path, root: Path, node: str = "") -> Path:
    """The socket of a root's holder: beside the daemon's socket, whose name may change. `node` is this daemon's, if several
    nodes share the root: they may be on one machine.
    """
    name = hashlib.sha256(bytes(root)).hexdigest()[:12] + (f"-{node}" if node else "")
    return socket.absolute().parent / f"{name}.holder"


def lost_saves(path: Path) -> list[dict[str, Any]]:
    """The holder's records of staged saves that it gave up. Removes the file, so they are reported once."""
    place = path.with_suffix(".lost")
    try:
        with place.open("rb") as file:
            lines = file.read(2 * holder.RECORD_BYTES_MAX).splitlines()
        place.unlink()
        return [record for line in lines if isinstance(record := json.loads(line), dict)]
    except FileNotFoundError:
        return []
    except (OSError, ValueError) as error:
        log.warning("cannot read what the holder process has written to %s: %s", place, error)
        return []


def _connected(path: Path) -> socket.socket:
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    connection.settimeout(ANSWER_TIMEOUT_S)
    try:
        with addressable(path) as name:
            connection.connect(name)
        Callers().check(Caller.of(connection))  # no memory of ranks for a process that took the holder's place
    except CheckpointError as error:
        connection.close()
        raise PermissionError(f"the holder process at {path} belongs to another user: {error.detail}") from error
    except OSError:
        connection.close()
        raise
    return connection


@contextmanager
def reserved(path: Path) -> Iterator[None]:
    """Keep another process from becoming the holder at this socket above a daemon, for as long as this process and that
    daemon live: it would remove the sockets of this one, and only then find that the root is in use. Raises `RootBusy`.
    """
    prepare_directory(path)
    with open(path.with_suffix(".lock"), "ab") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            hint = "only one daemon can serve a root: is there another container with the same volumes?"
            raise RootBusy("another first process of a container keeps the memory of this root", hint=hint) from None
        os.set_inheritable(lock.fileno(), True)
        yield


@contextmanager
def opened(path: Path) -> Iterator[socket.socket]:
    """The listening socket of a new holder: it exists before the holder runs, so connecting need not wait for its start."""
    prepare_directory(path)
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        with addressable(path) as name:
            bind_privately(listener, path, name)
        listener.listen(8)
        yield listener


def notify_path(path: Path) -> Path:
    """Where the holder at this socket hears that the daemon below it is alive; as short as the daemon's own socket."""
    return path.with_name(f"{hashlib.sha256(bytes(path)).hexdigest()[:6]}.notify")


def holder_command(path: Path, listener: int) -> list[str]:
    """The command line of the holder at this socket, whose descriptor it inherits."""
    return [sys.executable, "-I", "-S", holder.__file__, "--socket", str(path), "--listener", str(listener)]


def _start(path: Path) -> None:
    with opened(path) as listener:
        number = listener.fileno()
        process = subprocess.Popen(
            holder_command(path, number),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            cwd="/",
            pass_fds=(number,),
            start_new_session=True,
        )
    process.returncode = 0  # it outlives us by design: keep Popen from warning that we did not wait for it
