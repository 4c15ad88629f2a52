"""Adapters merged into their bases as PEFT merges them, in its own arithmetic and in float64."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from safetensors.numpy import load_file

from tests.daemon.copies_world import copies_world
from tests.wings.merge.adapters.cases import CASES, AdapterCase
from tests.wings.merge.adapters.make_reference import merge
from tests.wings.merge.adapters.test_applying import RECIPE, ulps
from tests.wings.merge.test_merge_jobs import MergeWorld

pytestmark = pytest.mark.filterwarnings("ignore")  # PEFT warns of ties, of embeddings that it saves, and of Conv1D


@pytest.fixture
def world(tmp_path: Path) -> Iterator[MergeWorld]:
    with copies_world(tmp_path, replicas=()) as made:
        yield MergeWorld(made, tmp_path / "place")


def arrays(directory: Path) -> dict[str, NDArray[Any]]:
    return {name: array for file in sorted(directory.glob("*.safetensors")) for name, array in load_file(file).items()}


@pytest.mark.parametrize("exact", [True, False], ids=["float64", "own"])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_every_kind(world: MergeWorld, monkeypatch: pytest.MonkeyPatch, case: AdapterCase, exact: bool) -> None:
    """To a unit in the last place of the result, if PEFT computes in float64; in its own type, of the largest value."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    made = merge(case, world.place, exact)
    world.merge(RECIPE.replace("tuned", "adapter"))
    found, base, wanted = world.arrays(), arrays(made.base), arrays(made.merged)
    assert found.keys() == wanted.keys()
    for name, array in wanted.items():
        largest = max(float(np.abs(one).max()) for one in (array, base.get(name, array)))
        assert ulps(found[name], array, 0 if exact else largest) <= (1 if exact else 2), name
