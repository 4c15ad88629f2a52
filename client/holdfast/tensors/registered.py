"""Classes whose objects may be anywhere in a state, each with a function that takes one apart and one that makes one."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple

from holdfast_formats.errors import InvalidRequest, StateMismatch


class Registered(NamedTuple):
    """A class under its name, `module:Class`. What `take` returns is stored, and `make` gets it back."""

    name: str
    take: Callable[[Any], Any]
    make: Callable[[Any], Any]


class StoredObject(NamedTuple):
    """What is to become an object of the class of this name, once its tensors are filled."""

    name: str
    value: Any


_by_class: dict[type, Registered] = {}


def register_class(kind: type, take: Callable[[Any], Any], make: Callable[[Any], Any]) -> None:
    """Let states contain objects of a class that keeps tensors or plain values, such as GaLore's projectors in the state of
    an optimizer. Call it on every rank before the first `save()` or `restore()`.

    Only objects of exactly this class count. Tensors come back in row-major order. A checkpoint names the class, and a
    restore calls `make` of the class that the program has registered under this name: nothing is imported or executed
    because a checkpoint says so.

    Args:
        kind: The class.
        take: `take(object)` returns what is stored: tensors, plain values, and nested dicts and lists of them.
        make: `make(stored)` returns a new object.

    Raises:
        InvalidRequest: If `kind` is no class, or `take` or `make` no function.

    Example:
        >>> holdfast.register_class(GaLoreProjector, vars, lambda kept: restored_projector(**kept))
    """
    if not isinstance(kind, type):
        raise InvalidRequest(
            f"register_class() takes a class, not a {type(kind).__name__}",
            hint="pass the class of the object: holdfast.register_class(type(value), take, make)",
        )
    for name, function in (("take", take), ("make", make)):
        if not callable(function):
            raise InvalidRequest(
                f"{name} of register_class() must be a function, not a {type(function).__name__}",
                hint="take returns plain values of an object, and make an object of these",
            )
    _by_class[kind] = Registered(f"{kind.__module__}:{kind.__qualname__}", take, make)


def of_class(kind: type) -> Registered | None:
    """What is registered for a class."""
    return _by_class.get(kind)


def check_known(name: str) -> Registered:
    """What is registered under this name; `StateMismatch` if there is nothing."""
    one = next((one for one in _by_class.values() if one.name == name), None)
    if one is None:
        kind = name.rpartition(":")[2]
        raise StateMismatch(
            f"an object of the class {name} was stored, which is not registered",
            hint=f"call holdfast.register_class({kind}, take, make) before restore()",
        )
    return one


def resolved(value: Any) -> Any:
    """The value with an object in the place of each `StoredObject`; containers stay the same ones."""
    if isinstance(value, StoredObject):
        return made(value.name, resolved(value.value))
    if isinstance(value, dict):
        for key, item in value.items():
            value[key] = resolved(item)
    elif isinstance(value, list | deque):
        for position, item in enumerate(value):
            value[position] = resolved(item)
    elif type(value) is tuple:
        return tuple(map(resolved, value))
    return value


def made(name: str, stored: Any) -> Any:
    """The object of the class that is registered under this name; `StateMismatch` if there is none, or if it refuses."""
    one = check_known(name)
    try:
        return one.make(stored)
    except (TypeError, ValueError, LookupError, AttributeError, RuntimeError) as error:
        raise StateMismatch(
            f"the function registered for {name} refuses what was stored: {error}",
            hint="let make of holdfast.register_class() take what take returned when it was saved",
        ) from error
