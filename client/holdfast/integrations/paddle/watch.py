"""Whether Paddle's layers and tensors are what an earlier save found: flat lists are compared, and no walk is taken."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from operator import eq, is_
from typing import Any

_CONTAINERS = ("_parameters", "_buffers", "_sub_layers")
_METHODS = ("state_dict", "_state_dict_impl")
_TRANSIENT = "_non_persistable_buffer_names_set"


def identical(before: Sequence[object], now: Sequence[object]) -> bool:
    """Whether these are the identical objects in the same order."""
    return len(before) == len(now) and all(map(is_, before, now))


class MappingsWatch:
    """Mappings with the keys and the identical values that they had."""

    def __init__(self, mappings: Sequence[Mapping[str, Any]]) -> None:
        self._mappings = mappings
        self._lengths, self._keys = list(map(len, mappings)), list(chain.from_iterable(mappings))
        self.values = _values(mappings)

    def unchanged(self, mappings: Sequence[Mapping[str, Any]]) -> bool:
        """Whether these mappings are the identical ones, and have the same."""
        return (
            identical(self._mappings, mappings)
            and list(map(len, mappings)) == self._lengths
            and list(chain.from_iterable(mappings)) == self._keys
            and identical(self.values, _values(mappings))
        )


class TensorMemory:
    """The address and dtype that tensors had. They have memory."""

    def __init__(self, tensors: Sequence[Any]) -> None:
        self._tensors = tensors
        self._addresses = [one.data_ptr() for one in tensors]
        self._dtypes = [one.dtype for one in tensors]

    @property
    def unchanged(self) -> bool:
        # Dtypes by identity: Paddle's own == is slow.
        return [one.data_ptr() for one in self._tensors] == self._addresses and all(
            map(is_, (one.dtype for one in self._tensors), self._dtypes)
        )


class TensorForms:
    """The memory, shape, strides and `stop_gradient` that tensors had. They have memory."""

    def __init__(self, tensors: Sequence[Any]) -> None:
        self._tensors, self._memory = tensors, TensorMemory(tensors)
        self._shapes = [one.shape for one in tensors]
        self._strides = [one.strides for one in tensors]
        self._stopped = stopped(tensors)

    @property
    def unchanged(self) -> bool:
        return (
            self._memory.unchanged
            # One at a time: as many new lists would trigger Python's garbage collection.
            and all(map(eq, (one.shape for one in self._tensors), self._shapes))
            and all(map(eq, (one.strides for one in self._tensors), self._strides))
            and stopped(self._tensors) == self._stopped
        )


def stopped(tensors: Iterable[Any]) -> list[bool]:
    """The `stop_gradient` of each of these tensors."""
    return [one.stop_gradient for one in tensors]


class LayerWatch:
    """A layer as it was. `possible` is False if its `state_dict` is not what its containers have."""

    def __init__(self, layer: Any) -> None:
        self._layers = _with_sublayers(layer)
        self._containers = MappingsWatch(self._containers_now())
        self._transient = [set(vars(one)[_TRANSIENT]) for one in self._layers]
        self.possible = _is_plain(self._layers)

    @property
    def unchanged(self) -> bool:
        """Whether the layer has the identical layers, parameters and buffers, under the same names."""
        return (
            self.possible
            and self._containers.unchanged(self._containers_now())
            and [vars(one)[_TRANSIENT] for one in self._layers] == self._transient
        )

    def _containers_now(self) -> list[Mapping[str, Any]]:
        return [held[name] for held in map(vars, self._layers) for name in _CONTAINERS]


def _values(mappings: Iterable[Mapping[str, Any]]) -> list[Any]:
    return list(chain.from_iterable(one.values() for one in mappings))


def _with_sublayers(layer: Any) -> list[Any]:
    found: dict[int, Any] = {}
    left = [layer]
    while left:
        one = left.pop()
        if one is not None and id(one) not in found:
            found[id(one)] = one
            left.extend(one._sub_layers.values())
    return list(found.values())


def _is_plain(layers: Sequence[Any]) -> bool:
    from paddle.nn import Layer

    kinds = set(map(type, layers))
    return all(
        all(getattr(kind, name) is getattr(Layer, name) for kind in kinds) and not any(name in vars(one) for one in layers)
        for name in _METHODS
    )
