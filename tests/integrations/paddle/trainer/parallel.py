"""A training script with a Trainer of PaddleFormers in a form of fleet's parallelism, for `tests.integrations.resuming`.

PaddleFormers reads the ranks while it is imported, so they are placed before.
"""

from __future__ import annotations

from tests.integrations.paddle import gloo

gloo.place()
gloo.complete()

import argparse  # noqa: E402
import random  # noqa: E402
from pathlib import Path  # noqa: E402
from typing import Any  # noqa: E402

import numpy as np  # noqa: E402
import paddle  # noqa: E402
import torch  # noqa: E402
from paddle.distributed.fleet.meta_parallel import get_rng_state_tracker  # noqa: E402
from paddleformers.trainer import TrainingArguments  # noqa: E402
from paddleformers.transformers import LlamaConfig, LlamaForCausalLM  # noqa: E402
from paddleformers.transformers.llama.modeling import LlamaForCausalLMPipe  # noqa: E402

from holdfast.integrations.paddleformers import attach  # noqa: E402
from tests.integrations.paddle import fleet_trainings, fleet_worlds  # noqa: E402
from tests.integrations.paddle.fleet_trainings import Training  # noqa: E402
from tests.integrations.paddle.half import compute_in_float32  # noqa: E402
from tests.integrations.paddle.trainer.models import ROWS, WORDS, Sentences  # noqa: E402
from tests.integrations.paddle.trainer.train import Half, Notes, Recorded  # noqa: E402
from tests.integrations.recording import Record  # noqa: E402

TENSORS, STAGES = {"tensor_model_parallel_size": 2}, {"pipeline_model_parallel_size": 2}
FORMS: dict[str, dict[str, Any]] = {
    "plain": {},
    "stage1": {"sharding": "stage1"},
    "v2": {"sharding": "stage1", "split_param": True},  # with --half alone
    "stage2": {"sharding": "stage2"},
    "stage3": {"sharding": "stage3"},
    "tp": TENSORS,
    "pp": STAGES,
    "stage1-dp": {"sharding": "stage1", "sharding_parallel_size": 2},
    "stage1-tp": {"sharding": "stage1", **TENSORS},
    "stage2-tp": {"sharding": "stage2", **TENSORS},
    "stage1-pp": {"sharding": "stage1", **STAGES},
    "tp-pp": TENSORS | STAGES,
}
SEGMENT = 20  # elements up to which stage 3 leaves a parameter whole
BATCH = 2


class InStages(Recorded):
    """Also notes the rows and the losses of a pipeline, which computes all batches of a step at once."""

    def training_pipeline_step(self, model: Any, inputs: Any, *_: Any, **__: Any) -> Any:
        self.rows += inputs["row"].tolist()
        loss = super().training_pipeline_step(model, inputs)
        self.losses.append(float(loss))
        return loss


class HalfInStages(InStages, Half):
    """With weights of bfloat16, which it computes with in float32."""

    def _wrap_model(self, model: Any, training: bool = True) -> Any:
        wrapped = super()._wrap_model(model, training)
        if training:
            compute_in_float32(self.model)
        return wrapped


def arguments(options: argparse.Namespace) -> TrainingArguments:
    """Epochs of eleven steps, shuffled."""
    half = {"bf16": True, "fp16_opt_level": "O2"} if options.half else {}
    evaluation: dict[str, Any] = {}
    if options.evaluate:
        evaluation = {"evaluation_strategy": "steps", "eval_steps": 2, "per_device_eval_batch_size": BATCH}
        evaluation |= {"load_best_model_at_end": True, "metric_for_best_model": "loss", "save_total_limit": 2}
    return TrainingArguments(
        output_dir=str(options.work / "output"),
        max_steps=options.steps,
        per_device_train_batch_size=BATCH,
        gradient_accumulation_steps=2,
        learning_rate=1e-2,
        warmup_steps=2,
        max_grad_norm=0.0,  # PaddleFormers clips in fleet only with MixPrecisionOptimizer
        save_strategy="steps",
        save_steps=2,
        logging_steps=1,
        seed=7,
        amp_master_grad=options.half,
        device="cpu",
        report_to=[],
        disable_tqdm=True,
        **({"split_param": False} | FORMS[options.form]),
        **half,
        **evaluation,
    )


def model_of(args: TrainingArguments, options: argparse.Namespace) -> Any:
    """About ten thousand parameters, with dropout; as a pipeline or whole, and the ranks' parts of matrices."""
    paddle.seed(0)
    shape = {"vocab_size": WORDS, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 4}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 32}
    how = {"attention_dropout": 0.1, "fuse_rms_norm": False, "_attn_implementation": "eager"}
    parts = {"tensor_model_parallel_size": 1, "tensor_parallel_rank": 0}
    if args.tensor_model_parallel_size > 1:
        parts = {"tensor_model_parallel_size": 2, "tensor_parallel_rank": args.tensor_parallel_rank}
    config = LlamaConfig(**shape, **heads, **how, **parts, tie_word_embeddings=options.tied)
    if args.pipeline_model_parallel_size < 2:
        return LlamaForCausalLM(config)
    config.virtual_pipeline_model_parallel_size = options.virtual
    return LlamaForCausalLMPipe(config)


def whole_tensors(trainer: Any, work: Path) -> dict[str, torch.Tensor]:
    """Weights and the optimizer's state, put together of what all ranks have. Every rank calls it."""
    one = Training("trainer", trainer.model, trainer.model_wrapped, trainer.optimizer, trainer.lr_scheduler)
    args = trainer.args
    part = args.tensor_parallel_rank if args.tensor_model_parallel_size > 1 else 0
    arrays = fleet_worlds.whole(fleet_trainings.RankParts(part, fleet_trainings.held(one)), work, "end")
    return {name: torch.from_numpy(np.ascontiguousarray(array)) for name, array in arrays.items()}


def streams_of() -> list[Any]:
    """The next numbers of all random streams of this rank."""
    numbers = [paddle.rand([4]).tolist(), random.random(), np.random.random()]
    for name in sorted(get_rng_state_tracker().get_states_tracker()):
        with get_rng_state_tracker().rng_state(name):
            numbers.append([name, paddle.rand([4]).tolist()])
    return numbers


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--form", choices=FORMS, default="plain")
    parser.add_argument("--steps", type=int, default=14)
    parser.add_argument("--virtual", type=int, default=1)
    for flag in ("drawn", "evaluate", "half", "tied"):
        parser.add_argument(f"--{flag}", action="store_true")
    paddle.set_device("cpu")
    paddle.device.synchronize = lambda *_: None  # PaddleFormers calls it on a CPU too, where Paddle refuses it
    options = parser.parse_args()
    args = arguments(options)
    gloo.replace_group_sharded_parallel(SEGMENT)
    notes = Notes(Record(), options.work / "root")
    evaluated = Sentences(rows=8) if options.evaluate else None
    data = {"train_dataset": Sentences(options.drawn, ROWS * args.dataset_world_size), "eval_dataset": evaluated}
    kind, model = (HalfInStages if options.half else InStages), model_of(args, options)
    if options.half:
        model.to(dtype="bfloat16")
    trainer = kind(model=model, args=args, callbacks=[notes], **data)
    if options.half:
        trainer.disable_autocast_context_manager()
    notes.trainer = trainer
    attach(trainer, "run", at=options.work / "root")
    seed = 7 + args.dataset_rank  # PaddleFormers gives all ranks one
    random.seed(seed)
    np.random.seed(seed)
    trainer.train()
    values = [trainer.lr_scheduler.state_dict(), trainer.state.best_metric, *streams_of(), options.form]
    notes.record.ended(whole_tensors(trainer, options.work), [str(one) for one in values])


if __name__ == "__main__":
    main()
