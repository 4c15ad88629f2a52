"""Quantised tensors are decoded by the package, whichever box is asked for; `tests/integrations/gguf` has the real one."""

from __future__ import annotations

import types
from typing import Any

import numpy as np
import pytest

from holdfast_formats.errors import StateMismatch
from holdfast_formats.layout.parts import strides
from holdfast_formats.mapping.listing import ForeignPiece, ForeignTensor
from holdfast_formats.region import Box, whole
from holdfast_formats.tensors import TensorSpec
from holdfast_service.wings.convert.foreign.gguf import quantised
from holdfast_service.wings.convert.foreign.gguf.quantised import Dequantised, QuantisedBlock

VALUES, BYTES = 4, 3  # of a made-up type, whose block says its first value, step and number
RNG = np.random.default_rng(0)


def dequantize(rows: np.ndarray[Any, Any], kind: object) -> np.ndarray[Any, Any]:
    blocks = rows.reshape(len(rows), -1, BYTES).astype(np.float32)
    values = blocks[..., :1] + blocks[..., 1:2] * np.arange(VALUES, dtype=np.float32) - blocks[..., 2:]
    return values.reshape(len(rows), -1)


PACKAGE = types.SimpleNamespace(GGMLQuantizationType=lambda kind: kind, dequantize=dequantize)


@pytest.mark.parametrize(
    "box", [Box((0, 0, 0), (2, 3, 8)), Box((1, 1, 3), (1, 2, 2)), Box((0, 2, 5), (2, 1, 3)), Box((0, 0, 4), (1, 1, 1))]
)
def test_any_box(box: Box, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same values as of the whole tensor; only the blocks are read that hold them."""
    monkeypatch.setattr(quantised, "library", lambda: PACKAGE)
    codes = RNG.integers(0, 99, (2, 3, 6)).astype(np.uint8)
    piece = ForeignPiece("f", 0, whole(codes.shape), strides(codes.shape))
    stored = ForeignTensor(TensorSpec("model", "w", "U8", codes.shape), (piece,))
    decoder = Dequantised(stored, 2, QuantisedBlock("made-up", VALUES, BYTES))
    asked: list[Box] = []

    def fetch(tensor: ForeignTensor, wanted: Box, into: Any = None) -> np.ndarray[Any, Any]:
        asked.append(wanted)
        return np.asarray(codes[tuple(slice(at, at + n) for at, n in zip(*wanted, strict=True))])

    found = decoder.decode(box, fetch)
    everything = dequantize(codes.reshape(6, 6), 2).reshape(2, 3, 8)
    wanted = everything[tuple(slice(at, at + n) for at, n in zip(*box, strict=True))]
    assert found.dtype == np.float32 and np.array_equal(found, wanted)
    assert asked[0].shape[-1] == BYTES * (1 if box.offset[2] % VALUES + box.shape[2] <= VALUES else 2)
    assert decoder.inputs == (stored,) and decoder.terms[0] == 2


def test_types_that_the_package_does_not_decode(monkeypatch: pytest.MonkeyPatch) -> None:
    """And types that it does not know, and no package at all: refused by tensor, with the next step."""

    def refuse(rows: object, kind: object) -> None:
        raise NotImplementedError

    package = types.SimpleNamespace(GGMLQuantizationType=int, GGML_QUANT_SIZES={7: (32, 18), 2: (32, 18)}, dequantize=refuse)
    monkeypatch.setattr(quantised, "library", lambda: package)
    for kind in (7, 99):
        with pytest.raises(StateMismatch, match=f"ggml's type {kind}"):
            quantised.block(kind, "m.gguf", "w")
    monkeypatch.setattr(package, "dequantize", dequantize, raising=True)
    package.GGMLQuantizationType = lambda kind: types.SimpleNamespace(name="Q4", __hash__=lambda: kind)
    monkeypatch.setattr(quantised, "library", lambda: None)
    with pytest.raises(StateMismatch, match="is not installed") as refused:
        quantised.block(2, "m.gguf", "w")
    assert "pip install gguf" in (refused.value.hint or "")
