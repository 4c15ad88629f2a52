"""SMTP with a limit for the whole conversation: `smtplib` has one for each byte only."""

from __future__ import annotations

import io
import smtplib
import socket
import ssl
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from functools import cached_property

STEP_S = 10.0  # for each step,
WHOLE_S = 30.0  # and for all of them
ANSWERS_BYTES_MAX = 256 * 1024  # of all of a server's responses


class _Answers(io.RawIOBase):
    """A server's responses, within the remaining time and length."""

    def __init__(self, connection: socket.socket, ends: float) -> None:
        self._connection, self._ends, self._left = connection, ends, ANSWERS_BYTES_MAX

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        left_s = self._ends - time.monotonic()
        if left_s <= 0 or self._left <= 0:
            raise TimeoutError("its replies do not end")
        self._connection.settimeout(min(STEP_S, left_s))
        count = self._connection.recv_into(buffer)
        self._left -= count
        return count


class _Plain(smtplib.SMTP):
    """Begins with a limit of time for the whole."""

    file: io.BufferedReader | None

    def getreply(self) -> tuple[int, bytes]:
        if self.sock is None:
            raise smtplib.SMTPServerDisconnected("it is not connected")
        if self.file is None:
            self.file = io.BufferedReader(_Answers(self.sock, self._ends))
        return super().getreply()

    @cached_property
    def _ends(self) -> float:
        return time.monotonic() + WHOLE_S


class _Tls(_Plain, smtplib.SMTP_SSL):
    """The same, over TLS from the beginning."""


@contextmanager
def conversation(host: str, port: int, tls: ssl.SSLContext | None) -> Iterator[smtplib.SMTP]:
    """A conversation with a mail server, over TLS from the beginning if `tls` is given. Errors of QUIT are ignored: the
    message was accepted.
    """
    name = socket.gethostname()  # smtplib would ask a name server, for as long as that takes
    if tls is None:
        server: smtplib.SMTP = _Plain(host, port, name, timeout=STEP_S)
    else:
        server = _Tls(host, port, name, timeout=STEP_S, context=tls)
    with closing(server):
        yield server
        with suppress(smtplib.SMTPException, OSError):
            server.quit()
