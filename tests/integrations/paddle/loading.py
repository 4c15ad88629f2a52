"""Resumes PaddleFormers' trainer from a directory, and writes what it holds then: `loading.py DIR uc|flex|lora OUT.npz`.

A program of its own: Paddle keeps state for the whole process, and its trainer knows no other way to begin.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import paddle
from paddle.distributed import fleet
from paddleformers.peft import LoRAModel
from paddleformers.trainer import Trainer, TrainingArguments
from paddleformers.transformers import LlamaConfig, LlamaForCausalLM


class Resumed(Exception):
    """The trainer has loaded everything and would take its first step."""


class Loading(Trainer):
    """Ends where the training would begin: Paddle has no matrix product of bfloat16 on a CPU."""

    def training_step(self, *given: Any, **named: Any) -> None:
        raise Resumed


class Sentences(paddle.io.Dataset):
    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        return {"input_ids": np.arange(8), "labels": np.arange(8)}


def resumed(directory: Path, kind: str) -> Loading:
    """The trainer, resumed."""
    config = json.loads((directory / "config.json").read_text())
    half = config["torch_dtype"] == "bfloat16"
    known = LlamaConfig(**{key: value for key, value in config.items() if key != "architectures"})
    known.fuse_rms_norm = False
    paddle.set_default_dtype("bfloat16" if half else "float32")
    model = LlamaForCausalLM(known)
    paddle.set_default_dtype("float32")
    form = {"flex": "flex_checkpoint"}.get(kind, "unified_checkpoint")
    if kind == "lora":
        model = LoRAModel.from_pretrained(model, str(directory), load_checkpoint_format=form)
        model.mark_only_lora_as_trainable()
    arguments = TrainingArguments(
        output_dir=str(directory / "out"),
        max_steps=100,
        device="cpu",
        bf16=half,
        fp16_opt_level="O2",
        amp_master_grad=half,
        save_checkpoint_format=form,
        load_checkpoint_format=form,
        save_to_hf=kind != "flex",
        save_strategy="no",
        disable_tqdm=True,
    )
    if kind == "flex":
        strategy = fleet.DistributedStrategy()
        strategy.hybrid_configs = {"dp_degree": 1, "mp_degree": 1, "pp_degree": 1, "sharding_degree": 1}
        fleet.init(is_collective=True, strategy=strategy)
    trainer = Loading(model=model, args=arguments, train_dataset=Sentences())
    try:
        trainer.train(resume_from_checkpoint=str(directory))
    except Resumed:
        return trainer
    raise AssertionError("the trainer did not begin")


def held(trainer: Loading) -> dict[str, np.ndarray]:
    """Everything that it holds, by our groups and structured names, in Paddle's layout; the step, and the scheduler's."""
    found = {"step": np.array(trainer.state.global_step)}
    names = {}
    trained = getattr(trainer.model, "get_trainable_state_dict", trainer.model.state_dict)()
    for name, tensor in trained.items():
        found[f"model:{name}"] = tensor.astype("float32").numpy()
        names[tensor.name] = name
    for key, value in trainer.optimizer.state_dict().items():
        if key == "LR_Scheduler":
            found["last_epoch"], found["last_lr"] = np.array(value["last_epoch"]), np.array(value["last_lr"])
        elif key == "master_weights":
            found |= {f"master:{names[static]}": tensor.numpy() for static, tensor in value.items()}
        else:
            kind = next(end for end in ("moment1_0", "moment2_0", "beta1_pow_acc_0", "beta2_pow_acc_0") if key.endswith(end))
            static = key.removesuffix(f"_{kind}").removesuffix("_fp32_master_0")
            found[f"optim:{names[static]}/{kind}"] = value.numpy()
    return found


if __name__ == "__main__":
    paddle.set_device("cpu")
    np.savez(sys.argv[3], **held(resumed(Path(sys.argv[1]), sys.argv[2])))
