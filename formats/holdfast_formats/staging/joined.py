"""What all nodes of a save have brought, in one body: every node reads that, and not a row of each of the others."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from typing import TypeVar

import msgspec

from holdfast_formats import decoding
from holdfast_formats.errors import InvalidRequest

_Read = TypeVar("_Read")


class JoinedPart(msgspec.Struct, frozen=True, array_like=True):
    """A node's part of a sealed round: where its slots can be read, its declaration's digest, and what its ranks say."""

    node: str
    ranks: tuple[int, ...]
    url: str
    declaration: str
    said: bytes


decoding.decoder(JoinedPart)  # builds now what the decoder needs
_decode_parts = msgspec.msgpack.Decoder(tuple[JoinedPart, ...])
_decode_bodies = msgspec.msgpack.Decoder(tuple[bytes, ...])


def encode_parts(parts: Iterable[JoinedPart]) -> bytes:
    """All parts, in the order of their nodes' names."""
    return msgspec.msgpack.encode(sorted(parts, key=lambda part: part.node))


def decode_parts(encoded: bytes) -> tuple[JoinedPart, ...]:
    """The parts in the order of their nodes' names; `InvalidRequest` for what was not encoded here."""
    return _read(_decode_parts, encoded)


def name_of(digests: Iterable[str]) -> str:
    """Under which name the declarations with these digests are kept together."""
    return hashlib.sha256("\n".join(["together", *sorted(digests)]).encode()).hexdigest()


def encode_declarations(bodies: Iterable[bytes]) -> bytes:
    """Declarations of several nodes together: they are alike, so they are compressed much better than each alone."""
    return msgspec.msgpack.encode(tuple(bodies))


def decode_declarations(encoded: bytes) -> Mapping[str, bytes]:
    """The declarations by their digests, which are worked out: none is another one than it is said to be."""
    return {hashlib.sha256(body).hexdigest(): body for body in _read(_decode_bodies, encoded)}


def _read(decoder: msgspec.msgpack.Decoder[_Read], encoded: bytes) -> _Read:
    try:
        return decoder.decode(encoded)
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        raise InvalidRequest(f"what the nodes of a save have brought cannot be read: {error}") from error
