"""What a layout does where it does not fit, and what it says of its decisions. That it cuts right, `tests/layouts` shows."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest

from holdfast_formats.errors import InvalidRequest, NoSuchResource, StateMismatch
from holdfast_formats.layout import parts, rules
from holdfast_formats.layout.axis_cuts import Cutter
from holdfast_formats.layout.declared import declare
from holdfast_formats.layout.elements import take_apart
from holdfast_formats.layout.language import parse
from holdfast_formats.layout.rank_tensors import HeldSize, HeldTensors, LayoutHoldings, hold, of_manifest
from holdfast_formats.region import Box, Shape
from holdfast_formats.tensors import TensorSpec
from tests.formats import strategies
from tests.layouts import models
from tests.layouts.models import Model
from tests.local_tensors import fill

Q, K, V = (f"model.layers.0.self_attn.{part}_proj.weight" for part in "qkv")
QKV = "model.layers.0.self_attn.qkv_proj.weight"


def specs_of(model: Model, dtype: str = "F32") -> dict[str, tuple[str, Shape]]:
    return {name: (dtype, tensor.shape) for name, tensor in model.tensors.items()}


def rules_of(model: Model, **changes: Any) -> rules.Rules:
    return rules.choose({**model.config, **changes}, model.tensors)


def held(model: Model, layout: str, rank: int = 0, group: str = "model", **extra: tuple[str, Shape]) -> HeldTensors:
    return hold(parse(layout), rank, group, {**specs_of(model), **extra}, rules_of(model))


@pytest.mark.parametrize(
    ("layout", "what"),
    [
        ("tp=8", "'model.layers.0.self_attn.q_proj.weight': 4 heads in dimension 0 are not divisible by tp=8"),
        ("tp=3", "'model.layers.0.self_attn.q_proj.weight': 4 heads in dimension 0 are not divisible by tp=3"),
        ("pp=2:2/2", "the split 2/2 covers 4 layers, but the model has 5"),
    ],
)
def test_a_layout_that_does_not_divide_is_refused_with_the_numbers(layout: str, what: str) -> None:
    """The tensor, the numbers and the axis are in the text."""
    with pytest.raises(StateMismatch) as refused:
        held(models.llama(), layout)
    assert what in refused.value.detail


def test_rows_that_do_not_divide_are_refused_as_rows() -> None:
    """An MLP has no heads: its rows are counted."""
    wide = models.llama(heads=16, hidden=32, kv_heads=16)
    with pytest.raises(StateMismatch, match="24 rows in dimension 0 are not divisible by tp=16") as refused:
        held(wide, "tp=16")
    assert refused.value.hint == "choose a tp that divides 24"


def test_experts_that_do_not_divide_are_refused() -> None:
    """Experts go to expert-parallel ranks in equal numbers, or not at all."""
    with pytest.raises(StateMismatch, match=r"experts\.0\..*: 4 experts are not divisible by ep=3"):
        held(models.moe(), "ep=3,sharding=3:stage0")


def test_a_checkpoints_holding_follows_its_manifest() -> None:
    """Names in natural order, rules by the model's names, and an optimizer's that follow them; no other group is known."""
    parameters = ["lm_head.weight", "model.layers.10.mlp.up_proj.weight", "model.layers.2.mlp.up_proj.weight"]
    specs = [TensorSpec("model", name, "BF16", (8, 4)) for name in parameters]
    specs += [TensorSpec("optim", f"{name}/exp_avg", "F32", (8, 4)) for name in parameters]
    manifest = strategies.manifest_of(specs)
    found = of_manifest(manifest, "optim", parse("tp=2,sharding=2:stage1:flat"), {"model_type": "llama"})
    assert [tensor.name for tensor in found.of(0).tensors] == [f"{parameters[0]}/exp_avg", f"{parameters[2]}/exp_avg"]
    assert [tensor.shape for tensor in found.of(0).tensors] == [(16,), (8,)]
    with pytest.raises(NoSuchResource, match="no group 'ema'") as refused:
        of_manifest(manifest, "ema", parse(""), None)
    assert refused.value.hint == "groups: model, optim"


def test_a_rank_outside_the_world_is_refused() -> None:
    """Ranks are counted from 0."""
    with pytest.raises(InvalidRequest, match="rank 4 is not one of the 4 ranks"):
        held(models.llama(), "tp=4", 4)


def test_what_is_not_even_is_told() -> None:
    """Heads held by several ranks, an uneven vocabulary, an uneven pipeline and tensors without a rule are in the notes."""
    found = held(models.llama(), "tp=4,pp=2", group="model", strange=("F32", (3,)))
    assert found.notes == (
        "5 layers over 2 stages: the first 1 have 3, the others 2",
        "model.embed_tokens.weight: 30 are not divisible by tp=4: split unevenly, at most 8 per rank",
        "model.layers.0.self_attn.k_proj.weight and 5 more: 2 are not divisible by tp=4: "
        "split into 2, each replicated on 2 ranks",
        "strange: no rule matches: replicated on every rank",
    )
    assert parts.full("strange", "F32", (3,)) in found.tensors


def test_a_rule_may_replicate_what_does_not_divide() -> None:
    """`otherwise = "replicate"` gives every rank everything, and says so."""
    table = {
        "name": "team",
        "sizes": {"heads": "2"},
        "tensors": [
            {"name": "w", "shape": ["3", "2"], "cut": 0, "otherwise": "replicate", "stage": "every"},
            {"name": "b", "cut": 0, "units": "heads", "stage": "every"},
        ],
    }
    team = rules.choose({}, ["w"], extra=table)
    found = hold(parse("tp=2,pp=2"), 1, "model", {"w": ("F32", (3, 2))}, team)
    assert found.tensors == (parts.full("w", "F32", (3, 2)),)
    assert found.notes == ("w: 3 are not divisible by tp=2: replicated on every rank",)
    with pytest.raises(StateMismatch, match=r"'b' has shape \[5\], which cannot be split into 2 heads"):
        hold(parse("tp=2"), 0, "model", {"b": ("F32", (5,))}, team)
    with pytest.raises(StateMismatch, match=r"'w' has shape \[4, 2\], the config says \[3, 2\]"):
        hold(parse("tp=2"), 0, "model", {"w": ("F32", (4, 2))}, team)


def test_optimizer_state_of_another_shape_is_held_whole() -> None:
    """What a factored optimizer keeps for a parameter is not cut like it."""
    state = {f"{Q}/exp_avg_row": ("F32", (5,)), f"{Q}/exp_avg": ("F32", (16, 16)), f"{Q}/step": ("F32", ())}
    found = hold(parse("tp=2"), 1, "optim", state, rules_of(models.llama()))
    shapes = {tensor.name: tensor.shape for tensor in found.tensors}
    assert shapes == {f"{Q}/exp_avg_row": (5,), f"{Q}/exp_avg": (8, 16), f"{Q}/step": ()}
    assert found.notes == (f"{Q}/exp_avg_row: optimizer state with another shape than its parameter: replicated",)


def test_streams_of_a_process_are_its_ranks_own() -> None:
    """Tensors under `ranks/` go to the rank of that number, whatever the layout."""
    specs = {"ranks/00001/rng/torch": ("U8", (5,)), "ranks/00000/rng/torch": ("U8", (5,)), "shared": ("F32", (2,))}
    found = hold(parse("dp=2"), 1, "extra", specs, rules.choose(None, specs))
    assert [tensor.name for tensor in found.tensors] == ["shared", "ranks/00001/rng/torch"]


def test_a_vocabulary_may_be_larger_than_the_config_says() -> None:
    """Embeddings that were resized are cut by the rows they have."""
    specs = {**specs_of(models.llama()), "model.embed_tokens.weight": ("F32", (34, 16))}
    found = hold(parse("tp=2"), 0, "model", specs, rules_of(models.llama()))
    assert next(t for t in found.tensors if t.name == "model.embed_tokens.weight").shape == (17, 16)


def test_a_tied_head_is_stored_once_and_given_to_both_ends() -> None:
    """The last stage gets the head out of the embedding, cut and padded as a head is; the first has the embedding alone."""
    tied = models.llama()
    specs = {name: spec for name, spec in specs_of(tied).items() if name != "lm_head.weight"}
    chosen = rules.choose({**tied.config, "tie_word_embeddings": True}, specs)
    holding = LayoutHoldings(parse("tp=2,pp=2,vocab=16"), "model", specs, chosen)
    arrays = {"model.embed_tokens.weight": np.arange(1, 481, dtype=np.float32).reshape(30, 16)}
    last = next(t for t in holding.of(3).tensors if t.name == "lm_head.weight")
    padded = np.concatenate([arrays["model.embed_tokens.weight"], np.zeros((2, 16), np.float32)])
    assert np.array_equal(fill(last, arrays), padded[16:])
    assert "lm_head.weight" not in {t.name for t in holding.of(0).tensors}
    assert "lm_head.weight" not in {t.name for t in hold(parse("tp=2"), 0, "model", specs, chosen).tensors}


def test_how_much_a_rank_holds_is_what_its_tensors_hold() -> None:
    """`share` counts without making tensors; it counts the same as `of`, padding and an optimizer's scalars included."""
    model = models.llama()
    state = {f"{n}/{k}": ("F32", t.shape) for k in ("exp_avg", "exp_avg_sq") for n, t in model.tensors.items()}
    state |= {f"{name}/step": ("F32", ()) for name in model.tensors}
    for layout in ("tp=2,vocab=8", "tp=2,pp=2,sharding=2:stage2", "sharding=4:stage3:flat:align=8"):
        for group, specs in (("model", specs_of(model)), ("optim", state)):
            holding = LayoutHoldings(parse(layout), group, specs, rules_of(model))
            for rank in range(holding.layout.mesh.world):
                tensors = holding.of(rank).tensors
                assert holding.share(rank) == HeldSize(len(tensors), sum(4 * tensor.volume for tensor in tensors))


def test_work_grows_with_kinds_and_places_not_with_tensors_and_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """A kind of tensor is cut once a tensor-parallel rank, however many layers there are; and of the ranks that hold equal
    shapes one is worked out.
    """
    counted: Counter[str] = Counter()

    def counting(owner: type, name: str) -> None:
        counted_one = getattr(owner, name)

        def call(*arguments: Any) -> Any:
            counted[name] += 1
            return counted_one(*arguments)

        monkeypatch.setattr(owner, name, call)

    counting(Cutter, "_cut")
    counting(LayoutHoldings, "_work_out")
    for layers in (2, 20):
        counted.clear()
        model = models.llama(layers)
        holding = LayoutHoldings(parse("tp=2,pp=2,sharding=4:stage3"), "model", specs_of(model), rules_of(model))
        assert sum(holding.share(rank).bytes for rank in range(16)) >= sum(4 * a.size for a in model.arrays().values())
        assert counted["_work_out"] == 2  # stages
        assert counted["_cut"] == 2 * 7  # q, k and v, o, gate and up, down, norms, vocabulary


def test_a_contiguous_form_gives_each_rank_its_slice_of_the_whole() -> None:
    """Cut as one tensor, the first of two ranks may hold all of the gate and nothing of what comes up."""
    arrays = models.llama().arrays()
    gate, up = (arrays[f"model.layers.0.mlp.{part}_proj.weight"] for part in ("gate", "up"))
    for rank, expected in enumerate((gate, up)):
        found = held(models.llama(), "tp=2,gate_up=contiguous", rank)
        fused = next(t for t in found.tensors if t.name == "model.layers.0.mlp.gate_up_proj.weight")
        assert np.array_equal(fill(fused, arrays), expected)
    with pytest.raises(StateMismatch, match="18 rows are not divisible by 4 ranks"):
        table = {
            "name": "odd",
            "tensors": [{"name": "{part}", "part": ["a", "b"], "cut": 0, "otherwise": "uneven", "stage": "every"}],
            "fusions": [{"kind": "gate_up", "name": "ab", "of": ["a", "b"]}],
        }
        specs = {"a": ("F32", (8,)), "b": ("F32", (10,))}
        hold(parse("tp=4,gate_up=contiguous"), 0, "model", specs, rules.choose(None, specs, extra=table))


def test_a_contiguous_form_of_what_no_axis_cuts_is_whole() -> None:
    """Tensors that every tensor-parallel rank holds are not cut for being fused."""
    table = {
        "name": "whole",
        "tensors": [{"name": "{part}", "part": ["a", "b"], "stage": "every"}],
        "fusions": [{"kind": "gate_up", "name": "ab", "of": ["a", "b"]}],
    }
    specs = {"a": ("F32", (3,)), "b": ("F32", (2,))}
    team = rules.choose(None, specs, extra=table)
    for rank in (0, 1):
        (fused,) = hold(parse("tp=2,gate_up=contiguous"), rank, "model", specs, team).tensors
        assert fused.shape == (5,) and fused.padding == 0


def test_experts_are_stacked_with_gate_and_up_apart_where_the_layout_says_so() -> None:
    """`gate_up=split` beside `experts=stacked` gives a stack each."""
    names = {tensor.name for tensor in held(models.moe(), "experts=stacked,gate_up=split").tensors}
    assert "model.layers.0.mlp.experts.gate_up_proj" not in names
    assert {name for name in names if "layers.0.mlp.experts" in name} >= {"model.layers.0.mlp.experts.down_proj"}
    assert len({name for name in names if "layers.0.mlp.experts" in name}) == 3


def test_a_fused_tensor_needs_all_its_parts_of_one_dtype() -> None:
    """What is missing, or of another dtype, is named."""
    model = models.llama()
    specs = specs_of(model)
    with pytest.raises(StateMismatch, match=r"qkv_proj\.weight' cannot be fused: its parts have dtypes"):
        hold(parse("qkv=ranks"), 0, "model", {**specs, K: ("BF16", specs[K][1])}, rules_of(model))
    del specs[V]
    with pytest.raises(StateMismatch, match=r"cannot be fused: there is no 'model.layers.0.self_attn.v_proj.weight'"):
        hold(parse("qkv=ranks"), 0, "model", specs, rules_of(model))
    moe = models.moe()
    fewer = {name: spec for name, spec in specs_of(moe).items() if name != "model.layers.0.mlp.experts.1.up_proj.weight"}
    with pytest.raises(StateMismatch, match="some experts lack a tensor"):
        hold(parse("experts=stacked"), 0, "model", fewer, rules_of(moe))


def test_heads_that_nobody_counted_are_asked_for() -> None:
    """Without a config the number of heads is not known, and an interleaved form cannot be made."""
    specs = specs_of(models.llama())
    with pytest.raises(StateMismatch, match="the number of heads is not known") as refused:
        hold(parse("qkv=groups"), 0, "model", specs, rules.choose(None, specs))
    assert "config.json" in refused.value.hint


def test_fused_tensors_are_taken_apart_without_a_config_where_parts_are_equal() -> None:
    """gate|up falls into halves; query, key and value of unknown heads do not."""
    gate_up, neox = "model.layers.0.mlp.gate_up_proj.weight", "gpt_neox.layers.0.attention.query_key_value.weight"
    with pytest.raises(StateMismatch, match="the number of heads is not known"):
        take_apart({QKV: ("F32", (48, 16))}, rules.choose(None, [], table="llama"), keyed=False)
    with pytest.raises(StateMismatch, match="the number of heads is not known"):
        sized = rules.choose({"hidden_size": 16}, [], table="gpt_neox")
        take_apart({neox: ("F32", (48, 16))}, sized, keyed=False)
    unknown = rules.choose(None, [], table="llama")
    found = take_apart({gate_up: ("F32", (6, 4))}, unknown, keyed=False)
    assert [element.shape for element in found.by_name.values()] == [(3, 4), (3, 4)]
    with pytest.raises(StateMismatch, match="5 rows in dimension 0 cannot be split in the ratio"):
        take_apart({gate_up: ("F32", (5, 4))}, unknown, keyed=False)
    with pytest.raises(StateMismatch, match="but its parts add up to"):
        take_apart({QKV: ("F32", (31, 16))}, rules_of(models.llama()), keyed=False)


def test_stacks_that_do_not_fit_their_experts_are_refused() -> None:
    """The number of experts in the shape is held against the config's."""
    stacked = "model.layers.0.mlp.experts.down_proj"
    with pytest.raises(StateMismatch, match="stacks 3 experts, but the rules list 4"):
        take_apart({stacked: ("F32", (3, 16, 8))}, rules_of(models.moe()), keyed=False)
    with pytest.raises(StateMismatch, match=r"of shape \[4\] has no dimension 0"):
        take_apart({stacked: ("F32", (4,))}, rules_of(models.moe()), keyed=False)


def test_live_tensors_that_do_not_fit_their_layout_are_refused() -> None:
    """The local shape, and what the layout gives this rank instead, are in the text."""
    model = models.llama()
    with pytest.raises(StateMismatch, match=r"has the local shape \[16, 16\], rank 0 of this layout should have \[8, 16\]"):
        declare(parse("tp=2"), 0, rules_of(model), "model", {Q: ("F32", (16, 16))})
    with pytest.raises(StateMismatch, match="has no part of it"):
        declare(parse("pp=5"), 1, rules_of(model), "model", {Q: ("F32", (16, 16))})


def test_an_empty_live_tensor_is_one_that_others_hold() -> None:
    """Where parameters are shared out, a rank may hold nothing of some."""
    uneven = models.llama(layers=1, vocabulary=3)
    found = declare(parse("sharding=4:stage3"), 3, rules_of(uneven), "model", {"lm_head.weight": ("F32", (0, 16))})
    assert found["lm_head.weight"].local.parts == () and found["lm_head.weight"].specs == {}


def test_live_tensors_need_a_config_where_something_cuts_them() -> None:
    """A tensor that is held whole states its own shape; one that is cut does not."""
    unknown = rules.choose(None, [], table="llama")
    norm = "model.norm.weight"
    found = declare(parse("tp=2"), 0, unknown, "model", {norm: ("F32", (16,))})
    assert found[norm].specs[norm].shape == (16,)
    with pytest.raises(StateMismatch, match=r"the global shape of tensor .*q_proj") as refused:
        declare(parse("tp=2"), 0, unknown, "model", {Q: ("F32", (8, 16))})
    assert "config.json" in refused.value.hint


def test_a_fused_live_tensor_is_declared_as_what_is_stored() -> None:
    """Saving `qkv_proj` from two ranks hands over boxes of query, key and value, whose shapes come from the config."""
    found = declare(parse("tp=2"), 1, rules_of(models.llama()), "model", {QKV: ("BF16", (16, 16))})
    assert [(part.tensor, part.box) for part in found[QKV].local.parts] == [
        (Q, Box((8, 0), (8, 16))),
        (K, Box((4, 0), (4, 16))),
        (V, Box((4, 0), (4, 16))),
    ]
    assert {spec.name: spec.shape for spec in found[QKV].specs.values()} == {Q: (16, 16), K: (8, 16), V: (8, 16)}
