"""Hostile versions of valid inputs: JSON with other values, members and nesting; bytes cut, flipped and overwritten."""

from __future__ import annotations

import json
import random
from typing import Any

SIZES = (0, 1, 2**31 - 1, 2**31, 2**32 - 1, 2**32, 2**53, 2**62, 2**63 - 1, 2**63, 2**64 - 1, 100_000_000, 10**9)
NUMBERS: tuple[Any, ...] = (*SIZES, -1, -(2**63), 10**30, 0.5, 1e308, -0.0, float("nan"), float("inf"), True)
TEXTS = (
    "",
    "\x00",
    "..",
    "../../etc/passwd",
    "/etc/passwd",
    "a/b",
    "COMMIT",
    "manifest.json",
    "catalog.sqlite",
    "__metadata__",
    "\ud800",
    "é",
    "\u202egnp.exe",
    "a" * 300,
    "a\nb",
    "0" * 16,
    "f" * 16,
    "NaN",
    "F4",
    "BF16",
    "model",
)
VALUES: tuple[Any, ...] = (*NUMBERS, *TEXTS, None, [], {}, [[]], [0] * 40, {"a": {}}, [-1, -1], [2**40, 2**40])


def mutated(chance: random.Random, seed: bytes) -> bytes:
    """One hostile version of a valid input; most of it is as it was, so that it comes far."""
    document = _document(seed)
    if document is not None and chance.random() < 0.7:
        for _ in range(chance.choice((1, 1, 1, 2, 4))):
            document = _changed(chance, document)
        text = json.dumps(document, ensure_ascii=chance.random() < 0.5, separators=(",", ":"))
        found = text.encode("utf-8", "surrogatepass")
        if chance.random() < 0.1:
            found = _twice(chance, found)
        return found if chance.random() < 0.9 else bytes_changed(chance, found)
    return bytes_changed(chance, seed)


def framed(chance: random.Random, seed: bytes, length_bytes: int) -> bytes:
    """The same for JSON behind its length, which is mostly the right one, and for what follows it."""
    length = int.from_bytes(seed[:length_bytes], "little")
    head = mutated(chance, seed[length_bytes : length_bytes + length])
    tail = seed[length_bytes + length :]
    if chance.random() < 0.2:
        tail = tail[: chance.randrange(len(tail) + 1)] + chance.randbytes(chance.randrange(40))
    stated = len(head) if chance.random() < 0.8 else chance.choice(SIZES)
    return (stated % 2 ** (8 * length_bytes)).to_bytes(length_bytes, "little") + head + tail


def bytes_changed(chance: random.Random, seed: bytes) -> bytes:
    """Bits turned, words overwritten by extreme numbers, pieces cut out, doubled, swapped, or put in."""
    found = bytearray(seed)
    for _ in range(chance.choice((1, 1, 2, 5))):
        at = chance.randrange(len(found) + 1)
        match chance.randrange(6):
            case 0 if found:
                found[at % len(found)] ^= 1 << chance.randrange(8)
            case 1:
                del found[at : at + chance.choice((1, 8, 100, len(found)))]
            case 2:
                found[at:at] = chance.randbytes(chance.choice((1, 8, 64)))
            case 3:
                found[at:at] = found[at : at + 200]
            case 4:
                width = chance.choice((4, 8))
                found[at : at + width] = (chance.choice(SIZES) % 2 ** (8 * width)).to_bytes(width, "little")
            case _:
                found[at:at] = chance.choice(
                    (b"\x00", b"\xff\xfe", b'"', b"[" * 3000, b"{" * 50, b"9" * 5000, b"\\ud800", b",")
                )
    return bytes(found)


def _document(seed: bytes) -> Any:
    try:
        return json.loads(seed)
    except (ValueError, RecursionError):  # of what is kept, some is nested a thousand times
        return None


def _changed(chance: random.Random, value: Any) -> Any:
    """A copy in which one thing, somewhere, is another."""
    inner = chance.random() < 0.85
    if inner and isinstance(value, dict) and value:
        name = chance.choice(list(value))
        match chance.randrange(8):
            case 0:
                return {key: item for key, item in value.items() if key != name}
            case 1:
                return {(chance.choice(TEXTS) if key == name else key): item for key, item in value.items()}
            case 2:
                return {**value, chance.choice(TEXTS): chance.choice(VALUES)}
            case _:
                return {**value, name: _changed(chance, value[name])}
    if inner and isinstance(value, list) and value:
        at = chance.randrange(len(value))
        match chance.randrange(6):
            case 0:
                return value[:at] + value[at + 1 :]
            case 1:
                return value[:at] + value[at : at + 1] * 2 + value[at + 1 :]
            case 2:
                return value[::-1]
            case _:
                return [*value[:at], _changed(chance, value[at]), *value[at + 1 :]]
    if isinstance(value, int | float) and chance.random() < 0.4:
        return value + chance.choice((-1, 1, -4096, 4096))
    return chance.choice(VALUES)


def _twice(chance: random.Random, text: bytes) -> bytes:
    """A member that is there twice, as no encoder writes it."""
    at = text.find(b"{")
    end = text.find(b":", at)
    if at < 0 or end < 0:
        return text
    return text[: at + 1] + text[at + 1 : end] + b":" + chance.choice((b"0", b"null", b'""')) + b"," + text[at + 1 :]
