"""An adapter as PEFT loads it: one file, its names, its configuration."""

from __future__ import annotations

import json
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file

from holdfast_formats.errors import CheckpointError, InvalidRequest, NoSuchResource, StateMismatch
from holdfast_service.wings.convert.exports import peft
from holdfast_service.wings.convert.exports.plan import ExportOptions
from tests.wings.convert.exports.sources import llama, made, write

CONFIG = json.dumps({"peft_type": "LORA", "r": 2}).encode()
ASSETS = {"adapter_config.json": CONFIG, "config.json": b"{}", "README.md": b"an adapter"}
ADAPTER = {
    f"base_model.model.model.layers.{layer}.self_attn.q_proj.lora_{part}.weight": np.full(shape, layer, ml_dtypes.bfloat16)
    for layer in range(2)
    for part, shape in (("A", (2, 8)), ("B", (8, 2)))
}


@pytest.mark.parametrize("group", ["adapter", "adapter_model"])
@pytest.mark.parametrize("dtype", [None, "F32"])
def test_an_adapter_goes_out(tmp_path: Path, group: str, dtype: str | None) -> None:
    """An imported one and one that a trainer saved; in one file whatever its size, the base model's config left out."""
    groups = {group: ADAPTER, "model": llama()}
    source = made(tmp_path / "step", groups, assets=ASSETS, file_bytes_max=40).source
    plan = peft.plan(source, ExportOptions(dtype=dtype))
    out = write(source, plan, tmp_path / "out")
    assert sorted(path.name for path in out.iterdir()) == ["README.md", "adapter_config.json", "adapter_model.safetensors"]
    found = load_file(out / "adapter_model.safetensors")
    assert found.keys() == ADAPTER.keys()
    for name, array in ADAPTER.items():
        assert found[name].dtype == (np.float32 if dtype else array.dtype)
        assert np.array_equal(found[name].astype(np.float32), array.astype(np.float32))
    assert (out / "adapter_config.json").read_bytes() == CONFIG
    left = {one.what for one in plan.left_out}
    assert "config.json" in left and any(what.startswith("group model") for what in left)
    assert bool(plan.notes) == (dtype is not None)


@pytest.mark.parametrize(
    ("group", "assets", "options", "error", "says"),
    [
        ("model", ASSETS, ExportOptions(), NoSuchResource, "no adapter"),
        ("adapter", {}, ExportOptions(), NoSuchResource, "adapter_config.json"),
        ("adapter", ASSETS, ExportOptions(weights="ema"), InvalidRequest, "exported unchanged"),
        ("adapter", ASSETS, ExportOptions(layout="x"), InvalidRequest, "exported unchanged"),
    ],
)
def test_what_is_refused(
    tmp_path: Path, group: str, assets: dict[str, bytes], options: ExportOptions, error: type[CheckpointError], says: str
) -> None:
    """Without an adapter or its configuration PEFT could not load it; options that mean nothing are not ignored."""
    source = made(tmp_path / "step", {group: ADAPTER}, assets=assets).source
    with pytest.raises(error, match=says):
        peft.plan(source, options)


def test_a_conversion_that_loses_is_said(tmp_path: Path) -> None:
    """In the words of the other exports, for it may round."""
    source = made(tmp_path / "step", {"adapter": ADAPTER}, assets=ASSETS).source
    (note,) = peft.plan(source, ExportOptions(dtype="F16")).notes
    assert "rounded from bfloat16 to float16" in note


def test_prompts_have_no_prefix(tmp_path: Path) -> None:
    """PEFT names the tensors of prompt tuning, prefix tuning and p-tuning by themselves."""
    source = made(tmp_path / "step", {"adapter": {"prompt_embeddings": np.zeros((4, 8), "f4")}}, assets=ASSETS).source
    written = [one for one in peft.plan(source, ExportOptions()).files if one.name == "adapter_model.safetensors"]
    assert len(written) == 1


def test_names_of_others_are_refused(tmp_path: Path) -> None:
    """PEFT would load such a file without a word and use nothing of it."""
    source = made(tmp_path / "step", {"adapter": {**ADAPTER, "q.lora_A": np.zeros(2)}}, assets=ASSETS).source
    with pytest.raises(StateMismatch, match=r"'q.lora_A' is not a PEFT name"):
        peft.plan(source, ExportOptions())


def test_tied_adapters_are_there_under_each_name(tmp_path: Path) -> None:
    """PEFT would keep its own start values for a name that is missing, without an error."""
    first = next(iter(ADAPTER))
    other = first.replace("q_proj", "v_proj")
    source = made(tmp_path / "step", {"adapter": ADAPTER}, assets=ASSETS, aliases={"adapter": {other: first}}).source
    plan = peft.plan(source, ExportOptions())
    found = load_file(write(source, plan, tmp_path / "out") / "adapter_model.safetensors")
    assert found.keys() == {*ADAPTER, other} and found[other].tobytes() == ADAPTER[first].tobytes()
    assert any(f"{other} = {first}" in note for note in plan.notes)
