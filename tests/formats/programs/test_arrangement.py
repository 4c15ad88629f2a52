"""Arrangements are exact, whatever is done to them, one operation after the other, and their pieces are counted."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast_formats.errors import StateMismatch
from holdfast_formats.mapping.box_moves import MappedTensor, check
from holdfast_formats.programs import arrangement
from holdfast_formats.programs.arrangement import Arrangement
from holdfast_formats.tensors import TensorSpec
from tests.formats.programs.arrays import key


def _values(arranged: Arrangement, source: Any) -> Any:
    """The elements that the moves bring, one by one."""
    spec = TensorSpec("model", "made", "F32", arranged.shape)
    check(MappedTensor(spec, arranged.moves, arranged.padded), {key("x"): TensorSpec("model", "x", "F32", source.shape)})
    made = np.zeros(arranged.shape, source.dtype)
    for move in arranged.moves:
        for index in np.ndindex(move.target.shape):
            steps = move.target_step or (1,) * len(index)
            place = tuple(o + i * by for o, i, by in zip(move.target.offset, index, steps, strict=True))
            taken = list(move.box.offset)
            for d, axis in enumerate(move.axes):
                if axis is not None:
                    taken[axis] += index[d] * (move.step[axis] if move.step else 1)
            made[place] = source[tuple(taken)]
    return made


@given(data=st.data())
def test_any_operations_are_numpys(data: st.DataObject) -> None:
    """Picking with steps out of what was interleaved, joined and turned: the same as numpy's slices."""
    source = np.arange(48, dtype="<f4").reshape(12, 4)
    made, wanted = arrangement.of(key("x"), source.shape), source
    for _ in range(data.draw(st.integers(1, 4))):
        kind = data.draw(st.sampled_from(["pick", "turn", "interleave", "lift", "halve"]))
        if kind == "turn":
            made, wanted = arrangement.transposed(made, range(wanted.ndim)[::-1]), wanted.T
        elif kind == "lift" and wanted.ndim < 4:
            made, wanted = arrangement.lifted(made, 0), wanted[None]
        elif kind == "pick":
            axis = data.draw(st.integers(0, wanted.ndim - 1))
            step = data.draw(st.integers(1, 3))
            start = data.draw(st.integers(0, wanted.shape[axis] - 1))
            count = data.draw(st.integers(1, (wanted.shape[axis] - 1 - start) // step + 1))
            made = arrangement.picked(made, axis, start, count, step)
            wanted = wanted.take(range(start, start + count * step, step), axis)
        else:
            axis = data.draw(st.integers(0, wanted.ndim - 1))
            half = wanted.shape[axis] // 2
            if wanted.shape[axis] % 2 or not half:
                continue
            halves = [arrangement.picked(made, axis, at, half) for at in (0, half)]
            parts = [wanted.take(range(at, at + half), axis) for at in (0, half)]
            if kind == "halve":
                made, wanted = arrangement.joined(halves[::-1], axis, "x"), np.concatenate(parts[::-1], axis)
            else:
                made = arrangement.interleaved(halves, axis, "x")
                wanted = np.stack(parts, axis + 1).reshape(wanted.shape)
    np.testing.assert_array_equal(_values(made, source), wanted)


def test_too_many_pieces_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """A tensor of more pieces than memory should hold is named."""
    monkeypatch.setattr(arrangement, "MOVES_MAX", 3)
    one = arrangement.of(key("x"), (4,))
    with pytest.raises(StateMismatch, match="would be made of 4 pieces"):
        arrangement.joined([one, one, one, one], 0, "y")
