"""Random states of a process, as Trainer and Accelerate pickle them, in the form of `holdfast.state.rng`.

Python's is a tuple, numpy's a tuple with an array, torch's are byte tensors. Each stream becomes a tensor
`ranks/RANK/rng/STREAM` of group `extra`; numbers beside the words are in the value `rng`.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any, NamedTuple

import numpy as np

from holdfast_formats import dtypes
from holdfast_formats.errors import CheckpointError
from holdfast_formats.files import Files
from holdfast_formats.mapping.listing import ForeignTensor, TensorKey
from holdfast_service.wings.convert.foreign import json_values, torch_values
from holdfast_service.wings.convert.foreign.computed import whole_numbers
from holdfast_service.wings.convert.foreign.pickles import AnyArray, LatinArray, PickledArray

GROUP, KEY = "extra", "rng"
WORDS = 624  # of a Mersenne twister
_HINT = "save again with the trainer's own save"


class SavedStreams(NamedTuple):
    """The states of one process, as they are in its file. `cuda` has one for each device."""

    python: Any
    numpy: Any
    torch: Any
    cuda: Any = ()


class StreamsOfRank(NamedTuple):
    """The tensors of one rank, and its value `rng`."""

    tensors: tuple[ForeignTensor, ...]
    value: dict[str, Any]


def read(files: Files, saved: SavedStreams, rank: int, file: str) -> StreamsOfRank:
    """The streams of a rank. `StateMismatch` for states that are not those of Python, numpy and torch."""
    prefix = f"ranks/{rank:05d}/{KEY}/"
    tensors: list[ForeignTensor] = []
    version, state, gauss = _parts(saved.python, 3, "Python", file)
    plain = isinstance(state, list | tuple) and len(state) == WORDS + 1 and all(type(word) is int for word in state)
    if version != 3 or not plain or not all(0 <= word < 2**32 for word in state) or type(gauss) not in (float, type(None)):
        raise _refused(file, "Python")
    tensors.append(whole_numbers(TensorKey(GROUP, f"{prefix}python"), state, "I64"))
    kind, key, position, has_gauss, cached = _parts(saved.numpy, 5, "numpy", file)
    if kind != "MT19937" or type(position) is not int or type(has_gauss) is not int or type(cached) is not float:
        raise _refused(file, "numpy")
    tensors.append(whole_numbers(TensorKey(GROUP, f"{prefix}numpy"), _numpy_words(files, key, file), "U32"))
    named = {"torch": saved.torch, **{f"cuda.{n}": one for n, one in enumerate(_devices(saved.cuda))}}
    for name, stream in named.items():
        if not isinstance(stream, PickledArray) or stream.dtype != "U8" or len(stream.shape) != 1:
            raise _refused(file, "torch")
        tensors.append(torch_values.tensor(stream, GROUP, f"{prefix}{name}"))
    numpy_value = {
        "bit_generator": kind,
        "state": {"pos": position},
        "has_gauss": has_gauss,
        "gauss": torch_values.plain(cached, file, "numpy"),
    }
    python_value = {"version": version, "gauss": torch_values.plain(gauss, file, "python")}
    value = {"python": json_values.ordered(python_value), "numpy": json_values.ordered(numpy_value)}
    return StreamsOfRank(tuple(tensors), json_values.ordered(value))


def _devices(cuda: Any) -> Sequence[Any]:
    return cuda if isinstance(cuda, list | tuple) and not isinstance(cuda, PickledArray) else (cuda,)


def _parts(state: Any, count: int, what: str, file: str) -> tuple[Any, ...]:
    if not isinstance(state, list | tuple) or len(state) != count:
        raise _refused(file, what)
    return tuple(state)


def _numpy_words(files: Files, key: Any, file: str) -> list[int]:
    if isinstance(key, list | tuple) and not isinstance(key, AnyArray):
        given = list(key)
        if len(given) != WORDS or not all(type(word) is int and 0 <= word < 2**32 for word in given):
            raise _refused(file, "numpy")
        return given
    if not isinstance(key, AnyArray) or key.shape != (WORDS,) or key.dtype not in ("U32", "U64"):
        raise _refused(file, "numpy")
    if isinstance(key, LatinArray):
        data = files.read(key.file, key.offset, key.length).decode(errors="strict").encode("latin1")
    else:
        data = files.read(key.file, key.offset, prod(key.shape) * dtypes.bits(key.dtype) // 8)
    found = np.frombuffer(data, dtypes.to_numpy(key.dtype))
    if found.size != WORDS or int(found.max()) >= 2**32:
        raise _refused(file, "numpy")
    return [int(word) for word in found]


def _refused(file: str, what: str) -> CheckpointError:
    return torch_values.mismatch(file, what, f"has random states of {what} in a form that {what} does not write", _HINT)
