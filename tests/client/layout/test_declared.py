"""Local tensors of a declared layout: stored as whole ones, restored in any other layout, bit for bit."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from holdfast import Fragment, ParallelLayout
from holdfast.launch import Launch
from holdfast.layout.declared import DeclaredLayout, declare
from holdfast.state.train_state import MatchedLeaves, TrainState
from holdfast_formats.errors import InvalidRequest, StateMismatch
from holdfast_formats.layout import language
from tests.client import llama
from tests.client.checkpoint_in_memory import Checkpoint

PLAIN = ""
Cut = Callable[[llama.Arrays, int], llama.Arrays]  # whole tensors and a rank -> its local ones


def tensors(arrays: llama.Arrays) -> dict[str, nn.Parameter]:
    return {name: nn.Parameter(torch.from_numpy(np.array(array))) for name, array in arrays.items()}


def training(arrays: llama.Arrays, stepped: bool) -> dict[str, Any]:
    """Local parameters and an optimizer over them, whose moments are a known function of the parameters."""
    model = tensors(arrays)
    optim = torch.optim.AdamW(
        [{"params": list(model.values())[:3], "lr": 0.5}, {"params": list(model.values())[3:]}], lr=0.1
    )
    if stepped:
        for parameter in model.values():
            parameter.grad = parameter.detach().clone()
        optim.step()
        for name, parameter in model.items():
            parameter.data.copy_(torch.from_numpy(arrays[name]))
            optim.state[parameter]["exp_avg"].copy_(parameter.detach() * 3)
            optim.state[parameter]["exp_avg_sq"].copy_(parameter.detach() * 5)
    return {"model": model, "optim": optim, "epoch": 7}


def state_of(state: dict[str, Any], layout: str, rank: int) -> TrainState:
    world = language.parse(layout).mesh.world
    if layout == PLAIN:
        return TrainState(state, 0, 1)
    return TrainState(
        state, rank, world, declare(ParallelLayout(layout, config=llama.CONFIG), Launch(rank, world, "l", world), {})
    )


def save(states: Iterable[dict[str, Any]], layout: str) -> Checkpoint:
    return Checkpoint(*(state_of(state, layout, rank).snapshot() for rank, state in enumerate(states)))


def restore(
    checkpoint: Checkpoint, state: dict[str, Any], layout: str = PLAIN, rank: int = 0, **options: Any
) -> MatchedLeaves:
    restoration = state_of(state, layout, rank).prepare(checkpoint.stored(rank), **options)
    checkpoint.fill(restoration)
    restoration.apply()
    return restoration


def moved(arrays: llama.Arrays) -> llama.Arrays:
    """Other values in the same places: what a restore must overwrite, padding included."""
    return {name: array * 0 - 1 for name, array in arrays.items()}


def check(state: dict[str, Any], expected: llama.Arrays) -> None:
    """Parameters, and moments as `training` made them, are what they are expected to be; so are hyper-parameters."""
    assert set(state["model"]) == set(expected)
    for name, parameter in state["model"].items():
        kept = state["optim"].state[parameter]
        for found, factor in ((parameter, 1), (kept["exp_avg"], 3), (kept["exp_avg_sq"], 5)):
            np.testing.assert_array_equal(found.detach().numpy(), expected[name] * np.float32(factor), err_msg=name)
        assert kept["step"].item() == 1
    assert state["epoch"] == 7


def split(tp: int, fuse: bool = False, padding: int = 0) -> Cut:
    def local(whole: llama.Arrays, rank: int) -> llama.Arrays:
        found = llama.cut(whole, tp, rank % tp, padding)
        return llama.fused(found) if fuse else found

    return local


LAYOUTS: dict[str, tuple[str, int, Cut]] = {
    "plain": (PLAIN, 1, lambda whole, _: whole),
    "tp2": ("tp=2", 2, split(2)),
    "tp2-fused": ("tp=2,qkv=ranks,gate_up=ranks", 2, split(2, True)),
    "tp4-fused-by-its-names": ("tp=4,vocab=8", 4, split(4, True, 32)),
    "tp2-dp2-fused-padded": ("tp=2,dp=2,vocab=8", 4, split(2, True, 16)),
}


@pytest.fixture(scope="module")
def whole() -> llama.Arrays:
    """The model's tensors."""
    return llama.arrays(1)


def saved_in(name: str, whole: llama.Arrays) -> Checkpoint:
    """A checkpoint of these tensors, saved in one of the layouts."""
    layout, ranks, local = LAYOUTS[name]
    return save([training(local(whole, rank), stepped=True) for rank in range(ranks)], layout)


@pytest.mark.parametrize("name", LAYOUTS)
def test_what_is_stored_is_whole_and_unfused(whole: llama.Arrays, name: str) -> None:
    """Every layout stores the same tensors under the same names, optimizer state and its document among them."""
    checkpoint = saved_in(name, whole)
    plain = saved_in("plain", whole)
    for (group, tensor), stored in plain.tensors.items():
        if not tensor.startswith("ranks/"):
            assert torch.equal(checkpoint.tensors[group, tensor], stored), tensor
    own = {key for key in checkpoint.tensors if not key[1].startswith("ranks/")}
    assert own == {key for key in plain.tensors if not key[1].startswith("ranks/")}
    assert set(checkpoint.specs["model"]) == set(llama.shapes())


@pytest.mark.parametrize("source", LAYOUTS)
@pytest.mark.parametrize("target", LAYOUTS)
@pytest.mark.parametrize("stepped", [True, False])
def test_any_layout_restores_from_any_other(whole: llama.Arrays, source: str, target: str, stepped: bool) -> None:
    """Parameters, moments and steps are those of the source, into live optimizer state and into none; padding is zero."""
    checkpoint = saved_in(source, whole)
    layout, ranks, local = LAYOUTS[target]
    for rank in range(ranks):
        state = training(moved(local(whole, rank)), stepped)
        restoration = restore(checkpoint, state, layout, rank, keep=("optim/lr",))
        assert not restoration.missing and not restoration.unexpected
        check(state, local(whole, rank))


def test_documents_name_what_is_stored(whole: llama.Arrays) -> None:
    """A fused parameter's hyper-parameters are those of each of its parts, and come back from the parts."""
    checkpoint = saved_in("tp2-fused", whole)
    text = checkpoint.stored().values["optim"]["optim"]
    assert "q_proj" in text and "qkv_proj" not in text
    state = training(moved(llama.cut(whole, 2, 0)), stepped=False)
    state["optim"].param_groups[0]["lr"] = 9.0
    restore(checkpoint, state, "tp=2", strict=False)
    assert state["optim"].param_groups[0]["lr"] == 0.5
    state = training(moved(llama.fused(llama.cut(whole, 2, 0))), stepped=False)
    state["optim"].param_groups[0]["lr"] = 9.0
    restore(checkpoint, state, "tp=2", strict=False)
    assert [group["lr"] for group in state["optim"].param_groups] == [0.5, 0.1]


def flat_states(whole: llama.Arrays, method: str, ranks: int) -> list[dict[str, Any]]:
    """Sharding stage 1 as its code holds it: all parameters, and of masters and moments this rank's share."""
    names = list(whole)
    states = []
    for rank in range(ranks):
        shards = {
            name: _share(whole, names, method, rank, ranks)[name] for name in _share(whole, names, method, rank, ranks)
        }
        masters = {name: nn.Parameter(torch.from_numpy(np.array(array))) for name, array in shards.items()}
        optim = torch.optim.SGD(masters.values(), lr=0.1, momentum=0.9) if masters else None
        for parameter in masters.values():
            assert optim is not None
            optim.state[parameter] = {"momentum_buffer": parameter.detach() * 3, "step": torch.ones(())}
        state: dict[str, Any] = {"model": tensors(whole), "master": masters}
        states.append(state if optim is None else {**state, "optim": optim})
    return states


def _share(whole: llama.Arrays, names: list[str], method: str, rank: int, ranks: int) -> llama.Arrays:
    if method == "dim0":
        rows = {name: -(-whole[name].shape[0] // ranks) for name in names}
        return {name: whole[name][rank * n : (rank + 1) * n] for name, n in rows.items()}  # perhaps without rows
    total = sum(whole[name].size for name in names)
    share = -(-total // ranks)
    low, high, at, found = rank * share, (rank + 1) * share, 0, {}
    for name in names:
        first, last = max(low - at, 0), min(high - at, whole[name].size)
        if first < last:
            found[name] = whole[name].reshape(-1)[first:last]
        at += whole[name].size
    return found


@pytest.mark.parametrize("source", ["dim0", "flat"])
@pytest.mark.parametrize("target", ["dim0", "flat"])
def test_sharded_optimizers(whole: llama.Arrays, source: str, target: str) -> None:
    """Masters and moments that 9 ranks share out, of which one has no rows of most, come back on 2 and on 9."""
    checkpoint = save(flat_states(whole, source, 9), f"sharding=9:stage1:{source}")
    for name, array in whole.items():
        assert torch.equal(checkpoint.tensors["master", name], torch.from_numpy(array))
        assert torch.equal(checkpoint.tensors["optim", f"{name}/momentum_buffer"], torch.from_numpy(array * np.float32(3)))
    for ranks, rank in ((2, 0), (2, 1), (9, 7), (9, 8)):
        state = flat_states(moved(whole), target, ranks)[rank]
        restore(checkpoint, state, f"sharding={ranks}:stage1:{target}", rank)
        for name, array in _share(whole, list(whole), target, rank, ranks).items():
            np.testing.assert_array_equal(state["master"][name].detach().numpy(), array)
            moment = state["optim"].state[state["master"][name]]["momentum_buffer"]
            np.testing.assert_array_equal(moment.numpy(), array * np.float32(3))


def test_moments_of_another_shape_are_shards_where_the_layout_shares_them_out(whole: llama.Arrays) -> None:
    """An optimizer over whole parameters may keep flat shards of moments: they are stored whole, and come back."""
    names = list(whole)

    def state_with(arrays: llama.Arrays, rank: int, ranks: int, stepped: bool) -> dict[str, Any]:
        model = tensors(arrays)
        optim = torch.optim.SGD(model.values(), lr=0.1, momentum=0.9)
        for name, array in _share(arrays, names, "flat", rank, ranks).items() if stepped else ():
            optim.state[model[name]] = {"momentum_buffer": torch.from_numpy(array * np.float32(3)), "step": torch.ones(())}
        return {"model": model, "optim": optim}

    checkpoint = save([state_with(whole, rank, 3, True) for rank in range(3)], "sharding=3:stage1:flat")
    for name, array in whole.items():
        assert torch.equal(checkpoint.tensors["optim", f"{name}/momentum_buffer"], torch.from_numpy(array * np.float32(3)))
    for rank in range(2):
        for stepped in (True, False):
            state = state_with(moved(whole), rank, 2, stepped)
            restore(checkpoint, state, "sharding=2:stage1:flat", rank)
            shares = _share(whole, names, "flat", rank, 2)
            assert {name for name, p in state["model"].items() if state["optim"].state.get(p)} == set(shares)
            for name, array in shares.items():
                kept = state["optim"].state[state["model"][name]]
                np.testing.assert_array_equal(kept["momentum_buffer"].numpy(), array * np.float32(3))
                assert kept["step"].item() == 1


def test_stages_hold_their_layers(whole: llama.Arrays) -> None:
    """Pipeline stages store their own layers; a plain rank gets all, and another split of the layers gets its own."""
    stages = [llama.shapes(range(1), last=False), llama.shapes(range(1, 2), first=False)]
    states = [training({name: whole[name] for name in names}, stepped=False) for names in stages]
    checkpoint = save(states, "pp=2")
    state = {"model": tensors(moved(whole))}
    restore(checkpoint, state, groups=["model"])
    for name, array in whole.items():
        np.testing.assert_array_equal(state["model"][name].detach().numpy(), array)
    with pytest.raises(StateMismatch, match="missing"):
        restore(checkpoint, states[0], "pp=2", 1, groups=["model"])


def test_tied_embeddings_of_two_stages_are_stored_once(whole: llama.Arrays, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the config ties the head to the embedding, both stages hold one stored tensor; the other name is an alias."""
    monkeypatch.setitem(llama.CONFIG, "tie_word_embeddings", True)
    tied = {**whole, "lm_head.weight": whole["model.embed_tokens.weight"]}
    stages = [llama.shapes(range(1), last=False), llama.shapes(range(1, 2), first=False)]
    checkpoint = save([{"model": tensors({name: tied[name] for name in names})} for names in stages], "pp=2")
    assert "lm_head.weight" not in checkpoint.specs["model"]
    assert checkpoint.aliases["model"] == {"lm_head.weight": "model.embed_tokens.weight"}
    for rank, names in enumerate(stages):
        state = {"model": tensors({name: tied[name] * 0 for name in names})}
        restore(checkpoint, state, "pp=2", rank)
        for name in names:
            np.testing.assert_array_equal(state["model"][name].detach().numpy(), tied[name])


def test_what_is_unchanged_is_not_worked_out_again(whole: llama.Arrays) -> None:
    """The next snapshot has the very leaves of the last one, also after the optimizer's tensors were looked at anew."""
    state = training(llama.fused(llama.cut(whole, 2, 1)), stepped=True)
    train_state = state_of(state, "tp=2", 1)
    before = train_state.snapshot()
    again = train_state.snapshot()
    state["optim"].state[next(iter(state["model"].values()))]["extra"] = torch.ones(())
    third = train_state.snapshot()
    kept = {leaf.path: leaf for leaf in before.leaves if not leaf.name.startswith("ranks/")}
    for snapshot in (again, third):
        found = {leaf.path: leaf for leaf in snapshot.leaves}
        assert all(found[path] is leaf for path, leaf in kept.items())
    assert before.mesh == {"tp": 2, "cp": 1, "ep": 1, "sharding": 1, "dp": 1, "pp": 1, "etp": 2, "vpp": 1}


def test_only_the_optimizer_is_saved(whole: llama.Arrays) -> None:
    """A save of one group knows from the others what that group's tensors are."""
    state = training(llama.fused(llama.cut(whole, 2, 1)), stepped=True)
    train_state = state_of(state, "tp=2", 1)
    some = {leaf.path: leaf for leaf in train_state.snapshot(["optim"]).leaves}
    every = {leaf.path: leaf for leaf in train_state.snapshot().leaves if leaf.group == "optim"}
    assert set(some) == set(every)
    assert all(some[path].shape == leaf.shape for path, leaf in every.items())


@pytest.mark.parametrize("several", [False, True])
def test_what_says_itself_where_it_lies_is_left_alone(whole: llama.Arrays, several: bool) -> None:
    """A Fragment beside local tensors, or a list of them, is stored and restored by its own word."""
    name = "model.layers.0.mlp.down_proj.weight"

    def with_fragment(rank: int, arrays: llama.Arrays) -> dict[str, Any]:
        local: dict[str, Any] = tensors(llama.cut(arrays, 2, rank))
        rows = torch.from_numpy(np.array(arrays[name][8 * rank : 8 * rank + 8]))
        cuts = [(0, 3), (3, 8)] if several else [(0, 8)]
        parts = [Fragment(rows[a:b], (llama.HIDDEN, llama.INTER), offset=(8 * rank + a, 0)) for a, b in cuts]
        return {"model": {**local, name: parts if several else parts[0]}}

    checkpoint = save([with_fragment(rank, whole) for rank in range(2)], "tp=2")
    assert torch.equal(checkpoint.tensors["model", name], torch.from_numpy(whole[name]))
    for rank in range(2):
        state = with_fragment(rank, moved(whole))
        restore(checkpoint, state, "tp=2", rank)
        held = state["model"][name]
        found = torch.cat([part.tensor for part in (held if several else [held])]).numpy()
        np.testing.assert_array_equal(found, whole[name][8 * rank : 8 * rank + 8])


def test_what_does_not_fit_is_refused_by_name(whole: llama.Arrays) -> None:
    """Wrong worlds, shapes, memory and optimizer state are refused, naming the tensor, and change nothing."""
    with pytest.raises(InvalidRequest, match="2 ranks, but this launch has 3"):
        declare(ParallelLayout("tp=2"), Launch(0, 3, "l", 3), {})
    local = llama.fused(llama.cut(whole, 2, 0))
    name = "model.layers.0.self_attn.qkv_proj.weight"
    with pytest.raises(StateMismatch, match="qkv_proj"):
        state_of({"model": tensors({**local, name: local[name][:-1]})}, "tp=2", 0).snapshot()
    strided = torch.empty(local[name].shape[::-1]).t()
    with pytest.raises(InvalidRequest, match=r"qkv_proj.*contiguous"):
        state_of({"model": {**tensors(local), name: strided}}, "tp=2", 0).snapshot()
    state = training(local, stepped=True)
    state["optim"].state[state["model"][name]]["row"] = torch.ones(3)
    with pytest.raises(InvalidRequest, match=r"qkv_proj\.weight/row"):
        state_of(state, "tp=2", 0).snapshot()
    checkpoint = saved_in("plain", whole)
    smaller = {**local, name: local[name][:-1]}
    state = {"model": tensors(moved(smaller))}
    with pytest.raises(StateMismatch, match="qkv_proj"):
        restore(checkpoint, state, "tp=2", 0, groups=["model"])
    assert all((parameter == -1).all() for parameter in state["model"].values())


def test_buffers_that_no_rule_knows_are_stored_as_they_are(whole: llama.Arrays) -> None:
    """A name that the tables do not know is every rank's, as without a layout."""
    states = [{"model": {**tensors(llama.cut(whole, 2, rank)), "seen": torch.tensor(5)}} for rank in range(2)]
    checkpoint = save(states, "tp=2")
    assert checkpoint.tensors["model", "seen"].item() == 5
    states[1]["model"]["seen"] = torch.tensor(0)
    restore(checkpoint, states[1], "tp=2", 1)
    assert states[1]["model"]["seen"].item() == 5


def test_state_of_parameters_that_no_rule_knows(whole: llama.Arrays) -> None:
    """A vector without a rule is every rank's, and so is what an optimizer keeps of it, in whatever shape."""
    states = [training({**llama.cut(whole, 2, rank), "scale": np.ones(3, np.float32)}, stepped=True) for rank in range(2)]
    for state in states:
        state["optim"].state[state["model"]["scale"]]["row"] = torch.ones(2)
    checkpoint = save(states, "tp=2")
    assert checkpoint.tensors["optim", "scale/exp_avg"].tolist() == [3, 3, 3]
    assert checkpoint.tensors["optim", "scale/row"].tolist() == [1, 1] and checkpoint.specs["optim"]["scale/step"] == (
        "F32",
        (),
    )


def test_the_config_may_come_with_the_assets() -> None:
    """Where the layout has no config, the assets' config.json is the model's."""
    made = declare(ParallelLayout({"tp": 2}), Launch(1, 2, "l", 2), {"config.json": llama.CONFIG_BYTES})
    assert isinstance(made, DeclaredLayout) and made.config == llama.CONFIG
    another = ParallelLayout("tp=2", config={"model_type": "x"})
    given = declare(another, Launch(1, 2, "l", 2), {"config.json": llama.CONFIG_BYTES})
    assert given.config == {"model_type": "x"}
