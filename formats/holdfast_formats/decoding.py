"""msgspec's types, worked out where a module is imported: what decodes into one is made here, and kept.

msgspec works a Struct out at its first use. A second thread that uses it meanwhile is given what is half worked out, and the
process dies of it (seen with msgspec 0.22 in a daemon that checked two checkpoints just after its start). What is worked out
while a module is imported is worked out by one thread.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

import msgspec

_Made = TypeVar("_Made")


def decoder(of: type[_Made]) -> Callable[[bytes | memoryview], _Made]:
    """What makes one of JSON; it raises `msgspec.DecodeError`. To be called while a module is imported."""
    return msgspec.json.Decoder(of).decode


def converter(of: type[_Made]) -> Callable[[Any], _Made]:
    """What makes one of plain values; it raises `msgspec.ValidationError`. To be called while a module is imported."""
    decoder(of)  # works it out
    return partial(msgspec.convert, type=of)
