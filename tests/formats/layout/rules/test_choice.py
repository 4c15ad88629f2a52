"""rules.choice: which table fits a checkpoint."""

from __future__ import annotations

from importlib.resources import files
from typing import Any

import pytest

from holdfast_formats.errors import InvalidRequest
from holdfast_formats.layout.rules import choose, packaged

EMBED, HEAD = "model.embed_tokens.weight", "lm_head.weight"


def test_every_packaged_table_is_sound() -> None:
    """Each TOML file beside the code is a table of its own file's name, with rules."""
    there = {entry.name.removesuffix(".toml") for entry in (files("holdfast_formats.layout.rules") / "tables").iterdir()}
    assert set(packaged()) == there
    for name in packaged():
        assert choose(None, [], table=name).name == name


@pytest.mark.parametrize(
    ("config", "table"),
    [
        ({"architectures": ["MistralForCausalLM"], "model_type": "mistral"}, "llama"),
        ({"architectures": ["MyOwn", "Qwen3MoeForCausalLM"]}, "qwen_moe"),
        ({"architectures": ["MyOwn"], "model_type": "gemma2"}, "gemma"),
        ({"model_type": "deepseek_v3"}, "deepseek"),
        ({"model_type": "mistral3", "text_config": {"model_type": "mistral"}}, "llama"),
        ({"model_type": "vision", "text_config": {"architectures": ["Phi3ForCausalLM"]}}, "phi3"),
        ({"model_type": "vision", "text_config": "mistral"}, "none"),
        ({"architectures": "LlamaForCausalLM", "model_type": ["llama"]}, "none"),
        ({"architectures": [{"a": 1}], "model_type": 3}, "none"),
        ({}, "none"),
        (None, "none"),
    ],
)
def test_the_config_chooses(config: dict[str, Any] | None, table: str) -> None:
    """The architecture, else the model type, of the text model too; what is unknown or ill-typed chooses nothing."""
    assert choose(config, ["some.weight"]).name == table


QUERY, MOE = "model.layers.0.self_attn.q_proj.weight", "model.layers.0.block_sparse_moe."


@pytest.mark.parametrize(
    ("names", "table"),
    [
        (["layers.0.self_attn.q_proj.weight", "layers.0.mlp.gate_proj.weight"], "llama"),
        ([QUERY, "model.layers.1.mlp.gate.weight", "model.layers.1.mlp.experts.3.gate_proj.weight"], "qwen_moe"),
        ([QUERY, f"{MOE}gate.weight", f"{MOE}experts.0.w1.weight"], "mixtral"),
        ([QUERY, f"{MOE}gate.weight", f"{MOE}experts.0.w2.weight"], "none"),
        (["h.0.attn.c_attn.weight", "h.0.mlp.c_fc.weight"], "gpt2"),
        (["h.0.attn.c_attn.weight"], "none"),
        ([], "none"),
    ],
)
def test_the_names_choose_where_no_config_does(names: list[str], table: str) -> None:
    """The table all of whose marks are among the names, those with more marks first."""
    assert choose({"model_type": "mine"}, names).name == table
    assert choose(None, iter(names)).name == table


def test_names_decide_between_tables_of_one_architecture() -> None:
    """ERNIE's config is the same for two families of names; without names it is Hugging Face's."""
    config = {"architectures": ["Ernie4_5_MoeForCausalLM"]}
    layer = "ernie.layers.1.self_attn."
    paddle = ["ernie.embed_tokens.weight", f"{layer}qkv_proj.weight", f"{layer}o_proj.weight"]
    assert choose(config, [*paddle, "ernie.layers.1.mlp.experts.0.up_gate_proj.weight"]).name == "ernie_paddle"
    assert choose(config, ["model.embed_tokens.weight"]).name == "ernie"
    assert choose(config, []).name == "ernie"


def test_paddles_weights_stand_the_other_way_round() -> None:
    """In [in, out] the columns are dimension 1: of queries, keys and values, of gate and up, and of the head."""
    config = {
        "architectures": ["Ernie4_5_MoeForCausalLM"],
        "hidden_size": 8192,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "moe_intermediate_size": 3584,
        "moe_num_experts": 64,
        "vocab_size": 103424,
    }
    rules = choose(config, [], table="ernie_paddle")
    # shapes as the published checkpoint of 300 B has them
    for name, shape in {
        "ernie.layers.16.self_attn.qkv_proj.weight": (8192, 10240),
        "ernie.layers.16.mlp.experts.1.up_gate_proj.weight": (8192, 7168),
    }.items():
        fused = rules.fusion(name)
        assert fused is not None
        parts = [rules.rule(part) for part in fused.of]
        assert all(part is not None and part.dimension == fused.dimension == 1 for part in parts)
        assert (8192, sum(part.shape[1] for part in parts if part and part.shape)) == shape
    for name, shape in {
        "ernie.layers.16.mlp.experts.1.down_proj.weight": (3584, 8192),
        "ernie.layers.40.self_attn.o_proj.weight": (8192, 8192),
        "ernie.embed_tokens.weight": (103424, 8192),
    }.items():
        rule = rules.rule(name)
        assert rule is not None and rule.shape == shape and rule.dimension == 0


def test_a_table_is_chosen_by_name() -> None:
    """A name goes before the config; "none" knows nothing; a name that is no table is refused with those that are."""
    config = {"architectures": ["LlamaForCausalLM"]}
    assert choose(config, [], table="gpt2").name == "gpt2"
    assert choose(config, [], table="none").rule("model.norm.weight") is None
    with pytest.raises(InvalidRequest, match="no rules table 'lama'") as refused:
        choose(config, [], table="lama")
    assert "llama" in refused.value.hint


def test_a_table_of_ones_own_extends_a_packaged_one() -> None:
    """A given table is the one that counts, with what it extends, unless another is named."""
    mine = {
        "name": "mine",
        "extends": "llama",
        "sizes": {"values": "num_values ?? 1"},
        "tensors": [{"name": "value_head.weight", "shape": ["values", "hidden"], "stage": "last"}],
    }
    config = {"architectures": ["MixtralForCausalLM"], "hidden_size": 8}
    rules = choose(config, [], extra=mine)
    added, inherited = rules.rule("value_head.weight"), rules.rule("model.norm.weight")
    assert added is not None and inherited is not None
    assert (rules.name, added.shape, inherited.shape) == ("mine", (1, 8), (8,))
    assert choose(config, [], table="mine", extra=mine).name == "mine"
    assert choose(config, [], table="mixtral", extra=mine).name == "mixtral"


@pytest.mark.parametrize(
    ("extra", "why"),
    [
        ({"name": "llama"}, "'llama': the name is taken"),
        ({"name": "none"}, "'none': the name is taken"),
        ({"name": "mine", "extends": "lama"}, "'mine' extends 'lama', which does not exist"),
        ({"name": "mine", "extends": ["llama", "../llama"]}, "extends '../llama', which does not exist"),
        ({"name": "mine", "extends": ["ernie", "mixtral", "phi3", "gemma", "deepseek", "qwen_moe"]}, "more than 8 tables"),
        (
            {"name": "mine", "sizes": {"n": "7 // hidden_size"}},
            "'mine', size 'n' for this config: division by zero in a size: 7 // 0",
        ),
    ],
)
def test_tables_of_ones_own_that_cannot_be_meant_are_refused(extra: dict[str, Any], why: str) -> None:
    """Taken names, tables that do not exist and sizes that cannot be are refused by name."""
    with pytest.raises(InvalidRequest) as refused:
        choose({"hidden_size": 0}, [], extra=extra)
    assert why in refused.value.detail


@pytest.mark.parametrize("value", ["64", 64.0, True, [64, 64], -1, 2**60])
def test_a_size_that_is_no_number_is_refused(value: Any) -> None:
    """A config's size is a whole number from zero on, or is not said at all."""
    with pytest.raises(InvalidRequest, match=r"config\.json has hidden_size = "):
        choose({"model_type": "llama", "hidden_size": value}, [])
    assert choose({"model_type": "llama", "hidden_size": None}, []).layers is None


def test_a_text_models_sizes_go_before_the_outer_ones() -> None:
    """A model of several parts states its text model's sizes inside."""
    config = {"model_type": "gemma3", "hidden_size": 1, "text_config": {"hidden_size": 640, "num_hidden_layers": 18}}
    rules = choose(config, [])
    norm = rules.rule("model.language_model.norm.weight")
    assert rules.layers == 18
    assert norm is not None and norm.shape == (640,)


def test_layers_and_experts_are_counted_where_no_config_does() -> None:
    """By the names, and by the shape of a stack; a config goes before them."""
    single = "model.layers.2.mlp.experts.6.up_proj.weight"
    stack = "model.layers.3.mlp.experts.gate_up_proj"
    by_names = choose({"model_type": "qwen3_moe"}, [single, "unknown.7"])
    assert (by_names.layers, by_names.experts) == (3, 7)
    by_shape = choose({"model_type": "qwen3_moe"}, [stack], shapes={stack: (16, 48, 32)})
    assert (by_shape.layers, by_shape.experts) == (4, 16)
    said = choose(
        {"model_type": "qwen3_moe", "num_hidden_layers": 9, "num_experts": 8}, [single, stack], shapes={stack: (16, 4, 4)}
    )
    assert (said.layers, said.experts) == (9, 8)


@pytest.mark.parametrize(
    ("config", "held", "aliases"),
    [
        ({"tie_word_embeddings": True}, [EMBED], {HEAD: EMBED}),
        ({"tie_word_embeddings": True}, [HEAD], {EMBED: HEAD}),
        ({"tie_word_embeddings": True}, [EMBED, HEAD], {}),
        ({"tie_word_embeddings": True}, ["embed_tokens.weight"], {HEAD: "embed_tokens.weight"}),
        ({"tie_word_embeddings": True}, ["model.norm.weight"], {}),
        ({"tie_word_embeddings": True}, [], {HEAD: EMBED}),
        ({"tie_word_embeddings": False}, [EMBED], {}),
        ({"tie_word_embeddings": "yes"}, [EMBED], {}),
        ({}, [EMBED], {}),
        ({"model_type": "gemma2"}, [EMBED], {HEAD: EMBED}),
        ({"model_type": "gemma2", "tie_word_embeddings": False}, [EMBED], {}),
        ({"tie_word_embeddings": False, "text_config": {"tie_word_embeddings": True}}, [EMBED], {}),
        ({"text_config": {"tie_word_embeddings": True}}, [EMBED], {HEAD: EMBED}),
    ],
)
def test_ties_are_the_configs(config: dict[str, Any], held: list[str], aliases: dict[str, str]) -> None:
    """What the config ties and the checkpoint holds once is an alias of what is stored; the outer config goes first."""
    assert choose({"model_type": "llama"} | config, held).aliases() == aliases


def test_without_a_config_nothing_is_tied() -> None:
    """A checkpoint without a head may be of a model that has none."""
    names = ["model.layers.0.self_attn.q_proj.weight", "model.layers.0.mlp.gate_proj.weight", EMBED]
    assert choose(None, names).aliases() == {}
