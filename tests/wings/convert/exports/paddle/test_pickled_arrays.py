"""Dicts of arrays are unpickled by numpy as they were put; tests of FlexCheckpoint and sharding_io have whole files."""

from __future__ import annotations

import pickle

import numpy as np
import pytest

from holdfast_formats.errors import StateMismatch
from holdfast_formats.tensors import TensorSpec
from holdfast_service.wings.convert.exports.paddle import pickled_arrays
from holdfast_service.wings.convert.exports.paddle.pickled_arrays import PickledArrays
from holdfast_service.wings.convert.exports.safetensors_files import KnownTensor


def test_arrays_pairs_values_and_inner_dicts() -> None:
    array = np.arange(6, dtype=np.float32).reshape(2, 3)
    held = KnownTensor(TensorSpec("g", "x", "F32", (2, 3)), array.tobytes())
    bits = KnownTensor(TensorSpec("g", "y", "BF16", (1,)), b"\x80\x3f")
    pickled = PickledArrays()
    pickled.put("a", held)
    pickled.put("b", bits, "b's name")
    pickled.begin_inner("inner")
    pickled.put("a", held, "again")
    pickled.end_inner()
    pickled.put_value("names", {"a": ["x", 1]})
    assert not pickled.has_tensors
    made = pickled.ended().made("f")
    assert made.bytes == pickled.bytes and not made.tensors
    found = pickle.loads(b"".join(literal.data for literal in made.literals))
    assert list(found) == ["a", "b", "inner", "names"] and found["names"] == {"a": ["x", 1]}
    assert found["a"].tolist() == array.tolist()
    name, stored = found["b"]
    assert (name, stored.dtype, stored.tolist()) == ("b's name", np.uint16, [0x3F80])
    assert found["inner"]["a"][0] == "again" and found["inner"]["a"][1].tolist() == array.tolist()


def test_a_dtype_that_paddle_lacks() -> None:
    with pytest.raises(StateMismatch, match="F8_E4M3"):
        pickled_arrays.around("x", TensorSpec("g", "x", "F8_E4M3", (2,)))
