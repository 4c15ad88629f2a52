"""Nested Python values as JSON, exactly, and nothing executable: what cannot be written so is refused by its path.

Plain JSON stands for itself. Everything else is an object with a single key that begins with "$":

    {"$float": "nan"}  {"$int": "-0x1f…"}  {"$str": hex of UTF-8}  {"$bytes": base64}  {"$bytearray": base64}
    {"$bytesio": [base64, position]}
    {"$complex": [re, im]}  {"$tuple": […]}  {"$set": […]}  {"$frozenset": […]}  {"$range": [start, stop, step]}
    {"$deque": [maxlen, […]]}  {"$dict": [[key, value], …]}  {"$ordereddict": …}  {"$counter": …}
    {"$defaultdict": ["int", [[key, value], …]]}  {"$dtype": "float32"}  {"$device": "cuda:0"}  {"$size": […]}
    {"$scalar": ["float32", hex of its bytes]}  {"$tensor": name}  {"$array": name}
    {"$object": ["module:Class", …]}

A dict whose keys are all text, none beginning with "$", is an object; where its order is not the sorted one, "$keys" in it
lists the keys in order. Tensors and numpy arrays are stored beside the document, under the name that the tag holds; a list
of Fragments is one tensor. An object is of a class that `register_class` has got, and what its function makes of it.
"""

from __future__ import annotations

import base64
import io
import json
import math
import struct
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np
import torch

from holdfast.tensors import registered
from holdfast.tensors.advice import advice
from holdfast.tensors.fragments import Fragment, FragmentList, fragment_list, holds_fragments
from holdfast_formats.errors import CorruptManifest, InvalidRequest, LimitExceeded

DEPTH_MAX = 64
TEXT_BYTES_MAX = 64 * 2**20

Trail = tuple[str, ...]  # the path to a value: keys and positions
Place = Callable[[Trail, Any], str]  # stores a tensor or an array beside the document and returns its name
Fetch = Callable[[str, str], Any]  # ("tensor" or "array", name) -> the value

_PLAIN = frozenset({bool, type(None)})
_FLOAT_TEXTS = ("nan", "inf", "-inf")
_NAN_BITS = struct.pack(">d", math.nan)
_FACTORIES: dict[str, Any] = {kind.__name__: kind for kind in (bool, int, float, str, bytes, tuple, list, dict, set)}
_SCALAR_KINDS = "biufc"


def dumps(value: Any, path: str, place: Place | None = None, inside: bool = False) -> str:
    """The canonical JSON text of `value`; equal values have equal texts.

    Raises `InvalidRequest`, with the path, for values that JSON cannot hold (without `place` also tensors and arrays),
    and `LimitExceeded` for too large or too deeply nested ones. `inside` means that an object returned the value.
    """
    text = _text(_Writer(path, place, inside).encode(value, ()))
    if len(text) > TEXT_BYTES_MAX:
        raise LimitExceeded(
            f"{path}: its JSON takes {len(text)} bytes, over {TEXT_BYTES_MAX}",
            hint="keep large data in tensors or numpy arrays",
        )
    return text


def loads(text: str, path: str, fetch: Fetch | None = None, made: bool = True) -> Any:
    """The value that `dumps` wrote; `CorruptManifest` with `path` for any other text. Not `made`, as long as
    tensors are not filled: a `StoredObject` is in the place of each object of a registered class.
    """
    try:
        return (_Reader(fetch) if made else _ReaderBefore(fetch)).decode(json.loads(text))
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError, struct.error) as error:
        raise CorruptManifest(
            f"cannot read the stored value of {path}: {error}",
            hint="restore another step, or exclude this name with exclude=",
            file="state.json",
        ) from error


def referred(text: str) -> dict[str, str]:
    """The names to which a document refers, each with its kind: "tensor" or "array"."""
    names: dict[str, str] = {}

    def note(kind: str, name: str) -> None:
        names[name] = kind

    loads(text, "document", note, made=False)
    return names


def _text(encoded: Any) -> str:
    return json.dumps(encoded, sort_keys=True, allow_nan=False, separators=(",", ":"))


def render(path: str, trail: Trail) -> str:
    """A path as in Python: `loader.sampler.order[3]`."""
    return path + "".join(step if step.startswith("[") else f".{step}" for step in trail)


class _Writer:
    """Writes one value. Tracks the containers above it, to find cycles."""

    def __init__(self, path: str, place: Place | None, inside: bool) -> None:
        self.path = path
        self.inside = inside
        self.place = place
        self.above: set[int] = set()
        self.hashed = 0  # the number of keys and members of sets that contain this

    def encode(self, value: Any, trail: Trail) -> Any:
        kind = type(value)
        if kind in _PLAIN:
            return value
        if kind in _ATOMS:
            return _ATOMS[kind](value)
        if isinstance(value, torch.Tensor | Fragment) or kind is np.ndarray:  # a masked array has more than its memory
            return self._beside(value, trail)
        if isinstance(value, np.generic):
            return self._scalar(value, trail)
        if kind is io.BytesIO and self.inside and not value.closed:  # an entry of the state would keep the one that it has
            return {"$bytesio": [base64.b64encode(value.getvalue()).decode(), value.tell()]}
        one = registered.of_class(kind)
        if kind not in _CONTAINERS and one is None:
            raise self._refusal(value, trail)
        if holds_fragments(value):
            return self._beside(fragment_list(value, render(self.path, trail)), trail)
        if len(trail) >= DEPTH_MAX:
            raise LimitExceeded(
                f"{render(self.path, trail[:4])}…: nested deeper than {DEPTH_MAX} levels",
                hint="store it flatter: fewer dicts and lists inside each other",
            )
        if id(value) in self.above:
            raise InvalidRequest(f"{render(self.path, trail)} contains itself", hint="remove the reference cycle")
        self.above.add(id(value))
        try:
            return _CONTAINERS[kind](self, value, trail) if one is None else self.object(one, value, trail)
        finally:
            self.above.discard(id(value))

    def items(self, values: Iterable[Any], trail: Trail) -> list[Any]:
        values = list(values)
        kinds = set(map(type, values))
        if kinds <= _PLAIN or _all_small_integers(values):
            return values  # a sampler's permutation may have millions of numbers
        if kinds == {str} and "".join(values).isascii():
            return values  # the names of all parameters
        return [self.encode(value, (*trail, f"[{position}]")) for position, value in enumerate(values)]

    def members(self, values: Iterable[Any], trail: Trail) -> list[Any]:
        return sorted((self.key(value, (*trail, "{…}")) for value in values), key=_text)

    def key(self, value: Any, trail: Trail) -> Any:
        """Encode a key. A tensor as a key is refused, because its identity changes at every start."""
        self.hashed += 1
        try:
            return self.encode(value, trail)
        finally:
            self.hashed -= 1

    def pairs(self, value: Mapping[Any, Any], trail: Trail) -> list[Any]:
        return [[self.key(k, (*trail, f"{k!r:.40}")), self.encode(v, (*trail, f"{k!s:.80}"))] for k, v in value.items()]

    def mapping(self, value: dict[Any, Any], trail: Trail) -> Any:
        keys = list(value)
        if not all(type(key) is str and not key.startswith("$") and _is_unicode(key) for key in keys):
            return {"$dict": self.pairs(value, trail)}
        encoded = {key: self.encode(item, (*trail, key)) for key, item in value.items()}
        return encoded if keys == sorted(keys) else {**encoded, "$keys": keys}

    def object(self, one: registered.Registered, value: Any, trail: Trail) -> Any:
        return {"$object": [one.name, self.encode(one.take(value), trail)]}

    def defaulted(self, value: defaultdict[Any, Any], trail: Trail) -> Any:
        factory = value.default_factory
        known = factory is None or _FACTORIES.get(getattr(factory, "__name__", "")) is factory
        if not known:
            raise self._refusal(factory, (*trail, "default_factory"))
        return {"$defaultdict": [None if factory is None else factory.__name__, self.pairs(value, trail)]}

    def _beside(self, value: Any, trail: Trail) -> Any:
        if self.place is None or self.hashed:
            raise self._refusal(value.given if isinstance(value, FragmentList) else value, trail)
        return {"$array" if isinstance(value, np.ndarray) else "$tensor": self.place(trail, value)}

    def _scalar(self, value: np.generic, trail: Trail) -> Any:
        if value.dtype.kind not in _SCALAR_KINDS:
            raise self._refusal(value, trail)
        little = value.dtype.newbyteorder("<")
        return {"$scalar": [little.str, np.asarray(value).astype(little).tobytes().hex()]}

    def _refusal(self, value: Any, trail: Trail) -> InvalidRequest:
        kind = type(value)
        named = kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"
        return InvalidRequest(
            f"{render(self.path, trail)}: a value of type {named} cannot be stored",
            hint=advice(value, self.path, trail, self.inside),
            path=render(self.path, trail),
        )


def _is_unicode(text: str) -> bool:
    return text.isascii() or not any("\ud800" <= character <= "\udfff" for character in text)


def _all_small_integers(values: list[Any]) -> bool:
    return set(map(type, values)) == {int} and min(values) >= -(2**63) and max(values) < 2**63


def _encode_int(value: int) -> Any:
    return value if -(2**63) <= value < 2**63 else {"$int": hex(value)}


def _encode_float(value: float) -> Any:
    if math.isfinite(value):
        return value
    bits = struct.pack(">d", value)
    return {"$float": repr(value) if math.isinf(value) or bits == _NAN_BITS else bits.hex()}


def _encode_str(value: str) -> Any:
    return value if _is_unicode(value) else {"$str": value.encode(errors="surrogatepass").hex()}


_ATOMS: dict[type, Callable[[Any], Any]] = {
    int: _encode_int,
    float: _encode_float,
    str: _encode_str,
    bytes: lambda value: {"$bytes": base64.b64encode(value).decode()},
    bytearray: lambda value: {"$bytearray": base64.b64encode(value).decode()},
    complex: lambda value: {"$complex": [_encode_float(value.real), _encode_float(value.imag)]},
    range: lambda value: {"$range": [_encode_int(value.start), _encode_int(value.stop), _encode_int(value.step)]},
    torch.dtype: lambda value: {"$dtype": str(value).removeprefix("torch.")},
    torch.device: lambda value: {"$device": str(value)},
    torch.Size: lambda value: {"$size": list(value)},
}
_CONTAINERS: dict[type, Callable[[_Writer, Any, Trail], Any]] = {
    list: lambda writer, value, trail: writer.items(value, trail),
    tuple: lambda writer, value, trail: {"$tuple": writer.items(value, trail)},
    deque: lambda writer, value, trail: {"$deque": [value.maxlen, writer.items(value, trail)]},
    set: lambda writer, value, trail: {"$set": writer.members(value, trail)},
    frozenset: lambda writer, value, trail: {"$frozenset": writer.members(value, trail)},
    dict: _Writer.mapping,
    OrderedDict: lambda writer, value, trail: {"$ordereddict": writer.pairs(value, trail)},
    Counter: lambda writer, value, trail: {"$counter": writer.pairs(value, trail)},
    defaultdict: _Writer.defaulted,
}


class _Reader:
    """Reads a document; `fetch` supplies the tensors and arrays beside it."""

    def __init__(self, fetch: Fetch | None) -> None:
        self.fetch = fetch

    def decode(self, encoded: Any) -> Any:
        if isinstance(encoded, list):
            return [self.decode(item) for item in encoded] if set(map(type, encoded)) != {int} else encoded
        if not isinstance(encoded, dict):
            return encoded
        order = encoded.pop("$keys", None)
        if order is not None:
            return {key: self.decode(encoded[key]) for key in order}
        tag, content = next(iter(encoded.items())) if len(encoded) == 1 else ("", None)
        if not tag.startswith("$"):
            return {key: self.decode(value) for key, value in encoded.items()}
        if tag in ("$tensor", "$array"):
            if self.fetch is None or not isinstance(content, str):
                raise ValueError(f"nothing is stored beside it for {content!r}")
            return self.fetch(tag[1:], content)
        return _TAGS[tag](self, content)

    def pairs(self, content: Any) -> list[tuple[Any, Any]]:
        return [(self.decode(key), self.decode(value)) for key, value in content]

    def defaulted(self, content: Any) -> Any:
        name, pairs = content
        return defaultdict(None if name is None else _FACTORIES[name], self.pairs(pairs))

    def object(self, content: Any) -> Any:
        name, stored = content
        return registered.made(str(name), self.decode(stored))

    def sequence(self, content: Any) -> list[Any]:
        decoded = self.decode(content)
        if not isinstance(decoded, list):
            raise TypeError("a list was expected")
        return decoded


class _ReaderBefore(_Reader):
    """Reads a document before its tensors are filled, which a function that makes an object may read."""

    def object(self, content: Any) -> Any:
        name, stored = content
        registered.check_known(str(name))
        return registered.StoredObject(str(name), self.decode(stored))


def _decode_float(content: str) -> float:
    return float(content) if content in _FLOAT_TEXTS else float(struct.unpack(">d", bytes.fromhex(content))[0])


def _decode_dtype(content: str) -> torch.dtype:
    dtype = getattr(torch, content)
    if not isinstance(dtype, torch.dtype):
        raise TypeError(f"torch.{content} is not a dtype")
    return dtype


def _decode_stream(content: list[Any]) -> io.BytesIO:
    stream = io.BytesIO(base64.b64decode(content[0], validate=True))
    stream.seek(content[1])
    return stream


def _decode_scalar(content: list[str]) -> Any:
    dtype = np.dtype(content[0])
    if dtype.kind not in _SCALAR_KINDS:
        raise TypeError(f"{content[0]} is not a numeric dtype")
    return np.frombuffer(bytes.fromhex(content[1]), dtype)[0]


_TAGS: dict[str, Callable[[_Reader, Any], Any]] = {
    "$int": lambda reader, content: int(content, 16),
    "$float": lambda reader, content: _decode_float(content),
    "$str": lambda reader, content: bytes.fromhex(content).decode(errors="surrogatepass"),
    "$bytes": lambda reader, content: base64.b64decode(content, validate=True),
    "$bytearray": lambda reader, content: bytearray(base64.b64decode(content, validate=True)),
    "$bytesio": lambda reader, content: _decode_stream(content),
    "$complex": lambda reader, content: complex(*reader.sequence(content)),
    "$range": lambda reader, content: range(*reader.sequence(content)),
    "$dtype": lambda reader, content: _decode_dtype(content),
    "$device": lambda reader, content: torch.device(content),
    "$size": lambda reader, content: torch.Size(content),
    "$scalar": lambda reader, content: _decode_scalar(content),
    "$tuple": lambda reader, content: tuple(reader.sequence(content)),
    "$deque": lambda reader, content: deque(reader.sequence(content[1]), maxlen=content[0]),
    "$set": lambda reader, content: set(reader.sequence(content)),
    "$frozenset": lambda reader, content: frozenset(reader.sequence(content)),
    "$dict": lambda reader, content: dict(reader.pairs(content)),
    "$ordereddict": lambda reader, content: OrderedDict(reader.pairs(content)),
    "$counter": lambda reader, content: Counter(dict(reader.pairs(content))),
    "$defaultdict": _Reader.defaulted,
    "$object": lambda reader, content: reader.object(content),
}
