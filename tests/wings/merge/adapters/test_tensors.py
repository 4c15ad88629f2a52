"""An adapter's tensors are sorted by PEFT's names; a name without a meaning is refused."""

from __future__ import annotations

import pytest

from holdfast_formats.errors import StateMismatch
from holdfast_formats.mapping.listing import ForeignTensor
from holdfast_formats.tensors import TensorSpec
from holdfast_service.wings.merge.adapters.tensors import sort


def tensors(*names: str) -> dict[str, ForeignTensor]:
    keys = [f"base_model.model.{name}" for name in names]
    return {key: ForeignTensor(TensorSpec("adapter", key, "F32", (2, 2)), ()) for key in keys}


def test_every_name() -> None:
    sorted_tensors = sort(
        tensors(
            "q.lora_A.weight",
            "q.lora_B.weight",
            "q.lora_B.bias",
            "q.lora_magnitude_vector",
            "q.base_layer.bias",
            "experts.lora_A.weight",
            "experts.lora_B.weight",
            "experts.base_layer.lora_A.weight",
            "experts.base_layer.lora_B.weight",
            "embed.lora_embedding_A",
            "embed.lora_embedding_B",
            "embed.base_layer.weight",
            "wte.token_adapter.trainable_tokens_delta",
            "lm_head.weight",
        ),
        "tuned",
    )
    assert set(sorted_tensors.pairs) == {"q", "experts", "experts.base_layer", "embed"}
    q, embed = sorted_tensors.pairs["q"], sorted_tensors.pairs["embed"]
    assert q.magnitude is not None and q.bias is not None and not q.embedding
    assert embed.embedding and embed.magnitude is None and embed.bias is None
    assert set(sorted_tensors.replaced) == {"q.bias", "embed.weight", "lm_head.weight"}
    assert set(sorted_tensors.tokens) == {"wte"}


@pytest.mark.parametrize(
    ("names", "said"),
    [
        (["q.lora_A.weight"], "without"),
        (["q.lora_B.weight"], "without"),
        (["q.lora_embedding_B"], "without"),
        (["q.lora_magnitude_vector"], "without"),
        (["q.lora_C.weight"], "no known meaning"),
        (["q.token_adapter.base_layer.weight"], "no known meaning"),
        (["q.original_module.weight"], "no known meaning"),
    ],
)
def test_names_without_a_meaning(names: list[str], said: str) -> None:
    with pytest.raises(StateMismatch, match=said) as refused:
        sort(tensors(*names), "tuned")
    assert refused.value.members["tensor"] == f"base_model.model.{names[0]}" and "merge_and_unload" in refused.value.hint


def test_names_of_another_library() -> None:
    with pytest.raises(StateMismatch, match="begin with base_model"):
        sort({"unet.down.lora_A.weight": ForeignTensor(TensorSpec("adapter", "x", "F32", (2,)), ())}, "tuned")
