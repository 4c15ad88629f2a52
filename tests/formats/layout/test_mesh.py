"""The mesh: which rank stands where on the dense grid and on the experts'."""

from __future__ import annotations

from itertools import permutations
from math import gcd, prod

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from holdfast_formats.errors import InvalidRequest
from holdfast_formats.layout.mesh import (
    AXES,
    ORDER,
    STAGES_MAX,
    WORLD_MAX,
    Coordinate,
    Mesh,
    arrange,
    check_rank,
    told_order,
)

DENSE = ("tp", "cp", "sharding", "dp", "pp")
SIZES = st.fixed_dictionaries(
    {axis: st.sampled_from([1, 2, 3, 4]) for axis in ("tp", "cp", "sharding", "dp", "pp", "ep", "etp")}
)


@st.composite
def meshes(draw: st.DrawFn) -> Mesh:
    """Any mesh that can be arranged, in any order."""
    order = draw(st.permutations(ORDER))
    try:
        return arrange(draw(SIZES), order)
    except InvalidRequest:
        assume(False)
        raise


def groups(mesh: Mesh, axis: str) -> list[tuple[int, ...]]:
    """Every group of peers along an axis, in the order of its lowest rank."""
    return sorted({mesh.peers(rank, axis) for rank in range(mesh.world)})


@given(meshes())
def test_ranks_and_places_are_one_to_one(mesh: Mesh) -> None:
    """A rank's dense coordinate leads back to it, and no two ranks have one place on either grid."""
    places = [mesh.coordinate(rank) for rank in range(mesh.world)]
    for rank, at in enumerate(places):
        assert mesh.rank(tp=at.tp, cp=at.cp, sharding=at.sharding, dp=at.dp, pp=at.pp) == rank
    assert len({at[:5] for at in places}) == mesh.world == prod(getattr(mesh, axis) for axis in DENSE)
    assert len({(at.etp, at.ep, at.edp, at.pp) for at in places}) == mesh.world


@given(meshes())
def test_peers_partition_the_world(mesh: Mesh) -> None:
    """The groups of an axis have its size, hold every rank once, and differ along it alone, in its order."""
    for axis in Coordinate._fields:
        found = groups(mesh, axis)
        assert {len(group) for group in found} == {getattr(mesh, axis)}
        assert sorted(rank for group in found for rank in group) == list(range(mesh.world))
        for group in found:
            assert [getattr(mesh.coordinate(rank), axis) for rank in group] == list(range(len(group)))


@given(meshes())
def test_peers_are_the_axes_of_an_array_of_ranks(mesh: Mesh) -> None:
    """The order's first axis is the innermost one of the array that counts the ranks."""
    axes = [axis for axis in reversed(mesh.order) if axis != "ep"]
    array = np.arange(mesh.world).reshape([getattr(mesh, axis) for axis in axes])
    for axis in DENSE:
        moved = np.moveaxis(array, axes.index(axis), -1).reshape(-1, getattr(mesh, axis))
        assert groups(mesh, axis) == sorted(map(tuple, moved.tolist()))


@given(meshes())
def test_experts_are_shared_out_within_their_data_parallelism(mesh: Mesh) -> None:
    """Sharding ranks and replicas make up the experts' data parallelism, and there are no more replicas than `dp` has."""
    assert mesh.etp * mesh.ep * mesh.edp * mesh.pp == mesh.world
    assert mesh.edp // mesh.esharding == gcd(mesh.edp, mesh.dp)
    for rank in range(mesh.world):
        assert set(mesh.peers(rank, "esharding")) <= set(mesh.peers(rank, "edp"))


@given(SIZES, st.permutations(ORDER))
def test_equal_arrangements_are_equal_meshes(sizes: dict[str, int], order: list[str]) -> None:
    """Where an axis of one rank is named in an order makes no difference, and what is told of an order is enough."""
    sizes |= {"ep": 1, "cp": 1, "etp": sizes["tp"], "sharding": 1}
    rest = [axis for axis in order if axis not in ("ep", "cp", "sharding")]
    mesh = arrange(sizes, order)
    assert mesh == arrange(sizes, ["cp", *rest]) == arrange(sizes, told_order(mesh) or ORDER)


@given(meshes())
def test_what_is_told_of_an_order_is_enough(mesh: Mesh) -> None:
    """The mesh can be arranged again from its sizes and the told part of its order."""
    sizes = {axis: getattr(mesh, axis) for axis in AXES}
    assert arrange(sizes, told_order(mesh) or ORDER) == mesh


def test_dense_groups_are_megatrons() -> None:
    """The example of Megatron-core's `initialize_model_parallel`: 16 ranks, tp=2, pp=4."""
    mesh = arrange({"tp": 2, "pp": 4, "dp": 2})
    assert groups(mesh, "tp") == [(rank, rank + 1) for rank in range(0, 16, 2)]
    assert groups(mesh, "pp") == [(0, 4, 8, 12), (1, 5, 9, 13), (2, 6, 10, 14), (3, 7, 11, 15)]
    assert groups(mesh, "dp") == [(0, 2), (1, 3), (4, 6), (5, 7), (8, 10), (9, 11), (12, 14), (13, 15)]
    assert groups(arrange({"tp": 4, "cp": 2}), "cp") == [(0, 4), (1, 5), (2, 6), (3, 7)]


def test_expert_groups_are_megatrons() -> None:
    """With tp=2, cp=2, ep=4 and etp=1 over 16 ranks of two stages, experts see eight ranks as ep=4 times edp=2."""
    mesh = arrange({"tp": 2, "cp": 2, "dp": 2, "pp": 2, "ep": 4, "etp": 1})
    assert groups(mesh, "ep") == [(0, 1, 2, 3), (4, 5, 6, 7), (8, 9, 10, 11), (12, 13, 14, 15)]
    assert groups(mesh, "edp") == [(rank, rank + 4) for rank in (0, 1, 2, 3, 8, 9, 10, 11)]
    assert groups(mesh, "etp") == [(rank,) for rank in range(16)]
    assert groups(mesh, "pp") == [(rank, rank + 8) for rank in range(8)]


def test_stages_inside_data_parallelism() -> None:
    """tp-pp-dp, as for a launcher that keeps a model on neighbouring nodes: the next stage is tp ranks away."""
    mesh = arrange({"tp": 2, "pp": 2, "dp": 2}, ("tp", "pp", "dp"))
    assert groups(mesh, "pp") == [(0, 2), (1, 3), (4, 6), (5, 7)]
    assert mesh.coordinate(5) == Coordinate(tp=1, cp=0, sharding=0, dp=1, pp=0, etp=1, ep=0, edp=1, esharding=0)


def test_sharding_stands_just_inside_dp() -> None:
    """HSDP: ranks of one sharding group are neighbours, replicas a group apart, in every order that does not name them."""
    for order in (ORDER, ("tp", "dp", "pp"), ("dp", "tp", "pp", "cp")):
        mesh = arrange({"sharding": 4, "dp": 2}, order)
        assert mesh == arrange({"sharding": 4, "dp": 2})
        assert mesh.peers(5, "sharding") == (4, 5, 6, 7)
        assert mesh.peers(5, "dp") == (1, 5)
    paddle = arrange({"tp": 2, "sharding": 2, "pp": 2, "dp": 2}, ("tp", "sharding", "pp", "dp"))
    assert [paddle.peers(0, axis)[1] for axis in ("tp", "sharding", "pp", "dp")] == [1, 2, 4, 8]


def test_expert_replicas_follow_dp() -> None:
    """Four copies of each expert, two of which are replicas: the other factor is sharded."""
    mesh = arrange({"sharding": 4, "dp": 2, "ep": 2})
    assert (mesh.edp, mesh.esharding) == (4, 2)
    assert mesh.peers(0, "edp") == (0, 2, 4, 6)
    assert mesh.peers(0, "esharding") == (0, 2)
    outside = arrange({"sharding": 4, "dp": 2, "ep": 2}, ("ep", "dp", "sharding"))
    assert outside.peers(0, "edp") == (0, 2, 4, 6)
    assert outside.peers(0, "esharding") == (0, 4)


def test_etp_is_tp_unless_it_is_said() -> None:
    """Experts that do not fit are refused with the numbers and the way out."""
    assert arrange({"tp": 4, "ep": 2, "sharding": 8}).etp == 4
    with pytest.raises(InvalidRequest, match=r"etp=4 with ep=2 does not divide the 4 ranks .*etp defaults to tp.*\n.*etp=1"):
        arrange({"tp": 4, "ep": 2})
    assert arrange({"tp": 4, "ep": 2, "etp": 1}).edp == 2
    with pytest.raises(
        InvalidRequest, match=r"etp=1 with ep=3 does not divide the 4 ranks of a stage: .*\n.*choose an ep that divides 4"
    ):
        arrange({"tp": 4, "ep": 3, "etp": 1})


def test_a_stage_must_be_the_same_for_experts() -> None:
    """An order in which experts would see other stages is refused, as Megatron refuses it."""
    with pytest.raises(InvalidRequest, match=r"tp-pp-ep-dp the next stage is 4 ranks away .* and 1 for experts"):
        arrange({"tp": 4, "pp": 2, "ep": 4, "etp": 1, "dp": 2}, ("tp", "pp", "dp"))
    for order in permutations(("tp", "ep", "dp")):
        assert arrange({"tp": 4, "pp": 2, "ep": 4, "etp": 1, "dp": 2}, (*order, "pp")).edp == 2


@pytest.mark.parametrize(
    ("sizes", "order", "message"),
    [
        ({"np": 2}, ORDER, "no axis of a mesh is np=2"),
        ({"tp": 0}, ORDER, "tp=0"),
        ({"tp": WORLD_MAX + 1}, ORDER, "no axis of a mesh is tp="),
        ({"tp": WORLD_MAX, "dp": 2}, ORDER, "ranks are too many"),
        ({"pp": STAGES_MAX, "vpp": 2}, ORDER, "too many stages"),
        ({"vpp": 2}, ORDER, "vpp=2 needs pp of at least 2"),
        ({}, ("tp", "x" * 100), "no axis 'x{40}'"),
        ({}, ("tp", "tp"), "tp-tp names an axis twice"),
        ({"tp": 2}, ("dp", "pp"), "lacks tp, which has 2 ranks"),
    ],
)
def test_what_cannot_be_arranged_is_refused(sizes: dict[str, int], order: tuple[str, ...], message: str) -> None:
    """Unknown axes, sizes out of range and orders that lack or repeat an axis are named."""
    with pytest.raises(InvalidRequest, match=message):
        arrange(sizes, order)


def test_places_outside_the_mesh_are_refused() -> None:
    """Ranks, places and axes that do not exist are named."""
    mesh = arrange({"tp": 2})
    for rank in (-1, 2, True, 0.5):
        with pytest.raises(InvalidRequest, match="rank must be from 0 to 1"):
            mesh.coordinate(rank)  # type: ignore[arg-type]
    with pytest.raises(InvalidRequest, match="tp=2 is not on an axis of 2"):
        mesh.rank(tp=2)
    with pytest.raises(InvalidRequest, match=r"'vpp' is not an axis of a mesh .*\nhint: one of tp, cp"):
        mesh.peers(0, "vpp")
    assert check_rank(1, 2) == 1
