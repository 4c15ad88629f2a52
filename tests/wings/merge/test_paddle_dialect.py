"""`dialect: paddle` computes what PaddleFormers 1.2.0 does: its own merges of three small models are in `paddle/`.

They were written by its `MergeModel` on a CPU: `linear` with weights 0.3 and 0.7, `ties` with 1 and 2 and reserve_p 0.7.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray
from safetensors.numpy import load_file

from holdfast_service.wings.merge.norms import PairwiseSum
from holdfast_service.wings.merge.recipe import read_recipe
from tests.wings.merge.test_methods import computed

THERE = Path(__file__).with_name("paddle")
RECIPES = {
    "linear": """
merge_method: linear
dialect: paddle
models:
  - {model: a, parameters: {weight: 0.3}}
  - {model: b, parameters: {weight: 0.7}}
""",
    "ties": """
merge_method: ties
dialect: paddle
base_model: base
models:
  - {model: a, parameters: {weight: 1}}
  - {model: b, parameters: {weight: 2}}
parameters: {density: 0.7}
""",
}


@pytest.mark.parametrize("method", RECIPES)
@pytest.mark.parametrize("chunk", [0, 5, 64])
def test_its_own_merges(method: str, chunk: int) -> None:
    """Bit by bit."""
    recipe = read_recipe(RECIPES[method])
    models = [load_file(THERE / f"{name}.safetensors") for name in map(str, recipe.inputs)]
    for name, wanted in load_file(THERE / f"out_{method}.safetensors").items():
        found = computed(recipe.terms(name, 0), [model[name] for model in models], chunk)
        assert found.tobytes() == wanted.tobytes(), name


def test_slerp() -> None:
    """By its formula, in F32 as it computes it."""
    one, other = (load_file(THERE / f"{name}.safetensors") for name in ("a", "b"))
    text = "{merge_method: slerp, dialect: paddle, base_model: a, models: [{model: b}], parameters: {t: 0.3}}"
    for name in one:
        found = computed(read_recipe(text).terms(name, 0), [other[name], one[name]])
        assert np.abs(found - its_slerp(one[name], other[name], 0.3)).max() <= 3e-8


def its_slerp(one: NDArray[np.float32], other: NDArray[np.float32], t: float) -> NDArray[np.float32]:
    dot = np.sum((one / np.linalg.norm(one)) * (other / np.linalg.norm(other)))
    angle = np.arccos(dot)
    made: NDArray[np.float32] = np.sin(angle - angle * t) / np.sin(angle) * one + np.sin(angle * t) / np.sin(angle) * other
    return made


@pytest.mark.parametrize("elements", [1, 127, 129, 5000, 2**17 + 1, 300_001, 1_000_003])
def test_sums_are_numpys(elements: int) -> None:
    """Bit by bit, whatever the stretches in which a tensor comes."""
    values = np.random.default_rng(elements).standard_normal(elements, np.float32)
    found = PairwiseSum(elements)
    for at in range(0, elements, 70_001):
        found.add(values[at : at + 70_001])
    assert found.value == np.sum(values)
