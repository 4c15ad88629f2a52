"""Quantised models of Hugging Face are taken as they are, with what describes them; nothing computes with their codes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from safetensors import deserialize
from safetensors.numpy import save_file

from holdfast_formats import naming
from holdfast_formats.errors import StateMismatch
from holdfast_formats.mapping.listing import ForeignListing
from holdfast_formats.rest.jobs import ReadOptions
from holdfast_formats.rest.offline import RootJob
from holdfast_service.daemon.copying.progress import Quiet
from holdfast_service.offline.__main__ import main
from holdfast_service.wings.convert import offline
from holdfast_service.wings.convert.foreign import hugging_face
from tests.job_requests import a_conversion, a_merge, an_import
from tests.wings.convert.foreign.directories import OnDisk

Arrays = dict[str, np.ndarray[Any, Any]]
LAYER = "model.layers.0.mlp.up_proj"
NORM: Arrays = {"model.norm.weight": np.ones(4, np.float32)}
RNG = np.random.default_rng(0)


def integers(dtype: Any, *shape: int) -> np.ndarray[Any, Any]:
    return RNG.integers(0, 100, shape).astype(dtype)


# What each library writes: names and dtypes as of transformers 5, DeepSeek-V3, AutoGPTQ, AutoAWQ and compressed-tensors.
CODES: dict[str, Arrays] = {
    "fp8": {
        "weight": integers(ml_dtypes.float8_e4m3fn, 128, 256),
        "weight_scale_inv": np.ones((1, 2), np.float32),
    },
    "gptq": {
        "qweight": integers(np.int32, 4, 16),
        "qzeros": integers(np.int32, 1, 2),
        "scales": np.ones((1, 16), np.float16),
        "g_idx": integers(np.int32, 32),
    },
    "awq": {
        "qweight": integers(np.int32, 32, 2),
        "qzeros": integers(np.int32, 1, 2),
        "scales": np.ones((1, 16), np.float16),
    },
    "bitsandbytes": {
        "weight": integers(np.uint8, 64, 1),
        "weight.absmax": integers(np.uint8, 2),
        "weight.quant_map": np.ones(16, np.float32),
        "weight.quant_state.bitsandbytes__nf4": np.frombuffer(b'{"blocksize": 64}', np.uint8),
    },
    "compressed-tensors": {
        "weight_packed": integers(np.int32, 16, 4),
        "weight_scale": np.ones((16, 1), ml_dtypes.bfloat16),
        "weight_shape": np.array([16, 32]),
    },
}


def a_model(directory: Path, how: str, described: bool = True) -> Path:
    directory.mkdir()
    config = {"model_type": "llama", "quantization_config": {"quant_method": how}} if described else {"model_type": "llama"}
    (directory / "config.json").write_text(json.dumps(config))
    arrays = {f"{LAYER}.{name}": array for name, array in CODES[how].items()} | NORM
    save_file(arrays, directory / "model.safetensors", metadata={"format": "pt"})
    return directory


def stored(directory: Path) -> list[Any]:
    """Names, dtypes, shapes and bytes."""
    held = deserialize((directory / "model.safetensors").read_bytes())
    return sorted((name, one["dtype"], one["shape"], bytes(one["data"])) for name, one in held)


def read(directory: Path, **options: Any) -> ForeignListing:
    return hugging_face.read(OnDisk(directory), ReadOptions(**options))


@pytest.mark.parametrize("how", CODES)
def test_stored_as_they_are(tmp_path: Path, how: str) -> None:
    """Every code and scale, and the configuration, to the byte: in a checkpoint, and in an export."""
    source, root = a_model(tmp_path / "source", how), tmp_path / "root"
    work = RootJob(root=str(root), job=an_import("m", 1, **{"from": str(source)}))
    assert main(work.model_dump_json(by_alias=True)) == 0
    offline.convert(a_conversion(source=str(source), to=str(tmp_path / "out"), form="hf"), Quiet())
    for made in (root / naming.checkpoint_path("m", 1), tmp_path / "out"):
        assert (made / "config.json").read_bytes() == (source / "config.json").read_bytes()
        assert stored(made) == stored(source)


def test_the_report_says_so(tmp_path: Path) -> None:
    assert any("quantised (gptq)" in note for note in read(a_model(tmp_path / "a", "gptq")).notes)


@pytest.mark.parametrize(
    ("config", "how"),
    [
        ({"quantization_config": {"load_in_4bit": True}}, "bitsandbytes"),
        ({"text_config": {"quantization_config": {"quant_method": "awq"}}}, "awq"),
        ({"quantization_config": {"bits": 4}}, "bits"),
    ],
)
def test_older_and_inner_configurations(tmp_path: Path, config: dict[str, Any], how: str) -> None:
    directory = a_model(tmp_path / "a", "gptq")
    (directory / "config.json").write_text(json.dumps(config))
    assert any(how in note for note in read(directory).notes)


@pytest.mark.parametrize("how", CODES)
def test_codes_that_nothing_describes(tmp_path: Path, how: str) -> None:
    """They are refused, by tensor and file, unless asked for as they are, or if a file of the old programs is there."""
    directory = a_model(tmp_path / "a", how, described=False)
    with pytest.raises(StateMismatch, match="looks like quantised weights") as refused:
        read(directory)
    assert refused.value.hint is not None and "--as-is" in refused.value.hint
    assert any("not known" in note for note in read(directory, as_is=True).notes)
    (directory / "quantize_config.json").write_text("{}")
    assert any("quantize_config.json" in note for note in read(directory).notes)


def test_tensors_described_by_metadata(tmp_path: Path) -> None:
    """A checkpoint's files have no metadata of torchao, without which its tensors mean nothing."""
    directory = a_model(tmp_path / "a", "fp8")
    metadata = {"format": "pt", "tensor_names": '["w"]', "w": '{"_type": "Float8Tensor"}'}
    save_file(NORM, directory / "model.safetensors", metadata=metadata)
    with pytest.raises(StateMismatch, match="torchao"):
        read(directory)


@pytest.mark.parametrize("terms", [{"form": "hf", "dtype": "bf16"}, {"form": "paddle-uc"}, {"form": "paddle-flex"}])
def test_exports_that_would_change_codes(tmp_path: Path, terms: dict[str, str]) -> None:
    source = a_model(tmp_path / "source", "fp8")
    with pytest.raises(StateMismatch, match=r"quantised \(fp8\)") as refused:
        offline.convert(a_conversion(source=str(source), to=str(tmp_path / "out"), **terms), Quiet())
    assert refused.value.hint and not (tmp_path / "out").exists()


@pytest.mark.parametrize("described", [True, False])
def test_merges(tmp_path: Path, described: bool, capfd: pytest.CaptureFixture[str]) -> None:
    """Codes are no values: a merge of them is refused, with the model's name."""
    root, models = tmp_path / "root", "[{model: one@1}, {model: one@2}]"
    source = a_model(tmp_path / "source", "gptq", described)
    for step in (1, 2):
        job = an_import("one", step, **{"from": str(source)}, as_is=not described)
        assert main(RootJob(root=str(root), job=job).model_dump_json(by_alias=True)) == 0
    recipe = f"{{merge_method: linear, models: {models}, parameters: {{weight: 1}}}}"
    assert main(RootJob(root=str(root), job=a_merge("merged", 1, recipe)).model_dump_json(by_alias=True)) != 0
    said = capfd.readouterr()
    assert ("one@1 is quantised (gptq)" if described else "one@1 looks like quantised") in said.out + said.err
