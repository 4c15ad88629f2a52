"""Mutual authentication of two nodes by a secret of the cluster, which is never sent.

The server makes a nonce for each connection. The proof of a request covers it, the intended address, the number of the
request on this connection, path and body, and the client's nonce. So a proof is valid for one request, at one address, on
one connection: no clock is needed, and nothing is stored. The response is authenticated by a key derived from the request's
proof: status and length first, then each chunk, by its place and its digest.
"""

from __future__ import annotations

import hashlib
import hmac
import re
import secrets
from collections.abc import Iterable
from typing import NamedTuple

from holdfast_formats.digest import DIGITS

CHALLENGE_PATH = "/challenge"
PROOF_HEADER = "X-Holdfast-Proof"
BODY_HEADER = "X-Holdfast-Body"  # SHA-256 of a request's body: the proof is checked before the body is read
NONCE_BYTES = 16
_SCHEME = "Holdfast"
_AUTHORIZATION = re.compile(rf"{_SCHEME} ([0-9a-f]{{{2 * NONCE_BYTES}}}) ([0-9a-f]{{64}})")
_NONCE = re.compile(rf"[0-9a-f]{{{2 * NONCE_BYTES}}}")


class NodeQuestion(NamedTuple):
    """A request: its address, the nonce of the connection and the request's number on it, and its content."""

    url: str
    nonce: str
    number: int
    path: str
    body: str  # its SHA-256

    def proof(self, secret: str, own_nonce: str) -> str:
        """Proof that the client with this nonce knows the secret."""
        return _mac(secret.encode(), "ask", own_nonce, *map(str, self))

    def proven(self, secret: str) -> ProvenRequest:
        """The `Authorization` to send, and the key of the response."""
        own_nonce = new_nonce()
        proof = self.proof(secret, own_nonce)
        return ProvenRequest(f"{_SCHEME} {own_nonce} {proof}", AnswerProof(secret, proof))

    def check(self, authorization: str, known: Iterable[str]) -> AnswerProof | None:
        """The proofs for the response to a request with this `Authorization`; None unless it was made with a known
        secret.
        """
        stated = _AUTHORIZATION.fullmatch(authorization)
        if stated is None:
            return None
        for secret in known:
            if hmac.compare_digest(stated[2], self.proof(secret, stated[1])):
                return AnswerProof(secret, stated[2])
        return None


class AnswerProof:
    """The proofs of one response, in the order in which they are sent. Both sides compute them."""

    def __init__(self, secret: str, asked: str) -> None:
        self._key = bytes.fromhex(_mac(secret.encode(), "answer", asked))
        self._chunks = 0

    def head(self, status: int, length: int) -> str:
        return _mac(self._key, "head", str(int(status)), str(length))

    def chunk(self, digest: str) -> str:
        """The proof of the next chunk with this digest; as long as a digest."""
        self._chunks += 1
        return _mac(self._key, "chunk", str(self._chunks), digest)[:DIGITS]


class ProvenRequest(NamedTuple):
    authorization: str
    answer: AnswerProof


def new_nonce() -> str:
    return secrets.token_hex(NONCE_BYTES)


def is_nonce(text: str) -> bool:
    return _NONCE.fullmatch(text) is not None


def body_digest(body: bytes) -> str:
    return hashlib.sha256(body).hexdigest()


def _mac(key: bytes, *words: str) -> str:
    """The HMAC of words without line breaks."""
    return hmac.new(key, "\n".join(words).encode(), hashlib.sha256).hexdigest()
