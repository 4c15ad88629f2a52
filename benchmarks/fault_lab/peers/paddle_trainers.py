"""PaddleFormers' Trainer, which saves and resumes by its own methods, and Holdfast over the same model and optimizer.

A save is the Trainer's `_save_checkpoint`, which its loop calls at a step that is to be saved. A resume is
`train(resume_from_checkpoint=get_last_checkpoint(output_dir))`, which ends where it would take the first step.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import paddle
import torch
from paddle.distributed import fleet
from paddleformers.trainer import Trainer, TrainingArguments
from paddleformers.trainer.trainer_utils import get_last_checkpoint
from paddleformers.transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.state import State
from holdfast.integrations import paddle as holdfast_paddle

HEAD = 16


class Begins(Exception):
    """The Trainer has everything, and would take its first step."""


class Beginning(Trainer):  # type: ignore[misc]
    """Ends there."""

    def training_step(self, *given: Any, **named: Any) -> None:
        raise Begins


class Sentences(paddle.io.Dataset):  # type: ignore[misc]
    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        return {"input_ids": np.arange(8), "labels": np.arange(8)}


class PaddleTrainer:
    """Paddle's own tensors take the place of the state's: parameters in FP32, and AdamW's moments."""

    def __init__(self, directory: Path, state: State, variant: str) -> None:
        paddle.set_device("cpu")
        paddle.device.synchronize = lambda *_: None  # PaddleFormers calls it on a CPU too, where Paddle refuses it
        strategy = fleet.DistributedStrategy()
        strategy.hybrid_configs = {"dp_degree": 1, "mp_degree": 1, "pp_degree": 1, "sharding_degree": 1}
        fleet.init(is_collective=True, strategy=strategy)
        self._directory, self._state, self._format = directory, state, variant
        dims = {name: tensor.shape for name, tensor in state.tensors.items()}
        rows, width = dims["model/embed_tokens.weight"]
        self._config = LlamaConfig(
            vocab_size=rows,
            hidden_size=width,
            intermediate_size=dims["model/layers.0.gate_proj.weight"][0],
            num_attention_heads=width // HEAD,
            num_key_value_heads=dims["model/layers.0.k_proj.weight"][0] // HEAD,
            num_hidden_layers=sum(name.startswith("model/") and "q_proj" in name for name in dims),
        )
        self._config.fuse_rms_norm = False
        self._begin(None)

    def save(self, step: int) -> None:
        self._trainer.state.global_step = step
        self._trainer._save_checkpoint(self._trainer.model_wrapped)

    def wait(self) -> None:
        """It was complete when save() returned: one process has no asynchronous save."""

    def close(self) -> None:
        """Nothing is held."""

    def resume(self) -> int:
        newest = get_last_checkpoint(str(self._directory))
        return self._begin(newest) if newest else 0

    def load(self, step: int) -> None:
        self._begin(str(self._directory / f"checkpoint-{step}"))

    def _begin(self, resumed: str | None) -> int:
        """A new Trainer, begun; the step that it would go on from."""
        arguments = TrainingArguments(
            output_dir=str(self._directory),
            max_steps=100,
            device="cpu",
            save_checkpoint_format=self._format,
            load_checkpoint_format=self._format,
            save_to_hf=self._format != "flex_checkpoint",
            save_strategy="no",
            amp_master_grad=False,
            report_to=[],
            disable_tqdm=True,
        )
        self._trainer = Beginning(LlamaForCausalLM(self._config), args=arguments, train_dataset=Sentences())
        try:
            self._trainer.train(resume_from_checkpoint=resumed)
        except Begins:
            self._take()
        return int(self._trainer.state.global_step)

    def _take(self) -> None:
        optimizer = self.optimizer
        block = paddle.base.framework.default_main_program().global_block()
        optimizer._create_accumulators(block, optimizer._parameter_list)
        named = self._trainer.model.state_dict()
        found = {f"model/{name}": tensor for name, tensor in named.items()}
        names = {tensor.name: name for name, tensor in named.items()}
        for kind in ("moment1", "moment2"):
            found |= {f"{kind}/{names[owner]}": tensor for owner, tensor in optimizer._accumulators[kind].items()}
        self._state.tensors.clear()
        self._state.tensors.update({name: torch.utils.dlpack.from_dlpack(tensor.detach()) for name, tensor in found.items()})

    @property
    def optimizer(self) -> Any:
        """Paddle's, without what fleet puts around it."""
        return getattr(self._trainer.optimizer, "_inner_opt", self._trainer.optimizer)


class HoldfastPaddle(PaddleTrainer):
    """The same model and optimizer, saved and restored by Holdfast; the daemon is started by the trainer."""

    def __init__(self, directory: Path, state: State, variant: str) -> None:
        super().__init__(directory, state, "unified_checkpoint")
        self._attached = holdfast_paddle.attach(self._trainer.model, self.optimizer, "run", at=directory)
        self._ticket: Any = None

    def save(self, step: int) -> None:
        self._ticket = self._attached.save(step)

    def wait(self) -> None:
        self._ticket.result()

    def close(self) -> None:
        self._attached.close()

    def resume(self) -> int:
        return self._restored(None)

    def load(self, step: int) -> None:
        self._restored(step)

    def _restored(self, step: int | None) -> int:
        restored = self._attached.restore(step)
        self._take()
        return restored


def open_peer(directory: Path, state: State, variant: str) -> PaddleTrainer:
    kind = HoldfastPaddle if variant == "holdfast" else PaddleTrainer
    return kind(directory, state, variant)
