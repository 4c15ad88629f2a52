"""How Paddle's attributes say that a parameter is cut."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from holdfast.integrations.paddle.fleet.places import ParameterPlace, TensorCut
from holdfast.integrations.paddle.fleet.tensor_parallel import TensorParallel
from holdfast_formats.errors import InvalidRequest


def parameter(*shape: int, **attributes: Any) -> SimpleNamespace:
    return SimpleNamespace(shape=shape, **attributes)


class Layer:
    """As fleet's: its parameters, and the group that has cut them."""

    def __init__(self, *parameters: SimpleNamespace, ranks: int = 2) -> None:
        self._parameters = parameters
        self.model_parallel_group = SimpleNamespace(rank=1, nranks=ranks)

    def sublayers(self, include_self: bool) -> list[Layer]:
        return [self]

    def parameters(self, include_sublayers: bool) -> tuple[SimpleNamespace, ...]:
        return self._parameters


def test_the_axis_and_the_group_of_its_layer_place_a_parameter() -> None:
    cut, whole = parameter(6, 5, is_distributed=True, split_axis=-1), parameter(6, is_distributed=False)
    places = TensorParallel(Layer(cut, whole))
    assert places.place("up.weight", cut) == ParameterPlace("up.weight", (6, 5), TensorCut(1, 1, 2))
    assert places.place("up.weight", cut).shape == (6, 10)
    assert places.place("norm.weight", whole) == ParameterPlace("norm.weight", (6,))


def test_a_group_of_one_rank_cuts_nothing() -> None:
    one = parameter(6, 5, is_distributed=True, split_axis=0)
    assert TensorParallel(Layer(one, ranks=1)).place("w", one).cut is None


@pytest.mark.parametrize("axis", [None, 2, -3])
def test_a_part_whose_dimension_is_not_known_is_refused_by_name(axis: int | None) -> None:
    one = parameter(6, 5, is_distributed=True, split_axis=axis)
    with pytest.raises(InvalidRequest, match=r"experts\.w is a part of a larger parameter") as refused:
        TensorParallel(Layer(one)).place("experts.w", one)
    assert refused.value.members["tensor"] == "experts.w"
