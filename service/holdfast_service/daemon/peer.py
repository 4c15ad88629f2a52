"""The process at the other end of a unix socket, and whether it is gone for sure."""

from __future__ import annotations

import logging
import os
import select
import socket
import struct

log = logging.getLogger(__name__)

_CREDENTIALS = struct.Struct("3i")  # SO_PEERCRED: process, user, group


class Peer:
    """A handle on the process that connected. A conversation may end and its process live on; this tells the two apart."""

    def __init__(self, connection: socket.socket) -> None:
        credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
        pid = _CREDENTIALS.unpack(credentials)[0]
        try:
            self._fd = os.pidfd_open(pid) if pid > 0 else -1  # 0: a process that cannot be seen from our namespace
        except OSError as error:
            log.debug("no handle on process %d: %s", pid, error)
            self._fd = -1

    @property
    def gone(self) -> bool:
        """Whether every thread of the process has ended. False where that cannot be told."""
        if self._fd < 0:
            return False
        poll = select.poll()
        poll.register(self._fd, select.POLLIN)
        return bool(poll.poll(0))

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
