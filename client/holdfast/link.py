"""This rank's connection to its node's daemon: requests and replies, outcomes as they come, one memfd when it is sent."""

from __future__ import annotations

import itertools
import os
import socket
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

from holdfast_formats import wire
from holdfast_formats.errors import CheckpointError, DaemonGone, DeadlineExceeded, from_problem

RECEIVE_BYTES = 65_536
CONNECT_TIMEOUT_S = 5.0
REPLY_TIMEOUT_S = 60.0
_HINT = "start one with `holdfast serve`, or pass root= to use an embedded one"

_Reply = TypeVar("_Reply", bound=wire.Reply)


class Link:
    """One conversation with the daemon. Requests may come from any thread; `on_outcome` is called on the link's own."""

    def __init__(self, path: Path, on_outcome: Callable[[wire.Outcome], None], on_lost: Callable[[CheckpointError], None]):
        self.path = path
        self._on_outcome, self._on_lost = on_outcome, on_lost
        self._socket = _connect(path)
        self._decoder = wire.FrameDecoder(wire.TO_RANK)
        self._ids = itertools.count()
        self._condition = threading.Condition()
        self._replies: dict[int, wire.Reply] = {}
        self._fds: list[int] = []
        self._lost: CheckpointError | None = None
        self._closing = False
        self._thread = threading.Thread(target=self._receive_loop, name="holdfast-link", daemon=True)
        self._thread.start()

    @property
    def alive(self) -> bool:
        return self._lost is None and not self._closing

    def next_id(self) -> int:
        return next(self._ids)

    def request(self, message: wire.Request, kind: type[_Reply], timeout_s: float = REPLY_TIMEOUT_S) -> _Reply:
        """Send a request and wait for its reply; a `Failed` reply is raised as the error it carries."""
        frame = wire.encode_frame(message)
        try:
            with self._condition:
                self._socket.sendall(frame)
        except OSError as error:
            raise DaemonGone(f"the daemon at {self.path} went away: {error}", hint=_HINT) from error
        with self._condition:
            arrived = self._condition.wait_for(lambda: message.id in self._replies or self._lost is not None, timeout_s)
            reply = self._replies.pop(message.id, None)
            if reply is None:
                if arrived and self._lost is not None:
                    raise self._lost
                raise DeadlineExceeded(f"the daemon at {self.path} did not answer within {timeout_s:.0f} s")
        if isinstance(reply, wire.Failed):
            raise from_problem(reply.problem)
        if not isinstance(reply, kind):
            raise DaemonGone(f"the daemon answered {type(message).__name__} with {type(reply).__name__}")
        return reply

    def take_fd(self) -> int:
        """The descriptor that came with the last reply; the caller closes it."""
        with self._condition:
            if not self._fds:
                raise DaemonGone("the daemon sent no shared memory")
            return self._fds.pop(0)

    def close(self) -> None:
        self._closing = True
        with suppress(OSError):  # the daemon may have hung up first
            self._socket.shutdown(socket.SHUT_RDWR)
        self._thread.join(timeout=5)
        self._socket.close()
        for fd in self._fds:
            os.close(fd)
        self._fds.clear()

    def _receive_loop(self) -> None:
        error = DaemonGone(f"the daemon at {self.path} closed the connection", hint=_HINT)
        try:
            while True:
                data, fds, _, _ = socket.recv_fds(self._socket, RECEIVE_BYTES, 4)
                with self._condition:
                    self._fds += fds
                if not data:
                    break
                for message in self._decoder.feed(data):
                    self._take(message)
        except OSError as failure:
            error = DaemonGone(f"the connection to the daemon at {self.path} broke: {failure}", hint=_HINT)
        except CheckpointError as failure:
            error = DaemonGone(f"the daemon at {self.path} cannot be understood: {failure.detail}", hint=failure.hint)
        with self._condition:
            self._lost = error
            self._condition.notify_all()
        if not self._closing:
            self._on_lost(error)

    def _take(self, message: Any) -> None:
        if isinstance(message, wire.Outcome):
            self._on_outcome(message)
            return
        with self._condition:
            self._replies[message.reply_to] = message
            self._condition.notify_all()


def _connect(path: Path) -> socket.socket:
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        connection.settimeout(CONNECT_TIMEOUT_S)
        connection.connect(str(path))
        connection.settimeout(None)
    except OSError as error:
        connection.close()
        raise DaemonGone(f"no daemon answers at {path}: {error}", hint=_HINT) from error
    return connection
