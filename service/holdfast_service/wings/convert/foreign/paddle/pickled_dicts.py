"""The dicts that `paddle.save` pickles: arrays by name, among them large ones that were cut, and those of protocol 2.

bfloat16 is stored as uint16. Older protocols limit the length of bytes, so that Paddle cut arrays of over 2³⁰ bytes into
flat slices `KEY@@.0`, `KEY@@.1` …, with instructions under `UnpackBigParamInfor@@`.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from math import prod
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from holdfast_formats.errors import StateMismatch
from holdfast_formats.files import Files
from holdfast_formats.mapping.listing import FetchBox, ForeignTensor
from holdfast_formats.region import Box, Shape, byte_span, flat_boxes
from holdfast_service.wings.convert.foreign import pickles
from holdfast_service.wings.convert.foreign.paddle.tensor_parallel import LocalTensorParts
from holdfast_service.wings.convert.foreign.pickles import AnyArray, LatinArray, LatinDecoder

BIG = "UnpackBigParamInfor@@"
STATIC_NAMES = "StructuredToParameterName@@"
_CLASSES = ("Metadata", "LocalTensorMetadata", "LocalTensorIndex")
_HOMES = ("paddle.distributed.flex_checkpoint.dcp.metadata", "paddle.distributed.checkpoint.metadata")
RECORDS = frozenset(f"{home}.{name}" for home in _HOMES for name in _CLASSES)


class SavedDict(NamedTuple):
    """The tensors of a saved dict by key, nested ones under `OUTER/KEY`, static names by structured name, and the rest."""

    tensors: Mapping[str, LocalTensorParts]
    inner: Mapping[str, Mapping[str, LocalTensorParts]]
    static: Mapping[str, str]
    rest: Mapping[str, Any]


def read_dict(files: Files, path: str, nested: Collection[str] = ()) -> SavedDict:
    """The tensors of a file; those of the dicts under the keys `nested` in `inner`. `StateMismatch` by file and key."""
    value = pickles.read_pickle(files, path, RECORDS)
    if not isinstance(value, dict):
        raise StateMismatch(f"{path} holds a {pickles.kind_of(value)}, not a state dict", file=path)
    tensors, rest = _tensors(path, value)
    inner: dict[str, Mapping[str, LocalTensorParts]] = {}
    for key in nested:
        if isinstance(rest.get(key), dict):
            inner[key], left = _tensors(path, rest.pop(key))
            if left:
                raise _unknown(path, next(iter(left)))
    static = rest.pop(STATIC_NAMES, {})
    named = {str(name): str(given) for name, given in static.items()} if isinstance(static, dict) else {}
    return SavedDict(tensors, inner, named, rest)


def refuse_rest(path: str, rest: Mapping[str, Any]) -> None:
    if rest:
        raise _unknown(path, next(iter(rest)))


def _unknown(path: str, key: str) -> StateMismatch:
    return StateMismatch(f"{path}: {key!r} is neither a tensor nor a known kind of value", file=path, tensor=str(key))


def _tensors(path: str, value: Mapping[Any, Any]) -> tuple[dict[str, LocalTensorParts], dict[str, Any]]:
    tensors: dict[str, LocalTensorParts] = {}
    rest: dict[str, Any] = {}
    for key, held in value.items():
        if not isinstance(key, str):
            raise StateMismatch(f"{path} has the key {key!r}, which is not a name", file=path)
        named = isinstance(held, tuple | list) and len(held) == 2 and isinstance(held[0], str)
        array = held[1] if named else held
        if isinstance(array, AnyArray):
            tensors[key] = _parts(key, array)
        else:
            rest[key] = held
    _join_big(path, tensors, rest.pop(BIG, {}))
    return tensors, rest


def _parts(key: str, array: AnyArray) -> LocalTensorParts:
    dtype = "BF16" if array.dtype == "U16" else array.dtype
    if isinstance(array, LatinArray):
        return LocalTensorParts(dtype, array.shape, (), (), array.file, key, LatinDecoder(array, dtype))
    return LocalTensorParts(dtype, array.shape, (array.stored(key).all(),), (), array.file, key)


def _join_big(path: str, tensors: dict[str, LocalTensorParts], stated: Any) -> None:
    """Replace slices of cut arrays by the whole ones."""
    if not isinstance(stated, dict):
        raise _unknown(path, BIG)
    for key, how in stated.items():
        names = how.get("slices") if isinstance(how, dict) else None
        shape = _shape(how.get("OriginShape")) if isinstance(how, dict) else None
        if not isinstance(names, list | tuple) or not names or shape is None or key in tensors:
            raise StateMismatch(f"{path}: {BIG} does not describe how {key!r} was split", file=path, tensor=str(key))
        missing = [name for name in names if name not in tensors]
        if missing:
            raise StateMismatch(f"{path}: slice {missing[0]!r} of {key!r} is missing", file=path, tensor=str(key))
        tensors[str(key)] = _joined([tensors.pop(name) for name in names], shape, str(key))


def _shape(value: Any) -> Shape | None:
    plain = isinstance(value, list | tuple) and all(isinstance(n, int) and n >= 0 for n in value)
    return tuple(value) if plain else None


def _joined(slices: list[LocalTensorParts], shape: Shape, key: str) -> LocalTensorParts:
    first = slices[0]
    if any(one.dtype != first.dtype for one in slices) or sum(prod(one.shape) for one in slices) != prod(shape):
        raise first.odd(f"the slices of {key!r} do not add up to the {prod(shape)} elements of {list(shape)}")
    if any(one.decoder is not None or len(one.pieces) != 1 or len(one.shape) != 1 for one in slices):
        tensors = tuple(one.tensor("extra", one.key) for one in slices)
        return LocalTensorParts(first.dtype, shape, (), (), first.file, key, Concatenated(tensors, shape))
    pieces, at = [], 0
    for one in slices:
        pieces += one.stored().run(0, at, at + one.shape[0], shape)
        at += one.shape[0]
    return LocalTensorParts(first.dtype, shape, tuple(pieces), (), first.file, key)


class Concatenated(NamedTuple):
    """The concatenated elements of several tensors, as one of `shape`."""

    inputs: tuple[ForeignTensor, ...]
    shape: Shape

    def decode(self, box: Box, fetch: FetchBox) -> NDArray[Any]:
        start, stop = byte_span(box, self.shape, 1)
        parts, at = [], 0
        for one in self.inputs:
            low, high = max(start - at, 0), min(stop - at, prod(one.spec.shape))
            parts += [fetch(one, part).reshape(-1) for part in flat_boxes(low, max(low, high), one.spec.shape)]
            at += prod(one.spec.shape)
        return pickles.out_of(np.concatenate(parts) if parts else np.empty(0), box, self.shape, start)
