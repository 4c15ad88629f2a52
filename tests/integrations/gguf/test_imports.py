"""GGUF files that the package `gguf` writes are imported with the values that it, and transformers, read of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFReader, GGUFWriter, dequantize
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from holdfast_formats import naming
from holdfast_formats.rest.offline import RootJob
from holdfast_service.daemon.copying.progress import Quiet
from holdfast_service.offline.__main__ import main
from holdfast_service.wings.convert import offline
from tests.integrations.gguf.test_exports import MODELS
from tests.job_requests import a_conversion, an_import

ROWS, VALUES = 8, 512
HEADS, KEY_HEADS = 2, 1
NOT_QUANTISED = {"F32", "F16", "F64", "BF16", "I8", "I16", "I32", "I64"}


def decoded_types() -> list[GGMLQuantizationType]:
    """The quantised types that the package decodes."""
    found = []
    for kind, (_, size) in GGML_QUANT_SIZES.items():
        try:
            dequantize(np.zeros((1, size), np.uint8), kind)
        except NotImplementedError:
            continue
        if kind.name not in NOT_QUANTISED:
            found.append(kind)
    return found


def imported(source: Path, root: Path, **options: Any) -> dict[str, torch.Tensor]:
    job = an_import("m", 1, **{"from": str(source)}, **options)
    assert main(RootJob(root=str(root), job=job).model_dump_json(by_alias=True)) == 0
    return load_file(root / naming.checkpoint_path("m", 1) / "model.safetensors")


@pytest.mark.parametrize("kind", decoded_types(), ids=lambda kind: kind.name)
def test_quantised_tensors(tmp_path: Path, kind: GGMLQuantizationType) -> None:
    """Any bytes of each type that the package decodes, bit by bit; queries with their rows apart."""
    rng, (values, size) = np.random.default_rng(0), GGML_QUANT_SIZES[kind]
    (tmp_path / "source").mkdir()
    writer = GGUFWriter(tmp_path / "source" / "m.gguf", "llama")
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KEY_HEADS)
    names = {
        "token_embd.weight": "model.embed_tokens.weight",
        "blk.0.attn_q.weight": "model.layers.0.self_attn.q_proj.weight",
    }
    for name in names:
        writer.add_tensor(name, rng.integers(0, 256, (ROWS, VALUES // values * size)).astype(np.uint8), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    stored = {one.name: dequantize(one.data, one.tensor_type) for one in GGUFReader(tmp_path / "source" / "m.gguf").tensors}
    apart = stored["blk.0.attn_q.weight"].reshape(HEADS, ROWS // HEADS // 2, 2, VALUES).swapaxes(1, 2).reshape(ROWS, VALUES)
    wanted = {**stored, "blk.0.attn_q.weight": apart}
    found = imported(tmp_path / "source", tmp_path / "root")
    as_is = imported(tmp_path / "source", tmp_path / "as-is", as_is=True)
    for name, other in names.items():
        assert found[other].numpy().tobytes() == np.ascontiguousarray(wanted[name]).tobytes(), name
        assert as_is[name].numpy().tobytes() == stored[name].tobytes(), name


@pytest.mark.parametrize("name", MODELS)
def test_there_and_back(tmp_path: Path, name: str) -> None:
    """A model of transformers as a GGUF file, and imported again: the same tensors; transformers reads the file so, too."""
    torch.manual_seed(0)
    model = MODELS[name]().eval()
    model.save_pretrained(tmp_path / "hf")
    offline.convert(a_conversion(source=str(tmp_path / "hf"), to=str(tmp_path / "source"), form="gguf"), Quiet())
    found = imported(tmp_path / "source", tmp_path / "root")
    saved = load_file(tmp_path / "hf" / "model.safetensors")
    assert found.keys() == saved.keys()
    for key, tensor in saved.items():
        if "gemma" in name and "norm" in key:  # one was added and taken away
            assert torch.equal(found[key], (tensor + 1) - 1), key
        else:
            assert torch.equal(found[key], tensor), key
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "root" / naming.checkpoint_path("m", 1)).eval()
    official = AutoModelForCausalLM.from_pretrained(tmp_path / "source", gguf_file="model.gguf").eval()
    tokens = torch.arange(8)[None]
    with torch.no_grad():
        assert torch.equal(loaded(tokens).logits, official(tokens).logits)
