"""Weights that Paddle holds transposed ([in, out] instead of Hugging Face's [out, in]), and tensors with two dimensions
exchanged.

Paddle's model classes list them by the names of their Linear layers. A tensor is transposed by its strides, not by moving
it.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

from numpy.typing import NDArray

from holdfast_formats.errors import StateMismatch
from holdfast_formats.mapping.listing import Decoder, FetchBox, ForeignPiece, ForeignTensor
from holdfast_formats.region import Box

_DENSE = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
_EXPERTS_OF_DEEPSEEK = ("o_proj", "gate_proj", "up_proj", "down_proj", "gate")
LINEARS: Mapping[str, tuple[str, ...]] = {
    **dict.fromkeys(("llama", "qwen2", "qwen3", "ernie4_5", "glm4_moe", "gpt_oss"), _DENSE),
    "qwen3_moe": (*_DENSE, "gate"),
    "qwen2_moe": (*_DENSE, "gate", "shared_expert_gate"),
    "ernie4_5_moe": (*_DENSE, "gate", r"mtp_linear_proj\.\d+"),
    "deepseek_v3": ("kv_a_proj_with_mqa", "kv_b_proj", "q_a_proj", "q_b_proj", "eh_proj", *_EXPERTS_OF_DEEPSEEK),
    "gemma3_text": (*_DENSE, "lm_head"),
    "phi3": ("qkv_proj", "o_proj", "gate_up_proj", "down_proj"),
}
# Names that are in every model of the first row, apart from its Linear layers; others need a config.json.
_PLAIN = re.compile(
    r"(^|\.)(embed_tokens|lm_head|norm|input_layernorm|post_attention_layernorm|q_norm|k_norm)\.weight$"
    r"|\.bias$|rotary_emb\.inv_freq$|\.lora_[AB]$"
)


class Linears(NamedTuple):
    """The Linear weights of a model class; `model` is its name, None if no table has it."""

    model: str | None
    pattern: re.Pattern[str] | None

    def certainly(self, name: str) -> bool:
        return self.pattern is not None and "lora" not in name and self.pattern.search(name) is not None

    def has(self, name: str) -> bool:
        """Whether Paddle holds this weight transposed, if it has two dimensions. `StateMismatch` for an unknown class."""
        if self.pattern is None:
            raise StateMismatch(
                f"{name!r} is in Paddle's layout, but Holdfast does not know which weights of "
                f"{'a model without config.json' if self.model is None else repr(self.model)} that layout transposes",
                hint="add the model's config.json, or import with --as-is, which keeps names and layouts",
                tensor=name,
            )
        return self.certainly(name)


def linears(config: Mapping[str, Any] | None, names: Collection[str]) -> Linears:
    """The Linear weights by a model's config.json; without one by its names, if they are of the plainest kind."""
    if config is not None:
        model = _model_of(config)
        return Linears(model, _pattern(LINEARS[model]) if model in LINEARS else None)
    plain = _pattern(LINEARS["llama"])
    known = all(plain.search(name) is not None or _PLAIN.search(name) is not None for name in names)
    return Linears(None, plain if known else None)


def _model_of(config: Mapping[str, Any]) -> str:
    stated = config.get("model_type")
    classes = config.get("architectures")
    named = classes[0] if isinstance(classes, list) and classes and isinstance(classes[0], str) else ""
    for candidate in (stated, named.removesuffix("ForCausalLM").removesuffix("Model")):
        plain = re.sub(r"[^a-z0-9]", "", str(candidate).lower())
        for model in LINEARS:
            if plain in (model.replace("_", ""), model.removesuffix("_text").replace("_", "")):
                return model
    return str(stated or named or "config.json without model_type")


def _pattern(linear: tuple[str, ...]) -> re.Pattern[str]:
    return re.compile(rf"(^|\.)({'|'.join(linear)})\.weight$")


def turned(tensor: ForeignTensor) -> ForeignTensor:
    spec = tensor.spec
    decoder = None if tensor.decoder is None else Turned(tensor.decoder)
    spec_turned = type(spec)(spec.group, spec.name, spec.dtype, spec.shape[::-1])
    return ForeignTensor(spec_turned, _turn(tensor.pieces), _turn(tensor.copies), decoder)


def _turn(pieces: tuple[ForeignPiece, ...]) -> tuple[ForeignPiece, ...]:
    return tuple(piece._replace(box=_exchanged(piece.box), strides=piece.strides[::-1]) for piece in pieces)


def _exchanged(box: Box) -> Box:
    return Box(box.offset[::-1], box.shape[::-1])


class Turned(NamedTuple):
    """Decodes a matrix transposed."""

    decoder: Decoder

    @property
    def inputs(self) -> tuple[ForeignTensor, ...]:
        return self.decoder.inputs

    def decode(self, box: Box, fetch: FetchBox) -> NDArray[Any]:
        return self.decoder.decode(_exchanged(box), fetch).T
