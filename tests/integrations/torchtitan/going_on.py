"""Ranks that train with torchtitan for the test of imports: from the beginning with a save of torchtitan's own on the way,
or from a run of Holdfast. Each writes its losses, its rows, and digests of all tensors at the end.
"""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path
from typing import Any

from tests.integrations.recording import digest, optimizer_tensors
from tests.integrations.torchtitan import tiny

# isort: split
import torch
from torch.distributed.fsdp import FSDPModule
from torchtitan.components.checkpointer import CheckpointManager
from torchtitan.trainer import Trainer

from holdfast.integrations.torchtitan import HoldfastCheckpointManager

FIRST, STEPS = 6, 26


class Noting(Trainer):
    """Notes the loss and the rows of every step."""

    def __init__(self, config: Trainer.Config) -> None:
        super().__init__(config)
        self.began, self.losses, self.rows = -1, list[float](), list[list[int]]()
        self.metrics_processor.log = self._noted
        for module in (module for part in self.model_parts for module in part.modules()):
            if isinstance(module, FSDPModule):
                module.set_force_sum_reduction_for_comms(True)  # gloo can do no other

    def train_step(self, data_iterator: Any) -> Any:
        if self.began < 0:
            self.began = self.step - 1
        self.rows.append([])
        return super().train_step(data_iterator)

    def batch_generator(self, data_iterable: Any) -> Any:
        for batch in super().batch_generator(data_iterable):
            self.rows[-1] += batch[0]["input"][:, 0].tolist()
            yield batch

    def _noted(self, step: int, global_avg_loss: float, *others: Any, **more: Any) -> None:
        self.losses.append(float(global_avg_loss))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--told", type=Path, required=True)
    parser.add_argument("--root")
    parser.add_argument("--run")
    chosen = parser.parse_args()
    options: dict[str, Any] = {"enable": True, "interval": FIRST, "last_save_model_only": False}
    manager: Any = CheckpointManager
    if chosen.root:
        manager, options = HoldfastCheckpointManager, {**options, "run": chosen.run, "at": chosen.root}
    trainer = Noting(tiny.trainer_config(chosen.work, STEPS, manager.Config(**options)))
    trainer.train()
    trainer.close()
    tensors = {name: value for part in trainer.model_parts for name, value in part.named_parameters()}
    for optimizer in trainer.optimizers:
        tensors |= optimizer_tensors(optimizer, "optim")
    whole = {name: one.full_tensor() if hasattr(one, "full_tensor") else one for name, one in tensors.items()}
    told = {"began": trainer.began, "losses": trainer.losses, "rows": trainer.rows}
    told |= {"tensors": {name: digest(one) for name, one in whole.items()}, "schedule": trainer.lr_schedulers.state_dict()}
    chosen.told.with_name(f"{chosen.told.name}-{os.environ['RANK']}.json").write_text(json.dumps(told))
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
