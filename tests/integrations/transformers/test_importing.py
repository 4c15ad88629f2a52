"""A Trainer's own `checkpoint-N` imported and exported: training goes on as that of the program that wrote it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Trainer, TrainingArguments

from holdfast.integrations.transformers import attach
from tests.daemons import RunningDaemon
from tests.integrations.transformers.models import Sentences, small_model
from tests.kit.commands import call
from tests.kit.daemons import own_daemon, run

__all__ = ["run"]

daemon = own_daemon()
FIRST, STEPS = 6, 26


class Recorded(Trainer):
    """Notes the loss of every step."""

    def compute_loss(self, model: Any, inputs: Any, *arguments: Any, **named: Any) -> Any:
        inputs.pop("row", None)
        loss = super().compute_loss(model, inputs, *arguments, **named)
        vars(self).setdefault("losses", []).append(float(loss.detach()))
        return loss


def made(output: Path, **changed: Any) -> Recorded:
    """26 steps of two epochs and more, with dropout, weight decay and a cosine schedule, shuffled."""
    settings: dict[str, Any] = {
        "output_dir": str(output),
        "max_steps": STEPS,
        "save_steps": FIRST,
        "logging_steps": 1,
        "per_device_train_batch_size": 2,
        "learning_rate": 1e-2,
        "lr_scheduler_type": "cosine",
        "warmup_steps": 2,
        "weight_decay": 0.1,
        "remove_unused_columns": False,
        "use_cpu": True,
        "report_to": "none",
        "disable_tqdm": True,
    }
    return Recorded(small_model(), TrainingArguments(**(settings | changed)), train_dataset=Sentences())


def same(one: Trainer, other: Trainer) -> bool:
    """Whether two Trainers have the same weights and moments, bit for bit."""
    held, again = one.model.state_dict(), other.model.state_dict()
    moments = [list(each.optimizer.state.values()) for each in (one, other)]
    pairs = [(a[key], b[key]) for a, b in zip(*moments, strict=True) for key in a]
    kept = all(torch.equal(a, b) if isinstance(a, torch.Tensor) else (type(a), a) == (type(b), b) for a, b in pairs)
    return kept and all(torch.equal(value, again[name]) for name, value in held.items())


@pytest.mark.parametrize(
    "changed", [{}, {"optim": "adafactor"}, {"gradient_accumulation_steps": 2}, {"dataloader_num_workers": 2}], ids=str
)
def test_the_next_twenty_steps_are_equal(daemon: RunningDaemon, run: str, tmp_path: Path, changed: dict[str, Any]) -> None:
    original = made(tmp_path / "out", **changed)
    original.train()
    result = call("import", tmp_path / "out" / f"checkpoint-{FIRST}", f"{run}@{FIRST}", "--root", daemon.root)
    assert result.exit_code == 0, result.output
    trainer = attach(made(tmp_path / "again", **changed), run, at=daemon.root)
    trainer.train(resume_from_checkpoint=True)
    done = len(original.losses) * FIRST // STEPS
    assert len(trainer.losses) == len(original.losses) - done
    assert trainer.losses == original.losses[done:]
    assert same(trainer, original)


def test_an_export_resumes_without_holdfast(daemon: RunningDaemon, run: str, tmp_path: Path) -> None:
    """Of what an attached Trainer saved, and of what was imported from the Trainer's own files: to the last bit."""
    original = made(tmp_path / "out")
    original.train()
    attached = attach(made(tmp_path / "saved"), run, at=daemon.root)
    attached.train()
    assert attached.losses == original.losses
    imported = f"{run}-imported@{FIRST}"
    assert call("import", tmp_path / "out" / f"checkpoint-{FIRST}", imported, "--root", daemon.root).exit_code == 0
    for number, checkpoint in enumerate((f"{run}@{FIRST}", imported)):
        place = tmp_path / f"export-{number}" / f"checkpoint-{FIRST}"
        place.parent.mkdir()
        result = call("export", checkpoint, place, "--as", "trainer", "--root", daemon.root)
        assert result.exit_code == 0, result.output
        trainer = made(tmp_path / f"again-{number}")
        trainer.train(resume_from_checkpoint=str(place))
        assert trainer.losses == original.losses[FIRST:]
        assert same(trainer, original)
