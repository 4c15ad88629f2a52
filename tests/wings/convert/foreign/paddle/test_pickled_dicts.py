"""Arrays of pickled dicts, also those whose bytes stand as text, and those that were cut."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from holdfast_formats.errors import StateMismatch
from holdfast_formats.mapping.reading import fetched
from holdfast_formats.region import Box
from holdfast_service.wings.convert.foreign.paddle.pickled_dicts import read_dict, refuse_rest
from holdfast_service.wings.convert.foreign.pickled import latin_arrays
from tests.wings.convert.foreign.directories import OnDisk


def _write(folder: Path, value: Any, protocol: int = 4) -> OnDisk:
    (folder / "f").write_bytes(pickle.dumps(value, protocol))
    return OnDisk(folder)


@pytest.mark.parametrize("protocol", [2, 3, 4])
@pytest.mark.parametrize("count", [1, 7, 2**20])
def test_boxes_of_any_protocol(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, protocol: int, count: int) -> None:
    """Every box of an array, wherever the text is cut between its characters of one and two bytes."""
    monkeypatch.setattr(latin_arrays, "COUNT_BYTES", count)
    monkeypatch.setattr(latin_arrays, "SPAN_BYTES_MAX", 8 * count)
    values = np.random.RandomState(1).standard_normal((5, 6)).astype("f4")
    turned = np.asfortranarray(values)
    files = _write(
        tmp_path, {"a": ("name", values), "t": turned, "s": np.float32([3.5]), "e": np.zeros((0, 3), "f4")}, protocol
    )
    saved = read_dict(files, "f")
    tensor = saved.tensors["a"].tensor("model", "a")
    assert (tensor.decoder is not None) == (protocol == 2)
    for box in (Box((0, 0), (5, 6)), Box((1, 2), (3, 1)), Box((4, 5), (1, 1)), Box((0, 3), (5, 2)), Box((2, 0), (0, 6))):
        np.testing.assert_array_equal(fetched(files, tensor, box), values[box.slices])
        np.testing.assert_array_equal(fetched(files, saved.tensors["t"].tensor("model", "t"), box), values[box.slices])
    assert fetched(files, saved.tensors["s"].tensor("model", "s")) == 3.5
    assert fetched(files, saved.tensors["e"].tensor("model", "e")).shape == (0, 3)


@pytest.mark.parametrize("protocol", [2, 4])
def test_arrays_that_were_cut(tmp_path: Path, protocol: int) -> None:
    """Flat slices become the whole array, which is read box by box."""
    values = np.arange(60, dtype="u2").reshape(5, 4, 3)
    flat = values.reshape(-1)
    info = {"a": {"OriginShape": (5, 4, 3), "slices": ["a@@.0", "a@@.1", "a@@.2"]}}
    held = {"a@@.0": flat[:1], "a@@.1": flat[1:37], "a@@.2": flat[37:], "UnpackBigParamInfor@@": info}
    files = _write(tmp_path, held, protocol)
    (tensor,) = [part.tensor("model", "a") for part in read_dict(files, "f").tensors.values()]
    assert tensor.spec.dtype == "BF16"
    for box in (Box((0, 0, 0), (5, 4, 3)), Box((2, 1, 1), (2, 2, 1)), Box((4, 0, 2), (1, 4, 1)), Box((0, 0, 0), (1, 1, 1))):
        np.testing.assert_array_equal(fetched(files, tensor, box).view("u2"), values[box.slices])


def test_nested_and_named(tmp_path: Path) -> None:
    """Masters are a dict inside, names are kept apart, and what is left is for the caller to refuse."""
    held = {"w": np.zeros(2, "f4"), "m": {"x": np.ones(1, "f4")}, "StructuredToParameterName@@": {"w": "w_0"}, "n": 3}
    saved = read_dict(_write(tmp_path, held), "f", ("m", "absent"))
    assert (set(saved.tensors), set(saved.inner["m"]), saved.static, saved.rest) == ({"w"}, {"x"}, {"w": "w_0"}, {"n": 3})
    with pytest.raises(StateMismatch, match="f: 'n' is neither a tensor nor a known kind of value"):
        refuse_rest("f", saved.rest)


def test_what_does_not_fit_is_refused(tmp_path: Path) -> None:
    """No dict, keys that are no names, cuts that are not described or lack a slice, texts of another length."""
    a = np.zeros(4, "f4")
    for value, message in (
        ([a], "f holds a list, not a state dict"),
        ({1: a}, "has the key 1, which is not a name"),
        ({"m": {"x": 1}}, "'x' is neither a tensor"),
        ({"UnpackBigParamInfor@@": [1]}, "'UnpackBigParamInfor@@' is neither"),
        ({"UnpackBigParamInfor@@": {"a": 3}}, "does not describe how 'a' was split"),
        ({"UnpackBigParamInfor@@": {"a": {"OriginShape": [4], "slices": ["b"]}}}, "slice 'b' of 'a' is missing"),
        ({"b": a, "UnpackBigParamInfor@@": {"a": {"OriginShape": [5], "slices": ["b"]}}}, "do not add up to the 5 elements"),
    ):
        with pytest.raises(StateMismatch, match=message):
            read_dict(_write(tmp_path, value), "f", ("m",))
