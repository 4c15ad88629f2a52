"""Trees: nested Python values with tensors in them, stored as one JSON document and the tensors beside it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np
import torch

from holdfast.tensors import json_values
from holdfast.tensors.fragments import FragmentList, Storable, is_sharded
from holdfast.tensors.json_values import Trail
from holdfast.tensors.torch_dtypes import has_memory, local_shape, overlaps, shares_places, torch_dtype
from holdfast_formats.errors import InvalidRequest
from holdfast_formats.region import Shape

COPY_BYTES_MAX = 16 * 2**20  # up to this size tensors are copied at once, because a loader's next batch changes them


class Tree(NamedTuple):
    """A nested value as text, and the tensors to which it refers by name; arrays among them are copies."""

    text: str
    tensors: dict[str, Storable]


def grow(value: Any, path: str, prefix: str, own: str | None = None) -> Tree:
    """Split a nested value into text and tensors, or refuse it with the path.

    Tensors are named `prefix/key/…`, or below `own`, a prefix of this rank, if given; DTensors and Fragments, of which
    every rank has a part, keep `prefix`.
    """
    tensors: dict[str, Storable] = {}

    def place(trail: Trail, item: Any) -> str:
        sharded = is_sharded(item)
        name = _name(prefix if own is None or sharded else own, trail, tensors)
        if isinstance(item, np.ndarray):
            item = _from_array(item, json_values.render(path, trail), filled=own is None)
        elif own is not None and not sharded and has_memory(item) and (_is_short(item) or overlaps(item)):
            item = item.detach().clone()
        tensors[name] = item
        return name

    return Tree(json_values.dumps(value, path, place, inside=own is not None), tensors)


def _name(prefix: str, trail: Trail, taken: Mapping[str, Any]) -> str:
    name = "/".join((prefix, *(step.strip("[]").replace("/", "|") for step in trail)))
    candidate, number = name, 2
    while candidate in taken:  # {1: …, "1": …}: the document keeps them apart
        candidate, number = f"{name}~{number}", number + 1
    return candidate


def _is_short(tensor: torch.Tensor) -> bool:
    return tensor.device.type == "cpu" and tensor.nbytes <= COPY_BYTES_MAX


def _from_array(array: np.ndarray[Any, Any], path: str, filled: bool) -> torch.Tensor:
    if filled and array.flags.writeable and shares_places((*array.shape, array.itemsize), (*array.strides, 1)):
        raise InvalidRequest(
            f"{path}: several elements of this numpy array share memory, so it could not be restored",
            hint="use numpy.array(value) instead",
        )
    try:
        return torch.from_numpy(np.array(array, order="C", copy=True))
    except (TypeError, ValueError) as error:
        raise InvalidRequest(
            f"{path}: a numpy array of {array.dtype} cannot be stored: {error}",
            hint="convert it to a numeric array in this machine's byte order; store text as a list",
        ) from error


class Regrown(NamedTuple):
    """A tree that is being restored: fill the tensors first, then `build` returns the value."""

    tensors: dict[str, Storable]
    unknown: tuple[str, ...]
    build: Callable[[], Any]
    build_before: Callable[
        [], Any
    ]  # before the tensors are filled: with a `StoredObject` in the place of registered objects


def regrow(text: str, path: str, spec: Callable[[str], tuple[str, Shape] | None], live: Mapping[str, Storable]) -> Regrown:
    """Prepare the value that `grow` split; `live` tensors are filled in place, the others are new.

    `unknown` lists referenced names that the checkpoint does not have.
    """
    kinds = json_values.referred(text)
    specs = {name: spec(name) for name in kinds}
    tensors: dict[str, Storable] = {}
    for name, known in specs.items():
        if known is not None:
            dtype = torch_dtype(known[0], name)
            tensors[name] = (
                live[name] if name in live else torch.empty(local_shape(dtype, known[1]), dtype=dtype, device="cpu")
            )

    def fetch(kind: str, name: str) -> Any:
        value = tensors[name]
        if isinstance(value, FragmentList):
            return value.given
        return value.numpy() if kind == "array" and isinstance(value, torch.Tensor) else value

    return Regrown(
        tensors,
        tuple(name for name, known in specs.items() if known is None),
        lambda: json_values.loads(text, path, fetch),
        lambda: json_values.loads(text, path, fetch, made=False),
    )
