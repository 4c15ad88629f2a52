"""Makes reference.safetensors: what PEFT makes of the cases. Run it where peft 0.21 and transformers 5 are installed:

    python -m tests.wings.merge.adapters.make_reference

PEFT computes in the types of weights and adapter, so its products have the error of that type's sums; here it computes in
float64, and its results are rounded once. tests/integrations/peft compares with its own arithmetic, too.
"""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from peft.utils import merge_utils
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, PretrainedConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING

from holdfast_service.wings.merge.draws import Draws
from tests.wings.merge.adapters.cases import CASES, COMBINATIONS, COMBINED, AdapterCase, CombinationCase

REFERENCE = Path(__file__).with_name("reference.safetensors")
_SMALL = {"hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2, "vocab_size": 20}
_GROUPED = {"num_key_value_heads": 2, "intermediate_size": 12, "max_position_embeddings": 32}
_ONE = {**_SMALL, **_GROUPED, "num_hidden_layers": 1}
_TOKENS = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
MODELS: dict[str, dict[str, Any]] = {
    "llama": {"type": "llama", **_SMALL, **_GROUPED, "tie_word_embeddings": False},
    "tied": {"type": "llama", **_SMALL, **_GROUPED, "tie_word_embeddings": True},
    "qwen2": {"type": "qwen2", **_ONE, "tie_word_embeddings": False},
    "gpt2": {"type": "gpt2", "n_embd": 8, "n_layer": 1, "n_head": 2, "vocab_size": 20, "n_positions": 16},
    "mixtral": {"type": "mixtral", **_ONE, "num_local_experts": 3},
    "qwen3_moe": {"type": "qwen3_moe", **_ONE, "moe_intermediate_size": 6, "num_experts": 3, "head_dim": 4},
    "gpt_oss": {"type": "gpt_oss", **_ONE, "intermediate_size": 8, "num_local_experts": 3, "head_dim": 4},
    "vit": {"type": "vit", **_ONE, "image_size": 8, "patch_size": 4},
}


class Merge(NamedTuple):
    """A base and an adapter as their libraries saved them, and the files of PEFT's own merge."""

    base: Path
    adapter: Path
    merged: Path


def merge(case: AdapterCase, place: Path, exact: bool = False) -> Merge:
    """Train nothing, but give the adapter values, and merge it with PEFT; `exact`: in float64."""
    torch.manual_seed(5)
    made = Merge(place / "base", place / "adapter", place / "merged")
    model = _model(case).to(getattr(torch, case.dtype))
    model.save_pretrained(made.base)
    if case.vocabulary is not None:
        model.resize_token_embeddings(case.vocabulary, mean_resizing=False)
    trained = get_peft_model(model, LoraConfig(**{"r": 4, "lora_alpha": 6, "init_lora_weights": False, **case.words}))
    with torch.no_grad():
        for name, value in trained.named_parameters():
            if value.requires_grad:
                value.add_(torch.randn_like(value) * 0.1)
            elif case.vocabulary is not None and "embed_tokens" in name:
                value[-4:] += torch.randn_like(value[-4:]) * 0.1
    trained.save_pretrained(made.adapter, save_embedding_layers=True if case.vocabulary is not None else "auto")
    base = type(model).from_pretrained(made.base, dtype=torch.float64 if exact else case.dtype)
    if case.vocabulary is not None:
        base.resize_token_embeddings(case.vocabulary, mean_resizing=False)
    loaded = PeftModel.from_pretrained(base, made.adapter)
    merged = (loaded.double() if exact else loaded).merge_and_unload()
    merged.to(getattr(torch, case.dtype)).save_pretrained(made.merged)
    return made


def adapters(place: Path) -> None:
    """Save the adapters `one` and `two` of a small Llama, and the model."""
    torch.manual_seed(6)
    model = _model(CASES[0])
    model.save_pretrained(place / "base")
    for name, words in zip(("one", "two"), COMBINED, strict=True):
        base = type(model).from_pretrained(place / "base")
        trained = get_peft_model(base, LoraConfig(**{"init_lora_weights": False, **words}))
        with torch.no_grad():
            for value in trained.parameters():
                if value.requires_grad:
                    value.add_(torch.randn_like(value) * 0.1)
        trained.save_pretrained(place / name, save_embedding_layers=False)


def combine(case: CombinationCase, place: Path) -> None:
    """Combine the adapters of `adapters` with PEFT, which gets Holdfast's draws, into the directory `combined`."""
    held = {
        value.numpy().tobytes(): (number, name)
        for number, one in enumerate(("one", "two"))
        for name, value in tensors(place / one).items()
    }

    def drawn(tensor: torch.Tensor, density: float, rescale: bool) -> torch.Tensor:
        draws = Draws(0, *held[tensor.numpy().tobytes()]).uniform(0, tensor.numel())
        return tensor * (torch.from_numpy(draws) < density).reshape(tensor.shape) / density

    model = type(_model(CASES[0])).from_pretrained(place / "base")
    loaded, names = PeftModel.from_pretrained(model, place / "one", adapter_name="one"), ["one", "two"]
    loaded.load_adapter(place / "two", "two")
    chosen = names[: len(case.weights)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(merge_utils, "random_pruning", drawn)
        loaded.add_weighted_adapter(chosen, list(case.weights), "combined", combination_type=case.method, **case.words)
    loaded.save_pretrained(place, selected_adapters=["combined"], save_embedding_layers=False)


def _model(case: AdapterCase) -> PreTrainedModel:
    words = dict(MODELS[case.model])
    config: PretrainedConfig = AutoConfig.for_model(words.pop("type"), **{**_TOKENS, **words})
    mapping = MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING if case.model == "vit" else MODEL_FOR_CAUSAL_LM_MAPPING
    model: PreTrainedModel = mapping[type(config)](config)
    return model


def tensors(directory: Path) -> dict[str, torch.Tensor]:
    return {name: value for file in sorted(directory.glob("*.safetensors")) for name, value in load_file(file).items()}


if __name__ == "__main__":
    os.environ["HF_HUB_OFFLINE"] = "1"
    held: dict[str, torch.Tensor] = {}
    configs: dict[str, str] = {}
    for one in CASES:
        with tempfile.TemporaryDirectory() as place:
            made = merge(one, Path(place), exact=True)
            base, changed = tensors(made.base), tensors(made.merged)
            kept = {name: value for name, value in changed.items() if name not in base or not torch.equal(value, base[name])}
            held |= {f"{one.base}/base/{name}": value for name, value in base.items()}
            held |= {f"{one.name}/adapter/{name}": value for name, value in tensors(made.adapter).items()}
            held |= {f"{one.name}/merged/{name}": value for name, value in kept.items()}
            for key, file in (
                (f"{one.base}/base", made.base / "config.json"),
                (f"{one.name}/adapter", made.adapter / "adapter_config.json"),
                (f"{one.name}/merged", made.merged / "config.json"),
            ):
                configs[key] = json.dumps(json.loads(file.read_text()), separators=(",", ":"))
    with tempfile.TemporaryDirectory() as place:
        adapters(Path(place))
        for name in ("one", "two"):
            held |= {f"{name}/{key}": value for key, value in tensors(Path(place) / name).items()}
            configs[name] = json.dumps(json.loads((Path(place) / name / "adapter_config.json").read_text()))
        for combination in COMBINATIONS:
            combine(combination, Path(place))
            held |= {f"{combination.name}/{key}": value for key, value in tensors(Path(place) / "combined").items()}
            configs[combination.name] = (Path(place) / "combined" / "adapter_config.json").read_text()
    save_file(held, REFERENCE, metadata=configs)
