"""The interface between a checkpointer and a daemon, over a unix socket or HTTP."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Protocol, TypeVar

from holdfast_formats.staging import wire

Reply = TypeVar("Reply", bound=wire.Reply)


class Transport(Protocol):
    """Requests of one rank and their replies. Outcomes, and the loss of the daemon, go to callbacks."""

    @property
    def alive(self) -> bool: ...
    @property
    def near(self) -> bool: ...  # shares this machine's memory with the daemon, which can send messages at any time
    @property
    def daemon(self) -> str: ...  # the daemon's address, for errors
    def ping(self, timeout_s: float) -> None:
        """Ping the daemon, beside all requests. `DeadlineExceeded` if it does not answer in time, `DaemonGone`
        without one.
        """

    @property
    def receiving(self) -> AbstractContextManager[object]:
        """Held from a request with descriptors in its reply until they are taken, so that threads do not mix theirs up."""

    def next_id(self) -> int: ...
    def request(self, message: wire.Request, kind: type[Reply], timeout_s: float = ...) -> Reply: ...
    def ask(self, message: wire.Request, kind: type[Reply], fds: tuple[int, ...] = (), timeout_s: float = ...) -> Reply:
        """Like `request`, with file descriptors, and only to the current daemon: `DaemonGone` as soon as it is
        lost.
        """

    def notify(self, message: wire.Request) -> None: ...  # what has no reply; lost where there is no daemon just now
    def take_fd(self) -> int: ...  # the segment's memory, after `Reserve`; the caller closes it
    def take_fds(self, count: int) -> list[int]: ...  # after `Held` or `Load`; the caller closes them
    def keep_average(self, fd: int) -> None: ...  # brought to the next daemon; the caller keeps it open
    def close(self, ended: bool = False) -> None: ...  # `ended`: as planned, so nothing need be held for a restart
