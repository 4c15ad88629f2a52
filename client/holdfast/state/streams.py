"""The user's random streams as entries of the state: torch generators, and trackers of several.

A tracker has `get_states` and `set_states`, as Megatron's CudaRNGStatesTracker, or `get_states_tracker` and
`set_states_tracker`, as Paddle's. Each rank's streams are its own.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import torch

from holdfast.tensors.json_values import DEPTH_MAX
from holdfast_formats.digest import digest
from holdfast_formats.errors import StateMismatch

TRACKER_METHODS = (("get_states", "set_states"), ("get_states_tracker", "set_states_tracker"))
_GENERATOR = "torch.Generator"  # the key of a generator's state
_DEVICE = "device"


class CheckedEntry(ABC):
    """An adapter of an entry, which checks what a checkpoint has of it before anything changes."""

    @abstractmethod
    def refuse_unfit(self, stored: Any) -> None:
        """Raise `StateMismatch` for a document that cannot be restored; its tensors are not filled yet."""


class IncompleteEntry(CheckedEntry):
    """An adapter whose object has more than it saves."""

    @abstractmethod
    def left_out(self, key: str) -> str | None:
        """What a save of the entry under this key leaves out now, in a sentence."""


class FurtherStreams(CheckedEntry):
    """Random streams of a framework. They are stored and restored with those of the process (`holdfast.state.rng`), under
    their `name`; a state without them leaves them out with a notice.
    """

    name: str

    @abstractmethod
    def state_dict(self) -> Any:
        """The streams as they are now, as a JSON value."""

    @abstractmethod
    def load_state_dict(self, stored: Any) -> None: ...

    @abstractmethod
    def absent(self, stored: Any) -> list[str]:
        """Names of stored streams that this process does not have."""

    @abstractmethod
    def begun(self, stored: Any) -> list[str]:
        """Names of streams that this process has and does not continue: they go on as it seeded them."""

    @abstractmethod
    def mixed(self, stored: Any, number: int) -> Any:
        """These streams for a rank that has none of its own, each seeded from the stored one by `seed_of`."""


def seed_of(stored: bytes, number: int) -> int:
    """The seed of a new stream, from a stored one and a number."""
    return int(digest(stored + number.to_bytes(8, "little")), 16)


class HeldGenerator(CheckedEntry):
    """A generator of torch as an object with a state."""

    def __init__(self, key: str, generator: torch.Generator) -> None:
        self._key, self._generator = key, generator

    def state_dict(self) -> Any:
        return _taken(self._generator)

    def refuse_unfit(self, stored: Any) -> None:
        """Raise `StateMismatch` for a document of something else; its tensors are not filled yet."""
        if not _is_taken(stored):
            raise StateMismatch(
                f"{self._key}: the checkpoint has no state of a torch.Generator under this key",
                hint="exclude this name with exclude=, which keeps the live generator",
            )
        _refuse_other_device(self._key, self._generator, stored)

    def load_state_dict(self, stored: Any) -> None:
        _put(self._key, self._generator, stored)


class HeldTracker(CheckedEntry):
    """A tracker, which gets and sets several random streams at once, as an object with a state."""

    def __init__(self, key: str, tracker: Any, get: str, put: str) -> None:
        self._key, self._tracker, self._get, self._put = key, tracker, get, put

    def state_dict(self) -> Any:
        return _taken(getattr(self._tracker, self._get)())

    def refuse_unfit(self, stored: Any) -> None:
        """Raise `StateMismatch` for generators on another device than the live ones."""
        _refuse_other_devices(self._key, stored, getattr(self._tracker, self._get)())

    def load_state_dict(self, stored: Any) -> None:
        """Restore the tracker's streams; its present generators stay the same objects."""
        states = _given(self._key, stored, getattr(self._tracker, self._get)())
        try:
            getattr(self._tracker, self._put)(states)
        except Exception as error:  # the user's class decides what it raises
            raise StateMismatch(
                f"{self._key}: {type(self._tracker).__name__}.{self._put}() does not take the saved streams: {error}",
                hint="build it as it was saved, or exclude this name with exclude=",
            ) from error


HeldStreams = HeldGenerator | HeldTracker


def stateful(key: str, value: object) -> Any | None:
    """The object with `state_dict` of an entry: the entry itself, or an adapter for its random streams; None if it has
    neither.
    """
    if isinstance(value, type):
        return None
    if isinstance(value, torch.Generator):
        return HeldGenerator(key, value)
    if _has(value, "state_dict", "load_state_dict"):
        return value
    methods = next((pair for pair in TRACKER_METHODS if _has(value, *pair)), None)
    return None if methods is None else HeldTracker(key, value, *methods)


def _has(value: object, *methods: str) -> bool:
    return all(callable(getattr(value, name, None)) for name in methods)


def _taken(value: Any, depth: int = 0) -> Any:
    """The value with generators' states in their places, and copies of tensors, which change while training continues. Too
    deep nesting is refused when it is written.
    """
    if depth > DEPTH_MAX:
        return value
    if isinstance(value, torch.Generator):
        return {_GENERATOR: value.get_state(), _DEVICE: value.device.type}
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    if type(value) is dict:
        return {name: _taken(item, depth + 1) for name, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_taken(item, depth + 1) for item in value)
    return value


def _given(key: str, stored: Any, live: Any) -> Any:
    """The stored value in the form of the live one: generators continue in place, and tensors are on the live ones'
    device.
    """
    if _is_taken(stored):
        generator = live if isinstance(live, torch.Generator) else torch.Generator(stored[_DEVICE])
        _put(key, generator, stored)
        return generator
    if isinstance(stored, torch.Tensor):
        return stored.to(live.device) if isinstance(live, torch.Tensor) else stored
    if type(stored) is dict:
        inside = live if isinstance(live, dict) else {}
        return {name: _given(f"{key}.{name}", item, inside.get(name)) for name, item in stored.items()}
    if type(stored) in (list, tuple):
        items = live if isinstance(live, list | tuple) and len(live) == len(stored) else [None] * len(stored)
        return type(stored)(_given(f"{key}[{i}]", one, two) for i, (one, two) in enumerate(zip(stored, items, strict=True)))
    return stored


def _is_taken(stored: Any) -> bool:
    return isinstance(stored, dict) and isinstance(stored.get(_GENERATOR), torch.Tensor) and len(stored) == 2


def _refuse_other_devices(key: str, stored: Any, live: Any) -> None:
    if _is_taken(stored):
        if isinstance(live, torch.Generator):
            _refuse_other_device(key, live, stored)
    elif type(stored) is dict and isinstance(live, dict):
        for name, item in stored.items():
            _refuse_other_devices(f"{key}.{name}", item, live.get(name))


def _refuse_other_device(key: str, generator: torch.Generator, stored: Any) -> None:
    if stored[_DEVICE] != generator.device.type:
        raise StateMismatch(
            f"{key}: the saved generator was on {stored[_DEVICE]}, this one is on {generator.device.type}, and their states "
            "are of different kinds",
            hint="make the generator on the device that it was saved from, or exclude this name with exclude=",
        )


def _put(key: str, generator: torch.Generator, stored: Any) -> None:
    try:
        generator.set_state(stored[_GENERATOR])
    except (RuntimeError, TypeError) as error:
        raise StateMismatch(
            f"{key}: this torch.Generator does not take the saved state: {error}",
            hint="exclude this name with exclude=, which keeps the live generator",
        ) from error
