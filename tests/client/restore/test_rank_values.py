"""Whose values, positions and random streams a rank restores when the world is another one, and what it is told."""

from __future__ import annotations

import json

import pytest

from holdfast.restore.rank_values import state_of_rank
from holdfast_formats.disk import state_json
from holdfast_formats.disk.manifests import Manifest
from holdfast_formats.layout import language, successors
from holdfast_formats.layout.successors import SavedRankChoice


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
        found = state_of_rank(made, encoded, rank, mesh("tp=2,dp=2"))
        assert (found.values["extra"]["loader"], found.stream, found.notes) == (str(rank), SavedRankChoice(rank, True), ())
        assert found.values["extra"]["epoch"] == "7"


@pytest.mark.parametrize(("rank", "loader"), [(0, 0), (1, 0), (2, 1), (3, 1)])
def test_positions_follow_the_data_parallel_index_over_tensor_parallel_changes(rank: int, loader: int) -> None:
    """From dp=2 to tp=2,dp=2 nobody's position is lost: both ranks of an index go on where it was."""
    made, encoded = saved("dp=2", 2)
    found = state_of_rank(made, encoded, rank, mesh("tp=2,dp=2"))
    assert found.values["extra"]["loader"] == str(loader)
    assert not [note for note in found.notes if "loader" in note]
    assert found.stream == SavedRankChoice(loader, rank % 2 == 0)
    assert found.values["extra"]["rng"] == f'"{loader}"' and found.values["model"]["te._extra_state"] == f'"state {loader}"'
    told = [note for note in found.notes if "te._extra_state" in note]
    assert bool(told) == (rank % 2 == 1)


def test_new_positions_and_lost_ones_are_told() -> None:
    """More data-parallel ranks than were saved start where others do; fewer leave positions behind: both are noted."""
    made, encoded = saved("dp=2", 2)
    more = state_of_rank(made, encoded, 3, mesh("dp=4"))
    assert more.values["extra"]["loader"] == "1"
    assert any("extra/loader" in note and "index 3 is new (2 were saved)" in note for note in more.notes)
    made, encoded = saved("dp=4", 4)
    fewer = state_of_rank(made, encoded, 1, mesh("dp=2"))
    assert fewer.values["extra"]["loader"] == "1"
    assert any(
        "extra/loader" in note and "indices 2 to 3 of 4 were saved but are not continued" in note for note in fewer.notes
    )


@pytest.mark.parametrize(("layout", "now"), [(None, "dp=2"), ("dp=2", None), ("dp=3", "dp=2")])
def test_without_two_layouts_ranks_go_by_number(layout: str | None, now: str | None) -> None:
    """Where one side has no layout, or the manifest's is of another world, a rank takes its own number's, or one modulo."""
    made, encoded = saved(layout, 2)
    here = None if now is None else mesh(now)
    assert state_of_rank(made, encoded, 1, here).values["extra"]["loader"] == "1"
    assert state_of_rank(made, encoded, 1, here).stream is None
    larger = state_of_rank(made, encoded, 3, None)
    assert larger.values["extra"]["loader"] == "1"
    assert "extra/loader: taken from another rank of the saved world" in larger.notes
    assert not [note for note in larger.notes if "rng" in note or "optim" in note]


@pytest.mark.parametrize("now", [None, "pp=2"])
def test_what_optimizers_say_is_put_together(now: str | None) -> None:
    """Each rank knew its own stage's parameters; every rank gets what all of them knew."""
    made, encoded = saved("pp=2", 2)
    found = json.loads(state_of_rank(made, encoded, 0, None if now is None else mesh(now)).values["optim"]["optim"])
    assert set(found["state"]) - {"$keys"} == {"layers.0", "layers.1"}
    assert found["masters"]["m"] == ["layers.0", "layers.1"]
    assert [group["params"] for group in found["groups"].values()] == [["layers.0", "layers.1"]]
