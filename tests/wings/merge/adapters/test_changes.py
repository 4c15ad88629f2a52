"""Every box of a changed weight has the bits of the whole, and the whole is the formula's."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from holdfast_formats.mapping.box_moves import BoxMove
from holdfast_formats.mapping.listing import ForeignTensor, TensorKey
from holdfast_formats.region import Box, whole
from holdfast_formats.tensors import TensorSpec
from holdfast_service.wings.merge.adapters import changes
from holdfast_service.wings.merge.adapters.changes import Added, BiasAdded, Magnified, Product, TokenRows

CHANCE = np.random.default_rng(3)
HELD: dict[str, NDArray[np.float32]] = {}
VIEWS = {"plain": (6, 5), "turned": (5, 6), "experts": (3, 6, 5), "experts turned": (3, 5, 6), "convolution": (6, 5, 2, 2)}


def tensor(name: str, *shape: int) -> ForeignTensor:
    HELD[name] = CHANCE.standard_normal(shape, np.float32)
    return ForeignTensor(TensorSpec("model", name, "F32", shape), ())


def fetch(stored: ForeignTensor, box: Box, into: NDArray[Any] | None = None) -> NDArray[Any]:
    return HELD[stored.spec.name][box.slices]


def product(view: str) -> Product:
    experts = 3 if view.startswith("experts") else 1
    inner = (2, 2) if view == "convolution" else ()
    low, high = tensor("A", 2 * experts, 5, *inner), tensor("B", 6, 2 * experts, *(1 for _ in inner))
    return Product(low, high, 1.5, "plain" if view == "convolution" else view, experts)  # type: ignore[arg-type]


def formula(view: str) -> NDArray[np.float64]:
    low, high = HELD["A"].astype(np.float64), HELD["B"].astype(np.float64)
    if view.startswith("experts"):
        made = np.einsum("erI,ore->eoI".lower(), low.reshape(3, 2, 5), high.reshape(6, 2, 3))
        return 1.5 * (made if view == "experts" else made.transpose(0, 2, 1))
    flat = 1.5 * high.reshape(6, 2) @ low.reshape(2, -1)
    return flat.T if view == "turned" else flat.reshape(VIEWS[view])


def boxes(shape: tuple[int, ...]) -> list[Box]:
    found = [whole(shape)]
    for _ in range(12):
        start = [int(CHANCE.integers(0, n)) for n in shape]
        found.append(Box(tuple(start), tuple(int(CHANCE.integers(1, n - o + 1)) for n, o in zip(shape, start, strict=True))))
    return found


def check(made: Any, shape: tuple[int, ...], wanted: NDArray[np.float64]) -> None:
    full = made.decode(whole(shape), fetch)
    assert full.dtype == np.float32 and np.abs(full - wanted).max() <= 1e-6
    for box in boxes(shape):
        assert made.decode(box, fetch).tobytes() == full[box.slices].tobytes()


@pytest.mark.parametrize("view", VIEWS)
def test_added(view: str) -> None:
    added = Added(tensor("W", *VIEWS[view]), product(view))
    check(added, VIEWS[view], HELD["W"] + formula(view))


@pytest.mark.parametrize("view", ["plain", "turned", "convolution"])
def test_magnified(view: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of outputs have the trained lengths, in whatever stretches they are summed."""
    monkeypatch.setattr(changes, "_NORM_ELEMENTS", 12)
    magnified = Magnified(Added(tensor("W", *VIEWS[view]), product(view)), tensor("m", 6))
    summed = HELD["W"] + formula(view)
    outputs = 1 if view == "turned" else 0
    others = tuple(axis for axis in range(summed.ndim) if axis != outputs)
    lengths = np.sqrt(np.square(summed).sum(axis=others, keepdims=True))
    check(magnified, VIEWS[view], summed / lengths * HELD["m"].reshape(lengths.shape))


def test_moved() -> None:
    """A weight that is a part of the adapted tensor, perhaps turned; what of it does not go there is unchanged."""
    added = Added(
        tensor("W", 4, 8),
        product("experts"),
        BoxMove(TensorKey("model", "W"), Box((0, 2), (4, 5)), Box((1, 2, 0), (1, 4, 5)), (None, 0, 1)),
    )
    wanted = HELD["W"].astype(np.float64)
    wanted[:, 2:7] += formula("experts")[1, 2:6]
    check(added, (4, 8), wanted)
    turned = Added(
        tensor("W", 5, 4),
        product("experts"),
        BoxMove(TensorKey("model", "W"), Box((0, 0), (5, 4)), Box((2, 1, 0), (1, 4, 5)), (None, 1, 0)),
    )
    check(turned, (5, 4), HELD["W"] + formula("experts")[2, 1:5].T)


def test_biases_and_tokens() -> None:
    shifted = BiasAdded(tensor("bias", 6), tensor("b", 6), 1.5)
    check(shifted, (6,), HELD["bias"] + 1.5 * HELD["b"].astype(np.float64))
    rows = TokenRows(tensor("E", 7, 3), tensor("rows", 2, 3), (5, 1))
    wanted = HELD["E"].astype(np.float64)
    wanted[[5, 1]] = HELD["rows"]
    check(rows, (7, 3), wanted)


def test_what_fits() -> None:
    assert (
        changes.fits((2, 5), (6, 2), (6, 5), False, False) == changes.fits((2, 6), (6, 2), (6, 6), False, False) == "plain"
    )
    assert (
        changes.fits((2, 5), (6, 2), (5, 6), False, False) == changes.fits((2, 6), (6, 2), (6, 6), True, False) == "turned"
    )
    assert changes.fits((2, 6), (6, 2), (6, 6), False, True) == "turned"
    assert changes.fits((2, 5), (6, 3), (6, 5), False, False) is None
    assert changes.fits((2, 5), (6, 2), (6, 5), False, True) is None
    assert changes.fits_experts((6, 5), (6, 6), (3, 6, 5), False) == "experts"
    assert changes.fits_experts((6, 6), (6, 6), (3, 6, 6), True) == "experts turned"
    assert changes.fits_experts((6, 5), (6, 6), (4, 6, 5), False) is None
