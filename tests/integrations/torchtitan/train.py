"""A script that trains with torchtitan, saves every few steps, and goes on from the newest save."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.integrations.environments import stand_alone
from tests.integrations.recording import Record, optimizer_tensors
from tests.integrations.torchtitan import tiny

# isort: split
import torch
from torch.distributed.fsdp import FSDPModule
from torch.nn import functional
from torchtitan.trainer import Trainer

from holdfast.integrations.torchtitan import HoldfastCheckpointManager

STEPS, INTERVAL = 16, 3


class RecordedTrainer(Trainer):
    """torchtitan's Trainer, which writes down what it does; the embeddings have dropout."""

    def __init__(self, config: Trainer.Config, record: Record) -> None:
        super().__init__(config)
        self._record, self._rows, self._loss = record, [], None
        self._began = False
        self.metrics_processor.log = self._noted
        for module in (module for part in self.model_parts for module in part.modules()):
            if isinstance(module, FSDPModule):
                module.set_force_sum_reduction_for_comms(True)  # gloo can do no other
        for part in self.model_parts:
            if part.tok_embeddings is not None:
                part.tok_embeddings.register_forward_hook(lambda module, inputs, output: functional.dropout(output, 0.2))

    def batch_generator(self, data_iterable: Any) -> Iterator[Any]:
        for batch in super().batch_generator(data_iterable):
            self._rows += batch[0]["input"][:, 0].tolist()
            yield batch

    def should_continue_training(self) -> bool:
        if not self._began:
            self._began = True
            self._record.began(self.step)
        if self._loss is not None:  # the step's save was begun
            loss, rows, self._loss, self._rows = self._loss, self._rows, None, []
            self._record.step(self.step, loss, rows)
        return super().should_continue_training()

    def _noted(self, step: int, global_avg_loss: float, *others: Any, **more: Any) -> None:
        self._loss = float(global_avg_loss)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--workers", type=int, default=0)
    parser.add_argument("--accumulate", type=int, default=1)
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--full", action="store_true", help="the last save has everything")
    return parser.parse_args()


def main() -> None:
    chosen, record = arguments(), Record()
    stand_alone()
    config = tiny.trainer_config(
        chosen.work,
        chosen.steps,
        HoldfastCheckpointManager.Config(
            enable=True,
            run="run",
            at=str(chosen.work / "root"),
            interval=INTERVAL,
            keep_latest_k=2,
            last_save_model_only=not chosen.full,
        ),
        chosen.workers,
    )
    if chosen.accumulate > 1:
        config.training.global_batch_size = 2 * chosen.accumulate * tiny.world()
    trainer = RecordedTrainer(config, record)
    trainer.train()
    trainer.close()
    tensors = {name: value for part in trainer.model_parts for name, value in part.named_parameters()}
    for index, optimizer in enumerate(trainer.optimizers):
        tensors |= optimizer_tensors(optimizer, f"optim.{index}")
    whole = {name: value.full_tensor() if hasattr(value, "full_tensor") else value for name, value in tensors.items()}
    record.ended(whole, [trainer.step, trainer.lr_schedulers.state_dict()])
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
