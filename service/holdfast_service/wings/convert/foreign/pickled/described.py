"""Names what a pickled value is, in words that its user knows."""

from __future__ import annotations

from typing import Any

from holdfast_service.wings.convert.foreign.pickled.calls import LatinBytes, NumpyDtype, UnfilledArray
from holdfast_service.wings.convert.foreign.pickled.values import (
    LatinArray,
    PickledArray,
    PickledBytes,
    PickledGlobal,
    PickledOpaque,
    PickledRecord,
)

_MADE = {  # what the functions of numpy's and torch's pickles make
    "numpy.ndarray": "numpy array",
    "numeric._frombuffer": "numpy array",
    "multiarray._reconstruct": "numpy array",
    "multiarray.scalar": "numpy scalar",
    "_rebuild_": "tensor",
}


def kind_of(value: Any) -> str:
    """What a value is, in a sentence after `a`."""
    if isinstance(value, PickledOpaque):
        kind = next((made for end, made in _MADE.items() if end in value.name and value.problem), f"{value.name} object")
        return f"{kind}, of which the pickle {value.problem}" if value.problem else kind
    if isinstance(value, PickledArray):
        return "tensor" if value.storage else "numpy array"
    if isinstance(value, LatinArray | UnfilledArray):
        return "numpy array"
    if isinstance(value, PickledBytes | LatinBytes):
        return "bytes object"
    if isinstance(value, NumpyDtype):
        return "numpy dtype"
    return f"{value.name} object" if isinstance(value, PickledGlobal | PickledRecord) else type(value).__name__
