"""Writes pickles: plain values, and objects of named classes. Nothing is imported, and nothing is called.

The opcodes are those of protocol 2, which every reader of torch's files knows; bytes raise it to 3.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from holdfast_formats.errors import InvalidRequest

DEPTH_MAX = 100
_HINT = "export only the model with `--as hf`"


class NamedGlobal(NamedTuple):
    """A class or function, such as `torch.float32`."""

    name: str


class GlobalCall(NamedTuple):
    """The result of a global for these arguments, computed by the reader."""

    function: NamedGlobal
    arguments: tuple[Any, ...]


class MadeObject(NamedTuple):
    """An object with this state: its attributes by name, or what its `__setstate__` takes. None: it has no state."""

    kind: NamedGlobal
    state: Any = None


class PersistentId(NamedTuple):
    """A reference that the reader resolves, as torch finds storages."""

    identifier: Any


class ObjectKeys(NamedTuple):
    """A dict by its pairs of key and value, for keys that are objects."""

    pairs: Sequence[tuple[Any, Any]]


def dumps(value: Any) -> bytes:
    """The pickle of a value; `InvalidRequest` for an unknown type, and for values nested too deeply."""
    writer = _PickleWriter()
    writer.write(value, 0)
    return b"\x80" + bytes((writer.protocol,)) + bytes(writer.made) + b"."


class _PickleWriter:
    """Writes one pickle. Names and texts are memoized."""

    def __init__(self) -> None:
        self.made, self.protocol = bytearray(), 2
        self._memo: dict[tuple[type, str], int] = {}

    def write(self, value: Any, depth: int) -> None:
        if depth > DEPTH_MAX:
            raise InvalidRequest(f"a value is nested deeper than {DEPTH_MAX} levels", hint=_HINT)
        if isinstance(value, NamedGlobal | str):
            self._named(value)
        elif isinstance(value, GlobalCall | MadeObject | PersistentId):
            self._object(value, depth)
        elif isinstance(value, ObjectKeys):
            self._dict(value.pairs, depth)
        elif value is None or isinstance(value, bool | int | float):
            self.made += _number(value)
        elif isinstance(value, bytes):
            self.protocol = 3
            self.made += b"B" + struct.pack("<I", len(value)) + value
        elif isinstance(value, tuple):
            self._sequence(value, depth, b"(", b"t") if value else self.made.extend(b")")
        elif isinstance(value, list):
            self._sequence(value, depth, b"](", b"e") if value else self.made.extend(b"]")
        elif isinstance(value, Mapping):
            self._dict(list(value.items()), depth)
        elif isinstance(value, set | frozenset | complex):
            parts = (value.real, value.imag) if isinstance(value, complex) else (sorted(value, key=repr),)
            self._object(GlobalCall(NamedGlobal(f"builtins.{type(value).__name__}"), parts), depth)
        else:
            raise InvalidRequest(f"a value of type {type(value).__name__} cannot be written into a pickle", hint=_HINT)

    def _named(self, value: NamedGlobal | str) -> None:
        key = (type(value), value.name if isinstance(value, NamedGlobal) else value)
        known = self._memo.get(key)
        if known is not None:
            self.made += b"j" + struct.pack("<I", known)
            return
        if isinstance(value, NamedGlobal):
            module, _, name = value.name.rpartition(".")
            self.made += f"c{module}\n{name}\n".encode()
        else:
            text = value.encode(errors="surrogatepass")
            self.made += b"X" + struct.pack("<I", len(text)) + text
        self._memo[key] = len(self._memo)
        self.made += b"r" + struct.pack("<I", self._memo[key])

    def _object(self, value: GlobalCall | MadeObject | PersistentId, depth: int) -> None:
        if isinstance(value, PersistentId):
            self.write(value.identifier, depth + 1)
            self.made += b"Q"
        elif isinstance(value, GlobalCall):
            self._named(value.function)
            self.write(value.arguments, depth + 1)
            self.made += b"R"
        else:
            self._named(value.kind)
            self.made += b")\x81"
            if value.state is not None:
                self.write(value.state, depth + 1)
                self.made += b"b"

    def _sequence(self, values: Sequence[Any], depth: int, begin: bytes, end: bytes) -> None:
        self.made += begin
        for value in values:
            self.write(value, depth + 1)
        self.made += end

    def _dict(self, pairs: Sequence[tuple[Any, Any]], depth: int) -> None:
        self.made += b"}(" if pairs else b"}"
        for pair in pairs:
            for value in pair:
                self.write(value, depth + 1)
        self.made += b"u" if pairs else b""


def _number(value: float | None) -> bytes:
    if value is None or isinstance(value, bool):
        return {None: b"N", True: b"\x88", False: b"\x89"}[value]
    return b"G" + struct.pack(">d", value) if isinstance(value, float) else _integer(value)


def _integer(value: int) -> bytes:
    if 0 <= value < 256:
        return b"K" + bytes((value,))
    if -(2**31) <= value < 2**31:
        return b"J" + struct.pack("<i", value)
    encoded = value.to_bytes((value.bit_length() + 8) // 8, "little", signed=True)
    length = b"\x8a" + bytes((len(encoded),)) if len(encoded) < 256 else b"\x8b" + struct.pack("<i", len(encoded))
    return length + encoded
