"""A rank's link to its node's daemon: requests, replies and outcomes.

If the daemon dies, the link reconnects to the next one in the background: it repeats the hello, attaches its segment,
and names the steps it waits for. Requests wait a moment for that. Seals and, if a slot is free, leases do not wait: the
next daemon finds them in shared memory.
"""

from __future__ import annotations

import itertools
import logging
import os
import threading
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

from holdfast.link import exchange
from holdfast.link.daemon_socket import DaemonSocket
from holdfast.link.exchange import HINT, SILENT_HINT, Expected, connect, expected
from holdfast.link.reconnect_state import ReconnectState
from holdfast.threads import own_threads
from holdfast_formats.errors import CheckpointError, DaemonGone, DeadlineExceeded, WrongRoot
from holdfast_formats.staging import wire

log = logging.getLogger(__name__)

REPLY_TIMEOUT_S = 60.0
MEND_WAIT_S = 10.0  # how long after the loss of a daemon a request waits for the next one
MEND_S = 60.0  # how long the next daemon is looked for in the background
MEND_PAUSE_S = 0.05
_FORKED = "create a separate Checkpointer in the child process if it should save"
_SAME_VERSION = "use the same version of holdfast on both sides"

_links: weakref.WeakSet[SocketLink] = weakref.WeakSet()


class SocketLink:
    """The connection of one rank. Requests may come from any thread; `on_outcome` is called on the link's thread.

    `dial` returns the next daemon's socket, and may start one; without it the first loss is final. `on_lost` is called
    for a final loss, `on_stop` when another rank of the launch is to stop.
    """

    def __init__(
        self,
        path: Path,
        on_outcome: Callable[[wire.Outcome], None],
        on_lost: Callable[[CheckpointError], None],
        dial: Callable[[], Path] | None = None,
        on_stop: Callable[[], object] = bool,
    ):
        self.path = path
        self._on_outcome, self._on_lost, self._dial, self._on_stop = on_outcome, on_lost, dial, on_stop
        self._ids = itertools.count()
        self._condition = threading.Condition()
        self._replies: dict[int, wire.Reply] = {}
        self.receiving = threading.Lock()
        self._broken: CheckpointError | None = None  # the present conversation's end
        self._lost: CheckpointError | None = None  # the end of all
        self._mender: threading.Thread | None = None
        self._broken_at = 0.0
        self._dialled = 0  # tries of the mender that failed
        self._hurry = threading.Event()
        self._closing = threading.Event()
        self._state = ReconnectState()
        self._attaching = False  # while the segment is being attached to the next daemon
        self._begin(DaemonSocket(connect(path), path))
        _links.add(self)

    @property
    def alive(self) -> bool:
        """Whether requests can succeed; also true while the link reconnects."""
        return self._lost is None and not self._closing.is_set()

    @property
    def near(self) -> bool:
        return True

    @property
    def daemon(self) -> str:
        return self._socket.name

    def ping(self, timeout_s: float) -> None:
        exchange.ping(self.path, timeout_s)

    def leave_to_parent(self) -> None:
        """Close this end in a forked child: the connection belongs to the parent and must end with it."""
        self._condition = threading.Condition()  # another thread, which there is not in here, may have held the old one
        self._lost = self._broken = DaemonGone(
            "this process was forked from the rank; the connection belongs to the parent", hint=_FORKED
        )
        self._socket.leave_to_parent()
        self._state.close()

    def next_id(self) -> int:
        return next(self._ids)

    def request(self, message: wire.Request, kind: type[Expected], timeout_s: float = REPLY_TIMEOUT_S) -> Expected:
        """Send a request and wait for its reply; a `Failed` reply is raised as its error.

        If the daemon is lost, the next one gets the request; `DaemonGone` if there is none within `MEND_WAIT_S` of the
        loss, and at once after that.
        """
        limit = time.monotonic() + timeout_s
        while (reply := self._wait_until_mended(message)) is None:
            try:
                reply = self._ask(message, limit)
                break
            except DaemonGone:
                if self._dial is None or self._lost is not None or self._closing.is_set():
                    raise
        return expected(message, reply, kind)

    def ask(
        self, message: wire.Request, kind: type[Expected], fds: tuple[int, ...] = (), timeout_s: float = REPLY_TIMEOUT_S
    ) -> Expected:
        """Like `request`, with file descriptors, and only to the current daemon: `DaemonGone` as soon as it is lost."""
        return expected(message, self._ask(message, time.monotonic() + timeout_s, fds), kind)

    def notify(self, message: wire.Request) -> None:
        """Send a message without a reply. It is silently lost without a daemon, or if the daemon does not read."""
        with self._condition:
            reached = self.alive and self._mender is None and self._broken is None
            connection = self._socket
        if reached:
            connection.send_or_lose(message)

    def take_fd(self) -> int:
        """The descriptor of the last reply; the caller closes it. The link keeps a copy for the next daemon."""
        with self._condition:
            (fd,) = self._socket.take_fds(1)
            self._state.keep_segment(fd)
            return fd

    def take_fds(self, count: int) -> list[int]:
        """The descriptors of the last reply; the caller closes them. `DaemonGone` if they are lost."""
        with self._condition:
            return self._socket.take_fds(count)

    def keep_average(self, fd: int) -> None:
        with self._condition:
            self._state.keep_average(fd)

    def close(self, ended: bool = False) -> None:
        """Disconnect. `ended`: the daemon need not keep an in-memory checkpoint for a restart."""
        self._closing.set()
        if ended and self._state.hello is not None:
            self._socket.send_or_lose(wire.Farewell(id=self.next_id()))
        self._end_waits()
        for thread in (self._mender, self._thread):
            if thread is not None and thread is not threading.current_thread():
                thread.join(timeout=5)
        with self._condition:
            self._socket.close()
            self._state.close()

    def _end_waits(self) -> None:
        """Wake up all waiting threads, for good."""
        self._closing.set()
        self._hurry.set()
        with self._condition:
            self._condition.notify_all()
        self._socket.shut_down()

    def _begin(self, connection: DaemonSocket) -> None:
        with self._condition:
            if self._closing.is_set():
                connection.close()
                raise DaemonGone(f"the connection to {self.path} is closed")
            self._socket, self._broken = connection, None
            self._replies.clear()
        self._thread = own_threads.begin(lambda: self._receive_loop(connection), "holdfast-link", self._end_waits)

    def _wait_until_mended(self, message: wire.Request) -> wire.Reply | None:
        """Wait for a new daemon; returns a reply at once if that one will find the request in the segment."""
        with self._condition:
            if self._mender is not None and self.alive:
                reply = self._state.answer(message, may_lease=not self._attaching)
                if reply is not None:
                    return reply
            goal = self._dialled + 2  # one whole try that begins from now on, though others went before
            limit = time.monotonic() + MEND_WAIT_S
            while self._mender is not None and self.alive:
                if self._dialled < goal:  # from then on the mender pauses: each failed try wakes all that wait
                    self._hurry.set()
                now = time.monotonic()
                if now >= limit or (now >= self._broken_at + MEND_WAIT_S and self._dialled >= goal):
                    raise DaemonGone(f"the daemon at {self.path} is gone and has not been restarted yet", hint=HINT)
                self._condition.wait(MEND_PAUSE_S)
            if self._lost is not None:
                raise self._lost
            return None

    def _ask(self, message: wire.Request, limit: float, fds: tuple[int, ...] = ()) -> wire.Reply:
        with self._condition:
            connection = self._socket
        try:
            connection.send(message, fds)
        except OSError as error:
            raise DaemonGone(f"the daemon at {self.path} is gone: {error}", hint=HINT) from error
        with self._condition:
            while message.id not in self._replies:
                if self._socket is not connection or self._broken is not None:
                    raise self._broken or DaemonGone(f"the daemon at {self.path} is gone", hint=HINT)
                if not self._condition.wait(max(limit - time.monotonic(), 0)) and time.monotonic() >= limit:
                    connection.shut_down()  # what is answered too late, with descriptors, is taken for no other's answer
                    raise DeadlineExceeded(f"{self.daemon} did not answer in time", hint=SILENT_HINT)
            reply = self._replies.pop(message.id)
            self._state.note(message, reply)
            return reply

    def _receive_loop(self, connection: DaemonSocket) -> None:
        error = DaemonGone(f"the daemon at {self.path} closed the connection", hint=HINT)
        understood = True
        try:
            for message in connection.messages():
                self._take(message)
        except OSError as failure:
            error = DaemonGone(f"the connection to the daemon at {self.path} broke: {failure}", hint=HINT)
        except CheckpointError as failure:
            understood = False
            error = DaemonGone(f"the daemon at {self.path} sent an invalid message: {failure.detail}", hint=_SAME_VERSION)
        self._break(connection, error, understood)

    def _break(self, connection: DaemonSocket, error: CheckpointError, understood: bool = True) -> None:
        """Handle a lost connection: reconnect in the background, or report the loss if that is impossible."""
        with self._condition:
            if connection is not self._socket:
                return
            self._broken = error
            self._condition.notify_all()
            if self._mender is not None or self._closing.is_set():
                return  # the mender looks after it
            self._broken_at = time.monotonic()
            if self._dial is not None and self._state.hello is not None and understood:
                dial = self._dial
                self._mender = own_threads.begin(lambda: self._mend(dial), "holdfast-mend", self._end_waits)
                return
            self._lost = error
        self._on_lost(error)

    def _mend(self, dial: Callable[[], Path]) -> None:
        error: CheckpointError | None = self._broken
        while time.monotonic() < self._broken_at + MEND_S and not self._closing.is_set():
            self._socket.hang_up()
            self._attaching = False
            try:
                self.path = dial()
                before = self._socket
                self._begin(DaemonSocket(connect(self.path), self.path))
                before.release_fds()
                self._rejoin()
                return
            except (DaemonGone, DeadlineExceeded, WrongRoot) as failure:  # another root's daemon may have taken the socket
                error = failure
            except CheckpointError as refusal:
                error = refusal
                break
            with self._condition:
                self._dialled += 1
                self._condition.notify_all()
            self._hurry.wait(MEND_PAUSE_S)
            self._hurry.clear()
        assert error is not None
        with self._condition:
            self._lost = self._broken = error
            self._condition.notify_all()
        if not self._closing.is_set():
            self._on_lost(error)

    def _rejoin(self) -> None:
        """Re-register this rank with a restarted daemon."""
        limit = time.monotonic() + REPLY_TIMEOUT_S
        state = self._state
        assert state.hello is not None
        hello = state.hello.model_copy(update={"id": self.next_id()})
        welcome = expected(hello, self._ask(hello, limit), wire.Welcome)
        if welcome.attempt != state.attempt:
            raise CheckpointError(f"the daemon at {self.path} counts this launch as attempt {welcome.attempt}")
        if state.segment >= 0:
            with self._condition:
                self._attaching = True
                attach = state.attach(self.next_id())
            expected(attach, self._ask(attach, limit, (state.segment,)), wire.Done)
        if state.average >= 0:  # after the slots: saves in these take the average before it goes on
            brought = wire.AttachAverage(id=self.next_id())
            expected(brought, self._ask(brought, limit, (state.average,)), wire.Done)
        while True:
            with self._condition:
                if self._broken is not None:
                    raise self._broken
                if not state.unsaid:
                    self._mender, self._attaching = None, False
                    self._condition.notify_all()
                    break
                unsaid = state.unsaid[0]
            reply = self._ask(unsaid.model_copy(update={"id": self.next_id()}), limit)
            with self._condition:
                state.unsaid.remove(unsaid)
            if isinstance(reply, wire.Failed):  # the answer to attach had its outcome
                log.info("step %d: the new daemon had already ended this save", unsaid.step)
        log.info("reconnected: a new daemon answers at %s", self.path)

    def _take(self, message: Any) -> None:
        if isinstance(message, wire.Outcome):
            with self._condition:
                self._state.ended(message.step)
            self._on_outcome(message)
            return
        if isinstance(message, wire.Stop):
            self._on_stop()
            return
        with self._condition:
            self._replies[message.reply_to] = message
            self._condition.notify_all()


def _leave_links_to_parent() -> None:
    for link in list(_links):
        link.leave_to_parent()


os.register_at_fork(after_in_child=_leave_links_to_parent)
