"""Tensors are compared bit by bit; `test_streaming.py` has copies."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from holdfast_formats.mapping import equality
from holdfast_formats.mapping.listing import TensorKey
from holdfast_service.daemon.copying.copies import CopyControl, CopyStopped
from holdfast_service.storage import PosixTier
from tests.daemon.copying.test_streaming import Model

ARRAY = np.arange(6, dtype=np.float32).reshape(2, 3)


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Model:
    """Equal tensors with NaN, one that differs in its last element, another shape, and zeros; compared in small parts."""
    monkeypatch.setattr(equality, "COMPARED_BYTES", 8)
    odd = np.where(ARRAY == 3, np.nan, ARRAY).astype(np.float32)
    made = Model(tmp_path / "source")
    other = odd.copy()
    other[1, 2] += 1
    last = np.zeros(7, np.float32)
    last[6] = 1e-40
    arrays = {"a": odd, "b": odd, "other": other, "flat": odd.reshape(6), "zeros": -np.zeros(7, np.float32), "last": last}
    for name, array in arrays.items():
        made.add(name, array)
    return made


def key(name: str) -> TensorKey:
    return TensorKey("model", name)


def test_equal(model: Model) -> None:
    """Of one dtype, shape and bits."""
    source, tensors = PosixTier(model.directory), model.tensors
    assert equality.equal(source, tensors[key("a")], tensors[key("b")])
    assert not any(equality.equal(source, tensors[key("a")], tensors[key(other)]) for other in ("other", "flat"))


def test_zeros(model: Model) -> None:
    source = PosixTier(model.directory)
    assert equality.zeros(source, model.tensors[key("zeros")])
    assert not equality.zeros(source, model.tensors[key("last")])


def test_it_can_be_stopped(model: Model) -> None:
    stopped = CopyControl(ended=lambda: True)
    with pytest.raises(CopyStopped):
        equality.zeros(PosixTier(model.directory), model.tensors[key("zeros")], stopped.check)
