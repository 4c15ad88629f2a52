"""Models of transformers: safetensors whole, in shards and tied, .bin files, and other heads."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from tests.corpus.cases import Case, Tensors, prefixed

SMALL = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
}
EXPERTS = {"num_local_experts": 4, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
VISION = {**SMALL, "image_size": 16, "patch_size": 8}
WHISPER = {
    **dict.fromkeys(("encoder_layers", "decoder_layers"), 1),
    **dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads"), 4),
    **dict.fromkeys(("encoder_ffn_dim", "decoder_ffn_dim"), 48),
    **dict.fromkeys(("max_source_positions", "max_target_positions"), 20),
    "vocab_size": 96,
    "d_model": 32,
    "num_mel_bins": 8,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 1,
}
# the class, and the settings of its configuration; what a configuration does not know, it ignores
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "bert": ("BertForMaskedLM", SMALL),
    "roberta": ("RobertaForSequenceClassification", SMALL),
    "gpt2": ("GPT2LMHeadModel", {"vocab_size": 96, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64}),
    "llama": ("LlamaForCausalLM", SMALL),
    "llama-classifier": ("LlamaForSequenceClassification", {**SMALL, "pad_token_id": 0}),
    "qwen2-tied": ("Qwen2ForCausalLM", {**SMALL, "tie_word_embeddings": True}),
    "qwen3-moe": ("Qwen3MoeForCausalLM", {**SMALL, **EXPERTS}),
    "mixtral": ("MixtralForCausalLM", {**SMALL, **EXPERTS}),
    "gemma2": ("Gemma2ForCausalLM", SMALL),
    "t5": (
        "T5ForConditionalGeneration",
        {"vocab_size": 96, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4},
    ),
    "vit": ("ViTForImageClassification", VISION),
    "clip": (
        "CLIPModel",
        {"text_config": {**SMALL, "projection_dim": 16}, "vision_config": {**VISION, "projection_dim": 16},
         "projection_dim": 16},
    ),
    "whisper": ("WhisperForConditionalGeneration", WHISPER),
    "mamba": ("MambaForCausalLM", {**SMALL, "state_size": 4}),
}  # fmt: skip


def model(name: str, dtype: torch.dtype = torch.float32) -> Any:
    """A small model of transformers."""
    import transformers

    of, settings = MODELS[name]
    made = getattr(transformers, of)
    return made(made.config_class(**settings)).to(dtype)


def saved(name: str, dtype: torch.dtype = torch.float32, **how: Any) -> Callable[[Path], object]:
    return lambda place: model(name, dtype).save_pretrained(place, **how)


def files(place: Path) -> Tensors:
    """What safetensors reads from every file of a directory."""
    from safetensors.torch import load_file

    return {
        name: one for path in sorted(place.glob("*.safetensors")) for name, one in prefixed("model", load_file(path)).items()
    }


def torch_files(place: Path) -> Tensors:
    """What torch reads from every .bin file of a directory."""
    paths = sorted(place.glob("pytorch_model*.bin"))
    return {name: one for path in paths for name, one in prefixed("model", torch.load(path, weights_only=True)).items()}


def pretrained(place: Path) -> Tensors:
    """What transformers makes of a directory; it must miss nothing."""
    import transformers

    of = transformers.AutoConfig.from_pretrained(place).architectures[0]
    made, told = getattr(transformers, of).from_pretrained(place, output_loading_info=True)
    assert not any(told.values()), told
    return dict(made.state_dict())


def one_bin(place: Path) -> None:
    made = model("bert", torch.float16)
    made.config.architectures = ["BertForMaskedLM"]
    made.config.save_pretrained(place)
    torch.save(made.state_dict(), place / "pytorch_model.bin")


def bins(place: Path) -> None:
    from huggingface_hub import save_torch_state_dict

    made = model("llama", torch.bfloat16)
    made.config.architectures = ["LlamaForCausalLM"]
    made.config.save_pretrained(place)
    save_torch_state_dict(made.state_dict(), place, filename_pattern="pytorch_model{suffix}.bin", max_shard_size="20KB",
                          safe_serialization=False)  # fmt: skip


def from_gguf(place: Path) -> Tensors:
    from transformers import AutoModelForCausalLM

    return dict(AutoModelForCausalLM.from_pretrained(place, gguf_file="model.gguf").state_dict())


def _case(name: str, make: Callable[[Path], object], **more: Any) -> Case:
    return Case(name, more.pop("library", "transformers"), make, **{"read": files, "load": pretrained, **more})


CASES = (
    *(_case(f"transformers-{name}", saved(name)) for name in MODELS),
    _case("transformers-llama-bf16-shards", saved("llama", torch.bfloat16, max_shard_size="20KB")),
    _case("transformers-mixtral-bf16-shards", saved("mixtral", torch.bfloat16, max_shard_size="20KB")),
    _case("transformers-bert-fp16-bin", one_bin, read=torch_files),
    _case("huggingface-hub-llama-bin-shards", bins, read=torch_files, library="huggingface_hub"),
    _case("transformers-llama-gguf", saved("llama"), exported=("--as", "gguf"), load_exported=from_gguf),
)
