"""A pipeline that was imported and exported makes the same picture as the one that diffusers saved."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from diffusers import AutoencoderKL, DDIMScheduler, DiffusionPipeline, StableDiffusionPipeline, UNet2DConditionModel
from transformers import CLIPTextConfig, CLIPTextModel, CLIPTokenizer

from holdfast_formats import naming
from holdfast_formats.rest.offline import RootJob
from holdfast_service.daemon.copying.progress import Quiet
from holdfast_service.offline.__main__ import main
from holdfast_service.wings.convert import offline
from tests.job_requests import a_conversion, an_import

TOKENS = ["<|startoftext|>", "<|endoftext|>", "l", "o", "w", "e", "r", "l</w>", "o</w>", "w</w>", "r</w>", "lo", "er</w>"]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small Stable Diffusion."""
    torch.manual_seed(0)
    place = tmp_path_factory.mktemp("pipeline")
    (place / "vocab.json").write_text(json.dumps({token: number for number, token in enumerate(TOKENS)}))
    (place / "merges.txt").write_text("#version: 0.2\nl o\ne r</w>\n")
    text = CLIPTextConfig(
        hidden_size=8, intermediate_size=16, num_attention_heads=2, num_hidden_layers=2, vocab_size=16, projection_dim=8,
        bos_token_id=0, eos_token_id=1, pad_token_id=1,
    )  # fmt: skip
    unet = UNet2DConditionModel(
        block_out_channels=(4, 8), layers_per_block=1, sample_size=8, norm_num_groups=2, cross_attention_dim=8,
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"), up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
        attention_head_dim=2,
    )  # fmt: skip
    vae = AutoencoderKL(
        block_out_channels=(4, 8), norm_num_groups=2, latent_channels=4,
        down_block_types=("DownEncoderBlock2D",) * 2, up_block_types=("UpDecoderBlock2D",) * 2,
    )  # fmt: skip
    StableDiffusionPipeline(
        vae=vae,
        text_encoder=CLIPTextModel(text),
        tokenizer=CLIPTokenizer(str(place / "vocab.json"), str(place / "merges.txt"), model_max_length=8),
        unet=unet,
        scheduler=DDIMScheduler(clip_sample=False, steps_offset=1),
        safety_checker=None,
        feature_extractor=None,
        requires_safety_checker=False,
    ).save_pretrained(place / "saved")
    return place / "saved"


def picture(directory: Path) -> np.ndarray:
    pipeline = DiffusionPipeline.from_pretrained(directory)
    pipeline.set_progress_bar_config(disable=True)
    drawn = pipeline("lower", num_inference_steps=2, generator=torch.manual_seed(1), output_type="np", height=16, width=16)
    return np.asarray(drawn.images)


def test_the_same_picture(saved: Path, tmp_path: Path) -> None:
    """Out of a checkpoint and straight from the source; a component is loaded from a checkpoint of its own."""
    root = tmp_path / "root"
    for step, source in ((1, saved), (2, saved / "unet")):
        job = an_import("p", step, **{"from": str(source)})
        assert main(RootJob(root=str(root), job=job).model_dump_json(by_alias=True)) == 0
    for name, source in (("one", root / naming.checkpoint_path("p", 1)), ("two", saved)):
        offline.convert(a_conversion(source=str(source), to=str(tmp_path / name), form="diffusers"), Quiet())
    wanted = picture(saved)
    assert wanted.std() > 0
    assert np.array_equal(picture(tmp_path / "one"), wanted) and np.array_equal(picture(tmp_path / "two"), wanted)
    unet = UNet2DConditionModel.from_pretrained(root / naming.checkpoint_path("p", 2)).state_dict()
    official = UNet2DConditionModel.from_pretrained(saved, subfolder="unet").state_dict()
    assert unet.keys() == official.keys() and all(torch.equal(unet[name], one) for name, one in official.items())
