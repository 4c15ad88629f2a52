"""Resumes PaddleFormers' trainer in two ranks of sharding: `sharded_loading.py DIR OUT`, with RANK in the environment.

Each rank writes OUT.RANK.npz: what it holds, by our groups and structured names, in Paddle's layout; state and masters are
its flat parts.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
import paddle
from paddle.distributed.fleet.utils import tensor_fusion_helper
from paddleformers.trainer import TrainingArguments
from paddleformers.transformers import LlamaConfig, LlamaForCausalLM

from tests.integrations.paddle.loading import Loading, Resumed, Sentences, held


class LoadingOptimizer(Loading):
    """Ends before the weights, which Paddle rounds from the masters: gloo broadcasts no bfloat16."""

    def _load_from_checkpoint(self, *given: Any, **named: Any) -> None:
        raise Resumed


def resumed(directory: Path) -> Loading:
    config = json.loads((directory / "config.json").read_text())
    half = config["torch_dtype"] == "bfloat16"
    arguments = TrainingArguments(
        output_dir=str(directory.parent / "trained"),
        max_steps=100,
        device="cpu",
        bf16=half,
        fp16_opt_level="O2",
        amp_master_grad=half,
        sharding="stage1",
        sharding_parallel_size=2,
        save_checkpoint_format="sharding_io",
        load_checkpoint_format="sharding_io",
        load_sharded_model=True,
        save_sharded_model=True,
        load_sharded_model_remap_parameter_name=True,
        save_to_hf=False,
        save_strategy="no",
        disable_tqdm=True,
    )
    known = LlamaConfig(**{key: value for key, value in config.items() if key != "architectures"})
    known.fuse_rms_norm = False
    paddle.set_default_dtype("bfloat16" if half else "float32")
    model = LlamaForCausalLM(known)
    paddle.set_default_dtype("float32")
    trainer = (LoadingOptimizer if half else Loading)(model=model, args=arguments, train_dataset=Sentences())
    try:
        trainer.train(resume_from_checkpoint=str(directory))
    except Resumed:
        return trainer
    raise AssertionError("the trainer did not begin")


if __name__ == "__main__":
    tensor_fusion_helper.alignment["unknown"] = tensor_fusion_helper.alignment["gpu"]  # Paddle has none for a CPU
    paddle.set_device("cpu")
    np.savez(f"{sys.argv[2]}.{os.environ['PADDLE_TRAINER_ID']}.npz", **held(resumed(Path(sys.argv[1]))))
