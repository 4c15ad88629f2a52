"""A list of Fragments is one tensor, wherever a state holds tensors."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from holdfast.state.train_state import TrainState
from holdfast.tensors.fragments import Fragment
from holdfast_formats.errors import InvalidRequest, StateMismatch
from holdfast_formats.region import Box
from tests.client.checkpoint_in_memory import Checkpoint, restore, save

ROWS, COLUMNS = 8, 6
WHOLE = torch.arange(float(ROWS * COLUMNS)).reshape(ROWS, COLUMNS)


class Sharded:
    """An object with a state_dict of its own, in which each rank has its parts of a tensor."""

    def __init__(self, parts: list[Fragment]) -> None:
        self.parts, self.loaded = parts, None

    def state_dict(self) -> dict[str, Any]:
        return {"deep": [1, {"w": self.parts}]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.loaded = state["deep"][1]["w"]


def cut(rows: list[tuple[int, int]], source: torch.Tensor = WHOLE) -> list[Fragment]:
    """Blocks of rows [start, stop), as parts in memory of their own."""
    return [Fragment(source[a:b].clone(), tuple(source.shape), offset=(a, 0)) for a, b in rows]


def filled(parts: list[Fragment] | tuple[Fragment, ...], source: torch.Tensor = WHOLE) -> bool:
    """Whether every part has the bytes of its place."""
    found = [source[box.slices].reshape(-1) for part in parts for box in part.boxes]
    nothing = torch.empty(0, dtype=source.dtype)
    return torch.equal(torch.cat([nothing, *found]), torch.cat([part.tensor.reshape(-1) for part in parts]))


def zeroed(parts: list[Fragment]) -> list[Fragment]:
    return [part.with_tensor(torch.zeros_like(part.tensor)) for part in parts]


Dealt = list[list[tuple[Box, tuple[int, int]]]]  # of each rank: boxes, and the runs of their elements that it has


@st.composite
def dealt(draw: st.DrawFn, shape: tuple[int, ...]) -> Dealt:
    """The elements of a tensor dealt out to ranks: boxes of a random grid, each in one to three flat runs."""
    boxes = [Box((), ())]
    for n in shape:
        edges = sorted({0, n, *draw(st.lists(st.integers(0, n), max_size=2))})
        boxes = [Box((*box.offset, a), (*box.shape, b - a)) for box in boxes for a, b in pairwise(edges)]
    ranks: Dealt = [[] for _ in range(draw(st.integers(1, 3)))]
    for box in boxes:
        for run in pairwise(sorted({0, box.volume, *draw(st.lists(st.integers(0, box.volume), max_size=2))})):
            draw(st.sampled_from(ranks)).append((box, run))
    return ranks


def states(ranks: Dealt, source: torch.Tensor) -> list[dict[str, Any]]:
    """What each rank holds of `source`; a rank that has nothing says so with an empty Fragment."""
    shape = tuple(source.shape)
    found = []
    for runs in ranks:
        parts = [
            Fragment(source[box.slices].reshape(-1)[a:b].clone(), shape, offset=box.offset, box=box.shape, flat=(a, b))
            for box, (a, b) in runs
        ]
        found.append({"model": {"w": parts or [Fragment(torch.empty(0), shape, flat=(0, 0))]}})
    return found


@given(st.lists(st.integers(1, 5), max_size=3).map(tuple), st.data())
def test_any_cut_comes_back_in_any_other(shape: tuple[int, ...], data: st.DataObject) -> None:
    """Ranks save lists of runs of boxes. Ranks with other lists, and a rank with the whole, get the same bytes; and back."""
    source = torch.randn(shape)
    saved, wanted = data.draw(dealt(shape)), data.draw(dealt(shape))
    snapshots = [TrainState(state, rank, len(saved)).snapshot() for rank, state in enumerate(states(saved, source))]
    checkpoint, whole = Checkpoint(*snapshots), save({"model": {"w": source}})
    assert list(checkpoint.specs["model"]) == ["w"] and torch.equal(checkpoint.tensors["model", "w"], source)
    alone = {"model": {"w": torch.zeros(shape)}}
    restore(checkpoint, alone)
    assert torch.equal(alone["model"]["w"], source)
    for stored in (checkpoint, whole):
        for rank, live in enumerate(states(wanted, torch.zeros(shape))):
            stored.fill(TrainState(live, rank, len(wanted)).prepare(stored.stored(rank)))
            assert filled(live["model"]["w"], source)


PLACES: dict[str, tuple[Callable[[Any], Mapping[str, Any]], tuple[str, str]]] = {
    "a key": (lambda held: {"w": held}, ("extra", "w")),
    "a mapping": (lambda held: {"some": {"w": held, "x": torch.ones(2)}}, ("extra", "some/w")),
    "the model": (lambda held: {"model": {"w": held}}, ("model", "w")),
    "masters": (lambda held: {"master": {"w": held}}, ("master", "w")),
    "ema": (lambda held: {"ema": {"w": held}}, ("ema", "w")),
    "a nested value": (lambda held: {"some": {"n": 1, "deep": [2, {"w": held}]}}, ("extra", "some/deep/1/w")),
    "a list of lists": (lambda held: {"some": [[1], held]}, ("extra", "some/1")),
}


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("kind", [list, tuple])
def test_a_list_is_one_tensor_wherever_tensors_are(place: str, kind: type) -> None:
    """It has the list's own name, is filled in place, also from a tensor that was saved whole, and the other way round."""
    wrap, key = PLACES[place]
    lists = kind(cut([(5, 8), (0, 2), (2, 5)]))
    checkpoint, whole = save(wrap(lists)), save(wrap(WHOLE.clone()))
    assert torch.equal(checkpoint.tensors[key], WHOLE) and torch.equal(whole.tensors[key], WHOLE)
    assert {name for name in checkpoint.tensors if "rng" not in name[1]} == {
        name for name in whole.tensors if "rng" not in name[1]
    }
    for saved in (checkpoint, whole):
        parts = kind(zeroed(cut([(0, 1), (1, 8)])))
        before = [part.tensor for part in parts]
        state = wrap(parts)
        done = restore(saved, state)
        assert filled(parts) and not done.notes
        assert all(part.tensor is tensor for part, tensor in zip(parts, before, strict=True))
        assert str(state) == str(wrap(parts))  # the very list stays where it was
    tensor = torch.zeros(ROWS, COLUMNS)
    restore(checkpoint, wrap(tensor))
    assert torch.equal(tensor, WHOLE)


def test_an_object_with_its_own_state_gets_its_parts():
    """Lists in a state_dict are the whole world's tensor, and each rank's object is given the parts that it has."""
    ranks = [Sharded(cut([(0, 1), (4, 8)])), Sharded(cut([(1, 4)]))]
    checkpoint = Checkpoint(*(TrainState({"s": held}, rank, 2).snapshot() for rank, held in enumerate(ranks)))
    assert torch.equal(checkpoint.tensors["extra", "s/deep/1/w"], WHOLE)
    live = Sharded(zeroed(cut([(2, 3), (7, 8)])))
    restore(checkpoint, {"s": live})
    assert filled(live.loaded) and [part.place for part in live.loaded] == [part.place for part in live.parts]


def test_one_list_at_two_places_of_a_value():
    """Filled once per place and put together, as any object is that a state has twice."""
    parts = zeroed(cut([(0, 3), (3, 8)]))
    one = cut([(0, 8)])
    state = {"some": {"a": parts, "b": parts, "n": 1}}
    done = restore(save({"some": {"a": one, "b": one, "n": 1}}), state)
    assert filled(parts) and state["some"]["a"] is state["some"]["b"] is parts and not done.notes
    different = {"some": {"a": cut([(0, 8)]), "b": cut([(0, 8)], -WHOLE), "n": 1}}
    done = restore(save(different), state)
    assert filled(parts) and filled(state["some"]["b"], -WHOLE) and state["some"]["b"] is not parts and done.notes


def test_tied_lists_are_stored_once():
    """The same Fragments under two names are one tensor, also if this rank's part of it is empty."""
    for parts in (cut([(0, 3), (3, 8)]), [Fragment(torch.empty(0, COLUMNS), (ROWS, COLUMNS), offset=(0, 0))]):
        snapshot = TrainState({"model": {"a": parts, "b": list(parts)}}, 0, 1).snapshot()
        assert [leaf.name for leaf in snapshot.leaves if leaf.group == "model"] == ["a"]
        assert snapshot.aliases["model"] == {"b": "a"}
    twins = {"a": cut([(0, 3), (3, 8)])}
    twins["b"] = [part.with_tensor(part.tensor.view_as(part.tensor)) for part in twins["a"]]
    assert TrainState({"model": twins}, 0, 1).snapshot().aliases["model"] == {"b": "a"}


def test_leaves_are_the_same_as_long_as_the_parts_are():
    """A list that is read anew at every save gives the identical leaf; another part, or another order, a new one."""
    parts = cut([(0, 3), (3, 8)])
    state = TrainState({"some": {"n": 1, "w": parts}}, 0, 1)

    def leaf() -> Any:
        return next(leaf for leaf in state.snapshot().leaves if leaf.name == "some/w")

    first = leaf()
    assert leaf() is first
    parts.reverse()
    turned = leaf()
    assert turned is not first and [p.box for p in turned.pieces] == [p.box for p in reversed(first.pieces)]
    parts[0].tensor = parts[0].tensor.clone()
    assert leaf() is not turned


@pytest.mark.parametrize(
    ("make", "path"),
    [
        (lambda: {"w": cut([(0, 5), (3, 8)])}, "w"),
        (lambda: {"w": [*cut([(0, 5)]), 1]}, "w"),
        (lambda: {"model": {"x": torch.ones(1), "w": [*cut([(0, 5)]), torch.ones(1)]}}, r"model\.w"),
        (lambda: {"model": {"w": (*cut([(0, 5)]), *cut([(5, 8)], WHOLE.double()))}}, r"model\.w"),
        (lambda: {"some": {"n": 1, "deep": [0, [*cut([(0, 5)]), *cut([(0, 1)])]]}}, r"some\.deep\[1\]"),
        (lambda: {"some": {"n": 1, "deep": [0, *cut([(0, 8)])]}}, r"some\.deep"),
        (lambda: {"s": Sharded([*cut([(0, 5)]), None])}, r"s\.deep\[1\]\.w"),
        (lambda: {"some": {"n": 1, tuple(cut([(0, 8)])): 2}}, r"some\.\(.*"),
        (lambda: {"model": {"w": []}}, r"model\.w"),
        (lambda: {"model": {"x": torch.ones(1), "w": ()}}, r"model\.w"),
        (lambda: {"some": {"x": cut([(0, 8)]), "w": []}}, r"some\.w"),
    ],
)
def test_a_list_that_is_not_one_tensor_is_refused_by_name(make: Callable[[], Any], path: str) -> None:
    """Before anything is staged: overlaps, other things, other dtypes, and lists that say nothing, at any depth."""
    with pytest.raises(InvalidRequest, match=rf"^{path}: .") as refused:
        save(make())
    assert refused.value.hint


@pytest.mark.parametrize("value", [{"x": torch.ones(1), "log": []}, {"n": 1, "log": ()}, [], {"w": WHOLE, "log": [1]}])
def test_lists_that_stand_for_themselves_stay_values(value: Any) -> None:
    """Empty lists, and lists beside tensors, are plain values where nothing says that they should be tensors."""
    state = {"some": copy.deepcopy(value)}
    restore(save({"some": value}), state)
    assert str(state["some"]) == str(value)


def test_a_missing_or_other_part_is_refused_by_name():
    """A list for another whole shape than the stored one, and a name that was never stored."""
    checkpoint = save({"model": {"w": cut([(0, 3), (3, 8)])}})
    with pytest.raises(StateMismatch, match=r"model/w: stored F32 \[8, 6\], live F32 \[9, 6\]"):
        restore(checkpoint, {"model": {"w": [Fragment(torch.zeros(1, 6), (9, 6), offset=(8, 0))]}})
    with pytest.raises(StateMismatch, match=r"missing from the checkpoint \(model/v\)"):
        restore(checkpoint, {"model": {"v": cut([(0, 3)])}})


class Fused(nn.Module):
    """Gate and up of a tensor-parallel rank, one below the other in one parameter, with a row of padding at the end."""

    def __init__(self, rank: int, source: torch.Tensor) -> None:
        super().__init__()
        half, share = ROWS // 2, ROWS // 4
        rows = [source[share * rank :][:share], source[half + share * rank :][:share], torch.full((1, COLUMNS), 7.0)]
        self.weight = nn.Parameter(torch.cat(rows))
        self.places = [share * rank, half + share * rank]

    def tensors(self) -> dict[str, Any]:
        share, held = ROWS // 4, self.weight
        pieces = [held[share * n : share * (n + 1)] for n in (0, 1)]
        return {
            "w": [Fragment(p, (ROWS, COLUMNS), offset=(at, 0), held=held) for p, at in zip(pieces, self.places, strict=True)]
        }


def stepped(parameter: nn.Parameter, grad: torch.Tensor) -> torch.optim.Optimizer:
    optimizer = torch.optim.AdamW([parameter], lr=0.1)
    parameter.grad = grad
    optimizer.step()
    return optimizer


def test_moments_of_a_fused_parameter_follow_its_parts():
    """Two ranks' moments are those of the whole tensor, which one rank restores, and two others; padding is not stored."""
    grad = torch.randn(ROWS, COLUMNS)
    ranks = [Fused(rank, WHOLE) for rank in (0, 1)]
    found = []
    for rank, fused in enumerate(ranks):
        optimizer = stepped(fused.weight, Fused(rank, grad).weight.detach())
        found.append(TrainState({"model": fused.tensors(), "optim": optimizer}, rank, 2).snapshot())
    checkpoint = Checkpoint(*found)
    full = nn.Parameter(WHOLE.clone())
    expected = stepped(full, grad)
    for key in ("exp_avg", "exp_avg_sq"):
        assert torch.equal(checkpoint.tensors["optim", f"w/{key}"], expected.state[full][key])

    single = nn.Parameter(torch.zeros(ROWS, COLUMNS))
    fresh = torch.optim.AdamW([single], lr=0.1)
    restore(checkpoint, {"model": {"w": single}, "optim": fresh})
    assert torch.equal(single, full) and torch.equal(fresh.state[single]["exp_avg"], expected.state[full]["exp_avg"])

    whole = save({"model": {"w": full}, "optim": expected})
    for rank in (0, 1):
        for live in (None, torch.ones(ROWS // 2 + 1, COLUMNS)):
            fused = Fused(rank, torch.zeros(ROWS, COLUMNS))
            optimizer = torch.optim.AdamW([fused.weight]) if live is None else stepped(fused.weight, live)
            padding = torch.zeros(COLUMNS) if live is None else optimizer.state[fused.weight]["exp_avg"][-1].clone()
            last = fused.weight[-1].detach().clone()
            state = TrainState({"model": fused.tensors(), "optim": optimizer}, rank, 2)
            restoration = state.prepare(whole.stored(rank))
            whole.fill(restoration)
            restoration.apply()
            moment = optimizer.state[fused.weight]["exp_avg"]
            assert torch.equal(moment[:-1], Fused(rank, expected.state[full]["exp_avg"]).weight[:-1])
            assert torch.equal(moment[-1], padding) and torch.equal(fused.weight[-1], last)
            assert optimizer.state[fused.weight]["step"] == 1


def test_an_optimizer_that_holds_other_tensors_is_refused():
    """The parts of a list must be views of the one parameter, named as held=: else their moments are not known."""
    separate = [nn.Parameter(torch.zeros(4, COLUMNS)) for _ in (0, 1)]
    parts = [Fragment(p, (ROWS, COLUMNS), offset=(4 * n, 0)) for n, p in enumerate(separate)]
    with pytest.raises(InvalidRequest, match=r"optim: w: .* not all views of it"):
        TrainState({"model": {"w": parts}, "optim": torch.optim.AdamW(separate)}, 0, 1)
    fused = Fused(0, WHOLE)
    forgotten = {"w": [part.with_tensor(part.tensor) for part in fused.tensors()["w"]]}
    with pytest.raises(InvalidRequest, match="belongs to no module in the state") as refused:
        TrainState({"model": forgotten, "optim": torch.optim.AdamW([fused.weight])}, 0, 1)
    assert "held=" in refused.value.hint


def test_masters_are_copied_from_the_restored_parts():
    """Wherever the parts of both lie; refused if this rank lacks elements of the weight that the masters have."""
    checkpoint = save({"model": {"w": WHOLE.bfloat16()}})

    def live(rows: list[tuple[int, int]]) -> dict[str, Any]:
        weights = zeroed(cut([(0, 3), (3, 6)], WHOLE.bfloat16()))
        return {"model": {"w": weights}, "master": {"w": zeroed(cut(rows))}}

    for rows in ([(0, 3), (3, 6)], [(3, 6), (0, 3)], [(0, 6)], [(2, 4)]):
        state = live(rows)
        with pytest.raises(StateMismatch, match=r"masters \(w\) would not be restored"):
            restore(checkpoint, state, groups=["model"])
        restore(checkpoint, state, groups=["model"], from_model="from-model")
        assert filled(state["master"]["w"], WHOLE.bfloat16().float())
    for rows in ([(0, 7)], [(6, 8)]):
        with pytest.raises(StateMismatch, match="sharded differently"):
            restore(checkpoint, live(rows), groups=["model"], from_model="from-model")


def test_masters_kept_by_the_optimizer_follow_the_parts():
    """A full-precision copy in the optimizer's state has the parameter's form, and is cut as it is."""
    fused = Fused(0, WHOLE)
    optimizer = torch.optim.SGD([fused.weight], lr=0.1)
    optimizer.state[fused.weight] = {"master_param": fused.weight.detach().double() + 0.25}
    state = {"model": fused.tensors(), "optim": optimizer}
    snapshot = TrainState(state, 0, 2).snapshot()
    leaf = next(leaf for leaf in snapshot.leaves if leaf.group == "master")
    assert leaf.name == "w" and leaf.shape == (ROWS, COLUMNS) and leaf.dtype == "F64"
    assert all(torch.equal(piece.tensor, WHOLE[piece.box.slices].double() + 0.25) for piece in leaf.pieces)
    assert [piece.box for piece in leaf.pieces] == [box for part in state["model"]["w"] for box in part.boxes]
