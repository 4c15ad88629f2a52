"""Makes msgspec decoders at import, because building them in two threads at once crashes the process.

msgspec builds its information on a Struct at the first use. A second thread that uses the Struct meanwhile gets a half-built
one, and the process crashes (seen with msgspec 0.22 in a daemon that checked two checkpoints just after its start). During
an import, only one thread builds it.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

import msgspec

_Made = TypeVar("_Made")


def decoder(of: type[_Made]) -> Callable[[bytes | memoryview], _Made]:
    """A decoder from JSON; it raises `msgspec.DecodeError`. Call this while a module is imported."""
    return msgspec.json.Decoder(of).decode


def converter(of: type[_Made]) -> Callable[[Any], _Made]:
    """A converter from plain values; it raises `msgspec.ValidationError`. Call this while a module is imported."""
    decoder(of)  # builds it now
    return partial(msgspec.convert, type=of)
