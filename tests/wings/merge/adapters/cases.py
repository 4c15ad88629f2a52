"""The adapters that are compared with PEFT's own merges: the model, the words of `LoraConfig`, the dtype of its weights."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple


class AdapterCase(NamedTuple):
    """An adapter of a small model. `vocabulary` is that of the adapter's model, if it was resized for training."""

    name: str
    model: str
    words: Mapping[str, Any]
    dtype: str = "float32"
    vocabulary: int | None = None

    @property
    def base(self) -> str:
        """The name of its base model: those of one kind and dtype are the same."""
        return f"{self.model} {self.dtype}"


_ATTENTION = ["q_proj", "v_proj"]
_ALL = {
    "target_modules": ["q_proj", "v_proj", "up_proj", "down_proj"],
    "rank_pattern": {"up_proj": 2, r"layers\.0\.self_attn\.q_proj": 3},
    "alpha_pattern": {"up_proj": 5, "v_proj": 0.5},
    "use_rslora": True,
    "use_dora": True,
    "bias": "all",
    "modules_to_save": ["lm_head"],
}
_EXPERTS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]

CASES = (
    AdapterCase("plain", "llama", {"target_modules": [*_ATTENTION, "up_proj"]}),
    AdapterCase("plain bf16", "llama", {"target_modules": [*_ATTENTION, "up_proj"]}, "bfloat16"),
    AdapterCase("rslora", "llama", {"target_modules": _ATTENTION, "use_rslora": True}),
    AdapterCase("dora", "llama", {"target_modules": [*_ATTENTION, "down_proj"], "use_dora": True}),
    AdapterCase("dora bf16", "llama", {"target_modules": [*_ATTENTION, "down_proj"], "use_dora": True}, "bfloat16"),
    AdapterCase("dora with rslora", "llama", {"target_modules": _ATTENTION, "use_dora": True, "use_rslora": True}),
    AdapterCase(
        "patterns",
        "llama",
        {
            "target_modules": [*_ATTENTION, "up_proj"],
            "rank_pattern": {"up_proj": 2, r"layers\.1\.self_attn\.q_proj": 3},
            "alpha_pattern": {"v_proj": 5, r"^model\.layers\.0\.mlp\.up_proj": 7},
        },
    ),
    AdapterCase("all biases", "qwen2", {"target_modules": ["q_proj", "up_proj"], "bias": "all"}),
    AdapterCase("biases of modules", "qwen2", {"target_modules": ["q_proj", "up_proj"], "bias": "lora_only"}),
    AdapterCase("biases of lora_B", "qwen2", {"target_modules": ["q_proj"], "lora_bias": True}),
    AdapterCase("an embedding", "llama", {"target_modules": ["embed_tokens", "q_proj"]}),
    AdapterCase("an embedding with dora", "llama", {"target_modules": ["embed_tokens", "q_proj"], "use_dora": True}),
    AdapterCase("a tied embedding", "tied", {"target_modules": ["embed_tokens", "q_proj"]}),
    AdapterCase("a tied head", "tied", {"target_modules": ["lm_head", "q_proj"]}),
    AdapterCase("modules", "llama", {"target_modules": ["q_proj"], "modules_to_save": ["lm_head", "embed_tokens"]}),
    AdapterCase("modules bf16", "llama", {"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]}, "bfloat16"),
    AdapterCase("norms", "llama", {"target_modules": ["q_proj"], "modules_to_save": ["norm"]}),
    AdapterCase("an embedding that was tied", "tied", {"target_modules": ["q_proj"], "modules_to_save": ["embed_tokens"]}),
    AdapterCase("a head that was tied", "tied", {"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]}),
    AdapterCase(
        "an embedding that stays tied",
        "tied",
        {"target_modules": ["q_proj"], "modules_to_save": ["embed_tokens"], "ensure_weight_tying": True},
    ),
    AdapterCase("more tokens", "llama", {"target_modules": ["q_proj"]}, vocabulary=24),
    AdapterCase("more tokens, tied", "tied", {"target_modules": ["q_proj"]}, vocabulary=24),
    AdapterCase("more tokens and an embedding", "tied", {"target_modules": ["embed_tokens"]}, vocabulary=24),
    AdapterCase("some tokens", "llama", {"target_modules": ["q_proj"], "trainable_token_indices": [9, 3]}),
    AdapterCase(
        "some tokens, tied", "tied", {"target_modules": ["q_proj"], "trainable_token_indices": {"embed_tokens": [1, 7]}}
    ),
    AdapterCase("conv1d", "gpt2", {"target_modules": ["c_attn", "c_proj", "c_fc"], "fan_in_fan_out": True}),
    AdapterCase("conv1d with dora", "gpt2", {"target_modules": ["c_attn"], "fan_in_fan_out": True, "use_dora": True}),
    AdapterCase("conv1d and an embedding", "gpt2", {"target_modules": ["c_fc", "wte"], "fan_in_fan_out": True}),
    AdapterCase("experts", "mixtral", {"target_modules": ["q_proj"], "target_parameters": _EXPERTS}),
    AdapterCase("experts bf16", "mixtral", {"target_modules": ["q_proj"], "target_parameters": _EXPERTS}, "bfloat16"),
    AdapterCase(
        "experts with patterns",
        "qwen3_moe",
        {
            "target_modules": ["q_proj"],
            "target_parameters": _EXPERTS,
            "rank_pattern": {"experts.gate_up_proj": 1, "experts.down_proj": 2},
        },
    ),
    AdapterCase("a router", "mixtral", {"target_modules": ["q_proj"], "target_parameters": ["mlp.gate.weight"]}),
    AdapterCase("experts of gpt-oss", "gpt_oss", {"target_modules": ["q_proj"], "target_parameters": _EXPERTS}),
    AdapterCase("all at once", "qwen2", _ALL),
    AdapterCase("all at once bf16", "qwen2", _ALL, "bfloat16"),
    AdapterCase("a head that was tied, and more tokens", "tied", {"target_modules": ["lm_head", "q_proj"]}, vocabulary=24),
    AdapterCase(
        "more tokens, and both saved",
        "tied",
        {"target_modules": ["q_proj"], "modules_to_save": ["lm_head", "embed_tokens"]},
        vocabulary=24,
    ),
    AdapterCase("conv1d and a head", "gpt2", {"target_modules": ["c_proj", "lm_head"], "fan_in_fan_out": True}),
    AdapterCase(
        "conv1d, all at once",
        "gpt2",
        {
            "target_modules": ["c_attn", "c_proj", "wte"],
            "rank_pattern": {"attn.c_proj": 2},
            "use_rslora": True,
            "alpha_pattern": {r"^transformer\.h\.0\.attn\.c_attn": 9},
            "fan_in_fan_out": True,
            "use_dora": True,
        },
    ),
    AdapterCase("a convolution", "vit", {"target_modules": ["projection", "query"]}),
    AdapterCase("a convolution with dora", "vit", {"target_modules": ["projection"], "use_dora": True}),
)


class CombinationCase(NamedTuple):
    """Adapters `one` and `two` combined by `add_weighted_adapter`: its `combination_type`, and its other words."""

    method: str
    weights: tuple[float, ...] = (0.7, -0.4)
    words: Mapping[str, Any] = {}

    @property
    def name(self) -> str:
        return " ".join(["combined", self.method, *map(str, self.words.values()), *["alone"] * (len(self.weights) == 1)])


COMBINED: tuple[Mapping[str, Any], ...] = (
    {"target_modules": ["q_proj", "up_proj", "embed_tokens"], "r": 4, "lora_alpha": 6},
    {"target_modules": ["q_proj", "v_proj", "embed_tokens"], "r": 4, "lora_alpha": 9},
)
COMBINATIONS = (
    CombinationCase("linear"),
    CombinationCase("linear", (0.7,)),
    CombinationCase("cat"),
    CombinationCase("svd"),
    CombinationCase("svd", words={"svd_rank": 6}),
    CombinationCase("ties", words={"density": 0.6}),
    CombinationCase("ties", words={"density": 0.6, "majority_sign_method": "frequency"}),
    CombinationCase("dare_linear", words={"density": 0.6}),
    CombinationCase("dare_ties", words={"density": 0.7, "majority_sign_method": "frequency"}),
    CombinationCase("magnitude_prune", words={"density": 0.3}),
)
