"""Two checkpoints side by side: states by digest, and distances that equal numpy's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast_formats import dtypes
from holdfast_formats.errors import NoSuchResource
from holdfast_formats.rest import comparing
from holdfast_formats.rest.comparing import Distance
from holdfast_formats.rest.measurements import Difference, DifferenceState
from tests.checkpoints import Built, build, varied_arrays

DTYPES = ["F32", "F64", "F16", "BF16", "F8_E4M3", "I32", "U8", "I64", "BOOL"]


def octets(array: Any) -> Any:
    return np.frombuffer(array.tobytes(), np.uint8)


def other(directory: Path, **changes: Any) -> Built:
    """The usual checkpoint with some tensors of the model replaced; None takes one away."""
    arrays = varied_arrays()
    arrays["model"] |= changes.pop("model", {})
    arrays["model"] = {name: array for name, array in arrays["model"].items() if array is not None}
    return build(directory, arrays, **changes)


@given(data=st.data(), dtype=st.sampled_from(DTYPES), count=st.integers(0, 300))
def test_distances_equal_numpys(data: st.DataObject, dtype: str, count: int) -> None:
    """Norms, the largest change and the number of differing elements, however the bytes are cut into blocks."""
    kind = dtypes.to_numpy(dtype)
    seed = data.draw(st.integers(0, 2**32 - 1))
    rng = np.random.default_rng(seed)
    a = rng.integers(0, 100, count).astype(np.float64).astype(kind)
    b = a.copy()
    for position in data.draw(st.lists(st.integers(0, max(count - 1, 0)), max_size=5 if count else 0)):
        b[position] = rng.integers(0, 100)
    cuts = sorted(data.draw(st.lists(st.integers(0, count), max_size=4)))
    found = Distance(dtype)
    pieces_a = [octets(part) for part in np.split(a, cuts)]
    for left, right in comparing.blocks(pieces_a, [octets(b)]):
        found.add(left, right)
    wide_a, wide_b = a.astype(np.float64), b.astype(np.float64)
    assert found.elements == count
    assert found.differing == np.count_nonzero(wide_a != wide_b)
    assert found.change == pytest.approx(np.linalg.norm(wide_b - wide_a))
    assert (found.norm_a, found.norm_b) == (pytest.approx(np.linalg.norm(wide_a)), pytest.approx(np.linalg.norm(wide_b)))
    assert found.largest == (np.abs(wide_b - wide_a).max() if count else 0)


def test_values_that_are_not_finite_are_counted_apart() -> None:
    """A NaN that stayed is no difference; one that appeared is, and no norm becomes NaN by it."""
    a = np.array([1, np.nan, 2, 3], np.float32)
    b = np.array([2, np.nan, np.inf, 3], np.float32)
    found = Distance("F32")
    found.add(octets(a), octets(b))
    assert (found.differing, found.nonfinite, found.change, found.largest) == (2, 1, 1.0, 1.0)


def test_a_side_with_nan_is_not_told_as_a_distance(tmp_path: Path) -> None:
    """Its norm, the change and the relative change are null, not zero; the tensor comes first, and is counted."""
    a = build(tmp_path / "a")
    names = ["embed.weight", "layers.0.q.weight"]
    arrays = {name: array.astype(np.float32) for name, array in a.arrays["model"].items() if name in names}
    sick = {names[0]: np.full_like(arrays[names[0]], np.nan), names[1]: arrays[names[1]] + 1}
    pairs = [pair for pair in comparing.pairs(a.manifest, other(tmp_path / "b", model=sick).manifest) if pair.name in names]
    found = []
    for pair in pairs:
        distance = Distance("F32")
        distance.add(octets(arrays[pair.name]), octets(sick[pair.name]))
        found.append(comparing.difference(pair, distance))
    nan, changed = found
    elements = arrays[names[0]].size
    assert (nan.norm_b, nan.change, nan.relative) == (None, None, None)
    assert nan.norm_a == pytest.approx(np.linalg.norm(arrays[names[0]].astype(np.float64)))
    assert (nan.detail["nonfinite_a"], nan.detail["nonfinite_b"], nan.detail["nonfinite"]) == (0, elements, elements)
    assert "largest" not in nan.detail and changed.relative is not None
    assert sorted(found, key=_place)[0] is nan
    total = comparing.summarise(found)
    assert (total.nonfinite, total.relative) == (1, pytest.approx(changed.relative))
    back = Distance("F32")
    back.add(octets(sick[names[0]]), octets(arrays[names[0]]))
    healed = comparing.difference(pairs[0], back)
    assert (healed.norm_a, healed.change, healed.relative) == (None, None, None) and healed.norm_b == pytest.approx(
        nan.norm_a
    )


def _place(one: Difference) -> tuple[int, int, float]:
    return comparing.largest_first(one, one.relative, comparing.has_nonfinite(one))


def test_what_changed_most_comes_first_and_random_generators_last() -> None:
    """Tensors of both by their change, then equal, reshaped and missing ones; the streams of processes come last."""
    told: list[tuple[str, DifferenceState, float | None]] = [
        ("extra", "changed", 2.0),
        ("model", "missing-in-a", None),
        ("model", "reshaped", None),
        ("model", "equal", 0.0),
        ("optim", "changed", 0.1),
        ("model", "changed", 0.5),
    ]
    listed = [
        Difference(group=group, name="w", state=state, dtype="F32", shape=[1], bytes=4, relative=relative)
        for group, state, relative in told
    ]
    assert sorted(listed, key=_place) == listed[::-1]


def test_complex_and_sub_byte_types_are_compared() -> None:
    """A complex number counts as its two parts; below one byte only the bits are told apart."""
    found = Distance("C64")
    found.add(octets(np.array([3 + 4j], np.complex64)), octets(np.array([0j], np.complex64)))
    assert (found.elements, found.differing, found.norm_a, found.change) == (1, 1, 5.0, 5.0)
    bits = Distance("F4")
    bits.add(octets(np.array([1, 2, 3], np.uint8)), octets(np.array([1, 2, 4], np.uint8)))
    assert (bits.differing, bits.change) == (1, 0.0)


class TestManifests:
    """What is known without a byte of a tensor."""

    def test_states(self, tmp_path: Path) -> None:
        """Equal, changed, missing on either side, of another shape, of another dtype."""
        a = build(tmp_path / "a")
        weight = a.arrays["model"]["layers.0.q.weight"]
        b = other(
            tmp_path / "b",
            model={
                "layers.0.q.weight": weight + 1,
                "layers.0.scale": np.zeros((1,), np.float32),
                "layers.0.fp8": a.arrays["model"]["layers.0.fp8"].astype(np.float16),
                "layers.0.none": None,
                "new": weight,
            },
        )
        pairs = comparing.pairs(a.manifest, b.manifest, "model")
        assert {pair.name: pair.state for pair in pairs} == {
            "embed.weight": "equal",
            "layers.0.fp8": "retyped",
            "layers.0.none": "missing-in-b",
            "layers.0.q.weight": "changed",
            "layers.0.scale": "reshaped",
            "new": "missing-in-a",
        }
        found = {pair.name: comparing.difference(pair) for pair in pairs}
        assert found["layers.0.scale"].detail == {"dtype_a": "F32", "shape_a": []}
        assert (found["embed.weight"].change, found["layers.0.q.weight"].change) == (0.0, None)
        total = comparing.summarise(found.values())
        assert total.tensors == {
            "equal": 1,
            "retyped": 1,
            "missing-in-a": 1,
            "missing-in-b": 1,
            "changed": 1,
            "reshaped": 1,
        }
        assert total.relative is None

    def test_other_cuts_leave_it_open(self, tmp_path: Path) -> None:
        """Digests of other extents say nothing; the bytes do."""
        a, b = build(tmp_path / "a"), build(tmp_path / "b", extent_bytes=128)
        pair = next(p for p in comparing.pairs(a.manifest, b.manifest) if p.name == "layers.0.q.weight")
        assert pair.state == "unknown"
        distance = Distance("F32")
        raw = octets(a.arrays["model"]["layers.0.q.weight"])
        distance.add(raw, raw)
        made = comparing.difference(pair, distance)
        assert (made.state, made.change, made.relative) == ("equal", 0.0, 0.0)
        assert comparing.summarise([made]).relative == 0.0

    def test_relative_change(self, tmp_path: Path) -> None:
        """Over the norm of a; without one there is none to be relative to."""
        pair = comparing.pairs(build(tmp_path / "a").manifest, other(tmp_path / "b").manifest, "optim")[0]
        for before, after, relative in (([3.0, 4.0], [3.0, 9.0], 1.0), ([0.0, 0.0], [0.0, 1.0], None)):
            distance = Distance("F64")
            distance.add(octets(np.array(before)), octets(np.array(after)))
            assert comparing.difference(pair, distance).relative == relative

    def test_unknown_group(self, tmp_path: Path) -> None:
        """A group that neither has is named, with those there are."""
        made = build(tmp_path / "a").manifest
        with pytest.raises(NoSuchResource, match="ema"):
            comparing.pairs(made, made, "ema")
