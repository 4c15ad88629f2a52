"""All nodes' parts of a save in one body, which every node reads instead of a row of each other node."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from typing import TypeVar

import msgspec

from holdfast_formats import decoding
from holdfast_formats.errors import InvalidRequest

_Read = TypeVar("_Read")


class JoinedPart(msgspec.Struct, frozen=True, array_like=True):
    """A node's part of a sealed round: the address of its slots, its declaration's digest, and its ranks' tables."""

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
    """The name under which the declarations with these digests are stored together."""
    return hashlib.sha256("\n".join(["together", *sorted(digests)]).encode()).hexdigest()


def encode_declarations(bodies: Iterable[bytes]) -> bytes:
    """Declarations of several nodes together: they are alike, so they compress much better than each alone."""
    return msgspec.msgpack.encode(tuple(bodies))


def decode_declarations(encoded: bytes) -> Mapping[str, bytes]:
    """The declarations by their digests, which are computed here, not trusted."""
    return {hashlib.sha256(body).hexdigest(): body for body in _read(_decode_bodies, encoded)}


def _read(decoder: msgspec.msgpack.Decoder[_Read], encoded: bytes) -> _Read:
    try:
        return decoder.decode(encoded)
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        raise InvalidRequest(f"cannot read the joined parts of a save: {error}") from error
