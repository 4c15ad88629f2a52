"""Has this user's own daemon do a job with paths of this user, over the daemon's socket."""

from __future__ import annotations

import os
import socket as sockets
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from holdfast.link import roots
from holdfast.link.exchange import RECEIVE_BYTES, connect, expected, name_of, peer_of, ping
from holdfast.rest.api import Api
from holdfast.threads.daemon_heartbeat import SIGN_EVERY_S, DaemonHeartbeat
from holdfast_formats import naming
from holdfast_formats.errors import DaemonGone, RoundAborted
from holdfast_formats.rest.jobs import JobRequest
from holdfast_formats.root_files import RootMark
from holdfast_formats.staging import wire

STOP_S = 10.0  # for what the daemon removes; each message that still comes gives it as long again


def socket_of(api: Api) -> Path | None:
    """The socket of the daemon that answers there, if it is visible here and belongs to exactly that daemon."""
    for node in api.nodes():
        try:
            at = os.stat(node.socket) if node.socket is not None else None
        except OSError:
            continue
        if at is not None and node.socket_id == naming.socket_id(at.st_ino, at.st_ctime_ns):
            return Path(str(node.socket))
    return None


class OwnDaemon:
    """A connection to a daemon of this user, for one job."""

    def __init__(self, connection: sockets.socket, path: Path, root: RootMark | None) -> None:
        self._connection, self._path, self._root = connection, path, root

    @classmethod
    def serving(cls, root: Path) -> OwnDaemon | None:
        """The daemon of this user that serves a directory; None if there is none."""
        path = roots.running_socket(root)
        return None if path is None else cls._of(path, roots.mark(root))

    @classmethod
    def answering(cls, api: Api) -> OwnDaemon | None:
        """The daemon at an address, if it is one of this user on this machine; None for others."""
        path = socket_of(api)
        return None if path is None else cls._of(path, None)

    @classmethod
    def _of(cls, path: Path, root: RootMark | None) -> OwnDaemon | None:
        try:
            connection = connect(path)
        except DaemonGone:
            return None
        if peer_of(connection).uid != os.geteuid():  # another user's, to which our paths mean nothing
            connection.close()
            return None
        return cls(connection, path, root)

    def do(self, job: JobRequest, on_bytes: Callable[[int, int], None]) -> dict[str, Any]:
        """Do it and return the result; `on_bytes` receives the progress. Raises the job's problem.

        If the caller is interrupted, the job is stopped and leaves nothing. Raises `DeadlineExceeded` if the daemon answers
        no ping for 10 s, as when it is stopped; what it was doing is then removed when it goes on.
        """
        request = wire.DoJob(id=0, root=self._root, directory=os.getcwd(), job=job.model_dump())
        with self._connection as connection:
            connection.sendall(wire.encode_frame(request))
            try:
                return expected(request, self._reply(on_bytes), wire.JobDone).result
            except KeyboardInterrupt:
                connection.shutdown(sockets.SHUT_WR)  # the daemon sees it, removes what it has written, and hangs up
                connection.settimeout(STOP_S)
                with suppress(TimeoutError):  # it stands still, and removes that when it goes on
                    while connection.recv(RECEIVE_BYTES):
                        pass
                raise RoundAborted("stopped by a signal", hint="run the same command again") from None

    def _reply(self, on_bytes: Callable[[int, int], None]) -> wire.Reply:
        decoder = wire.FrameDecoder(wire.TO_RANK)
        while data := self._received():
            for message in decoder.feed(data):
                if isinstance(message, wire.Reply):
                    return message
                on_bytes(message.done_bytes, message.total_bytes)
        raise DaemonGone(f"the daemon at {self._path} ended in the middle of the job", hint="run the same command again")

    def _received(self) -> bytes:
        """The daemon's next bytes. A step of a job may take long, so a silent daemon is pinged on another connection."""
        heartbeat = DaemonHeartbeat(
            lambda: name_of(self._connection, self._path), lambda within_s: ping(self._path, within_s)
        )
        self._connection.settimeout(SIGN_EVERY_S)
        while True:
            try:
                return self._connection.recv(RECEIVE_BYTES)
            except TimeoutError:
                heartbeat.check()
