"""Modules under other names: as one group, a part of them, or by the names that another program expects."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch import nn
from torch.optim.swa_utils import AveragedModel

import holdfast
from holdfast import Checkpointer, Fragment, Named
from holdfast.state.train_state import TrainState
from holdfast_formats import naming
from holdfast_formats.errors import InvalidRequest, LimitExceeded, StateMismatch
from tests.client.checkpoint_in_memory import Checkpoint, restore, save
from tests.daemons import RunningDaemon

_runs = itertools.count()


class Part(nn.Module):
    """The layers of one pipeline stage, by their numbers in the whole model."""

    def __init__(self, *layers: int, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.layers = nn.ModuleDict({str(number): nn.Linear(3, 3) for number in layers})
        self.register_buffer(f"scale{layers[0]}", torch.rand(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers.values():
            x = layer(x)
        return x


class Noting(nn.Module):
    """A module with a value of its own besides its tensors."""

    def __init__(self, note: object) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)
        self.note = note

    def get_extra_state(self) -> object:
        return self.note

    def set_extra_state(self, state: object) -> None:
        self.note = state


def adapter(seed: int = 0) -> nn.Module:
    """A frozen base with a trained adapter, by PEFT's names."""
    torch.manual_seed(seed)
    base = nn.Linear(4, 4, bias=False)
    model = nn.Module()
    model.base_model = nn.ModuleDict({"q": base, "lora_A_default": nn.Linear(4, 2, bias=False)})
    model.base_model["lora_B_default"] = nn.Linear(2, 4, bias=False)
    for parameter in base.parameters():
        parameter.requires_grad = False
    return model


def as_peft(name: str) -> str:
    return name.replace("_default", "")


def stepped(*modules: nn.Module) -> torch.optim.Optimizer:
    """An optimizer of all that is trained, with moments."""
    trained = [parameter for module in modules for parameter in module.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=0.1)
    for parameter in trained:
        parameter.grad = torch.randn_like(parameter)
    optimizer.step()
    return optimizer


def names(state: dict, group: str = "model") -> list[str]:
    """The names of a group's tensors."""
    return [leaf.name for leaf in TrainState(state, 0, 1).snapshot().leaves if leaf.group == group]


def test_pipeline_parts_are_one_group_and_optimizers_follow() -> None:
    """What was saved in parts comes back into the whole model, and the other way round, with each parameter's moments."""
    parts = [Part(0, 1, seed=1), Part(2, seed=2)]
    state = {"model": Named(parts), "optim": stepped(*parts)}
    saved = save(state)
    whole = nn.Module()
    whole.layers = nn.ModuleDict({str(number): nn.Linear(3, 3) for number in range(3)})
    whole.register_buffer("scale0", torch.zeros(2))
    whole.register_buffer("scale2", torch.zeros(2))
    plain = {"model": whole, "optim": torch.optim.AdamW(whole.parameters(), lr=0.5)}
    restore(saved, plain)
    for part in parts:
        for name, value in part.state_dict().items():
            assert torch.equal(whole.state_dict()[name], value), name
    parameters = dict(whole.named_parameters())
    for part in parts:
        for name, parameter in part.named_parameters():
            kept, found = (one["optim"].state[p] for one, p in ((state, parameter), (plain, parameters[name])))
            assert kept.keys() == found.keys() and all(torch.equal(kept[key], found[key]) for key in kept)
    others = [Part(0, 1, seed=3), Part(2, seed=4)]
    memory = others[0].layers["1"].weight.data_ptr()
    restore(save(plain), {"model": Named(others), "optim": stepped(*others)})
    assert torch.equal(others[0].layers["1"].weight, parts[0].layers["1"].weight)
    assert others[0].layers["1"].weight.data_ptr() == memory


@pytest.mark.parametrize("rename", [as_peft, {"base_model.lora_A_default.weight": "base_model.lora_A.weight"}])
def test_renamed_and_chosen(rename: object) -> None:
    """Only what is wanted is stored, by the names that are wanted, the optimizer's state as well."""
    model = adapter()
    state = {"adapter_model": Named(model, rename, ["*lora_A*"])}
    assert names(state, "adapter_model") == ["base_model.lora_A.weight"]
    model.base_model["lora_B_default"].weight.requires_grad = False
    state["optim"] = stepped(model)
    moments = [name for name in names(state, "optim") if name.endswith("exp_avg")]
    assert moments == ["adapter_model.base_model.lora_A.weight/exp_avg"]
    other = adapter(1)
    other.base_model["lora_B_default"].weight.requires_grad = False
    base = other.base_model["q"].weight.clone()
    restore(save(state), {"adapter_model": Named(other, rename, ["*lora_A*"]), "optim": stepped(other)})
    assert torch.equal(other.base_model["lora_A_default"].weight, model.base_model["lora_A_default"].weight)
    assert torch.equal(other.base_model["q"].weight, base)


@pytest.mark.parametrize(
    "only",
    [
        ["*lora_A*", "*lora_B*"],
        (re.compile(r".*lora_[AB].*"),),
        lambda name: "lora" in name,
        lambda name: re.search("lora", name),
    ],
)
def test_every_way_to_choose(only: object) -> None:
    """Globs, regular expressions and functions see the modules' own names."""
    assert names({"model": Named(adapter(), as_peft, only)}) == [
        "base_model.lora_A.weight",
        "base_model.lora_B.weight",
    ]


def test_the_key_is_the_group() -> None:
    """Unlike a module that is the only one, which is always the group model; reserved names stay reserved."""
    model = nn.Linear(2, 2)
    assert TrainState({"net": model}, 0, 1).groups() == ("model", "extra")
    assert TrainState({"net": Named(model)}, 0, 1).groups() == ("net", "extra")
    assert TrainState({"ema": Named(model)}, 0, 1).groups() == ("ema", "extra")
    assert TrainState({"a": Named(model), "net": nn.Linear(1, 1)}, 0, 1).groups() == ("a", "net", "extra")
    for key in ("optim", "master", "extra", "Net", "a-b"):
        with pytest.raises(InvalidRequest):
            TrainState({key: Named(model)}, 0, 1)


def test_wrappers_buffers_and_own_values() -> None:
    """Names are those that the modules would have without it; values of get_extra_state are renamed and chosen too."""
    compiled = torch.compile(nn.Linear(2, 2))
    assert names({"model": Named(compiled, lambda name: f"x.{name}")}) == ["x.weight", "x.bias"]
    assert "n_averaged" in names({"ema": Named(AveragedModel(nn.Linear(2, 2)))}, "ema")
    saved = save({"model": Named([Noting("one")], lambda name: f"x.{name}")})
    fresh = Noting("two")
    restore(saved, {"model": Named(fresh, lambda name: f"x.{name}")})
    assert fresh.note == "one"
    restore(
        save({"model": Named(Noting("one"), only=["linear.*"])}), {"model": Named(fresh := Noting(2), only=["linear.*"])}
    )
    assert fresh.note == 2


def test_what_is_one_tensor_may_have_one_name() -> None:
    """Parts that share an embedding, under one name or two: it is stored once, and both see what is restored."""
    shared = nn.Parameter(torch.rand(3))
    for second in ("embed", "head"):
        parts = [nn.Module(), nn.Module()]
        parts[0].register_parameter("embed", shared)
        parts[1].register_parameter(second, shared)
        state = {"model": Named(parts), "optim": torch.optim.SGD([shared], lr=0.1)}
        assert names(state) == ["embed"]
        expected, saved = shared.detach().clone(), save(state)
        with torch.no_grad():
            shared.zero_()
        restore(saved, state)
        assert torch.equal(shared, expected)
    tied = nn.ModuleDict({"a": nn.Linear(2, 2), "b": nn.Linear(2, 2)})
    tied["b"].weight = tied["a"].weight
    assert names({"model": Named(tied, lambda name: name.replace("b.weight", "a.weight"))}) == [
        "a.weight",
        "a.bias",
        "b.bias",
    ]


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: Named([Part(0), Part(0, seed=1)]), "two modules have 'scale0', and they differ"),
        (lambda: Named(Part(0, 1), lambda name: name.replace("1", "0")), r"'layers\.0\..*' and 'layers\.1\..*' are not one"),
        (
            lambda: Named([Noting(1), Noting(1)], lambda name: f"{name}{next(_runs)}" if "lin" in name else name),
            "_extra_state",
        ),
        (lambda: Named(Noting(1), {"linear.bias": "_extra_state"}), "_extra_state"),
        (lambda: Named(Part(0), lambda name: None), "rename= of Named makes None of 'scale0'"),
        (lambda: Named(Part(0), lambda name: b"x"), "which is not a name"),
        (lambda: Named(Part(0), lambda name: ""), "which is not a name"),
        (lambda: Named(Part(0), {"scale0": 3}), "makes 3 of 'scale0'"),
        (lambda: Named(Part(0), {"scale0": "s", "scale1": "t"}), "has 'scale1', which no module"),
        (lambda: Named(Part(0), lambda name: f"ranks/{name}"), "reserved"),
        (lambda: Named(Part(0), lambda name: "__metadata__" if "scale" in name else name), "__metadata__"),
        (lambda: Named(Part(0), lambda name: f"\ud800{name}"), "not valid Unicode"),
        (lambda: Named(Part(0), only=["lora"]), "keeps none of the names"),
        (lambda: Named(Part(0), only=[]), "keeps none of the names"),
    ],
)
def test_names_that_cannot_be_are_refused(make, says: str) -> None:
    """Before anything is staged, with the entry's key and the tensor's name."""
    with pytest.raises(InvalidRequest, match=says):
        TrainState({"model": make()}, 0, 1).snapshot()


def test_names_that_are_too_long() -> None:
    """As for modules."""
    with pytest.raises(LimitExceeded):
        TrainState({"model": Named(Part(0), lambda name: name * 5000)}, 0, 1).snapshot()


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ((None,), "not a NoneType"),
        (("model",), "not a str"),
        (({"a": nn.Linear(1, 1)},), "not a dict"),
        (([],), "is empty"),
        (([nn.Linear(1, 1), torch.ones(1)],), "holds a Tensor"),
        ((Named(nn.Linear(1, 1)),), "not a Named"),
        (([shared := nn.Linear(1, 1), shared],), "twice"),
        ((nn.Linear(1, 1), "prefix."), "rename="),
        ((nn.Linear(1, 1), ["a"]), "rename="),
        ((nn.Linear(1, 1), None, "*lora*"), "list of patterns"),
        ((nn.Linear(1, 1), None, re.compile("x")), "list of patterns"),
        ((nn.Linear(1, 1), None, {"weight"}), "list of patterns"),
        ((nn.Linear(1, 1), None, ["a", 3]), "has 3"),
        ((nn.Linear(1, 1), None, [re.compile(b"x")]), "regular expression for text"),
    ],
)
def test_arguments_that_make_no_sense(arguments: tuple, says: str) -> None:
    """Refused where they are written."""
    with pytest.raises(InvalidRequest, match=says):
        Named(*arguments)


def test_an_optimizer_of_what_is_left_out_is_refused() -> None:
    """What it trains would be lost. A tensor that is kept under another name, or by another entry, is not lost."""
    model = adapter()
    state = {"adapter_model": Named(model, only=["*lora_A*"]), "optim": stepped(model)}
    with pytest.raises(InvalidRequest, match=r"optim steps the parameter 'base_model\.lora_B_default\.weight', which only="):
        TrainState(state, 0, 1)
    TrainState({**state, "rest": Named(model, only=["*lora_B*"])}, 0, 1).snapshot()
    tied = nn.ModuleDict({"a": nn.Linear(2, 2, bias=False), "b": nn.Linear(2, 2, bias=False)})
    tied["b"].weight = tied["a"].weight
    assert names({"model": Named(tied, only=["b.*"]), "optim": torch.optim.SGD(tied.parameters())}) == ["b.weight"]
    with pytest.raises(InvalidRequest, match="belongs to no module"):
        TrainState({**state, "optim": torch.optim.SGD([torch.nn.Parameter(torch.ones(1))])}, 0, 1)


def test_only_does_not_excuse_what_is_stored_besides() -> None:
    """A checkpoint of all names is not restored in silence into a part of them; strict=False or ignore say that it may."""
    model, other = Part(0, 1), Part(0, 1, seed=5)
    state = {"model": Named(other, only=["layers.0.*"])}
    with pytest.raises(StateMismatch, match=r"model/layers\.1\.weight"):
        restore(save({"model": model}), state)
    kept = other.layers["1"].weight.clone()
    restore(save({"model": model}), state, strict=False)
    assert torch.equal(other.layers["0"].weight, model.layers["0"].weight) and torch.equal(other.layers["1"].weight, kept)


@given(
    owners=st.dictionaries(st.sampled_from("abcdef"), st.integers(0, 2), min_size=1),
    stored=st.permutations(["u", "v.w", "x", "a", "b", "c"]),
)
def test_any_distribution_under_any_names_comes_back(owners: dict[str, int], stored: list[str]) -> None:
    """Tensors of up to three modules, stored by names that may be another tensor's own."""
    to = dict(zip("abcdef", stored, strict=True))

    def modules(seed: int) -> list[nn.Module]:
        torch.manual_seed(seed)
        made = [nn.Module() for _ in range(3)]
        for name, owner in owners.items():
            made[owner].register_parameter(name, nn.Parameter(torch.rand(2)))
        return made

    saved = save({"model": Named(modules(1), lambda name: to[name])})
    assert {name for group, name in saved.tensors if group == "model"} == {to[name] for name in owners}
    fresh = modules(2)
    restore(saved, {"model": Named(fresh, {name: to[name] for name in owners})})
    for one, two in zip(modules(1), fresh, strict=True):
        assert all(torch.equal(value, two.state_dict()[name]) for name, value in one.state_dict().items())


def test_an_adapter_alone_is_a_directory_that_loads(daemon: RunningDaemon, run: str, tmp_path: Path) -> None:
    """Its files are adapter_model.safetensors and nothing of a model; it trains, saves in the background, and comes back."""
    model = adapter()
    optimizer = stepped(model)
    state = {"adapter_model": Named(model, as_peft, ["*lora_*"]), "optim": optimizer}
    assets = {"adapter_config.json": {"r": 2}}
    with Checkpointer(run, state, at=daemon.socket, assets=assets) as checkpointer:
        for step in (1, 2, 3):
            ticket = checkpointer.save(step)
            expected = {as_peft(name): value.clone() for name, value in model.state_dict().items() if "lora" in name}
            for parameter in model.parameters():
                parameter.grad = torch.randn_like(parameter)
            optimizer.step()
            ticket.result()
        assert checkpointer.restore() == 3
    directory = daemon.root / naming.checkpoint_path(run, 3)
    found = load_file(directory / "adapter_model.safetensors")
    assert found.keys() == expected.keys() and all(torch.equal(found[name], expected[name]) for name in found)
    assert not list(directory.glob("model*")) and (directory / "adapter_config.json").exists()
    assert (directory / "adapter_model.safetensors.index.json").exists()
    with holdfast.open(directory) as checkpoint:
        assert checkpoint.groups == ("adapter_model", "optim", "extra")
        assert checkpoint.read("base_model.lora_A.weight", group="adapter_model").shape == (2, 4)
    assert all(torch.equal(value, expected[as_peft(name)]) for name, value in model.state_dict().items() if "lora" in name)
    many = f"{run}-many"
    with Checkpointer(many, state, at=daemon.socket, file_bytes_max=32) as checkpointer:
        checkpointer.save(1, wait="durable")
    shards = sorted((daemon.root / naming.checkpoint_path(many, 1)).glob("adapter_model-*.safetensors"))
    assert [path.name for path in shards] == [f"adapter_model-0000{i}-of-00002.safetensors" for i in (1, 2)]


def test_buffers_are_copied_at_once(daemon: RunningDaemon, run: str) -> None:
    """A forward changes them, so they are not left for the background, in a Named either."""
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    optimizer = stepped(model)
    with Checkpointer(run, {"model": Named(model), "optim": optimizer}, at=daemon.socket) as checkpointer:
        expected = model[1].running_mean.clone()
        ticket = checkpointer.save(1)
        with torch.no_grad():
            model[1].running_mean.fill_(7.0)
        ticket.result()
        assert checkpointer.restore() == 1
    assert torch.equal(model[1].running_mean, expected)


def test_a_module_that_changes_is_seen() -> None:
    """A walk through the state is reused only while the modules inside are what they were."""
    part = Part(0)
    state = TrainState({"model": Named([part])}, 0, 1)
    before = state.snapshot()
    assert all(one is two for one, two in zip(before.leaves, state.snapshot().leaves, strict=True) if one.group == "model")
    part.layers["9"] = nn.Linear(3, 3)
    added = {leaf.name for leaf in state.snapshot().leaves} - {leaf.name for leaf in before.leaves}
    assert added == {"layers.9.weight", "layers.9.bias"}


def test_functions_that_change_their_mind_are_asked_again() -> None:
    """A layer that is unfrozen later is in the next save, under the name that it has then; a kept walk left it out."""
    part, chosen, prefix = Part(0), {"layers.0.weight"}, "a"
    named = Named(part, only=lambda name: name in chosen, rename=lambda name: f"{prefix}.{name}")
    state = TrainState({"model": named}, 0, 1)

    def names() -> set[str]:
        return {leaf.name for leaf in state.snapshot().leaves if leaf.group == "model"}

    assert names() == {"a.layers.0.weight"}
    chosen.add("layers.0.bias")
    assert names() == {"a.layers.0.weight", "a.layers.0.bias"}
    prefix = "b"
    assert names() == {"b.layers.0.weight", "b.layers.0.bias"}


def test_a_framework_s_partitions_stand_for_the_tensors():
    """`shards` says which parts this rank has; names, buffers and ties stay the module's, and restores fill the parts."""
    module = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3))
    whole = {name: value.detach().clone() for name, value in module.state_dict().items()}
    parts = [
        {
            name: Fragment(value.detach().reshape(-1)[a:b].clone(), value.shape, flat=(a, b))
            for name, value in module.named_parameters()
            for a, b in [(value.numel() // 2 * rank, value.numel() // 2 if rank == 0 else value.numel())]
        }
        for rank in range(2)
    ]
    for parameter in module.parameters():
        parameter.data = torch.empty(0)  # as a framework that keeps only the partitions

    def state(rank: int) -> dict[str, object]:
        return {"model": Named(module, shards=lambda name, value: parts[rank].get(name, value))}

    checkpoint = Checkpoint(*(TrainState(state(rank), rank, 2).snapshot() for rank in range(2)))
    assert all(torch.equal(checkpoint.tensors["model", name], value) for name, value in whole.items())
    train = TrainState(state(0), 0, 2)
    first = train.snapshot()
    assert all(a is b for a, b in zip(first.leaves[:3], train.snapshot().leaves[:3], strict=True))
    moved = parts[0]["0.weight"] = parts[0]["0.weight"].with_tensor(torch.zeros(6))
    leaf = next(leaf for leaf in train.snapshot().leaves if leaf.name == "0.weight")
    assert leaf.pieces[0].tensor.data_ptr() == moved.tensor.data_ptr()
    restoration = train.prepare(checkpoint.stored())
    checkpoint.fill(restoration)
    assert torch.equal(moved.tensor, whole["0.weight"].reshape(-1)[:6])
    with pytest.raises(InvalidRequest, match="shards= of Named must return a tensor"):
        TrainState({"model": Named(module, shards=lambda name, value: 3)}, 0, 1)
    with pytest.raises(InvalidRequest, match="shards= of Named must be a function"):
        Named(module, shards={})


@pytest.mark.parametrize("cast", [torch.Tensor.clone, torch.Tensor.double, lambda value: value.new_zeros(2)])
def test_shards_that_are_made_for_the_answer_are_refused(cast: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """A restore into a copy would be lost without a word: before, the restore said that all was well."""
    module = nn.Linear(4, 3)
    with pytest.raises(InvalidRequest, match=r"model.weight: shards= of Named returns different memory at every call"):
        TrainState({"model": Named(module, shards=lambda name, value: cast(value.detach()))}, 0, 1)
    views = Named(
        module, shards=lambda name, value: Fragment(value.detach().view(-1)[:], value.shape, flat=(0, value.numel()))
    )
    leaves = TrainState({"model": views}, 0, 1).snapshot().leaves
    assert sum(leaf.group == "model" for leaf in leaves) == 2
