"""The training state as a whole: groups, names, comparison, and everything back in place."""

from __future__ import annotations

import copy
import io
from types import MappingProxyType

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from holdfast.state.optimizer_resume import under_key
from holdfast.state.train_state import OfferedLeaves, TrainState
from holdfast.tensors.fragments import Fragment
from holdfast.tensors.torch_dtypes import _TO_SAFETENSORS
from holdfast_formats.errors import InvalidRequest, LimitExceeded, StateMismatch
from tests.client.checkpoint_in_memory import Checkpoint, restore, save


class Model(nn.Module):
    def __init__(self, tie: bool = True) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 4)
        self.norm = nn.BatchNorm1d(4)
        self.head = nn.Linear(4, 7, bias=False)
        if tie:
            self.head.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(self.embed(tokens)))


class Counting(nn.Module):
    """A module with a value of its own besides its tensors."""

    def __init__(self, extra: object = None) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)
        self.extra = extra

    def get_extra_state(self) -> object:
        return self.extra

    def set_extra_state(self, state: object) -> None:
        self.extra = state


class Loader:
    """A data loader with nested state, tensors and arrays in it."""

    def __init__(self, state: object) -> None:
        self.state = state

    def state_dict(self) -> object:
        return self.state

    def load_state_dict(self, state: object) -> None:
        self.state = state


def paths(snapshot) -> list[str]:
    """The names of a snapshot's tensors, random streams left out."""
    return [leaf.path for leaf in snapshot.leaves if "/rng/" not in leaf.name]


def snapshot(state, groups=None):
    return TrainState(state, 0, 1).snapshot(groups)


def test_module_names_are_the_models_own():
    """Parameters and buffers by their own names and live; tied ones once, under the first name."""
    model = Model()
    taken = snapshot({"model": model})
    assert paths(taken) == [f"model/{n}" for n in model.state_dict() if n != "head.weight"]
    assert taken.aliases == {"model": {"head.weight": "embed.weight"}}
    live = {leaf.name: leaf.pieces[0].tensor.data_ptr() for leaf in taken.leaves if leaf.group == "model" and leaf.pieces}
    assert live["embed.weight"] == model.embed.weight.data_ptr()


def test_the_groups_follow_the_entries():
    """One module is `model` under any key; others are groups by key; `extra` is always there; order is stable."""
    a, b = nn.Linear(1, 1), nn.Linear(1, 1)
    assert TrainState({}, 0, 1).groups() == ("extra",)
    assert TrainState({"net": a}, 0, 1).groups() == ("model", "extra")
    assert TrainState({"model": a, "critic": b}, 0, 1).groups() == ("critic", "model", "extra")
    assert TrainState({"actor": a, "critic": b}, 0, 1).groups() == ("actor", "critic", "extra")
    full = {"model": a, "ema": b, "master": {}, "optim": torch.optim.SGD(a.parameters())}
    assert TrainState(full, 0, 1).groups() == ("model", "master", "optim", "ema", "extra")
    empty = snapshot(full)
    assert empty.values["master"] == {} and set(empty.values) == set(empty.groups)


def test_a_critics_parameters_have_its_prefix():
    """Optimizer state of another module than the model is named with its key in front."""
    critic = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(critic.parameters(), momentum=0.9)
    optimizer.state[critic.weight]["momentum_buffer"] = torch.ones(1, 2)
    taken = snapshot({"model": nn.Linear(1, 1), "critic": critic, "optim": optimizer})
    assert "optim/critic.weight/momentum_buffer" in paths(taken) and "critic/weight" in paths(taken)


def test_wrappers_leave_no_trace():
    """torch.compile and activation checkpointing do not show in names, at the top or inside."""
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    plain = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    expected = paths(snapshot({"model": plain}))
    assert paths(snapshot({"model": torch.compile(plain)})) == expected
    assert paths(snapshot({"model": checkpoint_wrapper(plain)})) == expected
    inside = nn.Sequential(torch.compile(plain[0]), checkpoint_wrapper(plain[1]))
    assert paths(snapshot({"model": torch.compile(inside)})) == expected
    assert paths(snapshot({"model": nn.DataParallel(plain)})) == expected
    optimizer = torch.optim.SGD(torch.compile(plain).parameters(), momentum=0.9)
    assert '"params":["0.weight"' in snapshot({"model": torch.compile(inside), "optim": optimizer}).values["optim"]["optim"]


def test_ema_in_every_form():
    """A module or mapping under `ema`, or an AveragedModel anywhere: the model's own names, the average's count too."""
    model = nn.Linear(2, 2)
    averaged = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    averaged.update_parameters(model)
    expected = ["ema/weight", "ema/bias", "ema/n_averaged"]
    assert [p for p in paths(snapshot({"model": model, "average": averaged})) if p.startswith("ema")] == expected
    assert paths(snapshot({"ema": copy.deepcopy(model)})) == expected[:2]
    shadow = {name: p.detach().clone() for name, p in model.named_parameters()}
    assert paths(snapshot({"ema": shadow})) == expected[:2]
    other = AveragedModel(nn.Linear(2, 2))
    restore(save({"average": averaged}), {"average": other})
    assert other.n_averaged == 1 and torch.equal(other.module.weight, averaged.module.weight)
    with pytest.raises(InvalidRequest, match="average and ema would both"):
        TrainState({"average": averaged, "ema": shadow}, 0, 1)


def test_every_kind_of_state_comes_back():
    """Model, masters, optimizer, EMA, scheduler, loader, tensors, arrays, values: restored into fresh objects, exactly."""

    def build(seed: int) -> dict:
        torch.manual_seed(seed)
        model = Model().to(torch.bfloat16)
        masters = {name: p.detach().float().requires_grad_() for name, p in model.named_parameters()}
        optimizer = torch.optim.AdamW(masters.values(), lr=0.1)
        order = np.random.RandomState(seed).permutation(9)
        return {
            "model": model,
            "master": masters,
            "optim": optimizer,
            "ema": {name: tensor.detach().clone() for name, tensor in masters.items()},
            "scheduler": lr_scheduler.CosineAnnealingLR(optimizer, 10),
            "loader": Loader({"epoch": seed, "order": order, "seen": torch.arange(seed), "rest": (1, {2: b"x"})}),
            "best": 0.5 + seed,
            "history": [seed],
            "progress": {"tokens": 10**20 + seed, "curve": torch.full((3,), float(seed)), "bins": np.full(2, seed)},
            "stats": {"mean": torch.full((2,), float(seed)), "n": torch.tensor(seed)},
            "threshold": torch.tensor(float(seed)),
        }

    saved, live = build(5), build(6)
    for tensor in saved["master"].values():
        tensor.grad = torch.ones_like(tensor)
    saved["optim"].step()
    saved["scheduler"].step()
    held = dict(live)
    curve, history, bins = live["progress"]["curve"], live["history"], live["progress"]["bins"]
    restoration = restore(save(saved), live)
    assert not (restoration.missing or restoration.unexpected or restoration.notes)
    assert paths(snapshot(live)) == paths(snapshot(saved))
    for a, b in zip(snapshot(saved).leaves, snapshot(live).leaves, strict=True):
        assert all(torch.equal(x.tensor, y.tensor) for x, y in zip(a.pieces, b.pieces, strict=True)) or "/rng/" in a.name
    without_streams = [{k: v for k, v in snapshot(s).values["extra"].items() if k != "rng"} for s in (saved, live)]
    assert without_streams[0] == without_streams[1] and snapshot(saved).values["optim"] == snapshot(live).values["optim"]
    assert live["scheduler"].get_last_lr() == saved["scheduler"].get_last_lr()
    assert live["loader"].state["rest"] == (1, {2: b"x"}) and live["loader"].state["order"].dtype == np.int64
    assert live["best"] == 5.5 and live["history"] is history == [5] and live["progress"]["curve"] is curve
    assert live["progress"]["tokens"] == 10**20 + 5 and bins is not None
    assert all(live[key] is value for key, value in held.items() if key != "best")


def test_live_tensors_are_filled_in_place():
    """Parameters keep identity and memory; strided, 0-d and empty tensors are saved."""
    base = torch.zeros(4, 6)
    live = {"a": base[::2, 1:4], "b": base[1].t(), "c": torch.tensor(0), "d": torch.zeros(0, 3), "e": torch.zeros(2, 3).t()}
    saved = {name: torch.rand(t.shape).to(t.dtype) + 1 for name, t in live.items()}
    pointers = {name: t.data_ptr() for name, t in live.items()}
    restore(save({"t": saved}), {"t": live})
    assert all(torch.equal(live[name], tensor) for name, tensor in saved.items())
    assert pointers == {name: t.data_ptr() for name, t in live.items()} and base[3].sum() == 0


@pytest.mark.parametrize("dtype", sorted(_TO_SAFETENSORS, key=str), ids=str)
def test_every_dtype_round_trips(dtype):
    """All dtypes go through bit for bit, float4 with its doubled shape."""
    shape = (2, 16 // dtype.itemsize)
    content = torch.arange(32, dtype=torch.uint8).view(2, 16)
    saved = (content % 2).bool()[:, : shape[1]] if dtype == torch.bool else content.view(dtype)
    checkpoint = save({"x": saved})
    live = {
        "x": torch.zeros(2, 16, dtype=torch.uint8).view(saved.dtype) if dtype != torch.bool else torch.zeros(shape).bool()
    }
    restore(checkpoint, live)
    assert torch.equal(live["x"].view(torch.uint8), saved.contiguous().view(torch.uint8))


def test_some_groups_only():
    """A snapshot or restore of some groups touches only these; an unknown group is refused with what there is."""
    model = nn.Linear(2, 2)
    state = {"model": model, "optim": torch.optim.SGD(model.parameters()), "odd": 1}
    taken = snapshot(state, ["model"])
    assert taken.groups == ("model",) and taken.values == {"model": {}} and len(taken.leaves) == 2
    other = nn.Linear(2, 2)
    live = {"model": other, "optim": torch.optim.SGD(other.parameters()), "odd": 2}
    assert "optim, extra" not in restore(Checkpoint(taken), live, groups=["model"]).notes
    assert torch.equal(other.weight, model.weight) and live["odd"] == 2
    with pytest.raises(StateMismatch, match=r"extra/odd.*|optim/optim.*"):
        restore(Checkpoint(taken), live)
    with pytest.raises(InvalidRequest, match="no group ema") as caught:
        snapshot(state, ["ema"])
    assert "model, optim, extra" in caught.value.hint
    with pytest.raises(InvalidRequest, match="not the text 'model'"):
        snapshot(state, "model")


def test_unstorable_entries_of_other_groups_do_not_matter():
    """What is not saved is not looked at: a group can be saved beside an entry that could not."""
    state = {"model": nn.Linear(1, 1), "fn": len}
    assert len(snapshot(state, ["model"]).leaves) == 2
    with pytest.raises(InvalidRequest, match=r"^fn: a value of type"):
        snapshot(state)


def test_groups_that_the_state_has_not_are_left_alone():
    """A model alone can be restored from a full checkpoint; what stays behind is noted."""
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), momentum=0.9)
    optimizer.state[model.weight]["momentum_buffer"] = torch.ones(2, 2)
    checkpoint = save({"model": model, "optim": optimizer})
    assert "not restored: optim" in restore(checkpoint, {"model": nn.Linear(2, 2)}).notes[0]


def test_wrong_shapes_and_dtypes_are_named_and_nothing_is_touched():
    """Every tensor that does not fit is named with both shapes and dtypes, and the live state stays as it was."""
    model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 2))
    other = nn.Sequential(nn.Linear(2, 4), nn.Linear(3, 2).to(torch.float64))
    before = [p.detach().clone() for p in other.parameters()]
    for strict in (True, False):
        with pytest.raises(StateMismatch) as caught:
            restore(save({"model": model}), {"model": other}, strict=strict)
        assert "model/0.weight: stored F32 [3, 2], live F32 [4, 2]" in caught.value.detail
        assert "model/1.bias: stored F32 [2], live F64 [2]" in caught.value.detail
        assert len(caught.value.members["mismatched"]) == 4
    assert all(map(torch.equal, before, other.parameters()))
    restore(save({"model": model}), {"model": other}, ignore=["model/*"])


def test_missing_and_unexpected_names():
    """Names that one side only has: refused when strict, reported when not, silent when ignored."""
    saved = {"model": nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), "epoch": 3}
    live = {"model": nn.Sequential(nn.Linear(2, 2), nn.Identity(), nn.Linear(2, 2)), "best": 1}
    checkpoint = save(saved)
    with pytest.raises(StateMismatch) as caught:
        restore(checkpoint, live)
    missing = ["model/2.weight", "model/2.bias", "extra/best"]
    unexpected = ["model/1.weight", "model/1.bias", "extra/epoch"]
    assert caught.value.members["missing"] == missing and caught.value.members["unexpected"] == unexpected
    assert all(name in caught.value.detail for name in missing + unexpected)
    loose = restore(checkpoint, live, strict=False)
    assert (loose.missing, loose.unexpected) == (missing, unexpected)
    assert torch.equal(live["model"][0].weight, saved["model"][0].weight) and live["best"] == 1
    ignoring = restore(checkpoint, live, ignore=["model/[12].*", "extra/best", "extra/epoch"])
    assert not ignoring.missing and not ignoring.unexpected


def test_many_names_are_shortened_in_the_message():
    """A message lists some names; the error's members have all of them."""
    with pytest.raises(StateMismatch) as caught:
        restore(save({"t": {f"n{i}": torch.zeros(1) for i in range(50)}}), {})
    assert len(caught.value.members["unexpected"]) == 50 and caught.value.detail.count("extra/") == 20


def test_tied_tensors_restored_apart_and_together():
    """A tie on one side only: each untied copy is filled from the one; two tensors for one memory are noted if excused."""
    tied, apart = Model(), Model(tie=False)
    restoration = restore(save({"model": tied}), {"model": apart})
    assert not restoration.missing and torch.equal(apart.head.weight, apart.embed.weight)
    assert torch.equal(apart.embed.weight, tied.embed.weight)
    different = Model(tie=False)
    restoration = restore(save({"model": different}), {"model": tied}, strict=False)
    assert torch.equal(tied.embed.weight, different.embed.weight) and "head.weight" in restoration.notes[0]
    again = restore(save({"model": tied}), {"model": Model()})
    assert not again.notes and not again.missing


def test_a_tie_saved_under_another_first_name():
    """Which of the tied names the bytes stand under does not matter."""
    weight = torch.rand(2, 2)
    live = {"b": torch.zeros(2, 2)}
    live["a"] = live["b"]
    restore(save({"model": {"a": weight, "b": weight}}), {"model": live})
    assert torch.equal(live["b"], weight)
    only = {"a": torch.zeros(2, 2)}
    only = {"z": only["a"], "a": only["a"]}
    for one in ("a", "z"):
        only["z"].zero_()
        assert not restore(save({"model": {one: weight}}), {"model": only}).missing
        assert torch.equal(only["z"], weight)
    with pytest.raises(StateMismatch, match="model/z, model/a"):
        restore(save({"model": {"b": weight}}), {"model": only})


def test_extra_state_of_modules():
    """What get_extra_state gives is a value of the module's group, tensors in it included."""
    model, other = nn.Sequential(Counting({"seen": 3, "scale": torch.ones(2)})), nn.Sequential(Counting())
    taken = snapshot({"model": model})
    assert set(taken.values["model"]) == {"0._extra_state"}
    restore(save({"model": model}), {"model": other})
    assert other[0].extra["seen"] == 3 and torch.equal(other[0].extra["scale"], torch.ones(2))
    restore(save({"model": nn.Sequential(Counting(None))}), {"model": other})
    assert other[0].extra is None
    other[0].extra = io.BytesIO()
    restore(save({"model": nn.Sequential(Counting(b"fp8"))}), {"model": other})  # as an import of another program has it
    assert type(other[0].extra) is io.BytesIO and other[0].extra.getvalue() == b"fp8"
    with pytest.raises(StateMismatch, match=r"missing.*model/0\._extra_state"):
        restore(save({"model": nn.Sequential(nn.Sequential())}), {"model": nn.Sequential(Counting())})


SCHEDULERS = {
    "lambda": lambda o: lr_scheduler.LambdaLR(o, lambda step: 0.9**step),
    "step": lambda o: lr_scheduler.StepLR(o, 2),
    "milestones": lambda o: lr_scheduler.MultiStepLR(o, [2, 2, 5]),
    "onecycle": lambda o: lr_scheduler.OneCycleLR(o, 0.1, 20),
    "cyclic": lambda o: lr_scheduler.CyclicLR(o, 0.1, 0.2, cycle_momentum=False),
    "restarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 3),
    "plateau": lambda o: lr_scheduler.ReduceLROnPlateau(o, patience=1),
    "sequence": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.ConstantLR(o, 0.1, 2), lr_scheduler.ExponentialLR(o, 0.9)], milestones=[2]
    ),
    "chained": lambda o: lr_scheduler.ChainedScheduler(
        [lr_scheduler.ConstantLR(o, 0.1, 2), lr_scheduler.ExponentialLR(o, 0.9)]
    ),
}


@pytest.mark.parametrize("kind", SCHEDULERS)
@pytest.mark.filterwarnings("ignore::UserWarning:torch")  # lr schedulers warn about orders of calls that do not matter here
def test_schedulers_go_on(kind):
    """Every torch scheduler is stored without pickle and gives the same rates after a restore."""

    def build():
        model = nn.Linear(1, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        return {"model": model, "optim": optimizer, "scheduler": SCHEDULERS[kind](optimizer)}

    def rates(state, steps):
        found = []
        for _ in range(steps):
            state["optim"].step()
            state["scheduler"].step(*([1.0] if kind == "plateau" else []))
            found.append(state["optim"].param_groups[0]["lr"])
        return found

    saved, live = build(), build()
    rates(saved, 3)
    restore(save(saved), live)
    assert rates(live, 5) == rates(saved, 5)


def test_ranks_keep_their_own_loaders():
    """What a stateful object holds belongs to its rank, tensors too; a larger world's ranks take turns."""
    states = [{"loader": Loader({"rank": rank, "left": torch.arange(rank + 1)})} for rank in range(2)]
    checkpoint = Checkpoint(*(TrainState(state, rank, 2).snapshot() for rank, state in enumerate(states)))
    assert ("extra", "ranks/00001/loader/left") in checkpoint.tensors
    for rank in range(3):
        live = {"loader": Loader(None)}
        restoration = TrainState(live, rank, 3).prepare(checkpoint.stored(rank))
        checkpoint.fill(restoration)
        restoration.apply()
        assert live["loader"].state["rank"] == rank % 2 and live["loader"].state["left"].tolist() == list(
            range(rank % 2 + 1)
        )


def test_small_tensors_of_loaders_are_copied_at_once():
    """A loader that goes on after the snapshot does not change what is saved."""
    loader = Loader({"left": torch.zeros(3), "order": np.zeros(3)})
    taken = snapshot({"loader": loader})
    loader.state["left"].add_(1)
    loader.state["order"] += 1
    assert all(leaf.pieces[0].tensor.sum() == 0 for leaf in taken.leaves if "/loader/" in leaf.name)


def test_an_object_in_the_place_of_another_is_saved():
    """The state is read anew at every save: a scheduler or loader that was replaced is not the one of before."""

    class Counted:
        def __init__(self, count):
            self.count = count

        def state_dict(self):
            return {"count": self.count}

        def load_state_dict(self, state):
            self.count = state["count"]

    state = {"loader": Counted(1)}
    training = TrainState(state, 0, 1)
    assert training.snapshot().values["extra"]["loader"] == '{"count":1}'
    state["loader"] = Counted(2)
    assert training.snapshot().values["extra"]["loader"] == '{"count":2}'


def test_values_of_a_read_only_state():
    """A number cannot be put back into a mapping that cannot change: refused before anything is touched."""
    checkpoint = save({"epoch": 3, "log": [1]})
    with pytest.raises(InvalidRequest, match="epoch: a plain int"):
        restore(checkpoint, MappingProxyType({"epoch": 0, "log": []}))
    log: list = []
    restore(checkpoint, MappingProxyType({"log": log}), ignore=["extra/epoch"])
    assert log == [1]


@pytest.mark.parametrize(
    ("state", "message"),
    [
        ({"a/b": 1}, "'a/b' is not allowed"),
        ({"": 1}, "not allowed"),
        ({1: 1}, "1 is not allowed"),
        ({"rng": 1}, "'rng' is reserved"),
        ({"ranks": {"a": torch.zeros(1)}}, "'ranks' is reserved"),
        ({"Actor": nn.Linear(1, 1), "b": nn.Linear(1, 1)}, "'Actor' is not allowed"),
        ({"optim": nn.Linear(1, 1)}, "key 'optim'"),
        ([("model", 1)], "must be a mapping"),
    ],
)
def test_entries_that_cannot_be_named_are_refused(state, message):
    """Keys that are no names, or are the checkpoint's own, are refused when the state is handed over."""
    with pytest.raises(InvalidRequest, match=message):
        TrainState(state, 0, 1)


@pytest.mark.parametrize(
    ("state", "message"),
    [
        ({"model": {"w": torch.zeros(2).to_sparse()}}, "'model/w' is of layout"),
        ({"t": torch.zeros(2, dtype=torch.complex128)}, "'extra/t'.*complex128"),
        ({"loader": Loader({"deep": [{"t": torch.zeros(2, device="meta")}]})}, "deep/0/t' is on the meta device"),
        ({"model": nn.LazyLinear(2)}, "lazy"),
        ({"loader": Loader({"sampler": {"fn": len}})}, r"^loader\.sampler\.fn: a value of type builtin_function"),
        ({"loader": Loader({"names": np.array(["a"])})}, r"^loader\.names: a numpy array of <U1"),
        ({"master": {"ranks/w": torch.zeros(1)}}, "names that begin with 'ranks/'"),
        ({"both": [torch.optim.SGD([torch.zeros(1)]), 3]}, r"^both\[0\]: a value of type torch\.optim\.sgd\.SGD"),
    ],
)
def test_what_cannot_be_stored_is_refused_by_path(state, message):
    """A snapshot names the place and the reason before anything is staged."""
    with pytest.raises(InvalidRequest, match=message):
        snapshot(state)


def test_names_beyond_the_formats_limit_are_refused():
    """A tensor name that the format cannot hold is a named error."""
    with pytest.raises(LimitExceeded, match="tensor name"):
        snapshot({"t": {"x" * 2000: torch.zeros(1)}})


def test_a_document_that_refers_to_nothing_is_missing():
    """A value whose tensor the checkpoint lacks is reported by the tensor's name, and not handed over."""
    checkpoint = save({"loader": Loader({"t": torch.zeros(2)})})
    stored = checkpoint.stored()
    specs = {"extra": {n: s for n, s in stored.specs["extra"].items() if not n.endswith("loader/t")}}
    with pytest.raises(StateMismatch, match=r"extra/ranks/00000/loader/t"):
        TrainState({"loader": Loader(None)}, 0, 1).prepare(OfferedLeaves(specs, stored.aliases, stored.values))


def test_declared_shards_are_gathered_and_cut_anew():
    """Fragments of several ranks become one tensor, and any other cut of it can be restored."""
    whole = torch.arange(24.0).view(4, 6)
    cuts = [Fragment(whole.view(-1)[a:b].clone(), (4, 6), flat=(a, b)) for a, b in ((0, 5), (5, 17), (17, 24))]
    checkpoint = Checkpoint(*(TrainState({"model": {"w": cut}}, rank, 3).snapshot() for rank, cut in enumerate(cuts)))
    assert torch.equal(checkpoint.tensors["model", "w"], whole)
    local = torch.zeros(2, 3)
    restoration = TrainState({"model": {"w": Fragment(local, (4, 6), offset=(1, 2))}}, 0, 1).prepare(checkpoint.stored())
    checkpoint.fill(restoration)
    assert torch.equal(local, whole[1:3, 2:5])


def _offered(*keys: str, imported: bool = True) -> OfferedLeaves:
    return OfferedLeaves({}, {}, {"optim": dict.fromkeys(keys, "{}"), "extra": {"epoch": "3"}}, imported=imported)


def test_the_only_optimizer_of_an_imported_checkpoint() -> None:
    """It is taken whatever its key is, unless there is a choice; one that was saved here goes by its own key."""
    found = under_key(_offered("optim"), ["opt"])
    assert found.values == {"optim": {"opt": "{}"}, "extra": {"epoch": "3"}}
    assert found.notes == ("optim/opt is restored from optim/optim of the imported checkpoint",)
    for stored, live in [
        (_offered("opt"), ["opt"]),
        (_offered("a", "b"), ["opt"]),
        (_offered("optim"), ["gen", "disc"]),
        (_offered(), ["opt"]),
        (_offered("optim"), []),
        (_offered("optim", imported=False), ["opt"]),
    ]:
        assert under_key(stored, live) is stored


@pytest.mark.parametrize("imported", [True, False])
def test_objects_of_which_no_other_program_has_a_state(imported: bool) -> None:
    """Without a state in an imported checkpoint they keep their own; one that was saved here must have it."""

    class Position:
        only_ours = True

        def state_dict(self) -> dict[str, int]:
            return {"at": 1}

        def load_state_dict(self, state: dict[str, int]) -> None:
            raise AssertionError(state)

    found = TrainState({"loader": Position()}, 0, 1).prepare(
        OfferedLeaves({}, {}, {"extra": {}}, imported=imported), strict=False
    )
    assert any("the imported checkpoint has no extra/loader" in note for note in found.notes) is imported
    assert ("extra/loader" in found.missing) is not imported
    found.apply()


@pytest.mark.parametrize("imported", [True, False])
def test_values_of_another_program(imported: bool) -> None:
    """What an imported checkpoint has in group extra may be more than the state's; of one that was saved it may not."""
    stored = OfferedLeaves({"extra": {"loader/at": ("I64", ())}}, {}, {"extra": {"epoch": "3"}}, imported=imported)
    state = TrainState({"counts": {"seen": 0}}, 0, 1)
    with pytest.raises(StateMismatch) as refused:
        state.prepare(stored)
    assert refused.value.members["unexpected"] == ([] if imported else ["extra/loader/at", "extra/epoch"])
    assert "extra/counts" in refused.value.members["missing"]
    if imported:
        found = state.prepare(stored, strict=False)
        assert found.unexpected == ["extra/loader/at", "extra/epoch"]
