"""Transformers' Trainer with the adapter. What no Trainer saved has no `trainer_state.json`: a callback restores that."""

from __future__ import annotations

import argparse
from typing import Any

import torch
from torch.utils.data import Dataset
from transformers import Trainer, TrainerCallback, TrainingArguments

from holdfast import Checkpointer
from holdfast.integrations.transformers import attach
from tests.integrations.matrix import acts, tiny


class Rows(Dataset[dict[str, torch.Tensor]]):
    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        tokens = tiny.rows(1 + index // 4)[index % 4, :-1]
        return {"input_ids": tokens, "labels": tokens.clone()}


class AtBegin(TrainerCallback):
    """Calls a function with the model and the optimizer, when both are there and nothing has been trained yet."""

    def __init__(self, call: Any) -> None:
        self._call = call

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._call(state.global_step, {"model": kwargs["model"], "optim": kwargs["optimizer"]})


class OfTransformers:
    """A Trainer of Transformers' Llama."""

    def __init__(self, system: str, chosen: argparse.Namespace, seed: int) -> None:
        self.chosen, self.seed = chosen, seed
        self.model = tiny.llama(seed)
        self.loaded: tuple[str, str] | None = None
        self.trained = False

    def _trainer(self, steps: int, callbacks: Any = None, **more: Any) -> Trainer:
        arguments = TrainingArguments(
            str(self.chosen.work / f"output-{self.seed}-{steps}-{more.get('save_strategy')}-{self.loaded}".replace("'", "")),
            max_steps=steps, per_device_train_batch_size=4, learning_rate=1e-2, use_cpu=True, report_to="none",
            disable_tqdm=True, logging_steps=1, **more,
        )  # fmt: skip
        return Trainer(self.model, arguments, train_dataset=Rows(), callbacks=callbacks)

    def train(self) -> None:
        """A Trainer trains and saves in one call: see `save`."""

    def load(self, run: str, saved_by: str) -> None:
        """A Trainer loads when its training begins: see `save`."""
        self.loaded = run, saved_by

    def save(self, run: str) -> None:
        if self.loaded is None:
            attach(self._trainer(tiny.STEPS, save_steps=tiny.STEPS), run, at=self.chosen.root).train()
            self.told = self._loss()
            return
        loaded, saved_by = self.loaded

        def begin(step: int, state: dict[str, Any]) -> None:
            if saved_by != "trainer":
                with Checkpointer(loaded, state, at=self.chosen.root) as other:
                    assert other.restore(groups=("model", "optim")) == tiny.STEPS
            else:
                assert step == tiny.STEPS
            with Checkpointer(run, state, at=self.chosen.root) as again:
                again.save(tiny.STEPS, wait="durable")
            self.told = self._loss()

        trainer = self._trainer(tiny.STEPS + 1, [AtBegin(begin)], save_strategy="no")
        if saved_by == "trainer":
            attach(trainer, loaded, at=self.chosen.root)
        trainer.train()  # one more step, which needs all of it

    def loss(self) -> float:
        return self.told

    def _loss(self) -> float:
        tokens = tiny.rows(0)
        with torch.no_grad():
            return float(tiny.loss_of(self.model(tokens[:, :-1]).logits, tokens))


if __name__ == "__main__":
    acts.main(OfTransformers)
