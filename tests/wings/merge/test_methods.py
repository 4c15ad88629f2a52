"""What the methods compute is what mergekit computes, to one unit in the last place of F32, whatever is computed at once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from holdfast_formats.mapping.listing import ForeignTensor
from holdfast_formats.region import Box, flat_boxes, whole
from holdfast_formats.tensors import TensorSpec
from holdfast_service.wings.merge.merged_tensor import MergedTensor
from holdfast_service.wings.merge.methods import METHODS, MergedName, Values
from holdfast_service.wings.merge.scanning import Terms
from tests.wings.merge.cases import CASES, SEED, SHAPE, TENSOR, Case, inputs

REFERENCE = Path(__file__).with_name("reference.npz")  # make_reference.py makes it


def terms_of(case: Case) -> Terms:
    method = METHODS[case.method]
    shared: Values = {one.name: case.shared.get(one.name, one.default) for one in method.parameters if not one.of_model}
    models = [
        {one.name: given.get(one.name, one.default) for one in method.parameters if one.of_model} for given in case.models
    ]
    return method.terms(MergedName(TENSOR, SEED, "mergekit"), shared, models)


def computed(terms: Terms, arrays: list[NDArray[Any]], chunk: int = 0, boxes: list[Box] | None = None) -> NDArray[Any]:
    spec = TensorSpec("model", TENSOR, "F32", arrays[0].shape)
    held = {f"model.{i}": array for i, array in enumerate(arrays)}
    tensors = tuple(ForeignTensor(TensorSpec("model", name, "F32", array.shape), ()) for name, array in held.items())
    tensor = MergedTensor(spec, tensors, terms, chunk=chunk)

    def fetch(stored: ForeignTensor, wanted: Box, into: NDArray[Any] | None = None) -> NDArray[Any]:
        made = np.empty(wanted.shape, np.float32) if into is None else into
        made[...] = held[stored.spec.name][wanted.slices]
        return made

    parts = [tensor.decode(box, fetch).reshape(-1) for box in boxes or [whole(spec.shape)]]
    return np.concatenate(parts).reshape(spec.shape)


def distance(found: NDArray[np.float32], wanted: NDArray[np.float32], case: Case) -> float:
    """The largest distance, in units in the last place of the largest of what is added up, and of the result."""
    given = inputs(case)
    pairs = zip(given, case.models, strict=False) if case.has_base else ()
    scaled = [(one - given[-1]) / model.get("density", 1) for one, model in pairs]
    largest = np.max([np.abs(one) for one in (*given, *scaled, wanted)], axis=0)
    return float(np.max(np.abs(found - wanted) / np.spacing(largest)))


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_mergekit(case: Case) -> None:
    """Bit by bit, if sums of whole tensors are rounded once. Torch sums them in F32 in an order that depends on the
    processor and the number of threads; the factors that follow from such sums differ in the last place, and what they
    scale with them. DELLA may divide that by a small sum of weights. Methods of angles are compared with a mergekit that
    computes in float64, too.
    """
    with np.load(REFERENCE) as reference:
        wanted, exact = reference[case.name], reference.get(f"{case.name} exact")
    found = computed(terms_of(case), inputs(case))
    if case.method == "slerp":
        assert distance(found, wanted, case) <= 1
    elif case.exact == "all":
        assert exact is not None and distance(found, exact, case) <= 3
        assert distance(found, wanted, case) <= 5
    elif case.exact:
        assert exact is not None and found.tobytes() == exact.tobytes()
        assert distance(found, wanted, case) <= {"della": 4, "della_linear": 2}.get(case.method, 1)
    else:
        assert found.tobytes() == wanted.tobytes()


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
@pytest.mark.parametrize("chunk", [11, 64])
def test_chunks_change_no_bit(case: Case, chunk: int) -> None:
    """Nor do boxes that begin anywhere."""
    wanted = computed(terms_of(case), inputs(case))
    elements = SHAPE[0] * SHAPE[1]
    boxes = [box for at in range(0, elements, 113) for box in flat_boxes(at, min(at + 113, elements), SHAPE)]
    assert computed(terms_of(case), inputs(case), chunk).tobytes() == wanted.tobytes()
    assert computed(terms_of(case), inputs(case), chunk, boxes).tobytes() == wanted.tobytes()


@pytest.mark.parametrize("shape", [(700,), (5, 7, 20), (3, 4, 5, 6)])
@pytest.mark.parametrize("method", ["della", "della_linear"])
def test_ranks_of_any_shape(shape: tuple[int, ...], method: str) -> None:
    """Of vectors and of tensors with more than two dimensions: whatever is computed at once."""
    chance = np.random.default_rng(6)
    arrays = [chance.standard_normal(shape, np.float32) for _ in range(3)]
    terms = terms_of(Case(method, ({"weight": 1.0, "density": 0.5}, {"weight": 0.4, "density": 0.6})))
    wanted = computed(terms, arrays)
    boxes = [box for at in range(0, wanted.size, 29) for box in flat_boxes(at, min(at + 29, wanted.size), shape)]
    assert computed(terms, arrays, 13, boxes).tobytes() == wanted.tobytes()
