"""A connection to the exchange of another node, on which both sides prove that they know a secret of the cluster."""

from __future__ import annotations

import hmac
import http.client
import socket
import threading
from collections.abc import Sequence
from contextlib import suppress
from http import HTTPStatus
from typing import NamedTuple
from urllib.parse import urlsplit

from holdfast_formats.digest import DIGITS, digest
from holdfast_service.wings.cluster.exchange import proofs
from holdfast_service.wings.cluster.exchange.proofs import AnswerProof

READ_BYTES = 2**20


class Unproven(http.client.HTTPException):
    """The server has not proven that it is a node of this cluster, or does not accept this node as one."""


class ProvenAnswer(NamedTuple):
    """A response with verified status and length; its chunks are verified as they come."""

    response: http.client.HTTPResponse
    proof: AnswerProof
    status: int
    length: int

    def read_whole(self, bytes_max: int) -> bytes:
        """A response of one chunk."""
        if not DIGITS <= self.length <= bytes_max + DIGITS:
            raise http.client.HTTPException(f"it replied with {self.length} bytes")
        body = self.response.read(self.length - DIGITS)
        self.check(digest(body))
        return body

    def check(self, text: str) -> None:
        """Read the proof of a chunk with this digest. `HTTPException` if the chunk was changed."""
        stated = self.response.read(DIGITS)
        if not hmac.compare_digest(stated, self.proof.chunk(text).encode()):
            raise http.client.HTTPException("bytes were changed in transit")


class NodeConnection:
    """For one thread at a time; `hang_up` is thread-safe. `secrets` are tried in this order."""

    def __init__(self, url: str, secrets: Sequence[str], connect_s: float, silence_s: float) -> None:
        self.url, self._secrets = url, list(secrets)
        self._connect_s, self._silence_s = connect_s, silence_s
        self._http: http.client.HTTPConnection | None = None
        self._nonce, self._asked = "", 0
        self._response: http.client.HTTPResponse | None = (
            None  # has a file of the socket, which outlives a closed connection
        )
        self._lock = threading.Lock()  # guards the two below
        self._socket: socket.socket | None = None
        self._over = False

    def connect(self) -> None:
        """Raises `OSError`, `ValueError` and `HTTPException`."""
        if self._http is not None:
            return
        at = urlsplit(self.url)
        http_connection = http.client.HTTPConnection(
            at.hostname or "", at.port, timeout=self._connect_s, blocksize=READ_BYTES
        )
        http_connection.connect()
        http_connection.auto_open = 0  # another connection has another nonce
        with self._lock:
            if self._over:
                http_connection.close()
                raise TimeoutError("it took too long")
            self._socket = http_connection.sock
        http_connection.sock.settimeout(self._silence_s)
        self._http, self._nonce, self._asked = http_connection, "", 0

    def request(self, path: str, body: bytes) -> ProvenAnswer:
        """The answer to a request; `Unproven`, and as `connect`."""
        for secret in list(self._secrets):
            self.connect()
            answer = self._once(secret, path, body)
            if answer is not None:
                self._secrets = [secret, *(one for one in self._secrets if one != secret)]
                return answer
            self.close()  # the server closes it after a refusal, too
        raise Unproven("it shares no secret with this node")

    def _once(self, secret: str, path: str, body: bytes) -> ProvenAnswer | None:
        """Try one secret; None if the server does not know it."""
        assert self._http is not None
        if not self._nonce:
            self._nonce = self._challenge(self._http)
        self._asked += 1
        stated = proofs.body_digest(body)
        proven = proofs.NodeQuestion(self.url, self._nonce, self._asked, path, stated).proven(secret)
        headers = {
            "Authorization": proven.authorization,
            proofs.BODY_HEADER: stated,
            "Content-Type": "application/json",
        }
        self._http.request("POST", path, body, headers)
        response = self._response = self._http.getresponse()
        if response.status == HTTPStatus.UNAUTHORIZED:
            return None
        length = -1 if response.length is None else response.length
        expected = proven.answer.head(response.status, length)
        if not hmac.compare_digest(response.getheader(proofs.PROOF_HEADER, "").encode(), expected.encode()):
            raise Unproven("the peer at that address is not a node of this cluster")
        return ProvenAnswer(response, proven.answer, response.status, length)

    def _challenge(self, connection: http.client.HTTPConnection) -> str:
        connection.request("POST", proofs.CHALLENGE_PATH)
        answer = self._response = connection.getresponse()
        nonce = answer.read(2 * proofs.NONCE_BYTES).decode(errors="replace")
        if answer.status != HTTPStatus.OK or answer.length or not proofs.is_nonce(nonce):
            raise Unproven("the peer at that address is not a node of this cluster")
        return nonce

    def close(self) -> None:
        """Disconnect until the next request."""
        if self._response is not None:
            self._response.close()
        if self._http is not None:
            self._http.close()
        with self._lock:
            self._http = self._socket = self._response = None

    def hang_up(self) -> None:
        """End the connection for good. Reads end too, even from a peer that sends a byte now and then."""
        with self._lock:
            self._over = True
            if self._socket is not None:
                with suppress(OSError):
                    self._socket.shutdown(socket.SHUT_RDWR)
