"""`holdfast export --as peft` of what PEFT saved: `PeftModel.from_pretrained` loads it, with the same logits."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.numpy import load_file

from holdfast_service.wings.convert.exports import peft as exports_peft
from holdfast_service.wings.convert.exports.plan import ExportOptions
from tests.integrations.transformers.models import Sentences, small_model
from tests.wings.convert.exports.sources import made, write

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")


@pytest.mark.parametrize("group", ["adapter", "adapter_model"])
@pytest.mark.parametrize("changed", [{}, {"use_dora": True}, {"modules_to_save": ["ln_f"]}], ids=["lora", "dora", "modules"])
def test_peft_loads_it(tmp_path: Path, group: str, changed: dict[str, object]) -> None:
    """An adapter with weights of its own, in a checkpoint beside other things."""
    settings = {"r": 2, "target_modules": ["c_attn"], "fan_in_fan_out": True, "init_lora_weights": False}
    model = get_peft_model(small_model(), LoraConfig(**settings, **changed)).eval()
    model.save_pretrained(tmp_path / "saved")
    arrays = load_file(tmp_path / "saved" / "adapter_model.safetensors")
    assets = {"adapter_config.json": (tmp_path / "saved" / "adapter_config.json").read_bytes(), "config.json": b"{}"}
    source = made(tmp_path / "step", {group: arrays, "optim": {"x/step": arrays[min(arrays)]}}, assets=assets).source
    out = write(source, exports_peft.plan(source, ExportOptions()), tmp_path / "out")
    rows = torch.stack([Sentences()[place]["input_ids"] for place in range(2)])
    with torch.no_grad():
        expected = model(input_ids=rows).logits
        found = PeftModel.from_pretrained(small_model(), out).eval()(input_ids=rows).logits
        base = small_model().eval()(input_ids=rows).logits
    assert torch.equal(found, expected) and not torch.equal(found, base)
