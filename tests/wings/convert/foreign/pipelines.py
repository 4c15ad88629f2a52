"""A pipeline's directory as diffusers writes it, with small arrays."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

UNET = "diffusion_pytorch_model.safetensors"


def pipeline(top: Path) -> Path:
    """A unet of diffusers, a text encoder of transformers in two files, a scheduler and a tokenizer."""
    index = {
        "_class_name": "StableDiffusionPipeline",
        "_diffusers_version": "0.42.1",
        "requires_safety_checker": False,
        "safety_checker": [None, None],
        "scheduler": ["diffusers", "DDIMScheduler"],
        "text_encoder": ["transformers", "CLIPTextModel"],
        "tokenizer": ["transformers", "CLIPTokenizer"],
        "unet": ["diffusers", "UNet2DConditionModel"],
    }
    for name in ("scheduler", "text_encoder", "tokenizer", "unet"):
        (top / name).mkdir(parents=True)
    (top / "model_index.json").write_text(json.dumps(index))
    (top / "README.md").write_text("# A model")
    (top / "scheduler" / "scheduler_config.json").write_text('{"_class_name": "DDIMScheduler"}')
    (top / "tokenizer" / "vocab.json").write_text("{}")
    (top / "tokenizer" / "merges.txt").write_text("")
    (top / "unet" / "config.json").write_text('{"_class_name": "UNet2DConditionModel"}')
    (top / "text_encoder" / "config.json").write_text('{"model_type": "clip_text_model"}')
    save_file({"conv_in.weight": np.arange(8, dtype=np.float32)}, top / "unet" / UNET, metadata={"format": "pt"})
    for number in (1, 2):
        array = np.full(4, number, np.float16)
        file = top / "text_encoder" / f"model-0000{number}-of-00002.safetensors"
        save_file({f"layer.{number}.weight": array}, file, metadata={"format": "pt"})
    return top
