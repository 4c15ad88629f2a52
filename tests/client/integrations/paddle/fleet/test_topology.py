"""The mesh of fleet's ranks, from the names and sizes of its axes."""

from __future__ import annotations

import pytest

from holdfast.integrations.paddle.fleet.topology import mesh_of
from holdfast_formats.layout import language

USUAL = ("data", "pipe", "sharding", "sep", "model")  # the last is the innermost


@pytest.mark.parametrize(
    ("sizes", "layout"),
    [
        ((1, 1, 1, 1, 1), ""),
        ((2, 1, 1, 1, 1), "dp=2"),
        ((1, 1, 1, 1, 2), "tp=2"),
        ((2, 2, 2, 1, 2), "tp=2,sharding=2,pp=2,dp=2,order=tp-sharding-pp-dp"),
        ((1, 2, 1, 2, 1), "cp=2,pp=2"),
    ],
)
def test_axes_number_the_ranks_as_in_fleet(sizes: tuple[int, ...], layout: str) -> None:
    assert mesh_of(USUAL, sizes) == language.parse(layout).mesh


def test_another_order_of_the_axes_is_another_mesh() -> None:
    mesh = mesh_of(("sharding", "pipe", "sep", "data", "model"), (2, 2, 1, 2, 1))
    assert mesh == language.parse("sharding=2,pp=2,dp=2,order=dp-pp-sharding").mesh
    assert [mesh.coordinate(rank).sharding for rank in range(8)] == [0, 0, 0, 0, 1, 1, 1, 1]


def test_expert_parallelism_divides_sharding_in_two() -> None:
    """Ranks with other experts and ranks with the same ones all train on rows of their own."""
    names = ("pipe", "moe_sharding", "dense_sharding", "data", "sep", "model")
    assert mesh_of(names, (1, 2, 2, 1, 1, 2)) == language.parse("tp=2,sharding=2,dp=2").mesh


def test_axes_that_a_mesh_has_no_place_for() -> None:
    assert mesh_of((*USUAL, "another"), (1, 1, 1, 1, 1, 1)) is not None
    assert mesh_of((*USUAL, "another"), (2, 1, 1, 1, 1, 2)) is None
    assert mesh_of((*USUAL, "context"), (1, 1, 1, 2, 1, 2)) is None  # two for one place
    assert mesh_of(USUAL, (1, 1, 1, 1, 1 << 30)) is None
