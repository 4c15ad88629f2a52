"""Names of GGUF, both ways, and rows in the order of llama.cpp."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from holdfast_formats.mapping import box_moves, reading
from holdfast_formats.mapping.box_moves import MappedTensor, same
from holdfast_formats.mapping.listing import TensorKey
from holdfast_service.wings.convert.foreign.gguf import names
from holdfast_service.wings.convert.foreign.gguf.names import ARCHITECTURES
from tests.wings.convert.exports.sources import Made, llama, made


def _values(held: Made, mapped: MappedTensor) -> np.ndarray:
    tensors = held.source.listing.tensors
    box_moves.check(mapped, {key: one.spec for key, one in tensors.items()})
    return reading.elements(held.source.files, tensors, mapped, 0, int(np.prod(mapped.spec.shape))).reshape(
        mapped.spec.shape
    )


@pytest.mark.parametrize("kind", ARCHITECTURES)
def test_names_lead_back(kind: str) -> None:
    """Every tensor of a layer has one name in GGUF, and no other has it."""
    architecture = ARCHITECTURES[kind]
    ours = [f"model.layers.3.{stem}.{end}" for stem in architecture.layer for end in ("weight", "bias")]
    ours += ["model.embed_tokens.weight", "model.norm.weight"]
    theirs = [architecture.gguf_name(name) for name in ours]
    assert len({*theirs, None}) == len(ours) + 1
    assert [architecture.hugging_face_name(name or "") for name in theirs] == ours


def test_names_of_llama_cpp() -> None:
    llama_names, gemma2 = ARCHITECTURES["llama"], ARCHITECTURES["gemma2"]
    assert llama_names.gguf_name("model.layers.12.post_attention_layernorm.weight") == "blk.12.ffn_norm.weight"
    assert gemma2.gguf_name("model.layers.12.post_attention_layernorm.weight") == "blk.12.post_attention_norm.weight"
    assert llama_names.gguf_name("lm_head.weight") == "output.weight"
    for name in ("model.layers.0.self_attn.rotary_emb.inv_freq", "model.layers.0.odd.weight", "odd.weight"):
        assert llama_names.gguf_name(name) is None
    assert gemma2.gguf_name("lm_head.weight") is None
    assert llama_names.hugging_face_name("blk.0.odd.weight") is None
    assert llama_names.hugging_face_name("rope_freqs.weight") is None


@pytest.mark.parametrize("shape", [(16, 3), (16,)])
def test_rows_are_interleaved_as_llama_cpp_does(tmp_path: Path, shape: tuple[int, ...]) -> None:
    """`permute` of convert_hf_to_gguf.py, and the way back."""
    array = np.random.default_rng(0).standard_normal(shape).astype(np.float32)
    held = made(tmp_path / "step", {"model": {"q": array}})
    mapped = names.interleaved(same(held.source.listing.tensors[TensorKey("model", "q")]), heads=4)
    found = _values(held, mapped)
    assert np.array_equal(found, array.reshape(4, 2, 2, *shape[1:]).swapaxes(1, 2).reshape(shape))
    back = made(tmp_path / "back", {"model": {"q": found}})
    mapped = names.separated(same(back.source.listing.tensors[TensorKey("model", "q")]), heads=4)
    assert np.array_equal(_values(back, mapped), array)


def test_a_llama_of_the_tests_has_names_for_all() -> None:
    assert all(ARCHITECTURES["llama"].gguf_name(name) for name in llama())
