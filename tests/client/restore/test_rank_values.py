"""Whose values, positions and random streams a rank restores when the world is another one, and what it is told."""

from __future__ import annotations

import json

import msgspec
import pytest

from holdfast.left_out import LeftOutNote
from holdfast.restore.rank_values import state_of_rank
from holdfast.tensors.device_meshes import KnownMesh
from holdfast_formats.disk import state_json
from holdfast_formats.disk.manifests import Manifest
from holdfast_formats.layout import language, successors
from holdfast_formats.layout.mesh import Mesh
from holdfast_formats.layout.successors import SavedRankChoice

PLAIN = KnownMesh(None)


def saved(layout: str | None, world: int, **extra: object) -> tuple[Manifest, bytes]:
    """A checkpoint whose ranks each stored their number under `loader`, and agreed on `epoch`."""
    mesh = {} if layout is None else successors.stated(language.parse(layout).mesh)
    made = Manifest(1, "r", 1, 1, "", world, mesh, {}, (), {}, {})
    ranks = {
        rank: {
            "extra": {"loader": str(rank), "epoch": "7", "rng": f'"{rank}"'},
            "model": {"te._extra_state": f'"state {rank}"'},
            "optim": {"optim": document(f"layers.{rank}")},
        }
        for rank in range(world)
    }
    return made, state_json.merge(1, {}, ["extra", "model", "optim"], ranks)


def document(*names: str, lr: float = 0.1) -> str:
    group = {"params": list(names), "lr": lr}
    state = {name: {"seen": 3} for name in names}
    return json.dumps({"groups": {names[0]: group}, "state": state, "masters": {"m": list(names)}, "kinds": {}})


def mesh(layout: str):
    return language.parse(layout).mesh


def test_the_same_world_gets_its_own() -> None:
    """Every rank gets what it saved, with nothing to note."""
    made, encoded = saved("tp=2,dp=2", 4)
    for rank in range(4):
        found = state_of_rank(made, encoded, rank, mesh("tp=2,dp=2"), PLAIN)
        assert (found.values["extra"]["loader"], found.stream, found.notes) == (str(rank), SavedRankChoice(rank, True), ())
        assert found.values["extra"]["epoch"] == "7"


@pytest.mark.parametrize(("rank", "loader"), [(0, 0), (1, 0), (2, 1), (3, 1)])
def test_positions_follow_the_data_parallel_index_over_tensor_parallel_changes(rank: int, loader: int) -> None:
    """From dp=2 to tp=2,dp=2 nobody's position is lost: both ranks of an index go on where it was."""
    made, encoded = saved("dp=2", 2)
    found = state_of_rank(made, encoded, rank, mesh("tp=2,dp=2"), PLAIN)
    assert found.values["extra"]["loader"] == str(loader)
    assert not [note for note in found.notes if "loader" in note]
    assert found.stream == SavedRankChoice(loader, rank % 2 == 0)
    assert found.values["extra"]["rng"] == f'"{loader}"' and found.values["model"]["te._extra_state"] == f'"state {loader}"'
    told = [note for note in found.notes if "te._extra_state" in note]
    assert bool(told) == (rank % 2 == 1)


def test_new_positions_and_lost_ones_are_told() -> None:
    """More data-parallel ranks than were saved start where others do; fewer leave positions behind: both are noted."""
    made, encoded = saved("dp=2", 2)
    more = state_of_rank(made, encoded, 3, mesh("dp=4"), PLAIN)
    assert more.values["extra"]["loader"] == "1"
    assert any("extra/loader" in note and "index 3 is new (2 were saved)" in note for note in more.notes)
    made, encoded = saved("dp=4", 4)
    fewer = state_of_rank(made, encoded, 1, mesh("dp=2"), PLAIN)
    assert fewer.values["extra"]["loader"] == "1"
    assert any(
        "extra/loader" in note and "indices 2 to 3 of 4 were saved but are not continued" in note for note in fewer.notes
    )


@pytest.mark.parametrize(("layout", "now"), [(None, "dp=2"), ("dp=2", None), ("dp=3", "dp=2")])
def test_without_two_layouts_ranks_go_by_number(layout: str | None, now: str | None) -> None:
    """Where one side has no layout, or the manifest's is of another world, a rank takes its own number's, or one modulo."""
    made, encoded = saved(layout, 2)
    here = None if now is None else mesh(now)
    assert state_of_rank(made, encoded, 1, here, PLAIN).values["extra"]["loader"] == "1"
    assert state_of_rank(made, encoded, 1, here, PLAIN).stream is None
    larger = state_of_rank(made, encoded, 3, None, PLAIN)
    assert larger.values["extra"]["loader"] == "1"
    assert "extra/loader: taken from another rank of the saved world" in larger.notes
    assert not [note for note in larger.notes if "rng" in note or "optim" in note]


@pytest.mark.parametrize("now", [None, "pp=2"])
def test_what_optimizers_say_is_put_together(now: str | None) -> None:
    """Each rank knew its own stage's parameters; every rank gets what all of them knew."""
    made, encoded = saved("pp=2", 2)
    found = json.loads(state_of_rank(made, encoded, 0, None if now is None else mesh(now), PLAIN).values["optim"]["optim"])
    assert set(found["state"]) - {"$keys"} == {"layers.0", "layers.1"}
    assert found["masters"]["m"] == ["layers.0", "layers.1"]
    assert [group["params"] for group in found["groups"].values()] == [["layers.0", "layers.1"]]


DEVICE_MESHES = [
    ({"dp": 2, "tp": 2}, "dp=4", [0, 2, 0, 2]),  # one rank of each row, then the same rows again
    ({"tp": 2, "dp": 2}, "dp=2", [0, 1]),  # whose rows are the inner dimension
    ({"dp_replicate": 2, "dp_shard": 2, "tp": 1}, "tp=2,dp=4", [0, 0, 1, 1, 2, 2, 3, 3]),
    ({"mesh_0": 4}, "tp=2,dp=2", [0, 0, 1, 1]),
    ({}, "tp=2,dp=2", [0, 0, 1, 1]),
    ({"tp": 2}, "tp=2,dp=2", [0, 1, 2, 3]),  # of a part of the world
    ({"a": 2, "b": 2}, "tp=2,dp=2", [0, 1, 2, 3]),
    ({"mesh_0": 4}, "dp=2", [0, 1]),
]


@pytest.mark.parametrize(("dimensions", "now", "loaders"), DEVICE_MESHES)
def test_device_meshes_number_the_rows(dimensions: dict[str, int], now: str, loaders: list[int]) -> None:
    """Without layouts, the names of their dimensions say which ranks share rows; else ranks go by number."""
    made, encoded = saved(None, 4)
    made = msgspec.structs.replace(made, mesh=dimensions)
    derived = KnownMesh(mesh(now))
    found = [state_of_rank(made, encoded, rank, None, derived).values["extra"]["loader"] for rank in range(len(loaders))]
    assert found == [str(rank) for rank in loaders]


UNCLEAR = [({"a": 2, "b": 2}, KnownMesh(mesh("tp=2,dp=3"))), ({}, KnownMesh(None, "why"))]


@pytest.mark.parametrize(("dimensions", "derived"), UNCLEAR)
def test_a_new_rank_is_told_what_is_not_known(dimensions: dict[str, int], derived: KnownMesh) -> None:
    """Only a rank that mixes its streams by its number, and not if a layout says how the ranks are arranged."""
    made, encoded = saved(None, 4)
    made = msgspec.structs.replace(made, mesh=dimensions)

    def told(rank: int, stated: Mesh | None = None) -> list[str]:
        return [note for note in state_of_rank(made, encoded, rank, stated, derived).notes if isinstance(note, LeftOutNote)]

    assert not told(3) and "layout=ParallelLayout" in told(5)[0] and not told(5, mesh("dp=6"))
