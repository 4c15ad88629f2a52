"""Values of other programs as the JSON of state.json, and back: tuples, bytes, numbers that JSON lacks.

The tags are those of `holdfast.tensors.json_values`, by which the client reads and writes documents.
"""

from __future__ import annotations

import base64
import math
import struct
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from holdfast_formats.errors import CorruptManifest, InvalidRequest

DEPTH_MAX = 64

Trail = tuple[str, ...]
Other = Callable[[Trail, Any], Any]  # the JSON of a value of another type; raises InvalidRequest where there is none


def encode(value: Any, other: Other, trail: Trail = ()) -> Any:
    """The JSON form of `value`. `other` converts values that are not plain Python, with the path to them.

    Raises `InvalidRequest`, with the path, for values nested too deeply.
    """
    if len(trail) > DEPTH_MAX:
        raise InvalidRequest(
            f"{path_of(trail[:4])}… is nested deeper than {DEPTH_MAX} levels",
            hint="store it flatter, with the program that wrote it",
        )
    if value is None or isinstance(value, bool):
        return value
    if type(value) in _ATOMS:
        return _ATOMS[type(value)](value)
    if type(value) is list:
        return _items(value, other, trail)
    if type(value) is tuple:
        return {"$tuple": _items(value, other, trail)}
    if type(value) in (set, frozenset):
        return {f"${type(value).__name__}": sorted(_items(value, other, trail), key=repr)}
    if type(value) is dict:
        return _mapping(value, other, trail)
    return other(trail, value)


def pairs(value: Mapping[Any, Any], other: Other, trail: Trail) -> list[list[Any]]:
    """Keys and values for the tags of mappings."""
    return [[encode(k, other, (*trail, repr(k)[:40])), encode(v, other, (*trail, str(k)[:80]))] for k, v in value.items()]


def ordered(encoded: dict[str, Any]) -> dict[str, Any]:
    """A JSON object with the order of its keys, if that is not the sorted one."""
    keys = list(encoded)
    return encoded if keys == sorted(keys) else {**encoded, "$keys": keys}


def path_of(trail: Trail) -> str:
    return "".join(step if step.startswith("[") else f".{step}" for step in trail).lstrip(".")


def decode(encoded: Any, stored: Callable[[str, str], Any]) -> Any:
    """The value of a JSON document; `stored` returns what is beside it, by kind and name.

    Raises `CorruptManifest` for an invalid document, and `InvalidRequest` for tags of Python types that are not plain.
    """
    if isinstance(encoded, list):
        return [decode(item, stored) for item in encoded]
    if not isinstance(encoded, dict):
        return encoded
    if "$keys" in encoded:
        return {key: decode(encoded[key], stored) for key in encoded["$keys"]}
    tag, content = str(next(iter(encoded))) if len(encoded) == 1 else "", next(iter(encoded.values()), None)
    if not tag.startswith("$"):
        return {key: decode(value, stored) for key, value in encoded.items()}
    if tag in ("$tensor", "$array"):
        return stored(tag[1:], str(content))
    if tag not in _TAGS:
        raise InvalidRequest(f"the tag {tag} is unknown", hint="use the version of Holdfast that saved it, or a newer one")
    try:
        return _TAGS[tag](content, lambda item: decode(item, stored))
    except (ValueError, KeyError, TypeError, struct.error) as error:
        raise CorruptManifest(
            f"cannot read a value with the tag {tag}: {error}",
            hint="verify the checkpoint with `holdfast verify`, and use another one",
            file="state.json",
        ) from error


def _items(values: Iterable[Any], other: Other, trail: Trail) -> list[Any]:
    return [encode(value, other, (*trail, f"[{position}]")) for position, value in enumerate(values)]


def _mapping(value: dict[Any, Any], other: Other, trail: Trail) -> Any:
    if not all(type(key) is str and not key.startswith("$") and _is_unicode(key) for key in value):
        return {"$dict": pairs(value, other, trail)}
    return ordered({key: encode(item, other, (*trail, key)) for key, item in value.items()})


def _is_unicode(text: str) -> bool:
    return text.isascii() or not any("\ud800" <= character <= "\udfff" for character in text)


def _encode_float(value: float) -> Any:
    if math.isfinite(value):
        return value
    bits = struct.pack(">d", value)
    return {"$float": repr(value) if math.isinf(value) or bits == struct.pack(">d", math.nan) else bits.hex()}


def _decode_float(content: str) -> float:
    return float(content) if content in ("nan", "inf", "-inf") else float(struct.unpack(">d", bytes.fromhex(content))[0])


_ATOMS: dict[type, Callable[[Any], Any]] = {
    int: lambda value: value if -(2**63) <= value < 2**63 else {"$int": hex(value)},
    float: _encode_float,
    str: lambda value: value if _is_unicode(value) else {"$str": value.encode(errors="surrogatepass").hex()},
    bytes: lambda value: {"$bytes": base64.b64encode(value).decode()},
    bytearray: lambda value: {"$bytearray": base64.b64encode(value).decode()},
    complex: lambda value: {"$complex": [_encode_float(value.real), _encode_float(value.imag)]},
}
_TAGS: dict[str, Callable[[Any, Callable[[Any], Any]], Any]] = {
    "$int": lambda content, _: int(content, 16),
    "$float": lambda content, _: _decode_float(content),
    "$str": lambda content, _: bytes.fromhex(content).decode(errors="surrogatepass"),
    "$bytes": lambda content, _: base64.b64decode(content, validate=True),
    "$bytesio": lambda content, _: base64.b64decode(content[0], validate=True),
    "$tuple": lambda content, inner: tuple(inner(content)),
    "$dict": lambda content, inner: {inner(key): inner(value) for key, value in content},
    "$counter": lambda content, inner: {inner(key): inner(value) for key, value in content},
    "$ordereddict": lambda content, inner: {inner(key): inner(value) for key, value in content},
    "$size": lambda content, inner: tuple(inner(content)),
    "$set": lambda content, inner: set(inner(content)),
    "$frozenset": lambda content, inner: frozenset(inner(content)),
    "$complex": lambda content, inner: complex(*inner(content)),
}
