"""A Trainer's `checkpoint-N` of an adapter, imported and exported: training goes on as that of the program that wrote it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from peft import LoraConfig, get_peft_model
from transformers import Trainer, TrainingArguments

from holdfast.integrations.transformers import attach
from tests.daemons import RunningDaemon
from tests.integrations.transformers.models import Sentences, small_model
from tests.kit.commands import call
from tests.kit.daemons import own_daemon, run

__all__ = ["run"]

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")
daemon = own_daemon()
FIRST, STEPS = 6, 26


class Recorded(Trainer):
    """Notes the loss of every step."""

    def compute_loss(self, model: Any, inputs: Any, *arguments: Any, **named: Any) -> Any:
        inputs.pop("row", None)
        loss = super().compute_loss(model, inputs, *arguments, **named)
        vars(self).setdefault("losses", []).append(float(loss.detach()))
        return loss


def made(output: Path) -> Recorded:
    config = LoraConfig(r=2, target_modules=["c_attn"], fan_in_fan_out=True, lora_dropout=0.1, modules_to_save=["ln_f"])
    model = get_peft_model(small_model(), config)
    arguments = TrainingArguments(
        output_dir=str(output),
        max_steps=STEPS,
        save_steps=FIRST,
        logging_steps=1,
        per_device_train_batch_size=2,
        learning_rate=1e-2,
        remove_unused_columns=False,
        use_cpu=True,
        report_to="none",
        disable_tqdm=True,
    )
    return Recorded(model, arguments, train_dataset=Sentences())


def test_the_next_twenty_steps_are_equal(daemon: RunningDaemon, run: str, tmp_path: Path) -> None:
    original = made(tmp_path / "out")
    original.train()
    result = call("import", tmp_path / "out" / f"checkpoint-{FIRST}", f"{run}@{FIRST}", "--root", daemon.root)
    assert result.exit_code == 0, result.output
    (tmp_path / "export").mkdir()
    place = tmp_path / "export" / f"checkpoint-{FIRST}"
    exported = call("export", f"{run}@{FIRST}", place, "--as", "trainer", "--root", daemon.root)
    assert exported.exit_code == 0, exported.output
    attached = attach(made(tmp_path / "again"), run, at=daemon.root)
    attached.train(resume_from_checkpoint=True)
    assert attached.losses == original.losses[FIRST:]
    plain = made(tmp_path / "plain")
    plain.train(resume_from_checkpoint=str(place))
    assert plain.losses == original.losses[FIRST:]
