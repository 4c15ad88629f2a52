"""Lightning's Trainer with the callback, and FSDP2. What no Lightning saved has no loops: a callback restores that."""

from __future__ import annotations

import argparse
import os
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.strategies import ModelParallelStrategy
from torch.utils.data import DataLoader

from holdfast import Checkpointer
from holdfast.integrations.lightning import HoldfastCheckpoint
from tests.integrations.matrix import acts, tiny

ROWS = 12  # a batch of four for each step, and one more
RANKS = int(os.environ.get("WORLD_SIZE", "1"))


class Llama(L.LightningModule):
    """Transformers' Llama as an attribute of a LightningModule."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.net = tiny.llama(seed)

    def configure_model(self) -> None:
        from torch.distributed.fsdp import fully_shard

        for layer in (*self.net.model.layers, self.net):
            fully_shard(layer, mesh=self.device_mesh["data_parallel"])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.net.parameters(), lr=1e-2)

    def training_step(self, tokens: torch.Tensor, number: int) -> torch.Tensor:
        return tiny.loss_of(self.net(tokens[:, :-1]).logits, tokens)

    def loss(self) -> float:
        tokens = tiny.rows(0)
        with torch.no_grad():
            return float(tiny.loss_of(self.net(tokens[:, :-1]).logits, tokens))


class AtStart(Callback):
    """Calls a function with the module and its Trainer, when everything is there and nothing has been trained yet."""

    def __init__(self, call: Any) -> None:
        self._call = call

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._call(trainer, pl_module)


class OfLightning:
    """A Trainer of a LightningModule with a Llama inside."""

    def __init__(self, system: str, chosen: argparse.Namespace, seed: int) -> None:
        self.chosen, self.module = chosen, Llama(seed)
        self.loaded: tuple[str, str] | None = None

    def _fit(self, steps: int, callbacks: list[Callback], newest: bool) -> None:
        trainer = L.Trainer(
            accelerator="cpu", devices=RANKS, max_steps=steps, callbacks=callbacks, logger=False,
            strategy=ModelParallelStrategy(data_parallel_size=RANKS, tensor_parallel_size=1),
            default_root_dir=self.chosen.work, enable_progress_bar=False, enable_model_summary=False,
            enable_checkpointing=bool(callbacks), use_distributed_sampler=False,
        )  # fmt: skip
        rows = [row for number in range(1, 1 + ROWS // 4) for row in tiny.rows(number)]
        trainer.fit(self.module, DataLoader(rows, batch_size=4), ckpt_path="last" if newest else None)

    def train(self) -> None:
        """Lightning trains and saves in one call: see `save`."""

    def load(self, run: str, saved_by: str) -> None:
        """Lightning loads when its training begins: see `save`."""
        self.loaded = run, saved_by

    def save(self, run: str) -> None:
        if self.loaded is None:
            saves = HoldfastCheckpoint(run, weights="net", at=self.chosen.root, every_n_train_steps=tiny.STEPS)
            self._fit(tiny.STEPS, [saves], newest=False)
            self.told = self.module.loss()
            return
        loaded, saved_by = self.loaded

        def start(trainer: L.Trainer, module: L.LightningModule) -> None:
            state: dict[str, Any] = {"model": self.module.net, "optim": trainer.optimizers[0]}
            if saved_by == "lightning":
                assert trainer.global_step == tiny.STEPS
            else:
                with Checkpointer(loaded, state, at=self.chosen.root) as other:
                    assert other.restore(groups=("model", "optim")) == tiny.STEPS
            with Checkpointer(run, state, at=self.chosen.root) as again:
                again.save(tiny.STEPS, wait="durable")
            self.told = self.module.loss()

        callbacks: list[Callback] = [AtStart(start)]
        if saved_by == "lightning":
            every = tiny.STEPS + 2  # nothing is due
            callbacks.append(HoldfastCheckpoint(loaded, weights="net", at=self.chosen.root, every_n_train_steps=every))
        self._fit(tiny.STEPS + 1, callbacks, newest=saved_by == "lightning")  # one more step, which needs all of it

    def loss(self) -> float:
        return self.told


if __name__ == "__main__":
    acts.main(OfLightning)
