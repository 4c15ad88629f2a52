"""Live tensors of another system's names, saved through a mapping program: any mesh gives the checkpoint's own tensors."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from holdfast import Fragment, ParallelLayout
from holdfast.launch import Launch
from holdfast.layout.declared import declare
from holdfast.state.train_state import Snapshot, TrainState
from holdfast_formats.disk.manifests import TensorEntry
from holdfast_formats.disk.packing import natural_key
from holdfast_formats.errors import InvalidRequest, StateMismatch
from holdfast_formats.layout import language
from holdfast_formats.layout.elements import split_key
from holdfast_formats.mapping.listing import TensorKey
from holdfast_formats.programs import compile_program, load, placements
from holdfast_formats.tensors import TensorSpec
from tests.client.checkpoint_in_memory import Checkpoint
from tests.formats.programs.test_remade import LLAMA, MOE, Named, remade, shard, stored
from tests.layouts import models

STAGED = "sharding=3:stage1:flat"
MESHES = [
    "",
    "tp=2",
    "tp=2,pp=2",
    "pp=2,dp=2",
    STAGED,
    "tp=2,sharding=2:stage1:whole",
    "sharding=2:stage3:dim0",
    "tp=2,vocab=3",
]
EXPERTS = ["", "ep=2,dp=2", "tp=2,ep=2,dp=2", "tp=2,ep=2,etp=1,pp=2", "ep=4,dp=4,sharding=2:stage1:flat"]
DENSE = ["hf-megatron", "hf-megatron-stacked", "hf-paddle", "hf-titan", "hf-titan-legacy"]
MIXED = ["hf-megatron-moe", "hf-megatron-stacked-moe", "hf-paddle-qwen-moe", "hf-titan-qwen3", "hf-stacked"]
CASES = [(name, LLAMA, mesh) for name in DENSE for mesh in MESHES] + [
    (name, MOE, mesh) for name in MIXED for mesh in EXPERTS
]
EACH = pytest.mark.parametrize(
    ("name", "model", "mesh"), CASES, ids=[f"{name}-{mesh or 'alone'}" for name, _, mesh in CASES]
)

Shares = Callable[[str, str, int, str], Named]  # program, layout, rank, group -> that rank's local tensors


@pytest.fixture(scope="module")
def shares(tmp_path_factory: pytest.TempPathFactory) -> Shares:
    """What a rank of a layout holds, as shards are read through a program."""
    root = tmp_path_factory.mktemp("shares")
    built = {model.name: stored(root / model.name, model) for model in (LLAMA, MOE)}

    @cache
    def of(program: str, layout: str, rank: int, group: str) -> Named:
        model = "moe" if program in MIXED else "llama"
        return shard(built[model], load(program), layout, rank, group)

    return of


def tensors(arrays: Named, names: list[str] | None = None) -> dict[str, nn.Parameter]:
    """Parameters in the natural order of their names; of those that a rank has no part of, empty ones."""
    found = {name: arrays.get(name, np.zeros(0, np.float32)) for name in names or sorted(arrays, key=natural_key)}
    return {name: nn.Parameter(torch.from_numpy(np.array(array))) for name, array in found.items()}


def rank_state(state: dict[str, Any], model: models.Model, layout: str, rank: int, program: object) -> TrainState:
    world = language.parse(layout).mesh.world
    declared = declare(ParallelLayout(layout, config=model.config, program=program), Launch(rank, world, "l", world), {})
    return TrainState(state, rank, world, declared)


def live(shares: Shares, name: str, layout: str, rank: int, scale: float = 1, stepped: bool = True) -> dict[str, Any]:
    """A rank's model, masters and optimizer; masters are twice the weights, and moments too, as shards are."""
    whole = re.sub(":stage[13](:[a-z0-9]+)?", ":stage0", layout)
    names = sorted(shares(name, whole, rank, "model"), key=natural_key)
    weights = shares(name, layout, rank, "model")
    moments = shares(name, layout, rank, "optim")
    kept = {of.removesuffix("/exp_avg"): array for of, array in moments.items() if of.endswith("/exp_avg")}
    model = tensors({of: array * np.float32(scale) for of, array in weights.items()}, names)
    master = tensors({of: array * np.float32(scale) for of, array in kept.items()}, names)
    optim = torch.optim.AdamW(master.values(), lr=0.5)
    for of, parameter in master.items() if stepped else ():
        if of in kept:
            optim.state[parameter] = {"exp_avg": torch.from_numpy(np.array(kept[of])), "step": torch.tensor(7.0)}
    return {"model": model, "master": master, "optim": optim}


def check(state: dict[str, Any], shares: Shares, name: str, layout: str, rank: int) -> None:
    weights, moments = shares(name, layout, rank, "model"), shares(name, layout, rank, "optim")
    for of, array in weights.items():
        np.testing.assert_array_equal(state["model"][of].detach().numpy(), array, of)
    for of, array in moments.items():
        parameter, _, word = of.rpartition("/")
        if parameter in moments or word == "exp_avg":
            np.testing.assert_array_equal(state["optim"].state[state["master"][parameter]][word].numpy(), array, of)
            np.testing.assert_array_equal(state["master"][parameter].detach().numpy(), moments[f"{parameter}/exp_avg"], of)


@EACH
def test_any_mesh_saves_the_checkpoints_own_tensors(name: str, model: models.Model, mesh: str, shares: Shares) -> None:
    """Names, shapes and every element are those of the checkpoint; nothing appears twice, and nothing is missing."""
    world, whole = language.parse(mesh).mesh.world, model.arrays()
    states = [rank_state(live(shares, name, mesh, rank), model, mesh, rank, name) for rank in range(world)]
    snapshots = [state.snapshot() for state in states]
    check_placements(snapshots, name, model)
    saved = Checkpoint(*snapshots)
    assert {group: set(specs) for group, specs in saved.specs.items() if group != "extra"} == {
        "model": set(whole),
        "master": set(whole),
        "optim": {f"{of}/{key}" for of in whole for key in ("exp_avg", "step")},
    }
    for of, array in whole.items():
        for found, factor in (("model", 1), ("master", 2)):
            np.testing.assert_array_equal(saved.tensors[found, of].numpy(), array * factor, of)
        np.testing.assert_array_equal(saved.tensors["optim", f"{of}/exp_avg"].numpy(), array * 2, of)
        assert saved.tensors["optim", f"{of}/step"].item() == 7


def check_placements(snapshots: list[Snapshot], name: str, model: models.Model) -> None:
    """A world of any mesh may restore what the placements say, and another division would be noticed."""
    stored = {TensorKey("model", of): TensorSpec("model", of, "F32", array.shape) for of, array in model.arrays().items()}
    made = compile_program(load(name).for_one_rank(), stored, model.config)
    uses = placements.uses_of(made.arranged)
    for leaf in (leaf for snapshot in snapshots for leaf in snapshot.leaves if leaf.group != "extra"):
        owner, end = split_key(leaf.name, leaf.group == "optim")
        division = placements.division(leaf.shape, uses[owner])
        division.check(TensorEntry(leaf.dtype, leaf.shape, "f", 0, (), leaf.placement), owner, load(name))
        assert leaf.placement.endswith(division.text if end != "/step" else load(name).target)


TURNS = [
    *((name, LLAMA, a, b) for name in DENSE for a, b in [("tp=2,pp=2", STAGED), (STAGED, "tp=2"), ("", "tp=2,vocab=3")]),
    *((name, MOE, a, b) for name in MIXED for a, b in [("ep=2,dp=2", "tp=2,ep=2,etp=1,pp=2"), ("tp=2,ep=2,etp=1,pp=2", "")]),
]


@pytest.mark.parametrize(("name", "model", "source", "target"), TURNS, ids=[f"{n}-{a}-{b}" for n, _, a, b in TURNS])
def test_another_mesh_restores_it_and_saves_the_same_again(
    name: str, model: models.Model, source: str, target: str, shares: Shares
) -> None:
    """Bit for bit, optimizer included; and what was restored is saved in the names that it was restored from."""
    ranks = range(language.parse(source).mesh.world)
    saved = Checkpoint(*(rank_state(live(shares, name, source, r), model, source, r, name).snapshot() for r in ranks))
    again = []
    for rank in range(language.parse(target).mesh.world):
        state = live(shares, name, target, rank, 0, stepped=rank % 2 == 0)
        found = rank_state(state, model, target, rank, name)
        restoration = found.prepare(saved.stored(rank))
        saved.fill(restoration)
        restoration.apply()
        check(state, shares, name, target, rank)
        again.append(found.snapshot())
    second = Checkpoint(*again)
    assert {**second.specs, "extra": 0} == {**saved.specs, "extra": 0}
    for key, tensor in saved.tensors.items():
        assert key[0] == "extra" or torch.equal(second.tensors[key], tensor), key


def program(statements: str, more: str = "") -> str:
    return f"name = 'mine'\nfrom = 'a'\nto = 'b'\nstatements = '''\n{statements}\n'''\n{more}"


def alone(state: dict[str, Any], statements: str, more: str = "", config: dict[str, Any] | None = None) -> TrainState:
    """A rank by itself, with a program of its own and a model that no rules know."""
    layout = ParallelLayout("", config=config or {}, program=program(statements, more))
    return TrainState(state, 0, 1, declare(layout, Launch(0, 1, "l", 1), {}))


def restored(state: TrainState, saved: Checkpoint) -> TrainState:
    restoration = state.prepare(saved.stored(state.rank))
    saved.fill(restoration)
    restoration.apply()
    return state


def array(*shape: int, first: int = 1) -> torch.Tensor:
    return torch.arange(first, first + int(np.prod(shape)), dtype=torch.float32).reshape(shape)


STATEMENTS = [
    ("a -> b", {"b": array(2, 3)}, {"a": array(2, 3)}),
    ("a^T -> b", {"b": array(2, 3)}, {"a": array(2, 3).T}),
    ("a -> b, permute=[2,0,1]", {"b": array(2, 3, 4)}, {"a": array(2, 3, 4).permute(1, 2, 0)}),
    ("a, b -> c, axis=1, sizes=[1,2]", {"c": array(2, 3)}, {"a": array(2, 3)[:, :1], "b": array(2, 3)[:, 1:]}),
    ("c -> a, b, sizes=[1,2]", {"a": array(1, 2), "b": array(2, 2, first=3)}, {"c": array(3, 2)}),
    ("e.$EXPERT_ID -> all, stack", {"all": array(2, 3)}, {"e.0": array(3), "e.1": array(3, first=4)}),
    ("all -> e.$EXPERT_ID, unstack, axis=1", {"e.0": array(2), "e.1": array(2, first=3)}, {"all": array(2, 2).T}),
    ("a -> b, rotary=interleaved, num_heads=1, axis=0", {"b": array(4)}, {"a": torch.tensor([1.0, 3, 2, 4])}),
    ("b -> a, rotary=halves, num_heads=1, axis=0", {"a": array(4)}, {"b": torch.tensor([1.0, 3, 2, 4])}),
    ("a, b -> c, same", {"c": array(3)}, {"a": array(3), "b": array(3)}),
    ("a -> b, size=2, pad_to=4", {"b": array(4, 2)}, {"a": array(2, 2)}),
    ("gone -> _, optional\n* -> *", {"a": array(3), "x": array(2)}, {"a": array(3), "x": array(2)}),
    ("a.$LAYER_ID_OFFSET -> b.$LAYER_ID_OFFSET", {"b.0": array(2), "b.1": array(3)}, {"a.1": array(2), "a.2": array(3)}),
    ("a, b -> ab, sizes=equal\nab^T -> c", {"c": array(3, 4)}, {"a": array(3, 4).T[:2], "b": array(3, 4).T[2:]}),
]


@pytest.mark.parametrize(("statements", "held", "wanted"), STATEMENTS, ids=[case[0].split("\n")[0] for case in STATEMENTS])
def test_every_statement_with_a_way_back(
    statements: str, held: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]
) -> None:
    """Without rules and without a restore; what is saved restores as it was, but for padding, and is saved again alike."""
    saved = Checkpoint(alone({"model": held}, statements).snapshot())
    found = {name: tensor for (group, name), tensor in saved.tensors.items() if group == "model"}
    assert set(found) == set(wanted)
    for name, tensor in wanted.items():
        assert torch.equal(found[name], tensor), name
    fresh = {name: torch.full_like(tensor, -1) for name, tensor in held.items()}
    again = restored(alone({"model": fresh}, statements), saved)
    for name, tensor in held.items():
        held_rows = 2 if "pad_to" in statements else len(tensor)
        assert torch.equal(fresh[name][:held_rows], tensor[:held_rows]), name
    assert Checkpoint(again.snapshot()).specs == saved.specs


def test_padding_is_left_out_and_named() -> None:
    """Rows beyond the vocabulary are not in the checkpoint; the save's notes say so, and a restore makes them zeros."""
    held = {"b": array(4, 2)}
    snapshot = alone({"model": held}, "a -> b, size=2, pad_to=4").snapshot()
    assert snapshot.notes == ("4 elements of model/b are padding: not saved, restored as zeros",)
    saved = Checkpoint(snapshot)
    restored(alone({"model": held}, "a -> b, size=2, pad_to=4"), saved)
    assert held["b"].tolist() == [[1, 2], [3, 4], [0, 0], [0, 0]]


REFUSED = [
    ("a -> b, slice=[0:2]", {"b": array(2)}, "the elements outside a slice are lost"),
    ("a -> _\nb -> c", {"c": array(2)}, "drops what a checkpoint must have: line 1"),
    ("a -> _, zeros, shape=[2], dtype=float32\nb -> c", {"c": array(2)}, "drops what a checkpoint must have"),
    ("_ -> a, shape=[2], dtype=float32\n* -> *", {"a": array(2)}, "'a' is in no tensor of the checkpoint .line 1"),
    ("a, b -> c", {"c": array(4)}, "line 1, `a, b -> c`: the length of each part is missing"),
    ("/x(.*)/ -> /y\\1/", {"y1": array(2)}, "an expression has no inverse"),
    ("a -> b", {"b": array(2), "other": array(2)}, "no statement defines what 'other' is in the checkpoint"),
    ("a -> b, c, same", {"b": array(2), "c": array(2)}, "'b' and 'c' from the same elements of 'a'"),
    ("a -> b, src_dtype=bfloat16, dst_dtype=float32", {"b": array(2)}, "'a' is F32, not BF16"),
    ("a -> b, src_dtype=float32, dst_dtype=bfloat16", {"b": array(2)}, "a cast from float32 to bfloat16 loses digits"),
    ("a -> b, dtype=float32", {"b": array(2)}, "the dtype before the cast is missing"),
    ("c -> a, b, sizes=[1,1]", {"a": array(1), "b": array(1).double()}, "'b' is F64, and others .* of 'c' are F32"),
    ("a -> b, rotary=halves, num_heads={h}, axis=0", {"b": array(4)}, "the size 'h' is unknown"),
]


@pytest.mark.parametrize(("statements", "held", "why"), REFUSED, ids=[why for _, _, why in REFUSED])
def test_what_has_no_way_back_is_refused(statements: str, held: dict[str, torch.Tensor], why: str) -> None:
    """By program, statement or tensor, and before anything is staged; what could be restored still can."""
    more = '[sizes]\nh = "heads"\n' if "{h}" in statements else ""
    with pytest.raises((InvalidRequest, StateMismatch), match=f"(?s)program 'mine'.*{why}"):
        alone({"model": held}, statements, more).snapshot()


def test_names_are_those_of_the_checkpoint_that_was_restored() -> None:
    """A program without a way back saves what it has restored, and names that the way back would not choose are kept."""
    plain = Checkpoint(TrainState({"model": {"x1": array(2), "x2": array(3)}}, 0, 1).snapshot())
    live = {"y1": torch.zeros(2), "y2": torch.zeros(3)}
    state = restored(alone({"model": live}, "/x(.*)/ -> /y\\1/"), plain)
    again = Checkpoint(state.snapshot())
    assert {**again.specs, "extra": 0} == {**plain.specs, "extra": 0}
    either = "old -> b, optional\nnew -> b, optional"
    for name in ("old", "new"):
        plain = Checkpoint(TrainState({"model": {name: array(2)}}, 0, 1).snapshot())
        state = alone({"model": {"b": torch.zeros(2)}}, either)
        assert set(Checkpoint(state.snapshot()).specs["model"]) == {"new"}
        assert set(Checkpoint(restored(state, plain).snapshot()).specs["model"]) == {name}


def test_what_the_program_leaves_out_of_the_checkpoint_is_not_lost_in_silence() -> None:
    """A checkpoint with a tower that the trainer does not hold is restored; a save, which would lack it, is refused."""
    plain = Checkpoint(TrainState({"model": {"a": array(2), "tower": array(3)}}, 0, 1).snapshot())
    state = restored(alone({"model": {"b": torch.zeros(2)}}, "a -> b\ntower -> _, optional"), plain)
    with pytest.raises(InvalidRequest, match=r"3 elements of the checkpoint's 'tower' would be lost \(line 2"):
        state.snapshot()


def stepped(names: list[str], statements: str, steps: list[float], **groups: Any) -> TrainState:
    """Parameters with steps of their own."""
    model = {name: nn.Parameter(array(2)) for name in names}
    optim = torch.optim.AdamW([{"params": [p], **groups.get(name, {})} for name, p in model.items()], lr=0.5)
    for parameter, step in zip(model.values(), steps, strict=True):
        optim.state[parameter] = {
            "step": torch.tensor(float(step)),
            "exp_avg": array(2, first=5),
            "exp_avg_sq": array(2, first=7),
        }
    return alone({"model": model, "optim": optim}, statements)


def test_a_fused_parameter_has_one_step() -> None:
    """Each of its parts gets it; parts whose steps differ are not fused again."""
    state = stepped(["ab"], "a, b -> ab, sizes=equal", [3])
    saved = Checkpoint(state.snapshot())
    assert [saved.tensors["optim", f"{name}/step"].item() for name in "ab"] == [3, 3]
    fresh = restored(stepped(["ab"], "a, b -> ab, sizes=equal", [9]), saved)
    assert fresh.snapshot().leaves and [k["step"].item() for k in fresh.state["optim"].state.values()] == [3]


def test_split_parameters_are_stepped_together() -> None:
    """Where the checkpoint has them as one tensor, their steps and hyper-parameters must be equal, at every save."""
    split = "c -> a, b, sizes=[2,2]"
    state = stepped(["a", "b"], split, [3, 3])
    saved = Checkpoint(state.snapshot())
    assert saved.tensors["optim", "c/step"].item() == 3
    assert saved.tensors["optim", "c/exp_avg"].tolist() == [5, 6, 5, 6]
    fresh = restored(stepped(["a", "b"], split, [0, 0]), saved)
    assert [kept["step"].item() for kept in fresh.state["optim"].state.values()] == [3, 3]
    state.state["optim"].state[state.state["model"]["b"]]["step"].add_(1)
    for _ in range(2):  # what was walked through before is looked at again
        with pytest.raises(StateMismatch, match=r"optim/a/step is 3.0 and optim/b/step is 4.0, .* as 'c/step'"):
            state.snapshot()
    with pytest.raises(StateMismatch, match=r"parameters that are parts of 'c' .* different hyper-parameters"):
        stepped(["a", "b"], split, [3, 3], b={"lr": 0.25}).snapshot()


def test_tied_weights_are_stored_once() -> None:
    """One memory under two names is one tensor under the name that the model's family stores, the other is its alias."""
    arrays = local("hf-titan")
    model = tensors(arrays)
    model["lm_head.weight"] = model["tok_embeddings.weight"]
    for tied in (False, True):
        config = LLAMA.config | {"tie_word_embeddings": tied}
        saved = Checkpoint(rank_state({"model": model}, LLAMA._replace(config=config), "", 0, "hf-titan").snapshot())
        names = ["model.embed_tokens.weight", "lm_head.weight"]  # the live dict has the head first
        assert saved.aliases["model"] == {names[tied]: names[not tied]} and names[tied] not in saved.specs["model"]
        fresh = tensors({name: array * 0 for name, array in arrays.items()})
        fresh["lm_head.weight"] = fresh["tok_embeddings.weight"]
        restored(rank_state({"model": fresh}, LLAMA._replace(config=config), "", 0, "hf-titan"), saved)
        assert torch.equal(fresh["tok_embeddings.weight"], model["tok_embeddings.weight"])


def test_tied_weights_of_two_stages() -> None:
    """The last stage's head is the first one's embedding, with its optimizer state: stored once, and restored in both."""
    arrays = local("hf-megatron")
    config = LLAMA.config | {"tie_word_embeddings": True}
    model = LLAMA._replace(config=config)
    arrays["output_layer.weight"] = arrays["embedding.word_embeddings.weight"]

    def stage(rank: int, scale: float) -> TrainState:
        own = {0: ("embedding", "layers.0."), 1: ("output_layer", "final", "layers.1.")}[rank]
        held = tensors({name: array * np.float32(scale) for name, array in arrays.items() if any(o in name for o in own)})
        optim = torch.optim.AdamW(held.values(), lr=0.5)
        for of, parameter in held.items():
            moment = torch.from_numpy(arrays[of] * np.float32(3 * scale))
            optim.state[parameter] = {"step": torch.tensor(4.0 * scale), "exp_avg": moment}
        return rank_state({"model": held, "optim": optim}, model, "pp=2", rank, "hf-megatron")

    saved = Checkpoint(*(stage(rank, 1).snapshot() for rank in range(2)))
    assert set(saved.specs["model"]) == set(LLAMA.tensors) - {"lm_head.weight"}
    for rank in range(2):
        state = restored(stage(rank, 0), saved).state
        for name, parameter in state["model"].items():
            kept = state["optim"].state[parameter]
            np.testing.assert_array_equal(parameter.detach().numpy(), arrays[name], name)
            np.testing.assert_array_equal(kept["exp_avg"].numpy(), arrays[name] * np.float32(3), name)
            assert kept["step"].item() == 4


def local(name: str) -> Named:
    return remade(load(name), LLAMA.arrays(), LLAMA.config)


def test_the_layout_must_fit() -> None:
    """Shapes of another layout, and matrices that no rule knows, are refused by name."""
    halves = {"model": tensors({name: array[: len(array) // 2] for name, array in local("hf-titan").items()})}
    with pytest.raises(StateMismatch, match=r"'[a-z_]+.*weight' of group 'model' has the local shape .* should have"):
        rank_state(halves, LLAMA, "tp=2", 0, "hf-titan").snapshot()
    with pytest.raises(InvalidRequest, match="the layout has no rule for 'strange'"):
        config = {**LLAMA.config}
        text = program("strange -> odd\n* -> *")
        rank_state({"model": {"odd": array(2, 2)}}, LLAMA._replace(config=config), "tp=2", 0, text).snapshot()


def test_nothing_is_worked_out_again() -> None:
    """The next snapshot has the very leaves of the last one; each says through which program it was saved."""
    model = tensors(local("hf-megatron"))
    state = {"model": model, "optim": torch.optim.SGD(model.values(), lr=0.1)}
    found = rank_state(state, LLAMA, "", 0, "hf-megatron")
    first, second = found.snapshot(), found.snapshot()
    assert all(a is b for a, b in zip(first.leaves[: first.steady], second.leaves, strict=False))
    said = {leaf.name: leaf.placement for leaf in first.leaves if leaf.group == "model"}
    through = "through program hf-megatron, hf to megatron"
    assert all(placement.startswith(through) for placement in said.values())
    assert said["model.norm.weight"] == f"{through}, whole"
    state["optim"].state[next(iter(model.values()))] = {"momentum_buffer": torch.ones(30, 16)}
    third = {leaf.key: leaf for leaf in found.snapshot().leaves}
    assert all(third[leaf.key] is leaf for leaf in first.leaves[: first.steady])


class Plain(nn.Parameter):
    """A parameter with the one attribute of Fragments that the tests look at."""

    @property
    def tensor(self) -> nn.Parameter:
        return self


def fragments(whole: Named, rank: int, ranks: int, scale: float = 1, flat: bool = False) -> dict[str, Any]:
    """What a rank has under FSDP: rows of each tensor (FSDP2), or a range of its elements (FSDP1), stepped once or never.

    Tensors that are made of queries are left out of it: plain and whole on each rank.
    """
    model: dict[str, Fragment | Plain] = {}
    for name, values in whole.items():
        if "q" in name.rpartition("layers")[2]:
            model[name] = Plain(torch.from_numpy(values * np.float32(scale)))
            continue
        size = values.size if flat else len(values)
        share = -(-size // ranks)
        low, high = min(share * rank, size), min(share * (rank + 1), size)
        part = values.reshape(-1)[low:high] if flat else values[low:high]
        held = nn.Parameter(torch.from_numpy(np.array(part * np.float32(scale))))
        place: dict[str, Any] = {"flat": (low, high)} if flat else {"offset": (low, *(0 for _ in values.shape[1:]))}
        model[name] = Fragment(held, values.shape, **place)
    optim = torch.optim.AdamW([part.tensor for part in model.values()], lr=0.5)
    for part in model.values() if scale else ():
        moments = {key: part.tensor.detach() * factor for key, factor in (("exp_avg", 3), ("exp_avg_sq", 5))}
        optim.state[part.tensor] = {"step": torch.tensor(4.0), **moments}
    return {"model": model, "optim": optim}


@pytest.mark.parametrize("flat", [False, True])
@pytest.mark.parametrize(("name", "model"), [(name, LLAMA) for name in DENSE] + [(name, MOE) for name in MIXED])
def test_shards_that_say_where_they_lie(name: str, model: models.Model, flat: bool) -> None:
    """FSDP's shards of what the program makes, uneven ones too: saved from three ranks, restored in two, and saved again."""
    whole, arrays = remade(load(name), model.arrays(), model.config), model.arrays()
    states = [rank_state(fragments(whole, rank, 3, flat=flat), model, "dp=3", rank, name) for rank in range(3)]
    saved = Checkpoint(*(state.snapshot() for state in states))
    assert set(saved.specs["model"]) == set(arrays) and len(saved.specs["optim"]) == 3 * len(arrays)
    for of, values in arrays.items():
        for key, factor in (("", 1), ("/exp_avg", 3), ("/exp_avg_sq", 5)):
            found = saved.tensors["optim" if key else "model", of + key].numpy()
            np.testing.assert_array_equal(found, values * np.float32(factor), of + key)
        assert saved.tensors["optim", f"{of}/step"].item() == 4
    again = []
    for rank in range(2):
        state = restored(rank_state(fragments(whole, rank, 2, 0, not flat), model, "dp=2", rank, name), saved)
        expected = fragments(whole, rank, 2, 1, not flat)
        for of, part in expected["model"].items():
            mine = state.state["model"][of].tensor
            assert torch.equal(mine, part.tensor), of
            for key, kept in expected["optim"].state[part.tensor].items():
                assert torch.equal(state.state["optim"].state[mine][key], kept), (of, key)
        again.append(state.snapshot())
    second = Checkpoint(*again)
    assert all(torch.equal(second.tensors[key], tensor) for key, tensor in saved.tensors.items() if key[0] != "extra")


def test_a_shard_that_is_padded_is_refused() -> None:
    """Nobody would know which rank's padding it is: by name, on save and on restore."""
    part = {"b": Fragment(array(2, 2), (4, 2), offset=(0, 0))}
    state = alone({"model": part}, "a -> b, size=2, pad_to=4")
    plain = Checkpoint(TrainState({"model": {"a": array(2, 2)}}, 0, 1).snapshot())
    with pytest.raises(StateMismatch, match=r"'b' has shape .* with padding"):
        state.snapshot()
    with pytest.raises(InvalidRequest, match="model/b is a DTensor or Fragment, and program 'mine' pads it"):
        state.prepare(plain.stored(0))


def test_what_belongs_to_no_weight_stays_as_it_is() -> None:
    """A learning rate that is a tensor, and state of another module's optimizer, pass the program under their own names."""

    def state(scale: float) -> TrainState:
        model, other = {"b": nn.Parameter(array(2) * scale)}, nn.Linear(2, 1)
        optim = torch.optim.AdamW(model.values(), lr=torch.tensor(0.25 * scale))
        head = torch.optim.SGD(other.parameters(), lr=1.0, momentum=0.5)
        for parameter in other.parameters():
            nn.init.constant_(parameter, 3 * scale)
            head.state[parameter] = {"momentum_buffer": torch.full_like(parameter.detach(), 4 * scale)}
        return alone({"model": model, "head": other, "optim": optim, "headopt": head}, "a -> b")

    first = state(1)
    saved = Checkpoint(first.snapshot())
    assert set(saved.specs["model"]) == {"a"} and set(saved.specs["head"]) == {"weight", "bias"}
    fresh = restored(state(0), saved)
    assert fresh.state["optim"].param_groups[0]["lr"].item() == 0.25
    for mine, other in zip(first.state["head"].parameters(), fresh.state["head"].parameters(), strict=True):
        kept, found = first.state["headopt"].state[mine], fresh.state["headopt"].state[other]
        assert torch.equal(mine, other) and torch.equal(kept["momentum_buffer"], found["momentum_buffer"])


def test_a_part_of_the_state(shares: Shares) -> None:
    """A save of one group places its tensors as a save of all does; steps are compared if they are in it."""
    found = rank_state(live(shares, "hf-megatron", STAGED, 1), LLAMA, STAGED, 1, "hf-megatron")
    some = {leaf.path: leaf for leaf in found.snapshot(["optim"]).leaves}
    every = {leaf.path: leaf for leaf in found.snapshot().leaves if leaf.group == "optim"}
    assert set(some) == set(every)
    assert all([p.box for p in some[path].pieces] == [p.box for p in leaf.pieces] for path, leaf in every.items())
    state = stepped(["a", "b"], "c -> a, b, sizes=[2,2]", [3, 3])
    state.snapshot()
    state.snapshot(["model"])
    state.state["optim"].state[state.state["model"]["b"]]["step"].add_(1)
    state.snapshot(["model"])
    with pytest.raises(StateMismatch, match="both would be saved as 'c/step'"):
        state.snapshot()
