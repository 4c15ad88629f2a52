"""Puts restored values into the user's containers, arrays and tensors, so that these stay the same objects."""

from __future__ import annotations

from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Iterable
from itertools import zip_longest
from typing import Any

import numpy as np
import torch

from holdfast.left_out import LeftOutNote
from holdfast.tensors import json_values
from holdfast.tensors.fragments import Fragment, OneTensor, is_dtensor, local_tensor, parts_of
from holdfast.tensors.matching import MatchedLeaves
from holdfast_formats.digest import digest

_ABSENT = object()


class ContainerKeeper:
    """Puts values into live objects, for one restore, and records replaced objects.

    A live object may be at several places of a state, but can hold only one value. If the values restored for these places
    differ, the first place keeps the object, and the others get objects of their own.
    """

    def __init__(self) -> None:
        self.notes: list[str] = []
        self._given: dict[int, tuple[Any, Any]] = {}  # id of a live object -> the object, and its new value

    def noting(self, restoration: MatchedLeaves) -> MatchedLeaves:
        """Return the restoration with this keeper's notes added to its own."""
        self.notes = restoration.late
        return restoration

    def put(self, live: Any, value: Any, path: str) -> Any:
        """The object for the place of `live`: `live` with the new value, or `value` if `live` cannot take it.

        Nested objects at the same place in both are treated the same way, at every depth.
        """
        if type(live) is tuple and type(value) is tuple:
            items = self._items(live, value, path)
            return (
                live if len(items) == len(live) and all(a is b for a, b in zip(items, live, strict=True)) else tuple(items)
            )
        if not is_mutable(live):
            return value
        if not can_take(live, value):
            self.notes.append(_replaced(path, live, value))
            return value
        before = self._given.get(id(live))
        if before is not None:
            if _fingerprint(before[1]) == _fingerprint(value):
                return live
            text = "the live state uses one object here and elsewhere, but different values were saved"
            self.notes.append(LeftOutNote(f"{path}: {text}: replaced by a new object"))
            return value
        self._given[id(live)] = live, value
        return live if value is live else self._give(live, value, path)

    def _give(self, live: Any, value: Any, path: str) -> Any:
        if isinstance(live, torch.Tensor | Fragment):
            with torch.no_grad():
                local_tensor(live).copy_(local_tensor(value))
        elif isinstance(live, np.ndarray):
            live[...] = value
        elif isinstance(live, dict):
            merged = [(k, self.put(live[k], v, f"{path}/{k}") if k in live else v) for k, v in value.items()]
            live.clear()
            for key, item in merged:
                live[key] = item
            if isinstance(live, defaultdict):
                live.default_factory = value.default_factory
        elif isinstance(live, list):
            live[:] = self._items(live, value, path)
        elif isinstance(live, deque):
            items = self._items(live, value, path)
            live.clear()
            live.extend(items)
        elif isinstance(live, set):
            live.clear()
            live.update(value)
        else:
            return self._give_bytes(live, value, path)
        return live

    def _give_bytes(self, live: bytearray, value: bytearray, path: str) -> bytearray:
        try:
            live[:] = value
        except BufferError:  # a memoryview of it exists, and its length would change
            self.notes.append(_replaced(path, live, value))
            return value
        return live

    def _items(self, live: Iterable[Any], value: Iterable[Any], path: str) -> list[Any]:
        both = enumerate(zip_longest(live, value, fillvalue=_ABSENT))
        return [
            new if old is _ABSENT else self.put(old, new, f"{path}/{at}") for at, (old, new) in both if new is not _ABSENT
        ]


_KINDS = frozenset({dict, OrderedDict, Counter, defaultdict, list, deque, set, bytearray, np.ndarray})


def is_mutable(live: object) -> bool:
    """Whether code that holds this object would miss a replacement."""
    return type(live) in _KINDS or isinstance(live, torch.Tensor | Fragment)


def can_take(live: object, value: object) -> bool:
    """Whether a mutable object can become equal to `value` and stay the same object."""
    if live is value:
        return True
    if isinstance(live, torch.Tensor | Fragment):
        return (
            isinstance(value, torch.Tensor | Fragment)
            and _place(live) == _place(value)
            and not local_tensor(live).is_inference()
        )
    if type(live) is not type(value):
        return False
    if isinstance(live, np.ndarray) and isinstance(value, np.ndarray):
        return live.shape == value.shape and live.dtype == value.dtype and live.flags.writeable
    return not isinstance(live, deque) or not isinstance(value, deque) or live.maxlen == value.maxlen


def _place(value: OneTensor) -> tuple[object, ...]:
    """Identifies a tensor's bytes."""
    local = local_tensor(value)
    if isinstance(value, Fragment):
        return local.dtype, local.shape, *value.place
    sharding = (value.placements, value.device_mesh) if is_dtensor(value) else ()  # type: ignore[attr-defined]
    return local.dtype, local.shape, value.shape, sharding


def _replaced(path: str, live: object, value: object) -> LeftOutNote:
    return LeftOutNote(
        f"{path}: the live {type(live).__name__} cannot take the saved {type(value).__name__} in place: replaced "
        "by a new object"
    )


def _fingerprint(value: Any) -> str:
    def beside(_: json_values.Trail, item: Any) -> str:
        if isinstance(item, np.ndarray):
            return f"{item.dtype} {item.shape} {digest(item.tobytes())}"
        return "; ".join(f"{_place(part)} {digest(_bytes(part))}" for part in parts_of(item))

    return json_values.dumps(value, "value", beside)


def _bytes(value: OneTensor) -> bytes:
    return local_tensor(value).cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
