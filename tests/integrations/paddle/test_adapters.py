"""A checkpoint of a LoRAModel is an adapter of PEFT, and training resumes from it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file

from tests.integrations.paddle.test_huggingface import LOGITS_ATOL, ran, read, step_directory

PEFT = """
import sys
import numpy as np
import torch

sys.modules["torchcodec"] = None  # paddlecodec puts a module of this name beside transformers
from peft import PeftModel
from transformers import AutoModelForCausalLM

base, adapter, out = sys.argv[1:]
model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), adapter).eval()
tokens = torch.from_numpy(np.random.RandomState(100).randint(1, 64, (4, 16)))
np.savez(out, logits=model(tokens).logits.detach().numpy())
"""


def test_peft_loads_the_adapter_and_training_resumes(tmp_path: Path) -> None:
    """With layers that are trained as a whole. The base model is stored nowhere in it."""
    ran("adapted", tmp_path / "whole", 6, tmp_path / "whole.npz")
    for steps in (3, 6):
        ran("adapted", tmp_path / "root", steps, tmp_path / "resumed.npz")
    whole, resumed = read(tmp_path / "whole.npz"), read(tmp_path / "resumed.npz")
    assert int(resumed["first"]) == 3
    assert np.array_equal(whole["losses"][3:], resumed["losses"]) and np.array_equal(whole["logits"], resumed["logits"])
    stored = step_directory(tmp_path / "root", "adapter")
    assert not (stored / "model.safetensors").exists()
    tensors = load_file(stored / "adapter_model.safetensors")
    assert tensors["base_model.model.model.layers.0.mlp.down_proj.lora_A.weight"].shape == (2, 48)
    assert {name.rpartition(".")[0].rpartition(".")[2] for name in tensors} == {"lora_A", "lora_B", "lm_head", "norm"}
    assert json.loads((stored / "adapter_config.json").read_text())["use_rslora"] is True
    words = [step_directory(tmp_path / "root", "base"), stored, tmp_path / "peft.npz"]
    line = [sys.executable, "-c", PEFT, *map(str, words)]
    done = subprocess.run(line, capture_output=True, text=True, check=False, timeout=600)
    assert done.returncode == 0, done.stderr[-4000:]
    found = read(tmp_path / "peft.npz")["logits"]
    assert np.abs(found).max() > 1 and np.abs(found - whole["logits"]).max() < LOGITS_ATOL
