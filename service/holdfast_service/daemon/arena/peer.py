"""The process at the other end of a unix socket, and whether it has ended."""

from __future__ import annotations

import logging
import os
import select
import socket
import struct

log = logging.getLogger(__name__)

_SO_PEERPIDFD = 77  # Linux 6.5; Python does not name it
_CREDENTIALS = struct.Struct("3i")  # SO_PEERCRED: process, user, group


class PeerProcess:
    """A pidfd of the connected process. A connection may end while its process lives; this distinguishes the two."""

    def __init__(self, connection: socket.socket) -> None:
        self._gone = False
        self._fd = self._handle(connection)

    @property
    def gone(self) -> bool:
        """Whether every thread of the process has ended. False if that is unknown."""
        if self._fd < 0:
            return self._gone
        poll = select.poll()
        poll.register(self._fd, select.POLLIN)
        return bool(poll.poll(0))

    def shares_files(self, pid: int) -> bool:
        """Whether a path leads this process and its peer, which has this `pid`, to the same file: mount namespace and root
        directory are equal. False if that is unknown.
        """
        try:
            same = all(os.path.samefile(f"/proc/{pid}/{name}", f"/proc/self/{name}") for name in ("ns/mnt", "root"))
        except OSError as error:
            log.debug("cannot see the files of process %d: %s", pid, error)
            return False
        return same and self._fd >= 0 and not self.gone  # it lives, so `pid` was not another process meanwhile

    def _handle(self, connection: socket.socket) -> int:
        try:
            return connection.getsockopt(socket.SOL_SOCKET, _SO_PEERPIDFD)  # also of a process in another namespace
        except OSError as error:
            log.debug("cannot get a pidfd of a peer: %s", error)
        credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
        pid = _CREDENTIALS.unpack(credentials)[0]
        try:
            return os.pidfd_open(pid) if pid > 0 else -1  # 0: a process that cannot be seen from our namespace
        except ProcessLookupError:
            self._gone = True
        except OSError as error:
            log.debug("cannot get a pidfd of process %d: %s", pid, error)
        return -1

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def hung_up(connection: socket.socket) -> bool:
    """Whether the peer has closed the connection, even with messages unread."""
    poll = select.poll()
    poll.register(connection, select.POLLRDHUP)
    return bool(poll.poll(0))
