"""Entries of a DCP state dict are put where a Checkpointer would put them, whatever program wrote them."""

from __future__ import annotations

import argparse
import io
import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import DefaultSavePlanner
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict, get_state_dict

from holdfast.tensors import json_values
from holdfast_formats.errors import StateMismatch
from holdfast_formats.mapping import optimizer_state
from holdfast_formats.mapping.box_moves import same
from holdfast_formats.mapping.listing import ForeignListing, TensorKey
from holdfast_formats.region import Box
from holdfast_formats.rest.jobs import ReadOptions
from holdfast_service.wings.convert.foreign.dcp import export, kinds
from tests.wings.convert.foreign.dcp.directories import DirectoryFiles, assert_same, read, write
from tests.wings.convert.foreign.dcp.saving import Sharded, save_ranks

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is:UserWarning", "ignore:.*TypedStorage:UserWarning")


def _save(path: Path, state: dict[str, Any], **options: Any) -> None:
    dcp.save(state, checkpoint_id=path, no_dist=True, **options)


def _listing(path: Path, **options: bool) -> ForeignListing:
    return kinds.read_dcp(DirectoryFiles(path), ReadOptions(**options))


def _value(listing: ForeignListing, key: str, group: str = "extra") -> Any:
    """A document's value as the client reads it."""
    return json_values.loads(json.dumps(listing.documents[group][key]), key, lambda kind, name: (kind, name))


def _trained() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(3)
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 2))
    bias = [p for name, p in model.named_parameters() if name.endswith("bias")]
    weights = [p for name, p in model.named_parameters() if name.endswith("weight")]
    optimizer = torch.optim.AdamW([{"params": weights, "lr": 0.5}, {"params": bias, "weight_decay": 0.0}])
    for _ in range(2):
        model(torch.randn(8, 3)).sum().backward()
        optimizer.step()
    return model, optimizer


def _check_optimizer(path: Path, listing: ForeignListing, model: torch.nn.Module, optimizer: Any, key: str) -> None:
    assert_same(path, listing, "model", model.state_dict())
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    state = {f"{names[id(p)]}/{kind}": value for p, held in optimizer.state.items() for kind, value in held.items()}
    assert_same(path, listing, "optim", state)
    document = _value(listing, key, "optim")
    assert document["masters"] == document["state"] == document["kinds"] == {}
    live = [[names[id(p)] for p in group["params"]] for group in optimizer.param_groups]
    assert [group["params"] for group in document["groups"].values()] == live
    assert list(document["groups"]) == [group[0] for group in live]
    for kept, group in zip(document["groups"].values(), optimizer.param_groups, strict=True):
        assert {k: v for k, v in kept.items() if k != "params"} == {k: v for k, v in group.items() if k != "params"}


@pytest.mark.parametrize("around", [None, "app"])
@pytest.mark.parametrize("flat", [False, True])
def test_get_state_dict(tmp_path: Path, around: str | None, flat: bool) -> None:
    """A model and its optimizer in torch's two forms, and below one key, as PyTorch's recipe has them."""
    model, optimizer = _trained()
    weights, state = get_state_dict(model, optimizer, options=StateDictOptions(flatten_optimizer_state_dict=flat))
    held = {"model": weights, "optim": state}
    _save(tmp_path, {around: held, "epoch": 4} if around else {**held, "epoch": 4})
    listing = _listing(tmp_path)
    _check_optimizer(tmp_path, listing, model, optimizer, "optim")
    assert listing.documents["extra"] == {"epoch": 4}
    assert listing.notes == (("the outer key 'app' was removed: it only wraps model and optimizer",) if around else ())


def test_torchtitan(tmp_path: Path) -> None:
    """Weights at the top, a flattened optimizer, and what torchtitan keeps of loader, schedule and training."""
    model, optimizer = _trained()
    state = get_optimizer_state_dict(model, optimizer, options=StateDictOptions(flatten_optimizer_state_dict=True))
    loader = {"dp_rank_0": b"\x80\x04N.", "world_size": 1}
    more = {"lr_scheduler": {"last_epoch": 2}, "dataloader": loader, "train_state": {"step": 2, "ntokens_seen": 64}}
    _save(tmp_path, {**model.state_dict(), "optimizer": state, **more})
    listing = _listing(tmp_path)
    _check_optimizer(tmp_path, listing, model, optimizer, "optimizer")
    assert {key: _value(listing, key) for key in listing.documents["extra"]} == {**more, "dataloader.0-of-1": None}
    assert listing.step == 2
    assert listing.notes == ()
    assert {use.use for use in listing.files} == {"state", "tensors"}


def test_a_model_alone(tmp_path: Path) -> None:
    """Only weights, under names that could be anything's."""
    for name, state in {"a": {"weight": torch.ones(2), "bias": torch.zeros(1)}, "b": {"model.x": torch.ones(2)}}.items():
        _save(tmp_path / name, state)
        assert_same(tmp_path / name, _listing(tmp_path / name), "model", state)
    _save(tmp_path / "c", {"optim.state.x.exp_avg": torch.ones(2), "x": torch.zeros(2), "optim.param_groups.x.lr": 0.5},
          planner=DefaultSavePlanner(flatten_state_dict=False))  # fmt: skip
    listing = _listing(tmp_path / "c")
    assert {tuple(key) for key in listing.tensors} == {("model", "x"), ("optim", "x/exp_avg")}
    assert _value(listing, "optim", "optim")["groups"] == {"x": {"params": ["x"], "lr": 0.5}}


def test_lightning(tmp_path: Path) -> None:
    """Two optimizers of one module by the names of parameters, and the rest in meta.pt, which may need code."""
    model, optimizer = _trained()
    state = get_optimizer_state_dict(model, optimizer)
    other = {"state": {"gen.w": {"momentum_buffer": torch.ones(2)}}, "param_groups": [{"params": ["gen.w"], "lr": 1.0}]}
    weights = {**model.state_dict(), "gen.w": torch.zeros(2)}
    _save(tmp_path, {"state_dict": weights, "optimizer_0": state, "optimizer_1": other})
    meta = {"epoch": 1, "global_step": 7, "hyper_parameters": {"lr": 0.5}, "loops": {"fit_loop": {"x": (1, None)}}}
    torch.save(meta, tmp_path / "meta.pt")
    listing = _listing(tmp_path)
    assert_same(tmp_path, listing, "model", weights)
    assert set(listing.documents["optim"]) == {"optimizer_0", "optimizer_1"}
    assert read(tmp_path, listing, "optim", "gen.w/momentum_buffer").tolist() == [1, 1]
    assert _value(listing, "lightning") == meta
    assert listing.step == 7
    assert [use.use for use in listing.files if use.file == "meta.pt"] == ["state"]
    torch.save({"callback": random.Random()}, tmp_path / "meta.pt")
    listing = _listing(tmp_path)
    [use] = [use for use in listing.files if use.file == "meta.pt"]
    assert use.use == "unused"
    assert "random.Random" in use.reason
    assert any("meta.pt was left out" in note for note in listing.notes)


def test_values(tmp_path: Path) -> None:
    """Tensors and arrays inside of values stand beside the document; what would need code is left out by name."""
    ring = {"order": torch.arange(4), "next": [torch.ones(2), {"a": 1}], "plain": [1, 2, (3.5, "x")]}
    more = {
        "ring": ring,
        "pair": (torch.ones(3), 2),
        "numbers": np.arange(3),
        "buffer": io.BytesIO(b"abc"),
        "dtype": torch.bfloat16,
        "device": torch.device("cuda:1"),
        "code": random.Random(),
        "arguments": argparse.Namespace(lr=0.5, code=print),
        "ema": {"x": torch.ones(2)},
        "flat": {"a": torch.ones(1), "b": torch.zeros(1)},
        "rng": torch.zeros(3, dtype=torch.uint8),
        "single": torch.tensor(5),
    }
    _save(tmp_path, {"model": {"x": torch.zeros(2), "note": "kept"}, **more})
    listing = _listing(tmp_path)
    assert_same(tmp_path, listing, "ema", {"x": torch.ones(2)})
    assert _value(listing, "ring") == {
        "order": ("tensor", "ring/order"),
        "next": [("tensor", "ring/next/0"), {"a": 1}],
        "plain": [1, 2, (3.5, "x")],
    }
    assert read(tmp_path, listing, "extra", "ring/next/0").tolist() == [1, 1]
    assert _value(listing, "pair") == (("tensor", "pair/0"), 2)
    assert read(tmp_path, listing, "extra", "pair/0").tolist() == [1, 1, 1]
    assert _value(listing, "numbers") == ("array", "numbers")
    assert read(tmp_path, listing, "extra", "numbers").tolist() == [0, 1, 2]
    assert _value(listing, "buffer") == b"abc"
    assert _value(listing, "dtype") == torch.bfloat16
    assert _value(listing, "device") == torch.device("cuda:1")
    assert _value(listing, "note", "model") == "kept"
    names = {key.name for key in listing.tensors if key.group == "extra"}
    assert names == {"ring/order", "ring/next/0", "pair/0", "numbers", "flat/a", "flat/b", "rng_", "single"}
    assert "code" not in listing.documents["extra"]
    left = [note for note in listing.notes if "left out" in note]
    assert any(note.startswith("code was left out: ") and "random.Random" in note for note in left)
    assert any(note.startswith("arguments was left out: ") and "print" in note for note in left)
    assert len(left) == 2


def test_optimizers_that_have_no_names(tmp_path: Path) -> None:
    """State by number, or with tensors in other values, is kept as it is, and said."""
    model, optimizer = _trained()
    _save(tmp_path / "a", {"model": model.state_dict(), "optim": optimizer.state_dict()})
    listing = _listing(tmp_path / "a")
    [note] = listing.notes
    assert note.startswith("optim is kept unchanged in group extra: its state uses parameter numbers")
    assert not any(key.group == "optim" for key in listing.tensors)
    assert _value(listing, "optim")["state"]["0"]["exp_avg"] == ("tensor", "optim/state/0/exp_avg")
    found = read(tmp_path / "a", listing, "extra", "optim/state/0/exp_avg")
    assert found.tolist() == optimizer.state_dict()["state"][0]["exp_avg"].tolist()
    odd = {
        "deep": ({"state": {"x": {"a": {"b": torch.ones(1)}}}, "param_groups": [{"params": ["x"]}]}, "not an entry of an"),
        "lost": ({"state": {"y": {"a": torch.ones(1)}}, "param_groups": [{"params": ["x"]}]}, "lack 'y'"),
        "twice": ({"state": {}, "param_groups": [{"params": ["x"]}, {"params": ["x"]}]}, "in two of its parameter groups"),
        "numbers": ({"state": {"x": {"a": torch.ones(1)}}, "param_groups": [{"params": [0]}]}, "have no names"),
        "groups": ({"state": {"x": {"a": torch.ones(1)}}, "param_groups": [{"lr": 1.0}]}, "lacks its parameters"),
        "slash": (
            {"state": {"x": {"a/b": torch.ones(1)}}, "param_groups": [{"params": ["x"]}]},
            "cannot be stored in a checkpoint",
        ),
    }
    for name, (state, said) in odd.items():
        _save(tmp_path / name, {"model": {"x": torch.zeros(1)}, "optim": state})
        [note] = _listing(tmp_path / name).notes
        assert said in note


def test_masters_and_values_of_an_optimizer(tmp_path: Path) -> None:
    """Full-precision copies are masters; numbers stay in the document; a learning rate may be a tensor."""
    state = {"x": {"master_param": torch.ones(2), "step": 4, "master": torch.ones(3)}}
    groups = [{"params": ["x"], "lr": torch.tensor(0.5), "betas": (0.9, 0.95)}]
    _save(tmp_path, {"model": {"x": torch.zeros(2).bfloat16()}, "optim": {"state": state, "param_groups": groups}})
    listing = _listing(tmp_path)
    assert_same(tmp_path, listing, "master", {"x": torch.ones(2)})
    document = _value(listing, "optim", "optim")
    assert document["masters"] == {"master_param": ["x"]}
    assert document["state"] == {"x": {"step": 4}}
    kind, name = document["groups"]["x"]["lr"]
    assert kind == "tensor"
    assert read(tmp_path, listing, "optim", name) == 0.5
    assert TensorKey("optim", "x/master") in listing.tensors


def test_ranks_with_parts(tmp_path: Path) -> None:
    """Two ranks with shards of weights and moments."""
    whole = torch.arange(12.0).reshape(4, 3)
    rows = [Box((0, 0), (2, 3)), Box((2, 0), (2, 3))]
    states: list[dict[str, Any]] = [
        {
            "model": {"x": Sharded(whole, [row])},
            "optim": {
                "state": {"x": {"exp_avg": Sharded(whole + 1, [row]), "step": torch.tensor(3.0)}},
                "param_groups": [{"params": ["x"], "lr": 0.5}],
            },
        }
        for row in rows
    ]
    save_ranks(tmp_path, states)
    listing = _listing(tmp_path)
    assert_same(tmp_path, listing, "model", {"x": whole})
    assert_same(tmp_path, listing, "optim", {"x/exp_avg": whole + 1, "x/step": torch.tensor(3.0)})


def test_no_model_is_refused_and_taken_as_it_is(tmp_path: Path) -> None:
    """A state dict whose keys say nothing; two that may be the model; and `--as-is`."""
    state = {"net": [{"x": torch.ones(2)}], "step": torch.tensor(3), "note": "a"}
    _save(tmp_path / "a", state)
    with pytest.raises(StateMismatch, match=r"no key is known to hold a model; the keys are net, step"):
        _listing(tmp_path / "a")
    listing = _listing(tmp_path / "a", as_is=True)
    assert_same(tmp_path / "a", listing, "model", {"net.0.x": torch.ones(2), "step": torch.tensor(3)})
    assert listing.documents == {"extra": {"note": "a"}}
    _save(tmp_path / "b", {"model": {"x": torch.ones(2)}, "state_dict": {"x": torch.ones(2)}})
    with pytest.raises(StateMismatch, match="'model' and 'state_dict' could be the model"):
        _listing(tmp_path / "b")
    _save(tmp_path / "c", {"optim": {"state": {}, "param_groups": []}, "epoch": 1})
    with pytest.raises(StateMismatch, match=r"the keys are \(no tensor\)"):
        _listing(tmp_path / "c")


@pytest.mark.parametrize("layout", ["fsdp", "torchtitan"])
def test_there_and_back(tmp_path: Path, layout: str) -> None:
    """What was read is exported, and read again as the same listing."""
    model, optimizer = _trained()
    weights, state = get_state_dict(model, optimizer)
    more = {"loader": {"a": [1, (2, b"x")], "t": torch.arange(3)}, "flat": {"y": torch.ones(1)}}
    state["state"]["0.weight"]["master_param"] = torch.ones(4, 3)
    _save(tmp_path / "one", {"model": weights, "optimizer": state, **more})
    first = _listing(tmp_path / "one")
    made = export.target_files([same(tensor) for tensor in first.tensors.values()], first.documents, layout)
    assert made.left_out == ()
    (tmp_path / "two").mkdir()
    write(tmp_path / "two", made.files, DirectoryFiles(tmp_path / "one"), first.tensors)
    second = _listing(tmp_path / "two")
    assert second.documents == first.documents
    assert second.notes == ()
    assert {key: tensor.spec for key, tensor in second.tensors.items()} == {
        key: tensor.spec for key, tensor in first.tensors.items()
    }
    for group, name in first.tensors:
        one, two = (read(tmp_path / at, listing, group, name) for at, listing in (("one", first), ("two", second)))
        assert one.tobytes() == two.tobytes(), name
    assert optimizer_state.MASTER_GROUP in {key.group for key in second.tensors}


def test_an_optimizer_among_the_weights(tmp_path: Path) -> None:
    """`{**model, **optimizer}` with flattened keys: the moments are no weights; a buffer called `state` still is."""
    model, optimizer = _trained()
    model.register_buffer("state", torch.ones(2))
    options = StateDictOptions(flatten_optimizer_state_dict=True)
    weights, joined = get_state_dict(model, optimizer, options=options)
    _save(tmp_path / "a", {**weights, **joined})
    listing = _listing(tmp_path / "a")
    _check_optimizer(tmp_path / "a", listing, model, optimizer, "optimizer")
    assert any("beside the weights" in note for note in listing.notes)
    _save(tmp_path / "b", {"state.x": torch.ones(1), "x": torch.ones(1), "state.mean": torch.ones(1)})
    assert_same(
        tmp_path / "b", _listing(tmp_path / "b"), "model", dict.fromkeys(("state.x", "x", "state.mean"), torch.ones(1))
    )


@pytest.mark.parametrize("flattened", [False, True])
def test_weights_without_dots_beside_an_optimizer_of_them(tmp_path: Path, flattened: bool) -> None:
    """As torchtitan saves: what the optimizer has state of are weights, whatever stands beside them."""
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    options = StateDictOptions(flatten_optimizer_state_dict=flattened)
    weights, state = get_state_dict(model, optimizer, options=options)
    _save(tmp_path, {**weights, "optimizer": state, "train_state": {"step": torch.tensor(3)}})
    listing = _listing(tmp_path)
    _check_optimizer(tmp_path, listing, model, optimizer, "optimizer")
    assert TensorKey("extra", "train_state/step") in listing.tensors
