"""What a save may leave out by name, and what it refuses to: nothing that is trained goes missing without a word."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel

from holdfast.state.exclusion import check
from holdfast.state.named import Named
from holdfast.state.named_entries import NamedSnapshot
from holdfast.state.train_state import Snapshot, TrainState
from holdfast_formats.errors import InvalidRequest, StateMismatch
from tests.client.checkpoint_in_memory import Checkpoint, restore

Made = dict[str, Any]


class Rotary(nn.Module):
    """A model with a table that follows from its configuration, and a frozen part."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(5, 4)
        self.frozen = nn.Linear(4, 4).requires_grad_(False)
        self.head = nn.Linear(4, 5, bias=False)
        self.register_buffer("rotary", torch.rand(3))


class Listed(Rotary):
    """As a model of transformers that says what it makes itself."""

    _keys_to_ignore_on_save = ("rotary", "frozen.bias", "head.weight", "no.such.name")


def taken(state: Made, *exclude: str, groups: Any = None) -> Snapshot:
    return TrainState(state, 0, 1).snapshot(groups, exclude)


def paths(snapshot: Snapshot) -> set[str]:
    return {leaf.path for leaf in snapshot.leaves}


def test_buffers_and_frozen_weights_are_left_out_and_said() -> None:
    """The rest is stored as ever, and is restored with the same patterns; without them the missing names are told."""
    state = {"model": Rotary(), "epoch": 3}
    snapshot = taken(state, "model/rotary*", "model/frozen.*")
    gone = {"model/rotary", "model/frozen.weight", "model/frozen.bias"}
    assert paths(taken(state)) - paths(snapshot) == gone
    assert snapshot.notes == (
        "left out by exclude=, so not in the checkpoint: model/frozen.bias, model/frozen.weight, model/rotary",
    )
    live = {"model": Rotary(), "epoch": 0}
    before = live["model"].rotary.clone()
    checkpoint = Checkpoint(snapshot)
    with pytest.raises(StateMismatch, match=r"model/rotary"):
        restore(checkpoint, live)
    restore(checkpoint, live, ignore=["model/rotary*", "model/frozen.*"])
    assert torch.equal(live["model"].head.weight, state["model"].head.weight) and live["epoch"] == 3
    assert torch.equal(live["model"].rotary, before)


@pytest.mark.parametrize("groups", [None, ["model", "extra"]])
def test_what_is_trained_is_refused(groups: Any) -> None:
    """Whether it requires a gradient or an optimizer steps it, in the model, its masters, its moments and its averages."""
    model = Rotary()
    state = {"model": model, "ema": {"head.weight": model.head.weight.detach().clone()}}
    for pattern in ("model/head.weight", "*embed*", "ema/head*"):
        with pytest.raises(InvalidRequest, match=r"exclude= leaves out (model|ema)/.*trained") as told:
            taken(state, "model/rotary", pattern)
        assert "requires_grad_(False)" in told.value.hint
    stepped = {"model": model, "optim": torch.optim.AdamW([*model.parameters()])}
    with pytest.raises(InvalidRequest, match=r"model/frozen.bias, and an optimizer of the state steps it"):
        taken(stepped, "model/frozen.bias", groups=groups)
    model.head.weight.grad = torch.ones_like(model.head.weight)
    stepped["optim"].step()
    with pytest.raises(InvalidRequest, match="the optimizer could not continue"):
        taken(stepped, "optim/head.weight/exp_avg")
    masters = {"model": model, "master": {"head.weight": model.head.weight.detach().clone()}}
    with pytest.raises(InvalidRequest, match=r"master/head\.weight"):
        taken(masters, "m*/head.weight")


def test_it_is_looked_at_anew_at_every_save() -> None:
    """What was frozen at the last save and is trained now is refused, or stored."""
    state = {"model": Listed()}
    live = TrainState(state, 0, 1)
    live.snapshot(None, ["model/frozen.weight"])
    assert "model/frozen.bias" not in paths(live.snapshot())
    state["model"].frozen.requires_grad_(True)
    with pytest.raises(InvalidRequest, match=r"frozen.weight, and it is trained"):
        live.snapshot(None, ["model/frozen.weight"])
    assert "model/frozen.bias" in paths(live.snapshot())


def test_other_modules_and_plain_tensors_count_too() -> None:
    """A frozen teacher may be left out in part; a trained plain tensor may not."""
    state: Made = {"model": nn.Linear(1, 1), "teacher": nn.Linear(2, 2).requires_grad_(False)}
    assert "teacher/bias" not in paths(taken(state, "teacher/bias"))
    with pytest.raises(InvalidRequest, match="whole group teacher"):
        taken(state, "teacher/*")
    with pytest.raises(InvalidRequest, match=r"extra/temperature.*trained"):
        taken({"model": nn.Linear(1, 1), "temperature": nn.Parameter(torch.ones(1))}, "extra/temperature")


def test_entries_go_as_a_whole() -> None:
    """An entry of `extra` with all its tensors, or nothing of it; random streams as well."""
    state = {"model": nn.Linear(1, 1), "replay": {"x": torch.ones(3), "n": 2}, "table": {"a": torch.ones(1)}, "epoch": 1}
    snapshot = taken(state, "extra/replay", "extra/table/a")
    assert not any(path.startswith(("extra/replay", "extra/table")) for path in paths(snapshot))
    assert set(snapshot.values["extra"]) == {"epoch", "rng"}
    with pytest.raises(InvalidRequest, match=r"extra/replay/x, which is a part of extra/replay"):
        taken(state, "extra/replay/x")
    with pytest.raises(InvalidRequest, match=r"a part of extra/rng"):
        taken(state, "*/rng/torch")
    snapshot = taken(state, "extra/rng")
    assert not any("/rng/" in path for path in paths(snapshot)) and "rng" not in snapshot.values["extra"]
    live = {**state, "epoch": 0}
    done = restore(Checkpoint(snapshot), live)
    assert live["epoch"] == 1 and any("no random states" in note for note in done.notes)


def test_tied_tensors_go_together() -> None:
    """One name of two is no tensor less, so both are named or none."""
    model = nn.ModuleDict({"a": nn.Linear(2, 2, bias=False), "b": nn.Linear(2, 2, bias=False), "c": nn.Linear(2, 2)})
    model["b"].weight = model["a"].weight  # type: ignore[assignment]
    model.requires_grad_(False)
    for out, kept in ("ab", "ba"):
        with pytest.raises(InvalidRequest, match=rf"model/{out}.weight, and model/{kept}.weight is the same tensor"):
            taken({"model": model}, f"model/{out}.weight")
    snapshot = taken({"model": model}, "model/[ab].weight")
    assert "model/a.weight" not in paths(snapshot) and not snapshot.aliases["model"]


def test_nothing_matched_is_said() -> None:
    """A pattern with a mistake in it leaves nothing out, and the note says so."""
    assert taken({"model": Rotary()}, "model/rotery*").notes == ("exclude= matches no name of the state: model/rotery*",)


@pytest.mark.parametrize("patterns", ["model/x", [3], 3, [b"x"]])
def test_only_patterns(patterns: Any) -> None:
    with pytest.raises(InvalidRequest, match="exclude must be a sequence of patterns"):
        check(patterns, "exclude")


def test_adapters_leave_out_by_themselves() -> None:
    given = NamedSnapshot(frozenset({"model"}), {("model", "w"): torch.ones(1)}, {})
    with pytest.raises(InvalidRequest, match="adapter"):
        taken({"given": given}, "model/w")


@pytest.mark.parametrize("wrap", [lambda m: m, torch.nn.DataParallel, lambda m: Named(m, rename=lambda n: "base." + n)])
def test_what_a_module_makes_itself_is_not_stored(wrap: Any) -> None:
    """Buffers and frozen weights that `_keys_to_ignore_on_save` names; what is trained is stored all the same."""
    saved, live = Listed(), Listed()
    prefix = "base." if isinstance(wrap(saved), Named) else ""
    snapshot = TrainState({"model": wrap(saved)}, 0, 1).snapshot()
    names = {path.removeprefix(f"model/{prefix}") for path in paths(snapshot) if path.startswith("model/")}
    assert names == {"embed.weight", "frozen.weight", "head.weight"}
    note = "left out because the module lists them in _keys_to_ignore_on_save: "
    assert snapshot.notes == (f"{note}model/{prefix}rotary, model/{prefix}frozen.bias",)
    own = live.rotary.clone()
    done = restore(Checkpoint(snapshot), {"model": wrap(live)})
    assert torch.equal(live.head.weight, saved.head.weight) and torch.equal(live.rotary, own)
    assert any(
        "rotary is not in the checkpoint, because the module lists it in _keys_to_ignore_on_save" in note
        for note in done.notes
    )


def test_a_checkpoint_that_has_it_gives_it_back() -> None:
    """One that was saved before, or by a module that lists nothing."""
    plain, live = Rotary(), Listed()
    restore(Checkpoint(taken({"model": plain})), {"model": live})
    assert torch.equal(live.rotary, plain.rotary) and torch.equal(live.frozen.bias, plain.frozen.bias)


def test_listed_and_tied_is_stored() -> None:
    """A head that is tied to the embedding stays an alias of it, whichever of both is listed."""
    for listed in ("embed.weight", "head.weight"):
        model = Rotary()
        model.head.weight = model.embed.weight
        model.embed.requires_grad_(False)
        model._keys_to_ignore_on_save = [listed]  # type: ignore[assignment]
        snapshot = taken({"model": model})
        assert "model/embed.weight" in paths(snapshot) and snapshot.aliases["model"] == {"head.weight": "embed.weight"}


@pytest.mark.parametrize("average", [copy.deepcopy, AveragedModel])
def test_the_average_of_a_trained_weight_is_stored(average: Any) -> None:
    """A copy that requires no gradient is not made by the module: what was averaged would be gone."""
    model = Listed()
    ema = average(model).requires_grad_(False)
    snapshot = taken({"model": model, "ema": ema})
    assert {"ema/head.weight", "model/head.weight"} <= paths(snapshot)
    assert "ema/rotary" not in paths(snapshot)  # a table, in either of them


def test_listed_and_stepped_is_stored() -> None:
    """An optimizer has moments of it, so it is trained, although it is frozen in this phase."""
    model = Listed()
    optim = torch.optim.AdamW([model.head.weight])
    model.head.weight.requires_grad_(False)
    assert "model/head.weight" in paths(taken({"model": model, "optim": optim}))


def test_an_average_under_a_name_with_a_module_around_it() -> None:
    """Mappings of averages often have the names of the wrapped model."""
    model = Rotary()
    ema = {f"module.{name}": tensor.detach().clone() for name, tensor in model.state_dict().items()}
    with pytest.raises(InvalidRequest, match=r"ema/module\.head\.weight, and model/head\.weight is trained"):
        taken({"model": model, "ema": ema}, "ema/*head*")


def test_an_entry_of_tensors_alone_goes_by_its_key() -> None:
    """As any other entry of `extra`, whether or not it has a number beside its tensors; and so it is restored."""
    for replay in ({"x": torch.ones(5), "y": torch.ones(2)}, {"x": torch.ones(5), "n": 1}, torch.ones(5)):
        state = {"model": Rotary(), "replay": replay, "replays": torch.ones(1)}
        snapshot = taken(state, "extra/replay")
        assert {path for path in paths(snapshot) if path.startswith("extra/replay")} == {"extra/replays"}
        restore(Checkpoint(snapshot), state, ignore=["extra/replay"])
        with pytest.raises(StateMismatch, match="extra/replay"):
            restore(Checkpoint(snapshot), state)


def test_each_pattern_that_matches_nothing_is_said() -> None:
    """Also beside one that does."""
    snapshot = taken({"model": Rotary()}, "model/rotary", "model/rotery*", "mode/rotary")
    assert snapshot.notes == (
        "left out by exclude=, so not in the checkpoint: model/rotary",
        "exclude= matches no name of the state: model/rotery*, mode/rotary",
    )
