"""Of PEFT's configurations of LoRA those that can be merged are understood, and every other one is refused by its key."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest

from holdfast_formats.errors import StateMismatch
from holdfast_service.wings.merge.adapters.config import AdapterConfig, LoraTerms, read

# As PEFT 0.19 writes it.
WRITTEN: dict[str, Any] = {
    "alora_invocation_tokens": None,
    "alpha_pattern": {},
    "arrow_config": None,
    "auto_mapping": None,
    "base_model_name_or_path": "Qwen/Qwen2-VL-2B-Instruct",
    "bias": "none",
    "corda_config": None,
    "ensure_weight_tying": False,
    "eva_config": None,
    "exclude_modules": None,
    "fan_in_fan_out": False,
    "inference_mode": True,
    "init_lora_weights": True,
    "layer_replication": None,
    "layers_pattern": None,
    "layers_to_transform": None,
    "loftq_config": {},
    "lora_alpha": 16,
    "lora_bias": False,
    "lora_dropout": 0.05,
    "lora_ga_config": None,
    "megatron_config": None,
    "megatron_core": "megatron.core",
    "modules_to_save": None,
    "peft_type": "LORA",
    "peft_version": "0.19.1",
    "qalora_group_size": 16,
    "r": 4,
    "rank_pattern": {},
    "revision": None,
    "target_modules": ["q_proj", "v_proj"],
    "target_parameters": None,
    "task_type": "CAUSAL_LM",
    "trainable_token_indices": None,
    "use_bdlora": None,
    "use_dora": False,
    "use_qalora": False,
    "use_rslora": False,
}


def read_with(**changed: Any) -> AdapterConfig:
    return read(json.dumps(WRITTEN | changed).encode(), "tuned")


def test_plain_lora() -> None:
    """What PEFT writes, what decides only training and choice of modules, and an unknown option that is not used."""
    assert read_with() == AdapterConfig(4, 16)
    assert read_with().terms("q_proj") == LoraTerms(4, 4.0)
    assert read_with(use_rslora=True).terms("q_proj") == LoraTerms(4, 16 / math.sqrt(4))
    assert read_with(layers_to_transform=[1], exclude_modules=["lm_head"], init_lora_weights="eva", eva_config={"rho": 2})
    assert read_with(an_option_of_the_future=None) == AdapterConfig(4, 16)
    old = {"peft_type": "LORA", "r": 4, "lora_alpha": 8.0, "enable_lora": None, "merge_weights": False}
    assert read(json.dumps(old).encode(), "old").terms("q_proj") == LoraTerms(4, 2.0)


def test_what_changes_how_it_is_added() -> None:
    config = read_with(
        use_dora=True, lora_bias=True, fan_in_fan_out=True, ensure_weight_tying=True, modules_to_save=["head"]
    )
    assert config == AdapterConfig(4, 16, dora=True, lora_bias=True, turned=True, ties_kept=True, saved=("head",))
    assert config.saves("model.head.weight") and not config.saves("model.ahead.weight")
    assert read_with(target_parameters=["experts.down_proj"]).parameters == ("experts.down_proj",)
    assert read_with(trainable_token_indices=[5, 2]).tokens == {"": (5, 2)}
    assert read_with(trainable_token_indices={"embed_tokens": [5]}).tokens == {"embed_tokens": (5,)}


def test_patterns() -> None:
    """The first that matches the name, or its last parts; an anchored one only the whole name."""
    config = read_with(
        rank_pattern={r"layers\.1\.q_proj": 2, "q_proj": 8}, alpha_pattern={"^model.layers.[0-9]+.q_proj": 6, "^q_proj": 1}
    )
    assert config.terms("model.layers.1.q_proj") == LoraTerms(2, 3.0)
    assert config.terms("model.layers.11.q_proj") == LoraTerms(8, 6 / 8)
    assert config.terms("model.aq_proj") == LoraTerms(4, 4.0)
    assert config.terms("vision.q_proj") == LoraTerms(8, 2.0)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("alora_invocation_tokens", [27, 71226, 29]),
        ("alpha_pattern", {"q_proj": "8"}),
        ("arrow_config", {"top_k": 2}),
        ("bias", "some"),
        ("corda_config", {"corda_method": "kpm"}),
        ("ensure_weight_tying", "yes"),
        ("fan_in_fan_out", 1),
        ("init_lora_weights", "mica"),
        ("init_lora_weights", "pissa_niter_4"),
        ("layer_replication", [[0, 4]]),
        ("loftq_config", {"loftq_bits": 4}),
        ("lora_alpha", True),
        ("lora_alpha", None),
        ("lora_bias", "yes"),
        ("lora_ga_config", {"direction": "ArB2r"}),
        ("megatron_config", {"hidden_size": 8}),
        ("modules_to_save", "lm_head"),
        ("peft_type", "ADALORA"),
        ("r", 0),
        ("rank_pattern", {"(.+)*(.+)*x": 8}),
        ("rank_pattern", {"q_proj": 0}),
        ("target_parameters", [5]),
        ("trainable_token_indices", [5, 5]),
        ("use_bdlora", {"nblocks": 2}),
        ("use_dora", "yes"),
        ("use_qalora", True),
        ("use_rslora", 1),
        ("velora_config", {"num_groups": 2}),
        ("an_option_of_the_future", False),
        ("an_option_of_the_future", 3),
    ],
)
def test_all_else_is_refused_by_its_key(key: str, value: Any) -> None:
    """Also a key that no version knows here, whatever it says."""
    with pytest.raises(StateMismatch, match=rf"tuned is an adapter .*{key}") as caught:
        read_with(**{key: value})
    assert "merge_and_unload" in caught.value.hint


@pytest.mark.parametrize(
    "config", [b"{", b"[]", b"{}", b'{"peft_type": "LORA", "lora_alpha": 4}', b'{"peft_type": "LORA", "r": 4}']
)
def test_what_is_no_configuration(config: bytes) -> None:
    """Cut off, of another form, or without what the scale is made of."""
    with pytest.raises(StateMismatch, match=r"tuned.*adapter_config\.json"):
        read(config, "tuned")
