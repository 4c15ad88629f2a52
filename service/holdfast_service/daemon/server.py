"""The node's unix socket: one connection per rank, each in its own thread."""

from __future__ import annotations

import logging
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from holdfast_service.daemon.arena.callers import Callers, listen
from holdfast_service.daemon.rank_connection import DataPlane, RankConnection
from holdfast_service.daemon.rank_socket import RankSocket
from holdfast_service.daemon.saving.run_lifecycle import RunLifecycles

from .serving import Serving

log = logging.getLogger(__name__)

CONVERSATIONS_MAX = 1024
REAP_INTERVAL_S = 1.0
ACCEPT_RETRY_S = 0.5
ONLY_US = Callers()


class Daemon:
    """The data plane of a node: arena, saver, and the ranks' socket."""

    def __init__(
        self,
        path: Path,
        serving: Serving,
        parts: DataPlane,
        callers: Callers = ONLY_US,
        at_work: Callable[[], bool] = lambda: False,
    ) -> None:
        """`at_work`: something that is no save keeps the daemon busy."""
        self.path, self.serving, self.callers = path, serving, callers
        self._plane = parts
        self.saver, self.control, self.adoption = parts.saver, parts.control, parts.adoption
        self.lives = RunLifecycles(self.saver, self.control)
        self._lock = threading.Lock()
        self._conversations: set[RankConnection] = set()
        self._closing = threading.Event()
        self._at_work = at_work
        self._listener = listen(path, callers)
        self._threads = [
            threading.Thread(target=self._accept_loop, name="holdfast-accept", daemon=True),
            threading.Thread(target=self._reap_loop, name="holdfast-reaper", daemon=True),
        ]
        for thread in self._threads:
            thread.start()

    @property
    def ranks(self) -> int:
        with self._lock:
            return len(self._conversations)

    @property
    def busy(self) -> bool:
        """Whether a rank is connected, or a save or verification is pending."""
        return self.ranks > 0 or self.saver.busy or self._at_work()

    def close(self) -> None:
        """Stop listening, write complete saves, and disconnect the ranks."""
        self._closing.set()
        self._threads[1].join()
        self.lives.record()  # before disconnecting: connected ranks may continue with the next daemon
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # the thread that waits for a rank there waits no longer
        self._listener.close()
        self.path.unlink(missing_ok=True)
        self.adoption.close()
        self.saver.close()
        with self._lock:
            conversations = list(self._conversations)
        for conversation in conversations:
            conversation.socket.hang_up()
        for conversation in conversations:
            conversation.thread.join(timeout=5)
        for thread in self._threads:
            thread.join()

    def forget(self, conversation: RankConnection) -> None:
        with self._lock:
            self._conversations.discard(conversation)

    def _accept_loop(self) -> None:
        while not self._closing.is_set():
            try:
                connection, _ = self._listener.accept()
            except TimeoutError:
                continue
            except OSError as error:
                if self._closing.is_set():
                    return
                # Most likely no descriptor is left. New connections wait in the kernel's queue meanwhile.
                log.error("cannot accept a rank: %s; if the limit of open files was reached, raise it", error)
                self._closing.wait(ACCEPT_RETRY_S)
                continue
            with self._lock:
                if len(self._conversations) >= CONVERSATIONS_MAX:
                    connection.close()
                    continue
                rank = RankSocket(connection)
                conversation = RankConnection(rank, self._plane, self.serving, self.callers, self.forget)
                self._conversations.add(conversation)
            conversation.thread.start()

    def _reap_loop(self) -> None:
        while not self._closing.wait(REAP_INTERVAL_S):
            try:
                self._reap()
            except Exception:  # the next look tries again: without this thread no lease would end
                log.exception("supervising the ranks failed")

    def _reap(self) -> None:
        with self._lock:
            conversations = list(self._conversations)
        for conversation in conversations:
            if conversation.socket.has_lost_its_rank():
                conversation.socket.hang_up()
        self.saver.expire()
        self.adoption.expire(time.monotonic())
        self.lives.record()
        self._plane.arena.give_back_spare()
