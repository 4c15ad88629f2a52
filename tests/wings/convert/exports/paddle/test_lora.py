"""A LoRA adapter for PaddleFormers: what Paddle wrote comes back, and what PEFT made is translated or refused.

tests/integrations/paddle loads it with PaddleFormers.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from holdfast_formats.errors import CheckpointError, InvalidRequest, NoSuchResource, StateMismatch
from holdfast_formats.rest.jobs import ReadOptions
from holdfast_service.wings.convert.exports.paddle import lora as paddle_lora
from holdfast_service.wings.convert.exports.plan import ExportOptions
from holdfast_service.wings.convert.exports.source import of_listing
from holdfast_service.wings.convert.foreign.paddle import lora
from tests.wings.convert.exports.sources import made, trained, values_of, write
from tests.wings.convert.foreign.dcp.directories import DirectoryFiles
from tests.wings.convert.foreign.paddle.written import GOLDEN, read, values

LAYER = "base_model.model.model.layers.0.self_attn.q_proj"
A, B = (f"{LAYER}.lora_{side}.weight" for side in "AB")
ADAPTER = {A: np.arange(8, dtype=np.float32).reshape(2, 4), B: np.arange(6, dtype=np.float32).reshape(3, 2)}
ONE = np.zeros(3, np.float32)
CONFIG: dict[str, Any] = {
    "peft_type": "LORA",
    "task_type": "CAUSAL_LM",
    "r": 2,
    "lora_alpha": 6,
    "target_modules": ["q_proj", "mlp.up_proj"],
    "modules_to_save": None,
    "use_rslora": True,
    "bias": "none",
}


def _assets(**changed: Any) -> dict[str, bytes]:
    return {"adapter_config.json": json.dumps({**CONFIG, **changed}).encode(), "config.json": b"{}"}


def test_what_paddle_wrote_comes_back(tmp_path: Path) -> None:
    """Import and export give Paddle's own arrays, and importing them again the same tensors."""
    folder = GOLDEN / "lora" / "checkpoint-2"
    listing = lora.read(DirectoryFiles(folder), ReadOptions())
    source = of_listing(DirectoryFiles(folder), listing)
    out = write(source, paddle_lora.plan(source, ExportOptions()), tmp_path / "out")
    for stem in ("peft_model", "master_weights", "optimizer"):
        ours, theirs = (load_file(place / f"{stem}-00001-of-00001.safetensors") for place in (out, folder))
        assert ours.keys() == theirs.keys()
        for name, array in theirs.items():
            if "_pow_acc_0" in name:  # the fixture's were rounded from float64; Paddle multiplies them up in FP32
                assert np.allclose(ours[name], array, rtol=1e-6)
                continue
            assert (ours[name].shape, ours[name].tobytes()) == (array.shape, array.tobytes()), name
    index = json.loads((out / "peft_model.safetensors.index.json").read_text())
    assert index["type"] == "lora"
    assert (out / "lora_config.json").read_bytes() == (folder / "lora_config.json").read_bytes()
    again = read(lora.KIND, out)
    assert again.tensors.keys() == listing.tensors.keys()
    for group, name in listing.tensors:
        assert values(out, again, group, name).tobytes() == values(folder, listing, group, name).tobytes()


def test_an_adapter_of_peft(tmp_path: Path) -> None:
    """Transposed, with AdamW's state beside it, and a configuration that says the same."""
    groups = {"adapter": ADAPTER, **{key: held for key, held in trained(ADAPTER).items() if key in ("master", "optim")}}
    source = made(tmp_path / "step", groups, step=2, assets=_assets(), ranks=values_of(list(ADAPTER))).source
    plan = paddle_lora.plan(source, ExportOptions())
    out = write(source, plan, tmp_path / "out")
    found = load_file(out / "peft_model-00001-of-00001.safetensors")
    theirs = LAYER.removeprefix("base_model.model.")
    assert found[f"{theirs}.lora_A"].tolist() == ADAPTER[A].T.tolist()
    assert found[f"{theirs}.lora_B"].tolist() == ADAPTER[B].T.tolist()
    optimizer = load_file(out / "optimizer-00001-of-00001.safetensors")
    assert optimizer[f"{theirs}.lora_A/moment1_0"].tolist() == groups["optim"][f"{A}/exp_avg"].T.tolist()
    config = json.loads((out / "lora_config.json").read_text())
    assert (config["r"], config["lora_alpha"], config["rslora"], config["dtype"]) == (2, 6, True, "float32")
    names = ("model.layers.1.self_attn.q_proj", "model.layers.0.mlp.up_proj", "model.layers.0.mlp.down_proj", "xq_proj")
    matching = [name for name in names if any(re.fullmatch(one, name) for one in config["target_modules"])]
    assert matching == list(names[:2])
    assert plan.left_out == () and {"trainer_state.bin", "scheduler.pdparams", "adapter_config.json"} <= {
        path.name for path in out.iterdir()
    }


def test_an_adapter_that_a_trainer_saved(tmp_path: Path) -> None:
    """Its optimizer and masters have the entry's key in front of the parameters' names."""
    keyed = trained({f"adapter_model.{name}": array for name, array in ADAPTER.items()})
    groups = {"adapter_model": ADAPTER, "master": keyed["master"], "optim": keyed["optim"]}
    values = values_of([f"adapter_model.{name}" for name in ADAPTER])
    source = made(tmp_path / "step", groups, step=2, assets=_assets(), ranks=values).source
    out = write(source, paddle_lora.plan(source, ExportOptions()), tmp_path / "out")
    theirs = f"{LAYER.removeprefix('base_model.model.')}.lora_A"
    found = {stem: load_file(out / f"{stem}-00001-of-00001.safetensors") for stem in ("master_weights", "optimizer")}
    assert found["master_weights"][theirs].tolist() == keyed["master"][f"adapter_model.{A}"].T.tolist()
    moment = keyed["optim"][f"adapter_model.{A}/exp_avg"]
    assert found["optimizer"][f"{theirs}/moment1_0"].tolist() == moment.T.tolist()


def test_only_the_adapter(tmp_path: Path) -> None:
    """The base model stays behind, and without an optimizer there is nothing to resume."""
    groups = {"adapter_model": ADAPTER, "model": {"x": ONE}}
    source = made(tmp_path / "step", groups, assets=_assets(target_modules=".*q_proj", bias="lora_only")).source
    plan = paddle_lora.plan(source, ExportOptions())
    assert [one.what for one in plan.left_out] == ["group model (1 tensors)"]
    assert any("not resume" in note for note in plan.notes)
    config = json.loads((write(source, plan, tmp_path / "out") / "lora_config.json").read_text())
    assert (config["target_modules"], config["trainable_bias"]) == ([".*q_proj"], "lora")


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"use_dora": True}, "use_dora"),
        ({"rank_pattern": {"q_proj": 4}}, "rank_pattern"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
        ({"bias": "all"}, "plain LoRA"),
        ({"target_modules": None}, "plain LoRA"),
        ({"peft_type": "LOHA"}, "plain LoRA"),
    ],
)
def test_settings_that_paddle_lacks(tmp_path: Path, changed: dict[str, Any], said: str) -> None:
    with pytest.raises(StateMismatch, match=said) as caught:
        paddle_lora.plan(made(tmp_path / "step", {"adapter": ADAPTER}, assets=_assets(**changed)).source, ExportOptions())
    assert "--as peft" in caught.value.hint


@pytest.mark.parametrize(
    ("groups", "assets", "kind", "said"),
    [
        ({"model": ADAPTER}, _assets(), NoSuchResource, "no adapter"),
        ({"adapter": ADAPTER}, {}, NoSuchResource, r"adapter_config\.json"),
        ({"adapter": ADAPTER}, {"adapter_config.json": b"{"}, StateMismatch, "no JSON"),
        (
            {"adapter": {**ADAPTER, f"{LAYER}.lora_magnitude_vector": ONE}},
            _assets(),
            StateMismatch,
            "magnitude",
        ),
        (
            {"adapter": ADAPTER, "optim": {"other/exp_avg": ONE}},
            _assets(),
            StateMismatch,
            "other/exp_avg",
        ),
    ],
)
def test_what_is_refused(
    tmp_path: Path, groups: Any, assets: dict[str, bytes], kind: type[CheckpointError], said: str
) -> None:
    with pytest.raises(kind, match=said):
        paddle_lora.plan(made(tmp_path / "step", groups, assets=assets).source, ExportOptions())


def test_tied_adapters_and_options(tmp_path: Path) -> None:
    source = made(tmp_path / "step", {"adapter": ADAPTER}, assets=_assets(), aliases={"adapter": {"x": A}}).source
    with pytest.raises(StateMismatch, match="tied"):
        paddle_lora.plan(source, ExportOptions())
    with pytest.raises(InvalidRequest):
        paddle_lora.plan(source, ExportOptions(dtype="F32"))
