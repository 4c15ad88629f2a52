"""rules.rules: what a table says of one checkpoint's tensors."""

from __future__ import annotations

from typing import Any

import pytest

from holdfast_formats.errors import InvalidRequest, StateMismatch
from holdfast_formats.layout.rules import Rules, choose
from tests.kit.calls import counted

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "num_hidden_layers": 4,
    "vocab_size": 100,
}
DEEPSEEK = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "hidden_size": 512,
    "intermediate_size": 768,
    "moe_intermediate_size": 256,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_attention_heads": 8,
    "num_hidden_layers": 3,
    "qk_nope_head_dim": 48,
    "qk_rope_head_dim": 16,
    "v_head_dim": 32,
    "q_lora_rank": 384,
    "kv_lora_rank": 128,
    "vocab_size": 1000,
}


def _llama(**changes: Any) -> Rules:
    return choose(LLAMA | changes, [])


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("model.embed_tokens.weight", ((100, 64), 0, "tp", None, "uneven", True, "first")),
        ("lm_head.weight", ((100, 64), 0, "tp", None, "uneven", True, "last")),
        ("model.norm.weight", ((64,), None, "", None, "replicate", False, "last")),
        ("model.layers.3.input_layernorm.weight", ((64,), None, "", None, "replicate", False, 3)),
        ("model.layers.0.self_attn.q_proj.weight", ((64, 64), 0, "tp", 8, "refuse", False, 0)),
        ("model.layers.0.self_attn.k_proj.weight", ((16, 64), 0, "tp", 2, "largest", False, 0)),
        ("model.layers.0.self_attn.v_proj.bias", ((16,), 0, "tp", 2, "largest", False, 0)),
        ("model.layers.0.self_attn.o_proj.weight", ((64, 64), 1, "tp", 8, "refuse", False, 0)),
        ("model.layers.0.self_attn.o_proj.bias", ((64,), None, "", None, "replicate", False, 0)),
        ("model.layers.2.mlp.up_proj.weight", ((96, 64), 0, "tp", None, "refuse", False, 2)),
        ("model.layers.2.mlp.down_proj.weight", ((64, 96), 1, "tp", None, "refuse", False, 2)),
        ("layers.2.mlp.down_proj.weight", ((64, 96), 1, "tp", None, "refuse", False, 2)),
        ("model.layers.4.mlp.down_proj.weight", ((64, 96), 1, "tp", None, "refuse", False, "last")),
    ],
)
def test_a_rule_is_how_tensor_parallelism_cuts(name: str, said: tuple[Any, ...]) -> None:
    """Columns along dimension 0, rows along 1, heads whole, norms everywhere; what follows the layers is last."""
    rule = _llama().rule(name)
    assert rule is not None
    assert rule[:7] == said
    assert (rule.expert, rule.experts) == (None, None)


@pytest.mark.parametrize(
    "name", ["", "optimizer.step", "model.layers.x.mlp.up_proj.weight", "model.layers.07.mlp.up_proj.weight"]
)
def test_a_name_that_no_pattern_has_is_not_known(name: str) -> None:
    """No rule, no fused tensor, nothing it could be stored in."""
    rules = _llama()
    assert (rules.rule(name), rules.fusion(name), rules.fusions(name)) == (None, None, ())
    assert (rules.stored(name), rules.synonyms(name)) == (None, ())


def test_units_have_a_name_where_their_number_is_not_known() -> None:
    """Without a config a rule still says what is cut, by what, and in units of what."""
    names = [f"model.layers.{i}.{name}.weight" for i in (0, 5) for name in ("self_attn.q_proj", "mlp.gate_proj")]
    rules = choose(None, names)
    rule = rules.rule("model.layers.5.self_attn.k_proj.weight")
    assert rule is not None
    assert (rules.name, rules.layers, rules.experts) == ("llama", 6, None)
    assert (rule.shape, rule.dimension, rule.units, rule.unit, rule.stage) == (None, 0, None, "kv_heads", 5)
    fused = rules.fusion("model.layers.5.self_attn.qkv_proj.weight")
    assert fused is not None and fused.units is None


def test_a_fused_tensor_names_what_it_is_made_of() -> None:
    """Queries, keys and values along dimension 0, with the numbers of their heads; each part knows where it may be."""
    rules = _llama()
    fused = rules.fusion("model.layers.1.self_attn.qkv_proj.bias")
    assert fused is not None
    assert fused.of == tuple(f"model.layers.1.self_attn.{part}_proj.bias" for part in "qkv")
    assert (fused.kind, fused.dimension, fused.units, fused.stacked, fused.groups) == ("qkv", 0, (8, 2), False, 1)
    assert all(rules.fusions(part) == (fused,) for part in fused.of)
    assert rules.fusion(fused.name) is fused
    assert rules.rule(fused.name) is None
    assert rules.stored(fused.of[0]) is None


HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2}


@pytest.mark.parametrize(
    ("config", "name", "dimension", "units", "groups"),
    [
        ({"model_type": "phi3", **HEADS}, "model.layers.0.self_attn.qkv_proj.weight", 0, (4, 2), 1),
        ({"model_type": "gpt2", "n_head": 4}, "transformer.h.0.attn.c_attn.weight", 1, (4, 4), 1),
        ({"model_type": "gpt2", "n_head": 4}, "h.0.attn.c_attn.bias", 0, (4, 4), 1),
        ({"model_type": "gpt_neox", **HEADS}, "gpt_neox.layers.0.attention.query_key_value.weight", 0, (4, 4), 4),
        ({"model_type": "gpt_neox"}, "gpt_neox.layers.0.attention.query_key_value.bias", 0, None, 0),
        ({"model_type": "internlm2", **HEADS}, "model.layers.0.attention.wqkv.weight", 0, (4, 2), 2),
    ],
)
def test_where_the_fused_form_is_stored_the_parts_say_so(
    config: dict[str, Any], name: str, dimension: int, units: tuple[int, int] | None, groups: int
) -> None:
    """The parts are names of ours with rules of their own, and the fused tensor in whose form a save stores them."""
    rules = choose(config, [])
    fused = rules.fusion(name)
    assert fused is not None
    assert (fused.dimension, fused.units, fused.groups) == (dimension, units, groups)
    for part in fused.of:
        rule = rules.rule(part)
        assert rule is not None and rule.dimension == dimension
        assert rules.stored(part) is fused


def test_experts_are_stacked_expert_by_expert() -> None:
    """A stack of gate and up names both of each expert in turn; without gate and up it names one of each."""
    rules = choose(DEEPSEEK, [])
    stack = rules.fusion("model.layers.1.mlp.experts.gate_up_proj")
    down = rules.fusion("model.layers.1.mlp.experts.down_proj")
    assert stack is not None and down is not None
    one = "model.layers.1.mlp.experts.{}.{}_proj.weight"
    assert stack.of == tuple(one.format(expert, part) for expert in range(4) for part in ("gate", "up"))
    assert down.of == tuple(one.format(expert, "down") for expert in range(4))
    assert (stack.kind, stack.stacked, stack.dimension, stack.units, stack.groups) == ("experts", True, 0, None, 1)
    held = [fused.name.removeprefix("model.layers.1.mlp.experts.") for fused in rules.fusions(one.format(2, "up"))]
    assert held == ["2.gate_up_proj.weight", "gate_up_proj", "up_proj"]


def test_an_experts_rule_has_its_number() -> None:
    """An expert is cut inside by its own axis, and its number and their count are told; one too many is refused by name."""
    rules = choose(DEEPSEEK, [])
    rule = rules.rule("model.layers.2.mlp.experts.3.down_proj.weight")
    assert rule is not None
    assert (rule.shape, rule.dimension, rule.axis, rule.stage, rule.expert, rule.experts) == ((512, 256), 1, "etp", 2, 3, 4)
    shared = rules.rule("model.layers.2.mlp.shared_experts.down_proj.weight")
    assert shared is not None and (shared.axis, shared.expert) == ("tp", None)
    with pytest.raises(
        StateMismatch, match=r"experts\.4\.down_proj.* belongs to expert 4, but the config has only 4 experts"
    ):
        rules.rule("model.layers.2.mlp.experts.4.down_proj.weight")


def test_a_stack_of_unknown_height_is_not_known() -> None:
    """Where neither config nor names nor shapes count the experts, nothing is said of stacks."""
    rules = choose({"model_type": "qwen3_moe"}, ["model.layers.0.mlp.experts.gate_up_proj"])
    assert rules.experts is None
    assert rules.fusion("model.layers.0.mlp.experts.gate_up_proj") is None
    per_expert = rules.fusions("model.layers.0.mlp.experts.0.up_proj.weight")
    assert [fused.stacked for fused in per_expert] == [False]
    rule = rules.rule("model.layers.0.mlp.experts.99.up_proj.weight")
    assert rule is not None and (rule.expert, rule.experts) == (99, None)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        # 8 heads of 64 rows: two of them fill a block
        ("self_attn.q_b_proj.weight_scale_inv", ((4, 3), 0, "tp", None, "replicate")),
        # 8 heads of 80 rows: blocks and heads never meet but in fives
        ("self_attn.kv_b_proj.weight_scale_inv", ((5, 1), 0, "tp", None, "replicate")),
        ("self_attn.o_proj.weight_scale_inv", ((4, 2), 1, "tp", None, "replicate")),
        ("mlp.gate_proj.weight_scale_inv", ((6, 4), 0, "tp", None, "replicate")),
        ("mlp.experts.1.gate_proj.weight_scale_inv", ((2, 4), 0, "etp", None, "replicate")),
        ("self_attn.kv_a_proj_with_mqa.weight_scale_inv", ((2, 4), None, "", None, "replicate")),
    ],
)
def test_scales_are_cut_with_their_weights(name: str, said: tuple[Any, ...]) -> None:
    """One number a block of 128 by 128, the last block as small as it may be; cut as the weight is, or whole everywhere."""
    rule = choose(DEEPSEEK, []).rule(f"model.layers.1.{name}")
    assert rule is not None
    assert rule[:5] == said


def test_scales_keep_units_that_are_whole_blocks() -> None:
    """Heads of 128 rows are units of the scales too; rows that end within a block leave every rank with all scales."""
    rules = _llama(head_dim=128, intermediate_size=100)
    key = rules.rule("model.layers.0.self_attn.k_proj.weight_scale_inv")
    gate = rules.rule("model.layers.0.mlp.gate_proj.weight_scale_inv")
    assert key is not None and gate is not None
    assert (key.shape, key.units, key.unit, key.otherwise) == ((2, 1), 2, "kv_heads", "largest")
    assert (gate.shape, gate.dimension, gate.axis) == ((1, 1), None, "")
    unknown = choose(None, [], table="llama").rule("model.layers.0.mlp.gate_proj.weight_scale_inv")
    assert unknown is not None and (unknown.shape, unknown.dimension, unknown.otherwise) == (None, 0, "replicate")


def test_names_that_programs_change_are_synonyms() -> None:
    """Mixtral's router has one name on disk and another in memory."""
    rules = choose({"model_type": "mixtral"}, [])
    assert rules.synonyms("model.layers.3.mlp.gate.weight") == ("model.layers.3.block_sparse_moe.gate.weight",)
    assert rules.synonyms("model.layers.3.block_sparse_moe.gate.weight") == ("model.layers.3.mlp.gate.weight",)
    assert rules.synonyms("model.norm.weight") == ()


def test_a_number_written_out_goes_before_an_open_one() -> None:
    """A table may treat one layer otherwise than the others, wherever that stands in it."""
    extra = {"name": "mine", "tensors": [{"name": "l.{layer}.w", "cut": 0}, {"name": "l.0.w", "stage": "first"}]}
    rules = choose(None, [], extra=extra)
    first, second = rules.rule("l.0.w"), rules.rule("l.1.w")
    assert first is not None and second is not None
    assert (first.stage, first.dimension, second.stage, second.dimension) == ("first", None, 1, 0)


def test_a_shape_that_comes_out_wrong_is_refused_by_name() -> None:
    """A size below zero names the table and the pattern, before any tensor is asked for."""
    extra = {"name": "mine", "sizes": {"n": "n"}, "tensors": [{"name": "x", "shape": ["n - 8"], "stage": "first"}]}
    with pytest.raises(InvalidRequest, match="rules table 'mine', 'x': a size evaluates to -1"):
        choose({"n": 7}, [], extra=extra)


def test_a_rule_takes_a_few_calls() -> None:
    """The names of a large mixture's experts are asked for in no time, so that layouts of many ranks can be worked out.

    3 us on an idle machine.
    """
    rules = choose(DEEPSEEK | {"n_routed_experts": 256, "num_hidden_layers": 61}, [])
    names = [f"model.layers.{i}.mlp.experts.{e}.up_proj.weight" for i in range(61) for e in range(256)]
    calls, found = counted(lambda: [rules.rule(name) for name in names])
    assert all(found)
    assert calls / len(names) < 30  # 16 now
