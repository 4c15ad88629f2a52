"""A training script with a Trainer of PaddleFormers or PaddleNLP, for `tests.integrations.resuming`.

Every start runs the same lines: `attach`, and a plain `train()`.
"""

from __future__ import annotations

import argparse
import random
from pathlib import Path
from typing import Any, cast
from unittest import mock

import numpy as np
import paddle
import torch

from holdfast.integrations.paddleformers import attach
from holdfast.link import roots
from tests.integrations.paddle import fleet_trainings, fleet_worlds
from tests.integrations.paddle.fleet_trainings import Training
from tests.integrations.paddle.half import MasterAdamW
from tests.integrations.paddle.trainer.library import IS_PADDLENLP, Trainer, TrainerCallback, TrainingArguments
from tests.integrations.paddle.trainer.models import ROWS, Sentences, Stream, half_net, small_llama
from tests.integrations.recording import Record


class Recorded(Trainer):
    """Notes the rows and the loss of every step."""

    rows: list[int]
    losses: list[float]

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, *_: Any, **__: Any) -> Any:
        row = inputs.pop("row")
        outputs = model(**inputs)
        loss = outputs[0] if isinstance(outputs, tuple) else outputs
        if model.training:
            self.rows += row.tolist()
            self.losses.append(float(loss))
        return (loss, outputs[1]) if return_outputs else loss


class Half(Trainer):
    """With an optimizer that steps bfloat16 on a CPU."""

    def create_optimizer(self, lr_scheduler: Any = None) -> Any:
        _, named = self.get_optimizer_cls_and_kwargs(self.args)
        with mock.patch.object(Trainer, "get_optimizer_cls_and_kwargs", lambda args: (MasterAdamW, named)):
            return super().create_optimizer(lr_scheduler)


class RecordedHalf(Recorded, Half): ...


class Notes(TrainerCallback):
    """Writes the record."""

    def __init__(self, record: Record, root: Path) -> None:
        self.record, self.root, self.first, self.trainer = record, root, True, cast(Recorded, None)

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.record.began(state.global_step)
        self.trainer.rows, self.trainer.losses = [], []
        self.first = True

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """The first step finds the daemon: a rank that is ahead of one that starts it would wait in a collective."""
        if self.first:
            socket = roots.running_socket(self.root)
            assert socket is not None and roots.answers(socket)
            self.first = False

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.record.step(state.global_step, sum(self.trainer.losses), self.trainer.rows)
        self.trainer.rows, self.trainer.losses = [], []


def arguments(options: argparse.Namespace) -> TrainingArguments:
    """Three epochs of eleven steps, unless the options say otherwise, shuffled."""
    evaluation = {"evaluation_strategy": "steps", "eval_steps": options.save_steps} if options.evaluate else {}
    if options.best:
        evaluation |= {"load_best_model_at_end": True, "metric_for_best_model": "loss", "save_total_limit": 2}
        evaluation |= {"greater_is_better": False}
    half = (
        {"bf16": True, "max_grad_norm": 0.0, "fp16_opt_level": "O2", "amp_master_grad": options.master_grad}
        if options.half
        else {}
    )
    sharding: dict[str, Any] = {"sharding": "stage1" if options.sharded else ""}  # stage 1 is PaddleFormers' default
    if not IS_PADDLENLP:
        sharding["split_param"] = options.split
    if options.sharded and not options.half:
        sharding["max_grad_norm"] = 0.0  # else the Trainer sets attributes that only MixPrecisionOptimizer has
    return TrainingArguments(
        output_dir=str(options.work / "output"),
        max_steps=options.steps,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=options.accumulate,
        learning_rate=1e-2,
        warmup_steps=2,
        save_strategy="steps",
        save_steps=options.save_steps,
        logging_steps=1,
        seed=options.seed,
        ignore_data_skip=options.no_skip,
        dataloader_num_workers=options.workers,
        device="cpu",
        report_to=[],
        disable_tqdm=True,
        **(half if options.half else {"amp_master_grad": False}),
        **sharding,
        **evaluation,
        **({"zcc_save_ema_coef": 0.9} if options.average else {}),
    )


def made(options: argparse.Namespace) -> Trainer:
    """The Trainer, attached."""
    notes = Notes(Record(), options.work / "root")
    of_step = 2 * options.accumulate
    data: Any = Sentences(options.drawn, options.rows)
    if options.stream:
        data = Stream(options.drawn, lambda: notes.trainer.state.global_step * of_step if options.no_skip else 0)
    evaluated = Sentences(rows=6) if options.evaluate else None
    kind, model = (RecordedHalf, half_net()) if options.half else (Recorded, small_llama())
    trainer = kind(model=model, args=arguments(options), train_dataset=data, eval_dataset=evaluated, callbacks=[notes])
    if options.half:
        trainer.disable_autocast_context_manager()
    notes.trainer = trainer
    return attach(trainer, "run", at=options.work / "root")


def tensors_of(trainer: Trainer) -> dict[str, torch.Tensor]:
    """Parameters, and the optimizer's accumulators and masters, by their structured names."""
    named = trainer.model.state_dict()
    tensors = {f"model.{name}": tensor for name, tensor in named.items()}
    structured = {tensor.name: name for name, tensor in named.items()}
    for owner, master in trainer.optimizer._master_weights.items():
        tensors[f"master.{structured[owner]}"] = master
        structured[master.name] = structured[owner]
    for kind, by_owner in trainer.optimizer._accumulators.items():
        tensors |= {f"{kind}.{structured[owner]}": tensor for owner, tensor in by_owner.items()}
    return {name: torch.utils.dlpack.from_dlpack(tensor.detach()) for name, tensor in tensors.items()}


def whole_tensors(trainer: Trainer, work: Path) -> dict[str, torch.Tensor]:
    """Those of `tensors_of`, put together of what all ranks have. Every rank calls it."""
    one = Training("trainer", trainer.model, trainer.model_wrapped, trainer.optimizer, trainer.lr_scheduler)
    arrays = fleet_worlds.whole(fleet_trainings.RankParts(0, fleet_trainings.held(one)), work, "end")
    return {name: torch.from_numpy(array) for name, array in arrays.items()}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--work", type=Path, required=True)
    for name, default in (("steps", 33), ("workers", 0), ("rows", ROWS), ("accumulate", 1), ("save-steps", 2), ("seed", 7)):
        parser.add_argument(f"--{name}", type=int, default=default)
    for flag in ("drawn", "evaluate", "best", "half", "master-grad", "no-skip", "stream", "average", "sharded", "split"):
        parser.add_argument(f"--{flag}", action="store_true")
    paddle.set_device("cpu")
    paddle.device.synchronize = lambda *_: None  # PaddleFormers calls it on a CPU too, where Paddle refuses it
    options = parser.parse_args()
    trainer = made(options)
    seed = options.seed + trainer.args.process_index  # PaddleFormers gives all ranks one
    random.seed(seed)
    np.random.seed(seed)
    trainer.train()
    found = next(one for one in trainer.callback_handler.callbacks if isinstance(one, Notes))
    streams = [paddle.rand([4]).tolist(), random.random(), np.random.random()]
    values = [trainer.lr_scheduler.state_dict(), trainer.state.best_metric, *streams]
    found.record.ended(whole_tensors(trainer, options.work), [str(one) for one in values])


if __name__ == "__main__":
    main()
