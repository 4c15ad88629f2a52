"""A model's tensors under the names of llama.cpp's GGUF files, with the changes of layout that its programs expect."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import NamedTuple

from holdfast_formats.mapping.box_moves import BoxMove, MappedTensor
from holdfast_formats.region import Box

_LAYER = re.compile(r"model\.layers\.(\d+)\.(.+)")
_BLOCK = re.compile(r"blk\.(\d+)\.(.+)")
_OUTER = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
_LLAMA = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
_QWEN3 = {**_LLAMA, "self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm"}
_GEMMA2 = {
    **_LLAMA,
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}
DERIVED = frozenset({"rope_freqs.weight"})  # computed from the configuration, in a GGUF file only


class Architecture(NamedTuple):
    """An architecture of GGUF: its name, and the names of a layer's tensors, without `.weight` and `.bias`.

    `permuted`: rows of queries and keys are interleaved in each head. `norms_shifted`: norms are stored plus one.
    """

    name: str
    layer: Mapping[str, str]
    permuted: bool = False
    norms_shifted: bool = False

    def gguf_name(self, name: str) -> str | None:
        """GGUF's name for one of transformers; None if the architecture has no such tensor."""
        stem, dot, kind = name.rpartition(".")
        found = _LAYER.fullmatch(stem)
        if kind not in ("weight", "bias") or (found is not None and found[2] not in self.layer):
            return None
        made = self._outer.get(stem) if found is None else f"blk.{found[1]}.{self.layer[found[2]]}"
        return None if made is None else f"{made}{dot}{kind}"

    def hugging_face_name(self, name: str) -> str | None:
        """transformers' name for one of GGUF; None if the architecture has no such tensor."""
        stem, dot, kind = name.rpartition(".")
        found = _BLOCK.fullmatch(stem)
        names = {gguf: held for held, gguf in (self._outer if found is None else self.layer).items()}
        inner = names.get(stem if found is None else found[2])
        if kind not in ("weight", "bias") or inner is None:
            return None
        return f"{inner}{dot}{kind}" if found is None else f"model.layers.{found[1]}.{inner}{dot}{kind}"

    @property
    def _outer(self) -> Mapping[str, str]:
        """Names outside of layers: the head of a Gemma is always its embedding."""
        return {name: made for name, made in _OUTER.items() if made != "output" or not self.norms_shifted}

    def is_permuted(self, gguf_name: str) -> bool:
        return self.permuted and gguf_name.split(".")[-2] in ("attn_q", "attn_k")

    def is_shifted(self, gguf_name: str) -> bool:
        return self.norms_shifted and gguf_name.endswith("norm.weight")


ARCHITECTURES: Mapping[str, Architecture] = {  # by model_type of config.json
    "llama": Architecture("llama", _LLAMA, permuted=True),
    "mistral": Architecture("llama", _LLAMA, permuted=True),
    "qwen2": Architecture("qwen2", _LLAMA),
    "qwen3": Architecture("qwen3", _QWEN3),
    "gemma": Architecture("gemma", _LLAMA, norms_shifted=True),
    "gemma2": Architecture("gemma2", _GEMMA2, norms_shifted=True),
}


def interleaved(mapped: MappedTensor, heads: int) -> MappedTensor:
    """The rows of each head in the order first, middle, second, …: pairs that rotate together lie side by side.

    `mapped` takes one whole tensor unchanged; its rows are a multiple of 2 × `heads`.
    """
    return _paired(mapped, heads, to_gguf=True)


def separated(mapped: MappedTensor, heads: int) -> MappedTensor:
    """The inverse of `interleaved`."""
    return _paired(mapped, heads, to_gguf=False)


def _paired(mapped: MappedTensor, heads: int, to_gguf: bool) -> MappedTensor:
    ((source, _, _, axes, *_),) = mapped.moves
    rows, *rest = mapped.spec.shape
    half = rows // heads // 2
    steps = (2, *(1 for _ in rest))
    moves = []
    for head in range(heads):
        for side in (0, 1):
            apart = Box((head * 2 * half + side * half, *(0 for _ in rest)), (half, *rest))
            paired = Box((head * 2 * half + side, *(0 for _ in rest)), (half, *rest))
            if to_gguf:
                moves.append(BoxMove(source, apart, paired, axes, (), steps))
            else:
                moves.append(BoxMove(source, paired, apart, axes, steps, ()))
    return mapped._replace(moves=tuple(moves))
