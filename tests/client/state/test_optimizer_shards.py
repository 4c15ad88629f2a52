"""An optimizer by parameter name: what it writes and reads is what torch's optimizers over whole parameters do."""

from __future__ import annotations

import json
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import holdfast
from holdfast import ParallelLayout
from holdfast.checkpointer import Checkpointer
from holdfast.launch import Launch
from holdfast.layout.declared import declare
from holdfast.left_out import LeftOutNote
from holdfast.stage import background_safe
from holdfast.state import optimizer_wrappers
from holdfast.state.optimizer_shards import OptimizerShards
from holdfast.state.train_state import TrainState
from holdfast.tensors import optimizer_documents
from holdfast.tensors.fragments import Fragment
from holdfast_formats.disk import state_json
from holdfast_formats.errors import InvalidRequest, StateMismatch
from tests.client.checkpoint_in_memory import Checkpoint, restore, save
from tests.client.state.test_fragment_lists import Dealt, dealt

SHAPES = {"embed.weight": (5, 3), "norm": (4,), "head.weight": (3, 5), "scale": ()}
GROUPS = (("embed.weight", "head.weight"), ("norm", "scale"))
MOMENTS = ("exp_avg", "exp_avg_sq")


def parameters(seed: int = 0) -> dict[str, nn.Parameter]:
    torch.manual_seed(seed)
    return {name: nn.Parameter(torch.randn(shape)) for name, shape in SHAPES.items()}


def adam(weights: dict[str, nn.Parameter], steps: int = 0, lr: float = 0.1) -> torch.optim.AdamW:
    groups = [{"params": [weights[name] for name in names], "lr": lr * (n + 1)} for n, names in enumerate(GROUPS)]
    optimizer = torch.optim.AdamW(groups)
    generator = torch.Generator().manual_seed(steps)
    for _ in range(steps):
        for weight in weights.values():
            weight.grad = torch.randn(weight.shape, generator=generator)
        optimizer.step()
    return optimizer


class Partition:
    """A rank's part of an optimizer, as a framework would keep it: runs of boxes of every parameter."""

    def __init__(self, runs: dict[str, list[Any]], lr: float = 0.5, fresh: bool = False, masters: str = "") -> None:
        self.groups_now = [{"params": list(names), "lr": lr} for names in GROUPS]
        self.runs, self.installed = runs, 0
        self.kept: dict[str, dict[str, Any]] = {} if fresh else {name: self._moments(name) for name in SHAPES}
        if masters:
            for name in SHAPES:
                self.kept.setdefault(name, {})[masters] = self.parts(name)
        self.shards = OptimizerShards(groups=lambda: self.groups_now, state=lambda: self.kept, install=self.install)

    def _moments(self, name: str) -> dict[str, Any]:
        return {"step": torch.zeros(()), **{key: self.parts(name) for key in MOMENTS}}

    def parts(self, name: str) -> Any:
        shape = SHAPES[name]
        parts = [
            Fragment(torch.zeros(b - a), shape, offset=box.offset, box=box.shape, flat=(a, b))
            for box, (a, b) in self.runs[name]
        ]
        return parts or Fragment(torch.empty(0), shape, flat=(0, 0))

    def install(self, groups: list[dict[str, Any]], values: dict[str, dict[str, Any]]) -> None:
        self.installed += 1
        for live, stored in zip(self.groups_now, groups, strict=True):
            live.update(stored)
        for name, made in values.items():
            self.kept.setdefault(name, {}).update(made)

    def model(self, weights: dict[str, nn.Parameter]) -> dict[str, Any]:
        """The state: weights whole where the rank's state is there, else parts of them, as ZeRO-3 has them."""
        return {"model": weights, "optim": self.shards}


class Sharded(Partition):
    """The same with weights that are parts too; a fresh optimizer has no other place to put its state."""

    def model(self, weights: dict[str, nn.Parameter]) -> dict[str, Any]:
        return {"model": {name: self.parts(name) for name in SHAPES}, "optim": self.shards}


@st.composite
def partitions(draw: st.DrawFn) -> list[dict[str, list[Any]]]:
    """Every parameter dealt out to the same number of ranks."""
    cut: dict[str, Dealt] = {name: draw(dealt(shape)) for name, shape in SHAPES.items()}
    world = max(map(len, cut.values()))
    return [{name: ranks[rank] if rank < len(ranks) else [] for name, ranks in cut.items()} for rank in range(world)]


def document(checkpoint: Checkpoint) -> str:
    """What a rank gets of the optimizer's document: that of all ranks together."""
    texts = list(state_json.by_rank(checkpoint.state, "optim").get("optim", {}).values())
    own = state_json.for_rank(checkpoint.state, 0).values["optim"]["optim"]
    return optimizer_documents.merged(list(dict.fromkeys([own, *texts])))


def fill(checkpoint: Checkpoint, states: list[dict[str, Any]]) -> None:
    for rank, state in enumerate(states):
        restoration = TrainState(state, rank, len(states)).prepare(checkpoint.stored(rank))
        checkpoint.fill(restoration)
        restoration.apply()
        assert not restoration.missing and not restoration.unexpected
        assert not [note for note in restoration.notes if "optim" in note]  # others are about random streams


def tensors(checkpoint: Checkpoint, group: str = "optim") -> dict[str, torch.Tensor]:
    return {name: value for (where, name), value in checkpoint.tensors.items() if where == group}


def assert_same(one: Checkpoint, other: Checkpoint, group: str = "optim") -> None:
    a, b = tensors(one, group), tensors(other, group)
    assert a.keys() == b.keys() and all(torch.equal(a[name], b[name]) and a[name].dtype == b[name].dtype for name in a)


@given(partitions(), partitions(), st.booleans(), st.sampled_from([Partition, Sharded]))
def test_any_partition_is_stored_as_a_whole_optimizer(saved, wanted, fresh, kind):
    """A torch optimizer, any partition of it, any other, and a torch optimizer again: the same tensors and document."""
    weights = parameters()
    whole = save({"model": weights, "optim": adam(weights, 2)})
    kind = Sharded if fresh else kind
    for runs in (saved, wanted):
        ranks = [kind(own, fresh=fresh) for own in runs]
        states = [rank.model(weights) for rank in ranks]
        fill(whole, states)
        assert all(rank.installed == 1 and [g["lr"] for g in rank.groups_now] == [0.1, 0.2] for rank in ranks)
        again = Checkpoint(*(TrainState(state, rank, len(states)).snapshot() for rank, state in enumerate(states)))
        assert_same(whole, again)
        assert document(again) == document(whole)
        whole = again
    other = parameters(1)
    resumed = adam(other)
    restore(whole, {"model": other, "optim": resumed})
    for name, weight in weights.items():
        for key in ("step", *MOMENTS):
            assert torch.equal(resumed.state[other[name]][key], tensors(whole)[f"{name}/{key}"])
        assert torch.equal(other[name], weight) or kind is Sharded
    assert [group["lr"] for group in resumed.param_groups] == [0.1, 0.2]


@given(partitions(), partitions())
def test_masters_are_the_group_master_whatever_their_key(saved, wanted):
    """Full-precision copies of BF16 weights go from a torch optimizer to partitions and back, under any usual key."""
    weights = {name: nn.Parameter(weight.detach().bfloat16()) for name, weight in parameters().items()}
    optimizer = adam(weights)
    for name, weight in weights.items():
        moments = {key: torch.randn(SHAPES[name]) for key in MOMENTS}
        optimizer.state[weight] = {"master_param": torch.randn(SHAPES[name]), "step": torch.tensor(3.0), **moments}
    whole = save({"model": weights, "optim": optimizer})
    for runs, key in ((saved, "main_param"), (wanted, "master")):
        ranks = [Partition(own, masters=key) for own in runs]
        states = [rank.model(weights) for rank in ranks]
        fill(whole, states)
        assert all(set(rank.kept["norm"]) == {"step", *MOMENTS, key} for rank in ranks)
        whole = Checkpoint(*(TrainState(state, rank, len(states)).snapshot() for rank, state in enumerate(states)))
        assert {name for name in tensors(whole, "master")} == set(SHAPES)
    assert all(torch.equal(whole.tensors["master", n], optimizer.state[w]["master_param"]) for n, w in weights.items())
    twins = {name: nn.Parameter(weight.detach().clone()) for name, weight in weights.items()}
    resumed = adam(twins)
    restore(whole, {"model": twins, "optim": resumed})
    for name, weight in weights.items():
        for before, after in (("master_param", "master"), ("exp_avg", "exp_avg")):
            assert torch.equal(resumed.state[twins[name]][after], optimizer.state[weight][before])


def halves() -> list[Partition]:
    """Two ranks, each with half of every parameter."""
    ranks = []
    for rank in range(2):
        runs = {}
        for name, shape in SHAPES.items():
            count = torch.Size(shape).numel()
            edges = list(pairwise((0, count // 2, count)))
            runs[name] = [(Fragment(torch.empty(shape), shape, offset=(0,) * len(shape)).boxes[0], edges[rank])]
        ranks.append(Partition(runs))
    return ranks


def test_numbers_go_into_tensors_and_back():
    """A step that is a number here and a tensor there is restored as what it is here; other values stay JSON."""
    weights = parameters()
    optimizer = adam(weights, 3)
    optimizer.state[weights["norm"]]["skipped"] = 4
    checkpoint = save({"model": weights, "optim": optimizer})
    part = halves()[0]
    part.kept["norm"] |= {"step": 0, "skipped": 0}
    fill(checkpoint, [part.model(weights)])
    assert part.kept["norm"]["step"] == 3 and type(part.kept["norm"]["step"]) is int
    assert part.kept["norm"]["skipped"] == 4 and part.kept["scale"]["step"] == torch.tensor(3.0)

    ranks = halves()
    for rank in ranks:
        rank.kept["norm"]["step"] = 7
    states = [rank.model(weights) for rank in ranks]
    numbers = Checkpoint(*(TrainState(state, rank, 2).snapshot() for rank, state in enumerate(states)))
    assert json.loads(document(numbers))["state"] == {"norm": {"step": 7}}
    other = halves()[1]
    fill(numbers, [other.model(weights)])
    assert other.kept["norm"]["step"] == torch.tensor(7.0)


def test_what_only_one_side_has_is_told():
    """A live tensor or number that the checkpoint lacks is missing, and so is stored state of a strange parameter."""
    weights = parameters()
    checkpoint = save({"model": weights, "optim": adam(weights, 1)})
    part = halves()[0]
    part.kept["norm"] |= {"more": torch.zeros(4), "count": 5}
    with pytest.raises(StateMismatch) as told:
        restore(checkpoint, part.model(weights))
    assert set(told.value.members["missing"]) == {"optim/norm/more", "optim/norm/count"}
    assert part.installed == 0 and part.kept["norm"]["count"] == 5
    part = halves()[0]
    part.groups_now[1]["params"].remove("norm")
    del part.kept["norm"]
    with pytest.raises(StateMismatch) as told:
        restore(checkpoint, part.model(weights))
    assert set(told.value.members["unexpected"]) == {f"optim/norm/{key}" for key in ("step", *MOMENTS)}
    restore(checkpoint, part.model(weights), ignore=("optim/norm/*",))
    assert part.installed == 1


def test_masters_that_the_saved_optimizer_does_not_list_are_made():
    """As after an import: by an optimizer that has none yet and can make them; else the restore is refused."""
    weights = parameters()
    masters = {name: weight.detach() + 1 for name, weight in weights.items()}
    checkpoint = save({"model": weights, "master": masters, "optim": adam(weights, 1)})
    made: dict[tuple[str, str], torch.Tensor] = {}

    def new(name: str, key: str, dtype: torch.dtype) -> torch.Tensor:
        return made.setdefault((name, key), torch.zeros(SHAPES[name], dtype=dtype))

    def live(makes_masters: bool) -> dict[str, Any]:
        groups = Partition(halves()[0].runs).groups_now
        shards = OptimizerShards(
            groups=lambda: groups, state=dict, install=lambda *_: None, new=new, makes_masters=makes_masters
        )
        return {"model": parameters(1), "optim": shards}

    with pytest.raises(StateMismatch, match="master/"):
        restore(checkpoint, live(False))
    restore(checkpoint, live(True))
    assert all(torch.equal(made[name, "master"], master) for name, master in masters.items())


def test_masters_of_another_stage_are_no_part_of_a_restore_without_moments():
    """Of a parameter that other ranks step, this one has nothing to restore, in every choice of groups."""
    weights = parameters()
    masters = {name: weight.detach() + 1 for name, weight in weights.items()}
    checkpoint = save({"model": weights, "master": masters, "optim": adam(weights, 1)})
    ours = "embed.weight"
    kept = {ours: {"master": torch.zeros(SHAPES[ours])}}
    here: set[str] = set()

    def new(name: str, key: str, dtype: torch.dtype) -> Any:
        return (
            torch.zeros(SHAPES[name], dtype=dtype) if name in here else Fragment(torch.empty(0), SHAPES[name], flat=(0, 0))
        )

    def live() -> dict[str, Any]:
        groups = Partition(halves()[0].runs).groups_now
        shards = OptimizerShards(groups=lambda: groups, state=lambda: kept, install=print, new=new)
        return {"model": parameters(1), "optim": shards}

    restore(checkpoint, live(), groups=["model", "master"])
    assert torch.equal(kept[ours]["master"], masters[ours])
    here.add("norm")
    with pytest.raises(StateMismatch) as told:
        restore(checkpoint, live(), groups=["model", "master"])
    assert told.value.members["unexpected"] == ["master/norm"]


def test_weights_without_their_masters_are_refused():
    """Stale copies are refused by name, or set from the weights wherever this rank's part of both lies."""
    weights = parameters()
    checkpoint = save({"model": weights, "optim": adam(weights, 1)})
    part = halves()[1]
    for name in SHAPES:
        part.kept[name]["master"] = part.parts(name)
    live = parameters(1)
    with pytest.raises(StateMismatch, match="4 full-precision masters"):
        restore(checkpoint, part.model(live), groups=["model"])
    restore(checkpoint, part.model(live), groups=["model"], from_model="from-model")
    for name, weight in weights.items():
        (fragment,) = part.kept[name]["master"]
        start, stop = fragment.flat
        assert torch.equal(fragment.tensor, weight.detach().reshape(-1)[start:stop])


def test_a_master_of_other_elements_is_not_set_from_a_weight_of_its_shape():
    """Two ranges of one length: the weight's first half is no copy of the master's second half."""
    checkpoint = save({"model": {"w": torch.arange(12.0)}})
    weight, master = (Fragment(torch.full((6,), -1.0), (12,), flat=(a, a + 6)) for a in (0, 6))
    kept = {"w": {"master": master}}
    shards = OptimizerShards(groups=lambda: [{"params": ["w"]}], state=lambda: kept, install=print)
    with pytest.raises(StateMismatch, match="the master of w is sharded differently"):
        restore(checkpoint, {"model": {"w": weight}, "optim": shards}, groups=["model"], from_model="from-model")
    assert torch.equal(master.tensor, torch.full((6,), -1.0))


class Groups:
    """An optimizer with these groups, which `install` changes."""

    def __init__(self, *groups: dict[str, Any]) -> None:
        self.groups = list(groups)
        self.kept = {name: {"exp_avg": torch.zeros(2)} for group in groups for name in group["params"]}
        self.shards = OptimizerShards(groups=lambda: self.groups, state=lambda: self.kept, install=self.install)

    def install(self, groups: list[dict[str, Any]], values: dict[str, dict[str, Any]]) -> None:
        for live, restored in zip(self.groups, groups, strict=True):
            live.update(restored)

    @property
    def state(self) -> dict[str, Any]:
        return {"model": {name: torch.ones(2) for name in self.kept}, "optim": self.shards}


def test_a_group_without_hyper_parameters_takes_parameters_of_groups_that_differ():
    """As Megatron's adapter lists what other ranks step: their own groups take the hyper-parameters."""
    checkpoint = save(Groups({"params": ["a", "c"], "weight_decay": 0.5}, {"params": ["b", "d"], "weight_decay": 0.0}).state)
    live = Groups({"params": ["a"], "weight_decay": 0.1}, {"params": ["b"], "weight_decay": 0.1}, {"params": ["c", "d"]})
    restore(checkpoint, live.state)
    assert [group.get("weight_decay") for group in live.groups] == [0.5, 0.0, None]
    other = Groups({"params": ["a", "b"], "weight_decay": 0.1}, {"params": ["c", "d"]})
    with pytest.raises(StateMismatch, match="saved in groups that differ in weight_decay"):
        restore(checkpoint, other.state)


def test_groups_of_megatron_that_differ_in_the_layout_become_one():
    """Experts that ranks divide are a group of their own, and those of one rank are with all others."""
    expert, plain = ({"lr": 0.5, "is_expert_parallel": whether} for whether in (True, False))
    live = Groups({"params": ["a", "b"], "lr": 0.1, "is_expert_parallel": False})
    restore(save(Groups({"params": ["a"], **plain}, {"params": ["b"], **expert}).state), live.state)
    assert live.groups == [{"params": ["a", "b"], "lr": 0.5, "is_expert_parallel": False}]


def test_an_adapter_that_says_what_is_unchanged_is_not_read_again():
    """Of a save's state, other values of a tensor and other groups are as always; other tensors are seen if it says so."""
    weight, kept, asked, groups = torch.ones(4), {"w": {"exp_avg": torch.zeros(4)}}, [], [{"params": ["w"], "lr": 0.5}]
    said = [True]

    def state() -> dict[str, Any]:
        asked.append(None)
        return kept

    shards = OptimizerShards(groups=lambda: groups, state=state, install=print, unchanged=lambda: said[0])
    train = TrainState({"model": {"w": weight}, "optim": shards}, 0, 1)

    def moment() -> torch.Tensor:
        (leaf,) = [leaf for leaf in train.snapshot().leaves if leaf.name == "w/exp_avg"]
        return leaf.pieces[0].tensor

    def same(tensor: torch.Tensor) -> bool:
        return tensor.data_ptr() == kept["w"]["exp_avg"].data_ptr()

    assert same(moment())
    asked.clear()
    kept["w"]["exp_avg"].add_(1)
    groups[0]["lr"] = 0.25
    assert same(moment()) and not asked
    assert "0.25" in train.snapshot().values["optim"]["optim"]
    kept["w"]["exp_avg"] = torch.full((4,), 7.0)
    said[0] = False
    assert same(moment()) and asked


@pytest.mark.parametrize("wrong", ["new", "unchanged", "check", "state"])
def test_an_argument_that_is_no_function_is_refused(wrong: str):
    functions: dict[str, Any] = {"groups": list, "state": dict, "install": print}
    with pytest.raises(InvalidRequest, match=f"{wrong}= of OptimizerShards must be a function"):
        OptimizerShards(**{**functions, wrong: 3})


TURNED = """name = "turned"
from = "hf"
to = "ours"
statements = '''
fc.weight^T -> fc.w
q.weight, k.weight -> qk.w, sizes=equal
* -> *
'''
"""
TURNED_SHAPES = {"fc.w": (6, 4), "qk.w": (4, 3), "norm": (4,)}


class Turned:
    """A rank that holds all elements of the tensors that the program makes, whole or in two flat runs, and an optimizer.

    `cut` names what it holds in runs: everything, or as sharding does in stage 1, only what the optimizer keeps.
    """

    def __init__(self, seed: int, cut: str, masters: bool = True) -> None:
        self.generator, self.rate = torch.Generator().manual_seed(seed), 0.1 * seed
        self.cut = cut == "all"
        self.weights = {name: self.part(shape) for name, shape in TURNED_SHAPES.items()}
        self.cut = cut != ""
        step = {"step": torch.tensor(float(seed)), "beta1_pow_acc": torch.full((1,), 0.9**seed)}
        keys = ("exp_avg", "exp_avg_sq", "master")[: 3 if masters else 2]
        self.kept = {
            name: {key: tensor.clone() for key, tensor in step.items()} | {key: self.part(shape) for key in keys}
            for name, shape in TURNED_SHAPES.items()
        }
        self.shards = OptimizerShards(
            groups=lambda: [{"params": list(TURNED_SHAPES), "lr": self.rate}],
            state=lambda: self.kept,
            install=lambda groups, _: setattr(self, "rate", groups[0]["lr"]),
        )
        self.state = {"model": self.weights, "optim": self.shards}

    def part(self, shape: tuple[int, ...]) -> Any:
        tensor = torch.randn(shape, generator=self.generator)
        middle, flat = tensor.numel() // 3, tensor.view(-1)
        cuts = ((0, middle), (middle, tensor.numel()))
        return [Fragment(flat[a:b], shape, flat=(a, b)) for a, b in cuts] if self.cut else tensor

    def whole(self, name: str, key: str = "") -> torch.Tensor:
        found = self.kept[name][key] if key else self.weights[name]
        runs = [part.tensor for part in found] if isinstance(found, list) else [found.reshape(-1)]
        return torch.cat(runs).reshape(TURNED_SHAPES[name])


@pytest.mark.parametrize("masters", [False, True])
@pytest.mark.parametrize(("cut", "other"), [("", "all"), ("all", "state"), ("state", "")])
def test_its_state_goes_through_a_program_with_the_weights(tmp_path, cut, other, masters):
    """Masters, moments and single numbers are stored as those of the checkpoint's tensors, for torch; and come back, cut in
    another way.
    """
    layout = ParallelLayout("dp=1", program=TURNED)
    saved = Turned(3, cut, masters)
    with Checkpointer.alone("run", saved.state, at=tmp_path, layout=layout) as checkpointer:
        checkpointer.save(1, wait="durable")
    with holdfast.open("run@1", root=tmp_path) as checkpoint:
        power = checkpoint.read("q.weight/beta1_pow_acc", group="optim", framework="torch")
        moment = checkpoint.read("fc.weight/exp_avg", group="optim", framework="torch")
        joined = checkpoint.read("k.weight", group="master" if masters else "model", framework="torch")
    assert power.item() == saved.kept["qk.w"]["beta1_pow_acc"].item()
    assert torch.equal(moment, saved.whole("fc.w", "exp_avg").T)
    assert torch.equal(joined, saved.whole("qk.w", "master" if masters else "")[2:])
    restored = Turned(8, other, masters)
    with Checkpointer.alone("run", restored.state, at=tmp_path, layout=layout) as checkpointer:
        assert checkpointer.restore() == 1
    assert restored.rate == saved.rate
    for name in TURNED_SHAPES:
        for key in ("", *saved.kept[name]):
            if key in ("step", "beta1_pow_acc"):
                assert restored.kept[name][key].item() == saved.kept[name][key].item()
            else:
                assert torch.equal(restored.whole(name, key), saved.whole(name, key))


def test_a_layout_that_divides_plain_tensors_is_refused():
    """Its parts are known by the names of whole tensors."""
    declared = declare(ParallelLayout("tp=2"), Launch(0, 2, "l", 2), {})
    with pytest.raises(InvalidRequest, match="by the names of whole tensors, which layout= splits"):
        TrainState(Turned(3, "").state, 0, 2, declared)


REFUSED: dict[str, tuple[Callable[[Partition], None], str]] = {
    "a strange name": (lambda p: p.groups_now[0]["params"].append("more"), r"optim.groups\(\)\[0\] names 'more'"),
    "a name twice": (lambda p: p.groups_now[0]["params"].append("norm"), "names the parameter 'norm' twice"),
    "no names": (lambda p: p.groups_now.append({"lr": 1.0}), r"optim.groups\(\)\[2\] must be a dict"),
    "names that are none": (lambda p: p.groups_now.append({"params": [3]}), r"optim.groups\(\)\[2\] must be a dict"),
    "state of no group": (lambda p: p.kept.update(more={"step": 1}), "'more', which is in none of the groups"),
    "state that is none": (lambda p: p.kept.update(norm=[1]), r"optim.state\(\)\['norm'\] must be a mapping"),
    "a key with a slash": (lambda p: p.kept["norm"].update({"a/b": 1}), "the key 'a/b'"),
    "an empty list": (lambda p: p.kept["norm"].update(exp_avg=[]), "an empty list does not say"),
    "a mixed list": (lambda p: p.kept["norm"].update(exp_avg=[*p.parts("norm"), 1]), "values of type int"),
    "a function": (lambda p: p.kept["norm"].update(rule=len), r"optim\.state\.norm\.rule"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_cannot_be_named_or_stored_is_refused(what):
    """By name, before anything is staged."""
    change, told = REFUSED[what]
    part = halves()[0]
    change(part)
    with pytest.raises(InvalidRequest, match=told):
        TrainState(part.model(parameters()), 0, 2).snapshot()


def test_tensors_that_are_made_for_the_answer_are_refused():
    """Also where they come with a later step: a restore into a copy would be lost without a word."""
    part = halves()[0]
    made = OptimizerShards(groups=lambda: part.groups_now, state=lambda: copied(part.kept), install=part.install)
    with pytest.raises(InvalidRequest, match=r"optim.state\(\)\['[a-z.]*'\]\['exp_avg'\] is different memory at every call"):
        TrainState({**part.model(parameters()), "optim": made}, 0, 2).snapshot()
    train = TrainState(part.model(parameters()), 0, 2)
    train.snapshot()
    part.shards.state = lambda: {**part.kept, "norm": {**part.kept["norm"], "late": torch.ones(4)}}
    with pytest.raises(InvalidRequest, match=r"\['norm'\]\['late'\] is different memory"):
        train.snapshot()


def copied(kept: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    def copy(value: Any) -> Any:
        return [part.with_tensor(part.tensor.clone()) for part in value] if isinstance(value, list) else value

    return {name: {key: copy(value) for key, value in values.items()} for name, values in kept.items()}


def test_what_it_is_made_of_is_checked():
    """Functions that are none, hooks that are no torch optimizers, a parameter of two optimizers, one inside a list."""
    part, weights = halves()[0], parameters()
    with pytest.raises(InvalidRequest, match="groups= of OptimizerShards must be a function"):
        OptimizerShards(groups=[], state=dict, install=print)
    with pytest.raises(InvalidRequest, match="not a list"):
        OptimizerShards(groups=list, state=dict, install=print, hooks=[[]])
    with pytest.raises(InvalidRequest, match=r"parameter .* is in two optimizers: optim and more"):
        TrainState({**part.model(weights), "more": adam(weights)}, 0, 1)
    with pytest.raises(InvalidRequest, match="inside another object"):
        TrainState({"model": weights, "optim": [part.shards]}, 0, 1)


def test_a_tied_parameter_has_the_name_under_which_it_is_stored():
    """The other name is refused, with the hint."""
    one = nn.Parameter(torch.ones(2))
    shards = [
        OptimizerShards(groups=lambda name=name: [{"params": [name]}], state=dict, install=print) for name in ("a", "b")
    ]
    TrainState({"model": {"a": one, "b": one}, "optim": shards[0]}, 0, 1)
    with pytest.raises(InvalidRequest, match="'b', which is not a parameter") as told:
        TrainState({"model": {"a": one, "b": one}, "optim": shards[1]}, 0, 1)
    assert "tied" in told.value.hint


def test_copies_handed_over_as_masters_are_stored_once():
    """An optimizer that keeps the tensors of the mapping `master` stores them once, also where they are empty."""
    part = halves()[0]
    part.kept["norm"]["master"] = part.parts("norm")
    part.kept["scale"]["master"] = Fragment(torch.empty(0), (), flat=(0, 0))
    masters = {name: part.kept[name]["master"] for name in ("norm", "scale")}
    snapshot = TrainState({**part.model(parameters()), "master": masters}, 0, 2).snapshot()
    assert [leaf.name for leaf in snapshot.leaves if leaf.group == "master"] == ["norm", "scale"]


def described(state: TrainState) -> Any:
    snapshot = state.snapshot(None)
    return [
        (leaf.path, [(p.box, p.tensor.data_ptr()) for p in leaf.pieces])
        for leaf in snapshot.leaves
        if "rng" not in leaf.name
    ]


CHANGES: dict[str, Callable[[Partition], None]] = {
    "nothing": lambda p: None,
    "another learning rate": lambda p: p.groups_now[0].update(lr=0.25),
    "a tensor": lambda p: p.kept["norm"].update(step=torch.ones(())),
    "a part": lambda p: p.kept["norm"].update(exp_avg=p.parts("norm")),
    "a part in a list": lambda p: p.kept["norm"]["exp_avg"].__setitem__(0, p.parts("norm")[0]),
    "a part's tensor": lambda p: setattr(p.kept["norm"]["exp_avg"][0], "tensor", torch.ones(2)),
    "a key": lambda p: p.kept["norm"].update(more=torch.ones(3)),
    "a parameter's state": lambda p: p.kept.pop("norm"),
    "a number": lambda p: p.kept["norm"].update(number=2),
    "inside a value": lambda p: p.kept["norm"]["history"].append(3),
    "the groups": lambda p: p.groups_now[0]["params"].reverse(),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_later_save_sees_every_change(change):
    """What the second save of a state says is what a new walk through it would say."""
    part, weights = halves()[0], parameters()
    part.kept["norm"] |= {"number": 1, "history": [1, 2]}
    state = TrainState(part.model(weights), 0, 2)
    state.snapshot()
    CHANGES[change](part)
    anew = TrainState(part.model(weights), 0, 2)
    assert described(state) == described(anew)
    assert state.snapshot().values["optim"] == anew.snapshot().values["optim"]


def test_leaves_are_reused_as_long_as_nothing_changes():
    """A save after one that found the identical Fragments does not walk again, whatever the hyper-parameters."""
    part, weights = halves()[0], parameters()
    state = TrainState(part.model(weights), 0, 2)
    first = [leaf for leaf in state.snapshot().leaves if leaf.group == "optim"]
    part.groups_now[0]["lr"] = 0.75
    snapshot = state.snapshot()
    again = [leaf for leaf in snapshot.leaves if leaf.group == "optim"]
    assert all(a is b for a, b in zip(first, again, strict=True)) and "0.75" in snapshot.values["optim"]["optim"]


def test_its_hooks_wait_and_tell_how_it_will_grow():
    """The torch optimizers of `hooks` are those that wait, and whose missing moments get room in the slots."""
    weights = parameters()
    flat = nn.Parameter(torch.zeros(100))
    inner = torch.optim.AdamW([flat])
    part = halves()[0]
    shards = OptimizerShards(groups=part.shards.groups, state=part.shards.state, install=part.install, hooks=inner)
    state = {"model": weights, "optim": shards}
    assert optimizer_wrappers.innermost(state) == [inner]
    assert background_safe.expected_growth(state).bytes >= 2 * flat.nbytes
    hooks = background_safe.StepHooks(state, lambda *_: part.kept.clear())
    hooks.renew()
    flat.grad = torch.ones_like(flat)
    inner.step()
    assert part.kept == {} and hooks.optimizers == [inner]
    hooks.remove()


def test_a_partition_without_hooks_is_copied_at_once_beside_an_optimizer_with_hooks():
    """What changes it is not known: nobody would wait with its step for a copy in the background."""
    trained, part = nn.Linear(2, 2), halves()[0]
    state = {"model": parameters(), "trained": trained, "optim": torch.optim.AdamW(trained.parameters())}
    leaf = next(leaf for leaf in TrainState(state, 0, 1).snapshot().leaves if leaf.group == "trained")
    assert background_safe.Judge(state, fenced=False)(leaf, leaf.pieces[0])
    both = {**state, "more": part.shards}
    assert not background_safe.Judge(both, fenced=False)(leaf, leaf.pieces[0])
    assert background_safe.Judge(both, fenced=True)(leaf, leaf.pieces[0])


@given(partitions())
def test_an_optimizer_may_make_its_new_state_itself(runs):
    """`new` gives the memory of what is saved and not live; install gets the identical Fragments, filled."""
    weights = parameters()
    optimizer = adam(weights, 2)
    checkpoint = save({"model": weights, "optim": optimizer})
    for own in runs:
        part = Partition(own, fresh=True)
        made: dict[tuple[str, str], Any] = {}

        def new(name: str, key: str, dtype: torch.dtype, made: Any = made, part: Any = part) -> Any:
            assert dtype == torch.float32
            return made.setdefault((name, key), part.parts(name))

        shards = OptimizerShards(groups=part.shards.groups, state=part.shards.state, install=part.install, new=new)
        fill(checkpoint, [{"model": weights, "optim": shards}])
        assert set(made) == {(name, key) for name in SHAPES for key in MOMENTS}
        for (name, key), parts in made.items():
            assert part.kept[name][key] is parts
            for fragment in parts if isinstance(parts, list) else [parts]:
                whole = optimizer.state[weights[name]][key]
                at = [whole[box.slices].reshape(-1) for box in fragment.boxes]
                assert torch.equal(torch.cat([torch.empty(0), *at]), fragment.tensor)


def test_what_new_returns_is_checked():
    """Anything that is no tensor is refused, before anything is filled."""
    weights = parameters()
    checkpoint = save({"model": weights, "optim": adam(weights, 1)})
    part = halves()[0]
    shards = OptimizerShards(groups=part.shards.groups, state=dict, install=part.install, new=lambda *_: None)
    with pytest.raises(InvalidRequest, match=r"optim.new\('embed.weight', 'exp_avg'\) must be a tensor"):
        restore(checkpoint, {"model": weights, "optim": shards})
    with pytest.raises(InvalidRequest, match="new= of OptimizerShards must be a function"):
        OptimizerShards(groups=list, state=dict, install=print, new=3)


def test_what_it_leaves_out_is_noted_once_for_all():
    """By each save, however many optimizers tell of it."""
    told: list[str] = []
    state: dict[str, Any] = {"model": parameters()}
    for key, name in (("first", "norm"), ("second", "scale")):
        state[key] = OptimizerShards(
            groups=lambda name=name: [{"params": [name]}], state=dict, install=print, left_out=lambda: told
        )
    train_state = TrainState(state, 0, 1)
    assert not train_state.snapshot().notes
    told.append("not saved: a third one")
    assert [note for note in train_state.snapshot().notes if isinstance(note, LeftOutNote)] == told
    with pytest.raises(InvalidRequest, match="left_out= of OptimizerShards must be a function"):
        OptimizerShards(groups=list, state=dict, install=print, left_out="")


def test_masters_in_one_buffer_are_looked_at_one_by_one():
    """Restoring one slice of it restores no other: the next step would undo the weights of those."""
    flat = torch.zeros(8)
    weights = {"a": torch.zeros(4), "b": torch.zeros(4)}
    shards = OptimizerShards(
        groups=lambda: [{"params": ["a", "b"], "lr": 1.0}],
        state=lambda: {"a": {"master": flat[:4]}, "b": {"master": flat[4:]}},
        install=lambda groups, values: None,
    )
    state = {"model": weights, "optim": shards}
    checkpoint = save(state)
    restore(checkpoint, state)
    with pytest.raises(StateMismatch, match=r"1 full-precision masters \(b\)"):
        restore(checkpoint, state, ignore=("master/b",))
