"""`holdfast export --as gguf` is read by the package `gguf`, and by transformers with the same weights and logits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from gguf import GGUFReader, dequantize
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    Gemma2Config,
    Gemma2ForCausalLM,
    GemmaConfig,
    GemmaForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from holdfast_service.wings.convert.exports import gguf
from holdfast_service.wings.convert.exports.plan import ExportOptions
from tests.wings.convert.exports.sources import made, write

SIZE: dict[str, Any] = {
    "vocab_size": 384,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
SCALED = {"rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
MODELS: dict[str, Any] = {
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**SIZE)),
    "tied": lambda: LlamaForCausalLM(LlamaConfig(**SIZE, tie_word_embeddings=True)),
    "mistral": lambda: MistralForCausalLM(MistralConfig(**SIZE, sliding_window=None)),
    "qwen2": lambda: Qwen2ForCausalLM(Qwen2Config(**SIZE)),
    "qwen3": lambda: Qwen3ForCausalLM(Qwen3Config(**SIZE, head_dim=128)),  # transformers takes no other from GGUF
    "gemma2": lambda: Gemma2ForCausalLM(Gemma2Config(**SIZE, head_dim=256, sliding_window=16)),
}
ONLY_READ: dict[str, Any] = {  # what transformers' reader of GGUF has no place for: Gemma 1, biases, scaled rotations
    "gemma": lambda: GemmaForCausalLM(GemmaConfig(**SIZE, head_dim=16)),
    "biases": lambda: LlamaForCausalLM(LlamaConfig(**SIZE, attention_bias=True)),
    "scaled": lambda: LlamaForCausalLM(
        LlamaConfig(**SIZE, rope_parameters={**SCALED, "original_max_position_embeddings": 32})
    ),
}


def _model(make: Any) -> PreTrainedModel:
    torch.manual_seed(7)
    model: PreTrainedModel = make()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    return model.to(torch.bfloat16).eval()


def _exported(model: PreTrainedModel, directory: Path, dtype: str | None = None, **assets: bytes) -> Path:
    config = model.config
    tied = {"lm_head.weight"} if config.tie_word_embeddings else set()
    arrays = {
        name: tensor.view(torch.uint16).numpy().view(ml_dtypes.bfloat16)
        for name, tensor in model.state_dict().items()
        if name not in tied
    }
    named = {name.replace("_json", ".json"): data for name, data in assets.items()}
    held = {"config.json": config.to_json_string(use_diff=False).encode(), **named}
    source = made(directory / "step", {"model": arrays}, assets=held).source
    return write(source, gguf.plan(source, ExportOptions(dtype=dtype)), directory / "out")


@pytest.mark.parametrize("dtype", [None, "F32", "F16"])
@pytest.mark.parametrize("kind", MODELS)
def test_transformers_loads_it(tmp_path: Path, kind: str, dtype: str | None) -> None:
    """Every weight bit for bit (rounded by us, if F16 was asked for), and so the logits."""
    model = _model(MODELS[kind])
    out = _exported(model, tmp_path, dtype)
    found = AutoModelForCausalLM.from_pretrained(out, gguf_file="model.gguf", dtype=torch.float32).eval()
    expected = MODELS[kind]().eval()  # with the frequencies of its rotation in FP32
    expected.load_state_dict(model.float().state_dict())
    if dtype == "F16":
        for parameter in expected.parameters():
            parameter.data = parameter.half().float() if parameter.dim() > 1 else parameter
    assert type(found) in (type(model), LlamaForCausalLM)  # GGUF has no Mistral: it is a Llama there
    state = found.state_dict()
    assert state.keys() == expected.state_dict().keys()
    for name, tensor in expected.state_dict().items():
        assert torch.equal(state[name], tensor), name
    rows = torch.arange(40).reshape(2, 20)
    with torch.no_grad():
        assert torch.equal(found(rows).logits, expected(rows).logits)


@pytest.mark.parametrize("kind", [*MODELS, *ONLY_READ])
def test_gguf_reads_it(tmp_path: Path, kind: str) -> None:
    """All tensors, by llama.cpp's rules for their layout."""
    model = _model({**MODELS, **ONLY_READ}[kind])
    reader = GGUFReader(_exported(model, tmp_path) / "model.gguf")
    found = {tensor.name: dequantize(tensor.data, tensor.tensor_type) for tensor in reader.tensors}
    state = {name: tensor.float().numpy() for name, tensor in model.state_dict().items()}
    shift = np.float32(1 if kind.startswith("gemma") else 0)
    assert np.array_equal(found["output_norm.weight"], state["model.norm.weight"] + shift)
    assert np.array_equal(found["blk.1.ffn_down.weight"], state["model.layers.1.mlp.down_proj.weight"])
    queries = state["model.layers.1.self_attn.q_proj.weight"]
    if reader.fields["general.architecture"].contents() == "llama":
        queries = queries.reshape(4, 2, -1, 32).swapaxes(1, 2).reshape(queries.shape)
    assert np.array_equal(found["blk.1.attn_q.weight"], queries)
    if kind == "biases":
        bias = state["model.layers.1.self_attn.k_proj.bias"]
        assert np.array_equal(found["blk.1.attn_k.bias"], bias.reshape(2, 2, -1).swapaxes(1, 2).reshape(-1))
    if kind == "scaled":
        rotation = ONLY_READ[kind]().model.rotary_emb
        plain = 1.0 / 10000.0 ** (torch.arange(0, 8, 2).float() / 8)
        np.testing.assert_allclose(found["rope_freqs.weight"], (plain / rotation.inv_freq.float()).numpy(), rtol=1e-6)


def sentencepiece_model(directory: Path) -> Path:
    """A tokenizer.model with the settings of Llama's."""
    from sentencepiece import SentencePieceTrainer

    directory.mkdir()
    words = directory / "words.txt"
    words.write_text("the cat and the hat\n12 things that the cat has\nnaïve façade, and more\n" * 5)
    how = {"model_type": "bpe", "byte_fallback": True, "vocab_size": 320, "normalization_rule_name": "identity"}
    SentencePieceTrainer.Train(
        input=str(words), model_prefix=str(directory / "tokenizer"), remove_extra_whitespaces=False,
        user_defined_symbols=["<tool>"], minloglevel=2, **how,
    )  # fmt: skip
    return directory / "tokenizer.model"


def test_tokens_of_sentencepiece(tmp_path: Path) -> None:
    """Texts, scores and types are those that the package `gguf` gives llama.cpp for the same file."""
    from gguf.vocab import SentencePieceVocab

    saved = sentencepiece_model(tmp_path / "tokenizer")
    (saved.parent / "added_tokens.json").write_text('{"<|end|>": 320}')
    expected = list(SentencePieceVocab(saved.parent).all_tokens())
    assets = {"tokenizer.model": saved.read_bytes(), "added_tokens_json": (saved.parent / "added_tokens.json").read_bytes()}
    reader = GGUFReader(_exported(_model(MODELS["llama"]), tmp_path, **assets) / "model.gguf")
    texts, scores, kinds = (reader.fields[f"tokenizer.ggml.{key}"].contents() for key in ("tokens", "scores", "token_type"))
    tool = [text for text, _, _ in expected].index(b"<tool>")
    assert texts[: len(expected)] == [text.decode() for text, _, _ in expected]
    assert scores[: len(expected)] == [score for _, score, _ in expected]
    # the vocabulary of `gguf` leaves user-defined pieces normal; llama.cpp's conversion does not
    assert kinds[: len(expected)] == [4 if number == tool else int(kind) for number, (_, _, kind) in enumerate(expected)]
    assert kinds[len(expected) :] == [5] * (SIZE["vocab_size"] - len(expected))
    assert reader.fields["tokenizer.ggml.add_space_prefix"].contents() is True


def test_transformers_reads_the_tokenizer(tmp_path: Path) -> None:
    """The same tokens as from tokenizer.json."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    words = ["the cat and the hat", "12 things that the cat has", "naïve façade, and more"]
    tokenizer.train_from_iterator(words, trainers.BpeTrainer(vocab_size=300, initial_alphabet=alphabet))
    tokenizer.add_special_tokens(["<|end|>"])
    settings = b'{"eos_token": "<|end|>"}'
    model = _model(MODELS["qwen2"])
    out = _exported(model, tmp_path, tokenizer_json=tokenizer.to_str().encode(), tokenizer_config_json=settings)
    found = AutoTokenizer.from_pretrained(out, gguf_file="model.gguf")
    for text in (*words, "a hat: 123 naïve cats<|end|>"):
        assert found(text)["input_ids"] == tokenizer.encode(text).ids
    assert found.eos_token == "<|end|>"
