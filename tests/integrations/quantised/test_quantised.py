"""Quantised models load from a committed checkpoint, and from an export of it, as from the directory that was imported."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from compressed_tensors.compressors import pack_to_int32
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, FineGrainedFP8Config, LlamaConfig, LlamaForCausalLM

from holdfast_formats import naming
from holdfast_formats.rest.offline import RootJob
from holdfast_service.daemon.copying.progress import Quiet
from holdfast_service.offline.__main__ import main
from holdfast_service.wings.convert import offline
from tests.job_requests import a_conversion, an_import

BLOCK, TOKENS = 64, torch.arange(12)[None]
Tensors = dict[str, torch.Tensor]


def save_plain(place: Path) -> None:
    """A small model in BF16."""
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=64,
    )
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(place)


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("plain") / "model"
    save_plain(place)
    return place


def by_bitsandbytes(plain: Path, out: Path, **how: Any) -> dict[str, Any]:
    settings = BitsAndBytesConfig(**how)
    AutoModelForCausalLM.from_pretrained(plain, quantization_config=settings, device_map="cpu").save_pretrained(out)
    return {"device_map": "cpu"}


def replaced(plain: Path, out: Path, codes: Callable[[str, torch.Tensor], Tensors], described: dict[str, Any]) -> None:
    """The model with codes in the place of its projections."""
    shutil.copytree(plain, out)
    arrays: Tensors = {}
    for name, weight in load_file(plain / "model.safetensors").items():
        arrays |= codes(name, weight.float()) if name.endswith("_proj.weight") else {name: weight}
    save_file(arrays, out / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((out / "config.json").read_text())
    (out / "config.json").write_text(json.dumps({**config, "quantization_config": described}))


def as_deepseek(plain: Path, out: Path) -> dict[str, Any]:
    """FP8 with a scale for each block; on a CPU transformers only decodes it."""

    def codes(name: str, weight: torch.Tensor) -> Tensors:
        rows, columns = weight.shape
        blocks = weight.reshape(rows // BLOCK, BLOCK, columns // BLOCK, BLOCK)
        scales = blocks.abs().amax((1, 3)) / 448
        values = (blocks / scales[:, None, :, None]).reshape(rows, columns)
        return {name: values.to(torch.float8_e4m3fn), f"{name}_scale_inv": scales}

    block = {"weight_block_size": [BLOCK, BLOCK]}
    replaced(plain, out, codes, {"quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3", **block})
    return {"quantization_config": FineGrainedFP8Config(dequantize=True, weight_block_size=(BLOCK, BLOCK))}


def as_compressed_tensors(plain: Path, out: Path) -> dict[str, Any]:
    """Four bits in int32, a scale for each row."""

    def codes(name: str, weight: torch.Tensor) -> Tensors:
        scales = weight.abs().amax(1, keepdim=True) / 7
        values = (weight / scales).round().clamp(-8, 7).to(torch.int8)
        made = {"packed": pack_to_int32(values, 4), "scale": scales.to(torch.bfloat16)}
        return {f"{name}_{part}": one for part, one in {**made, "shape": torch.tensor(weight.shape)}.items()}

    weights = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "channel", "dynamic": False}
    described = {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "quantization_status": "compressed",
        "ignore": ["lm_head"],
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}},
    }
    replaced(plain, out, codes, described)
    return {"dtype": torch.bfloat16}


MAKERS: dict[str, Callable[[Path, Path], dict[str, Any]]] = {
    "bitsandbytes in 4 bits": lambda plain, out: by_bitsandbytes(
        plain, out, load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True
    ),
    "bitsandbytes in 8 bits": lambda plain, out: by_bitsandbytes(plain, out, load_in_8bit=True),
    "FP8 of DeepSeek": as_deepseek,
    "compressed-tensors": as_compressed_tensors,
}


@pytest.mark.parametrize("how", MAKERS)
def test_it_loads_as_from_its_source(plain: Path, tmp_path: Path, how: str) -> None:
    """The same parameters, buffers and logits, bit by bit; and not those of the unquantised model."""
    terms = MAKERS[how](plain, tmp_path / "source")
    job = an_import("m", 1, **{"from": str(tmp_path / "source")})
    assert main(RootJob(root=str(tmp_path / "root"), job=job).model_dump_json(by_alias=True)) == 0
    made = tmp_path / "root" / naming.checkpoint_path("m", 1)
    offline.convert(a_conversion(source=str(made), to=str(tmp_path / "out"), form="hf"), Quiet())
    models = [
        AutoModelForCausalLM.from_pretrained(place, **terms).eval()
        for place in (tmp_path / "source", made, tmp_path / "out")
    ]
    with torch.no_grad():
        wanted, *logits = [model(TOKENS).logits for model in models]
        unquantised = AutoModelForCausalLM.from_pretrained(plain)(TOKENS).logits
    states = [model.state_dict() for model in models]
    for found, state in zip(logits, states[1:], strict=True):
        assert torch.equal(found, wanted) and not torch.equal(found, unquantised)
        assert state.keys() == states[0].keys()
        assert all(torch.equal(state[name], one) for name, one in states[0].items() if isinstance(one, torch.Tensor))
