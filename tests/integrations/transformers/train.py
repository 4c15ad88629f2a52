"""A training script with a Trainer, for `tests.integrations.resuming`.

Every start runs the same lines: `attach`, and a plain `train()`.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
from transformers import Trainer, TrainerCallback, TrainingArguments

from holdfast.integrations.transformers import attach
from tests.integrations.recording import Record, optimizer_tensors
from tests.integrations.transformers.models import ROWS, Sentences, small_model


class Recorded(Trainer):
    """Notes the rows and the loss of every step."""

    rows: list[int]
    losses: list[float]

    def compute_loss(self, model: Any, inputs: Any, *arguments: Any, **named: Any) -> Any:
        row = inputs.pop("row")
        loss = super().compute_loss(model, inputs, *arguments, **named)
        if model.training:
            self.rows += row.tolist()
            self.losses.append(float((loss[0] if isinstance(loss, tuple) else loss).detach()))
        return loss


class Notes(TrainerCallback):
    """Writes the record."""

    def __init__(self, record: Record) -> None:
        self.record, self.trainer = record, None

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.record.began(state.global_step)
        self.trainer.rows, self.trainer.losses = [], []

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.record.step(state.global_step, sum(self.trainer.losses), self.trainer.rows)
        self.trainer.rows, self.trainer.losses = [], []


def arguments(options: argparse.Namespace) -> TrainingArguments:
    """Three epochs of eleven batches, unless the options say otherwise, shuffled."""
    grouped = _grouped() if options.grouped else {}
    evaluation = {"eval_strategy": "steps", "eval_steps": options.save_steps} if options.evaluate else {}
    if options.best:
        evaluation |= {"load_best_model_at_end": True, "metric_for_best_model": "loss", "save_total_limit": 2}
    return TrainingArguments(
        output_dir=str(options.work / "output"),
        num_train_epochs=options.epochs,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=options.accumulate,
        learning_rate=1e-2,
        warmup_steps=2,
        save_strategy=options.save,
        save_steps=options.save_steps,
        logging_steps=1,
        seed=options.seed,
        dataloader_num_workers=options.workers,
        remove_unused_columns=False,
        use_cpu=True,
        report_to="none",
        ddp_find_unused_parameters=False,
        disable_tqdm=True,
        **grouped,
        **evaluation,
    )


def _grouped() -> dict[str, Any]:
    """Rows grouped by length, which draws the order from torch's global generator; the name of it has changed with 5.0."""
    known = TrainingArguments.__dataclass_fields__
    return (
        {"train_sampling_strategy": "group_by_length"} if "train_sampling_strategy" in known else {"group_by_length": True}
    )


def made(options: argparse.Namespace) -> Trainer:
    """The Trainer, attached."""
    notes = Notes(Record())
    data = Sentences(options.drawn, options.rows)
    evaluated = Sentences(rows=6) if options.evaluate else None
    trainer = Recorded(small_model(), arguments(options), train_dataset=data, eval_dataset=evaluated, callbacks=[notes])
    notes.trainer = trainer
    return attach(trainer, "run", at=options.work / "root")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--workers", type=int, default=0)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--rows", type=int, default=ROWS)
    parser.add_argument("--accumulate", type=int, default=1)
    parser.add_argument("--save", default="steps")
    parser.add_argument("--save-steps", type=int, default=2)
    parser.add_argument("--seed", type=int, default=7)
    for flag in ("drawn", "evaluate", "best", "grouped"):
        parser.add_argument(f"--{flag}", action="store_true")
    trainer = made(parser.parse_args())
    trainer.train()
    tensors = {f"model.{name}": value for name, value in trainer.model.state_dict().items()}
    random_numbers = {"streams.torch": torch.get_rng_state()}
    values = [trainer.lr_scheduler.state_dict(), trainer.state.epoch, trainer.state.best_metric]
    found = next(one for one in trainer.callback_handler.callbacks if isinstance(one, Notes))
    found.record.ended(tensors | optimizer_tensors(trainer.optimizer) | random_numbers, [str(one) for one in values])


if __name__ == "__main__":
    main()
