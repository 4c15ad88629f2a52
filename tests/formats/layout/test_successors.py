"""Whom a rank takes after when the world has changed: positions by data-parallel index, streams by place."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from holdfast_formats.layout import language, successors
from holdfast_formats.layout.mesh import Mesh
from holdfast_formats.layout.successors import Mixing, SavedRankChoice

ORDERS = ["tp-cp-ep-sharding-dp-pp", "tp-cp-ep-dp-sharding-pp", "dp-tp-cp-sharding-ep-pp", "cp-tp-sharding-dp-ep-pp"]


@st.composite
def meshes(draw: st.DrawFn) -> Mesh:
    sizes = {axis: draw(st.integers(1, 3)) for axis in ("tp", "cp", "sharding", "dp", "pp")}
    text = ",".join(f"{axis}={n}" for axis, n in sizes.items())
    return language.parse(f"{text},order={draw(st.sampled_from(ORDERS))}").mesh


@given(meshes())
def test_a_manifest_states_a_mesh_and_its_order(mesh: Mesh) -> None:
    """What is written into a manifest is read as the same mesh, whose ranks stand where they stood."""
    assert successors.read(successors.stated(mesh)) == mesh


def test_other_meshes_say_nothing_of_roles() -> None:
    """A mesh read off DTensors, one without all axes, and one that cannot be are no layout's."""
    assert successors.read({"dp": 2, "tp": 2}) is None
    assert successors.read({}) is None
    whole = successors.stated(Mesh())
    assert successors.read({**whole, "tp": 0}) is None
    assert successors.read({**whole, "extra": 2}) is None


@given(meshes())
def test_in_the_same_mesh_everyone_is_their_own_heir(mesh: Mesh) -> None:
    """Nothing moves where nothing changed."""
    for rank in range(mesh.world):
        assert successors.position(mesh, mesh, rank) == successors.stream(mesh, mesh, rank) == SavedRankChoice(rank, True)
    assert not successors.left(mesh, mesh)


@given(meshes(), meshes())
def test_positions_follow_the_data_parallel_index(saved: Mesh, now: Mesh) -> None:
    """An index that both worlds have is continued exactly, by all who have it; one that is new takes another's."""
    for rank in range(now.world):
        wanted = successors.index(now, now.coordinate(rank))
        heir = successors.position(saved, now, rank)
        assert heir.exact == (wanted < saved.sharding * saved.dp)
        assert successors.index(saved, saved.coordinate(heir.rank)) == wanted % (saved.sharding * saved.dp)
    continued = {successors.index(now, now.coordinate(rank)) for rank in range(now.world)}
    assert set(range(saved.sharding * saved.dp)) - continued == set(successors.left(saved, now))


@given(meshes(), meshes())
def test_no_two_ranks_continue_one_stream_exactly(saved: Mesh, now: Mesh) -> None:
    """A stream goes on at its own place, and nowhere else."""
    heirs = [successors.stream(saved, now, rank) for rank in range(now.world)]
    exact = [heir.rank for heir in heirs if heir.exact]
    assert len(exact) == len(set(exact))
    for rank, heir in enumerate(heirs):
        here, there = now.coordinate(rank), saved.coordinate(heir.rank)
        same = (here.tp, here.cp, here.pp) == (there.tp, there.cp, there.pp)
        assert heir.exact == (same and successors.index(now, here) == successors.index(saved, there))


def drawn(saved: Mesh, now: Mesh, rank: int, device: bool) -> tuple[int | None, ...]:
    """What the streams of a rank follow from, if those of a saved tensor-parallel group were equal, and all of an index that
    are not of a device.
    """
    rank_choice = successors.stream(saved, now, rank)
    there = saved.coordinate(rank_choice.rank)
    index = successors.index(saved, there)
    return (index, there.cp, there.pp, rank_choice.mixing.device) if device else (index, rank_choice.mixing.process)


@given(meshes(), meshes())
def test_ranks_draw_the_same_numbers_if_they_must(saved: Mesh, now: Mesh) -> None:
    """Those of a tensor-parallel group for dropout, those of a data-parallel index for its rows, and no others."""
    groups: dict[tuple[int, ...], set[object]] = {}
    rows: dict[int, set[object]] = {}
    for rank in range(now.world):
        at, index = now.coordinate(rank), successors.index(now, now.coordinate(rank))
        groups.setdefault((index, at.cp, at.pp), set()).add(drawn(saved, now, rank, device=True))
        rows.setdefault(index, set()).add(drawn(saved, now, rank, device=False))
    for each in (groups, rows):
        assert all(len(alike) == 1 for alike in each.values())
        assert len({next(iter(alike)) for alike in each.values()}) == len(each)


def test_an_example() -> None:
    """From tp=2,dp=2 to tp=1,dp=4: rank 2 was rank 1's place before in no axis but dp, and index 2 is new."""
    saved, now = language.parse("tp=2,dp=2").mesh, language.parse("dp=4").mesh
    assert [successors.position(saved, now, rank) for rank in range(4)] == [
        SavedRankChoice(0, True),
        SavedRankChoice(2, True),
        SavedRankChoice(0, False),
        SavedRankChoice(2, False),
    ]
    assert [successors.stream(saved, now, rank) for rank in range(4)] == [
        SavedRankChoice(0, True),
        SavedRankChoice(2, True),
        SavedRankChoice(0, False, Mixing(2, 2)),
        SavedRankChoice(2, False, Mixing(3, 3)),
    ]
    assert list(successors.left(now, saved)) == [2, 3]
