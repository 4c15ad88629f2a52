"""Random states are read exactly, in the form in which Holdfast itself stores them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from holdfast.state import rng
from holdfast.tensors import json_values
from holdfast_formats.errors import StateMismatch
from holdfast_formats.mapping import reading
from holdfast_service.wings.convert.foreign.pickles import read_torch
from holdfast_service.wings.convert.foreign.trainers import random_states
from holdfast_service.wings.convert.foreign.trainers.random_states import SavedStreams
from tests.wings.convert.foreign.directories import OnDisk
from tests.wings.convert.foreign.trainers import directories


def read(place: Path, value: dict[str, Any], protocol: int = 2) -> random_states.StreamsOfRank:
    torch.save(value, place / "rng.pth", pickle_protocol=protocol)
    files = OnDisk(place)
    held = read_torch(files, "rng.pth")
    saved = SavedStreams(held.get("python"), held.get("numpy"), held.get("cpu"), held.get("cuda", ()))
    return random_states.read(files, saved, 3, "rng.pth")


@pytest.mark.parametrize("protocol", [2, 4])
@pytest.mark.parametrize("listed", [False, True], ids=["array", "list"])
def test_streams_continue_where_they_were(tmp_path: Path, protocol: int, listed: bool) -> None:
    """numpy's words as an array (bytes are text in protocol 2), or as a list, which is how an export has them."""
    with_states = directories.drawn()
    expected = rng.capture()
    if listed:
        kind, words, *rest = with_states["numpy"]
        with_states["numpy"] = (kind, [int(word) for word in words], *rest)
    found = read(
        tmp_path, with_states | {"cuda": [torch.arange(16, dtype=torch.uint8), torch.zeros(16, dtype=torch.uint8)]}, protocol
    )
    values = {
        tensor.spec.name.removeprefix("ranks/00003/rng/"): reading.fetched(OnDisk(tmp_path), tensor)
        for tensor in found.tensors
    }
    assert sorted(values) == ["cuda.0", "cuda.1", "numpy", "python", "torch"]
    assert values.pop("cuda.0").tolist() == list(range(16))
    assert values.pop("cuda.1").tolist() == [0] * 16
    for name, array in values.items():
        assert torch.equal(torch.from_numpy(np.array(array)), expected.tensors[name])
    assert json_values.loads(json.dumps(found.value), "rng") == expected.residual


def test_one_device_has_one_state(tmp_path: Path) -> None:
    """A Trainer with one process saves the state of its device alone."""
    found = read(tmp_path, directories.drawn() | {"cuda": torch.zeros(16, dtype=torch.uint8)})
    assert "ranks/00003/rng/cuda.0" in {tensor.spec.name for tensor in found.tensors}


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("python", None),
        ("python", (2, (0,) * 625, None)),
        ("python", (3, (0,) * 624, None)),
        ("python", (3, (-1,) * 625, None)),
        ("python", (3, (0,) * 625, "x")),
        ("numpy", ("PCG64", np.zeros(624, np.uint32), 0, 0, 0.0)),
        ("numpy", ("MT19937", np.zeros(623, np.uint32), 0, 0, 0.0)),
        ("numpy", ("MT19937", [0] * 623, 0, 0, 0.0)),
        ("numpy", ("MT19937", np.full(624, 2**32, np.uint64), 0, 0, 0.0)),
        ("numpy", {"bit_generator": "MT19937"}),
        ("cpu", torch.zeros(4)),
        ("cpu", 7),
        ("cuda", [torch.zeros((2, 2), dtype=torch.uint8)]),
    ],
)
def test_other_states_are_refused_by_file(tmp_path: Path, key: str, value: Any) -> None:
    with pytest.raises(StateMismatch, match=r"rng\.pth has random states of (Python|numpy|torch)") as refused:
        read(tmp_path, directories.drawn() | {key: value})
    assert "own save" in refused.value.hint


def test_nothing_is_unpickled(tmp_path: Path) -> None:
    """A call in place of a state is refused before anything of it runs."""

    class Call:
        def __reduce__(self) -> Any:
            return (Path.touch, (tmp_path / "ran",))

    torch.save({"python": Call()}, tmp_path / "rng.pth")
    with pytest.raises(StateMismatch):
        read_torch(OnDisk(tmp_path), "rng.pth")
    assert not (tmp_path / "ran").exists()
