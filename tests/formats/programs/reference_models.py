"""Small forward passes of Llama's family in the conventions of other systems: Paddle's, Megatron-core's, torchtitan's.

Each takes weights as that system names and lays them out, and does with them what that system does. What they have in common
(norms, causal attention, the order of layers) stands in `logits`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn.functional import linear, one_hot, rms_norm, scaled_dot_product_attention, silu

Weights = Mapping[str, Tensor]


class System(Protocol):
    """What differs between systems."""

    def top(self, part: str) -> Tensor: ...
    def norm(self, layer: int, part: str) -> Tensor | None: ...
    def qkv(self, layer: int, x: Tensor) -> tuple[Tensor, Tensor, Tensor]: ...
    def rotated(self, x: Tensor) -> Tensor: ...
    def out(self, layer: int, x: Tensor) -> Tensor: ...
    def feed_forward(self, layer: int, x: Tensor) -> Tensor: ...


def logits(system: System, config: Any, tokens: Tensor) -> Tensor:
    """The logits of a decoder whose parts a system computes."""
    x = system.top("embedding")[tokens]
    for layer in range(config.num_hidden_layers):
        normed = _norm(x, system.norm(layer, "attention"), config)
        q, k, v = (heads.transpose(1, 2) for heads in system.qkv(layer, normed))
        q = system.rotated(_norm(q, system.norm(layer, "query"), config))
        k = system.rotated(_norm(k, system.norm(layer, "key"), config))
        mixed = scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        x = x + system.out(layer, mixed.transpose(1, 2).flatten(2))
        x = x + system.feed_forward(layer, _norm(x, system.norm(layer, "feed_forward"), config))
    return linear(_norm(x, system.top("norm"), config), system.top("head"))


def _norm(x: Tensor, weight: Tensor | None, config: Any) -> Tensor:
    return x if weight is None else rms_norm(x, weight.shape, weight, config.rms_norm_eps)


def _angles(length: int, head: int, theta: float) -> Tensor:
    frequencies = 1.0 / theta ** (torch.arange(0, head, 2, dtype=torch.float32) / head)
    return torch.outer(torch.arange(length, dtype=torch.float32), frequencies)


def rotated_halves(x: Tensor, theta: float) -> Tensor:
    """Rotary embeddings that pair a head's first half with its second."""
    angles = _angles(x.shape[-2], x.shape[-1], theta)
    first, second = x.chunk(2, dim=-1)
    return torch.cat([first * angles.cos() - second * angles.sin(), second * angles.cos() + first * angles.sin()], dim=-1)


def rotated_pairs(x: Tensor, theta: float) -> Tensor:
    """Rotary embeddings that pair neighbours, as complex numbers."""
    turns = torch.polar(torch.ones(()), _angles(x.shape[-2], x.shape[-1], theta))
    return torch.view_as_real(torch.view_as_complex(x.unflatten(-1, (-1, 2))) * turns).flatten(-2)


def _grouped(fused: Tensor, config: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Query, key and value out of [q… k v] of every key-value group."""
    groups = config.num_key_value_heads
    each = config.num_attention_heads // groups
    parts = fused.unflatten(-1, (groups, each + 2, -1))
    q, k, v = parts.split([each, 1, 1], dim=-2)
    return q.flatten(-3, -2), k.squeeze(-2), v.squeeze(-2)


def _mixture(x: Tensor, router: Tensor, expert: Any, config: Any) -> Tensor:
    """The experts that a softmax router chooses, weighted; `expert(number, x)` is one of them."""
    weights = linear(x, router).softmax(-1)
    best, chosen = weights.topk(config.num_experts_per_tok, dim=-1)
    best = best / best.sum(-1, keepdim=True) if config.norm_topk_prob else best
    share = (one_hot(chosen, router.shape[0]) * best.unsqueeze(-1)).sum(-2)
    return sum(share[..., number : number + 1] * expert(number, x) for number in range(router.shape[0]))  # type: ignore[return-value]


def _experts(x: Tensor, chosen: Tensor, best: Tensor, expert: Any, bias: Tensor) -> Tensor:
    """The chosen experts' results, each times its weight; `bias` has an element for each expert."""
    share = (one_hot(chosen, bias.numel()) * best.unsqueeze(-1)).sum(-2)
    return sum(share[..., number : number + 1] * expert(number) for number in range(bias.numel()))  # type: ignore[return-value]


class Paddle:
    """PaddleFormers' modules: weights are [in, out]; `fused` has qkv_proj and up_gate_proj."""

    def __init__(self, weights: Weights, config: Any, fused: bool) -> None:
        self.weights, self.config, self.fused = weights, config, fused

    def top(self, part: str) -> Tensor:
        names = {"embedding": "model.embed_tokens.weight", "norm": "model.norm.weight", "head": "lm_head.weight"}
        return self.weights[names[part]]

    def norm(self, layer: int, part: str) -> Tensor | None:
        names = {"attention": "input_layernorm", "feed_forward": "post_attention_layernorm"}
        names |= {"query": "self_attn.q_norm", "key": "self_attn.k_norm"}
        return self.weights.get(f"model.layers.{layer}.{names[part]}.weight")

    def _times(self, x: Tensor, name: str) -> Tensor:
        made = x @ self.weights[f"{name}.weight"]
        return made + self.weights[f"{name}.bias"] if f"{name}.bias" in self.weights else made

    def qkv(self, layer: int, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        name = f"model.layers.{layer}.self_attn"
        if self.fused:
            return _grouped(self._times(x, f"{name}.qkv_proj"), self.config)
        q, k, v = (self._times(x, f"{name}.{part}_proj") for part in "qkv")
        heads, groups = self.config.num_attention_heads, self.config.num_key_value_heads
        return q.unflatten(-1, (heads, -1)), k.unflatten(-1, (groups, -1)), v.unflatten(-1, (groups, -1))

    def rotated(self, x: Tensor) -> Tensor:
        theta = self.config.rope_parameters["rope_theta"]
        return rotated_pairs(x, theta) if self.config.model_type.startswith("ernie") else rotated_halves(x, theta)

    def out(self, layer: int, x: Tensor) -> Tensor:
        return self._times(x, f"model.layers.{layer}.self_attn.o_proj")

    def _dense(self, name: str, x: Tensor) -> Tensor:
        if self.fused:
            gate, up = self._times(x, f"{name}.up_gate_proj").chunk(2, dim=-1)
        else:
            gate, up = self._times(x, f"{name}.gate_proj"), self._times(x, f"{name}.up_proj")
        return self._times(silu(gate) * up, f"{name}.down_proj")

    def feed_forward(self, layer: int, x: Tensor) -> Tensor:
        name = f"model.layers.{layer}.mlp"
        router = self.weights.get(f"{name}.gate.weight")
        if router is None:
            return self._dense(name, x)
        made = _mixture(x, router.T, lambda number, x: self._dense(f"{name}.experts.{number}", x), self.config)
        if f"{name}.shared_expert_gate.weight" in self.weights:
            made = made + (x @ self.weights[f"{name}.shared_expert_gate.weight"]).sigmoid() * self._dense(
                f"{name}.shared_expert", x
            )
        return made


class PaddleErnieMoe(Paddle):
    """ERNIE 4.5 with experts: a bias of its own for each expert takes part in the choice, and not in the weights."""

    def feed_forward(self, layer: int, x: Tensor) -> Tensor:
        name = f"model.layers.{layer}.mlp"
        if f"{name}.gate.weight" not in self.weights:
            return self._dense(name, x)
        weights = (x @ self.weights[f"{name}.gate.weight"]).softmax(-1)
        bias = self.weights[f"{name}.moe_statics.e_score_correction_bias"].flatten()
        chosen = (weights + bias).topk(self.config.moe_k, dim=-1).indices
        best = weights.gather(-1, chosen)
        made = _experts(x, chosen, best / best.sum(-1, keepdim=True), lambda e: self._dense(f"{name}.experts.{e}", x), bias)
        shared = f"{name}.shared_experts"
        return made + self._dense(shared, x) if f"{shared}.down_proj.weight" in self.weights else made


class PaddleDeepseek(Paddle):
    """DeepSeek-V3: latent attention, and a sigmoid router that first chooses groups of experts."""

    def qkv(self, layer: int, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        name, config = f"model.layers.{layer}.self_attn", self.config
        heads, plain, turned = config.num_attention_heads, config.qk_nope_head_dim, config.qk_rope_head_dim
        q = self._times(self._normed(self._times(x, f"{name}.q_a_proj"), f"{name}.q_a_layernorm"), f"{name}.q_b_proj")
        latent, k_turned = self._times(x, f"{name}.kv_a_proj_with_mqa").split([config.kv_lora_rank, turned], dim=-1)
        kv = self._times(self._normed(latent, f"{name}.kv_a_layernorm"), f"{name}.kv_b_proj").unflatten(-1, (heads, -1))
        k, v = kv.split([plain, config.v_head_dim], dim=-1)
        k_turned = k_turned.unsqueeze(-2).expand(*k_turned.shape[:-1], heads, turned)
        return q.unflatten(-1, (heads, -1)), torch.cat([k, k_turned], dim=-1), v

    def rotated(self, x: Tensor) -> Tensor:
        plain, turned = x.split([self.config.qk_nope_head_dim, self.config.qk_rope_head_dim], dim=-1)
        return torch.cat([plain, rotated_pairs(turned, self.config.rope_parameters["rope_theta"])], dim=-1)

    def feed_forward(self, layer: int, x: Tensor) -> Tensor:
        name, config = f"model.layers.{layer}.mlp", self.config
        if f"{name}.gate.weight" not in self.weights:
            return self._dense(name, x)
        scores = (x @ self.weights[f"{name}.gate.weight"]).sigmoid()
        bias = self.weights[f"{name}.gate.e_score_correction_bias"]
        groups = (scores + bias).unflatten(-1, (config.n_group, -1))
        best_groups = groups.topk(2, dim=-1).values.sum(-1).topk(config.topk_group, dim=-1).indices
        open_groups = one_hot(best_groups, config.n_group).sum(-2).bool()
        allowed = groups.masked_fill(~open_groups.unsqueeze(-1), 0.0).flatten(-2)
        chosen = allowed.topk(config.num_experts_per_tok, dim=-1).indices
        best = scores.gather(-1, chosen)
        best = best / best.sum(-1, keepdim=True) if config.norm_topk_prob else best
        best = best * config.routed_scaling_factor
        return _experts(x, chosen, best, lambda e: self._dense(f"{name}.experts.{e}", x), bias) + self._dense(
            f"{name}.shared_experts", x
        )

    def _normed(self, x: Tensor, name: str) -> Tensor:
        return rms_norm(x, x.shape[-1:], self.weights[f"{name}.weight"], 1e-6)


class Megatron:
    """Megatron-core's GPTModel: query, key and value fused by group; `stacked` has all layers in one tensor."""

    def __init__(self, weights: Weights, config: Any, stacked: bool) -> None:
        self.weights, self.config, self.stacked = weights, config, stacked

    def _of(self, layer: int, name: str) -> Tensor | None:
        if not self.stacked:
            return self.weights.get(f"decoder.layers.{layer}.{name}")
        held = self.weights.get(f"decoder.layers.{name}")
        return None if held is None else held[layer]

    def top(self, part: str) -> Tensor:
        names = {"embedding": "embedding.word_embeddings", "norm": "decoder.final_layernorm", "head": "output_layer"}
        return self.weights[f"{names[part]}.weight"]

    def norm(self, layer: int, part: str) -> Tensor | None:
        names = {
            "attention": "self_attention.linear_qkv.layer_norm_weight",
            "feed_forward": "mlp.linear_fc1.layer_norm_weight",
        }
        names |= {"query": "self_attention.q_layernorm.weight", "key": "self_attention.k_layernorm.weight"}
        found = self._of(layer, names[part])
        return self._of(layer, "pre_mlp_layernorm.weight") if found is None and part == "feed_forward" else found

    def _linear(self, layer: int, name: str, x: Tensor) -> Tensor:
        weight = self._of(layer, f"{name}.weight")
        assert weight is not None, name
        return linear(x, weight, self._of(layer, f"{name}.bias"))

    def qkv(self, layer: int, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return _grouped(self._linear(layer, "self_attention.linear_qkv", x), self.config)

    def rotated(self, x: Tensor) -> Tensor:
        return rotated_halves(x, self.config.rope_parameters["rope_theta"])

    def out(self, layer: int, x: Tensor) -> Tensor:
        return self._linear(layer, "self_attention.linear_proj", x)

    def feed_forward(self, layer: int, x: Tensor) -> Tensor:
        router = self._of(layer, "mlp.router.weight")
        if router is None:
            gate, up = self._linear(layer, "mlp.linear_fc1", x).chunk(2, dim=-1)
            return self._linear(layer, "mlp.linear_fc2", silu(gate) * up)
        first, second = (self._of(layer, f"mlp.experts.experts.linear_fc{n}.weight") for n in (1, 2))
        assert first is not None and second is not None

        def expert(number: int, x: Tensor) -> Tensor:
            gate, up = linear(x, first[number]).chunk(2, dim=-1)
            return linear(silu(gate) * up, second[number])

        made = _mixture(x, router, expert, self.config)
        shared = self._of(layer, "mlp.shared_experts.gate_weight")
        if shared is not None:
            gate, up = self._linear(layer, "mlp.shared_experts.linear_fc1", x).chunk(2, dim=-1)
            made = made + linear(x, shared).sigmoid() * self._linear(layer, "mlp.shared_experts.linear_fc2", silu(gate) * up)
        return made


class Titan:
    """torchtitan's Decoder: wq, wk, wv, feed_forward.w1, w2, w3; Llama's rotary embeddings pair neighbours."""

    def __init__(self, weights: Weights, config: Any, legacy: bool) -> None:
        self.weights, self.config = weights, config
        self.qkv_linear, self.head = ("", "output") if legacy else ("qkv_linear.", "lm_head")

    def top(self, part: str) -> Tensor:
        return self.weights[{"embedding": "tok_embeddings", "norm": "norm", "head": self.head}[part] + ".weight"]

    def norm(self, layer: int, part: str) -> Tensor | None:
        names = {"attention": "attention_norm", "feed_forward": "ffn_norm"}
        names |= {"query": "attention.q_norm", "key": "attention.k_norm"}
        return self.weights.get(f"layers.{layer}.{names[part]}.weight")

    def qkv(self, layer: int, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        name = f"layers.{layer}.attention.{self.qkv_linear}"
        q, k, v = (linear(x, self.weights[f"{name}{part}.weight"]) for part in ("wq", "wk", "wv"))
        heads, groups = self.config.num_attention_heads, self.config.num_key_value_heads
        return q.unflatten(-1, (heads, -1)), k.unflatten(-1, (groups, -1)), v.unflatten(-1, (groups, -1))

    def rotated(self, x: Tensor) -> Tensor:
        turn = rotated_pairs if self.config.model_type == "llama" else rotated_halves
        return turn(x, self.config.rope_parameters["rope_theta"])

    def out(self, layer: int, x: Tensor) -> Tensor:
        return linear(x, self.weights[f"layers.{layer}.attention.wo.weight"])

    def feed_forward(self, layer: int, x: Tensor) -> Tensor:
        router = self.weights.get(f"layers.{layer}.moe.router.gate.weight")
        if router is None:
            w1, w2, w3 = (self.weights[f"layers.{layer}.feed_forward.w{n}.weight"] for n in (1, 2, 3))
            return linear(silu(linear(x, w1)) * linear(x, w3), w2)
        name = f"layers.{layer}.moe.routed_experts.inner_experts"
        w1, w2, w3 = self.weights[f"{name}.w1_EFD"], self.weights[f"{name}.w2_EDF"], self.weights[f"{name}.w3_EFD"]
        return _mixture(x, router, lambda e, x: linear(silu(linear(x, w1[e])) * linear(x, w3[e]), w2[e]), self.config)
