"""A Trainer of PaddleFormers with Holdfast, and without it: `exported.py WORK whole|saved|uc|flex OUT.npz`.

`whole` takes six steps, `saved` the first four of them, and the others resume from its exports and take the last two. OUT
has the losses by step, and all tensors at the end. Nothing is random: exports have no random streams.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import paddle
from paddle.distributed import fleet
from paddleformers.trainer import TrainingArguments

from holdfast.integrations.paddleformers import attach
from tests.integrations.paddle.trainer.models import Sentences, small_llama
from tests.integrations.paddle.trainer.train import Recorded, tensors_of

STEPS, SAVED = 6, 4
FORMATS = {"uc": "unified_checkpoint", "flex": "flex_checkpoint"}


class Noted(Recorded):
    """The loss of every step."""

    def __init__(self, *given: Any, **named: Any) -> None:
        super().__init__(*given, **named)
        self.rows, self.losses = [], []


def main(work: Path, kind: str, out: Path) -> None:
    form = FORMATS.get(kind)
    how = {} if form is None else {"save_checkpoint_format": form, "load_checkpoint_format": form, "save_strategy": "no"}
    arguments = TrainingArguments(
        output_dir=str(work / f"output-{kind}"),
        max_steps=SAVED if kind == "saved" else STEPS,
        per_device_train_batch_size=2,
        learning_rate=1e-2,
        lr_scheduler_type="constant",
        save_steps=SAVED,
        amp_master_grad=False,
        device="cpu",
        report_to=[],
        disable_tqdm=True,
        **how,
    )
    if kind == "flex":
        strategy = fleet.DistributedStrategy()
        strategy.hybrid_configs = {"dp_degree": 1, "mp_degree": 1, "pp_degree": 1, "sharding_degree": 1}
        fleet.init(is_collective=True, strategy=strategy)
    trainer = Noted(model=small_llama(dropout=0.0), args=arguments, train_dataset=Sentences())
    if form is None:
        exports = {f"paddle-{name}": work / name for name in FORMATS} if kind == "saved" else {}
        attach(trainer, kind, at=work / "root", exports=exports).train()
    else:
        trainer.train(resume_from_checkpoint=str(work / kind / f"checkpoint-{SAVED}"))
    first = STEPS - len(trainer.losses) if kind != "saved" else 0
    losses = {f"loss {step}": np.array(loss) for step, loss in enumerate(trainer.losses, first + 1)}
    np.savez(out, **losses, **{name: tensor.numpy() for name, tensor in tensors_of(trainer).items()})


if __name__ == "__main__":
    paddle.set_device("cpu")
    paddle.device.synchronize = lambda *_: None  # as in `train`
    main(Path(sys.argv[1]), sys.argv[2], Path(sys.argv[3]))
