"""Messages to the service manager that started this process: systemd, or the holder in a container (sd_notify(3)).

Watchdog: a manager that sets WATCHDOG_USEC ends a service that does not call `alive` for so long, and starts it again.
"""

from __future__ import annotations

import array
import logging
import socket
import time

log = logging.getLogger(__name__)

STAGE_S = 300.0  # each stage of a start may take so long
SEND_S = 1.0  # a manager that is stopped reads nothing, and its socket has room for few messages
PINGS = 4  # within the time after which the manager counts the service as hung


def send(address: str, message: str, *fds: int) -> None:
    """Send one message to a service manager at `address` (`$NOTIFY_SOCKET`), with descriptors. Raises `OSError`, also if it
    has not taken the message within `SEND_S` seconds.
    """
    ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as sender:
        sender.settimeout(SEND_S)
        sender.sendmsg([message.encode()], ancillary, 0, "\0" + address[1:] if address.startswith("@") else address)


class ServiceManager:
    """The manager of this process. Without one, every call does nothing."""

    def __init__(self, address: str | None, watchdog_s: float | None = None) -> None:
        """`watchdog_s`: seconds without `alive` after which it ends this process; None if it has no watchdog."""
        self._address, self._watchdog_s = address, watchdog_s
        self._pinged = float("-inf")

    def starting(self, stage: str) -> None:
        """A stage of the start begins, which may take `STAGE_S` seconds."""
        self._notify(f"STATUS={stage}", f"EXTEND_TIMEOUT_USEC={_microseconds(STAGE_S)}")

    def ready(self, status: str) -> None:
        self._notify("READY=1", f"STATUS={status}")

    def alive(self) -> None:
        """Reset the watchdog. Call it often; it sends what is needed."""
        now = time.monotonic()
        if self._watchdog_s is not None and now - self._pinged >= self._watchdog_s / PINGS:
            self._pinged = now
            self._notify("WATCHDOG=1")

    def stopping(self, status: str, for_s: float | None = None) -> None:
        """The service stops, or goes on stopping: ask for `for_s` seconds from now on, beyond what was configured."""
        more = () if for_s is None else (f"EXTEND_TIMEOUT_USEC={_microseconds(for_s)}",)
        self._notify("STOPPING=1", f"STATUS={status}", *more)

    def _notify(self, *lines: str) -> None:
        if self._address is None:
            return
        try:
            send(self._address, "\n".join(lines))
        except OSError as error:
            log.warning("cannot notify the service manager at %s of %s: %s", self._address, lines[0], error)


def _microseconds(seconds: float) -> int:
    return int(seconds * 1_000_000)
