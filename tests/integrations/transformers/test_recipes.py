"""The lines for the Trainer that a checkpoint's page offers to copy."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainerState, TrainingArguments

from holdfast_formats.rest import bodies
from holdfast_service.wings.console import recipes
from tests.daemons import running, wait_until

TIMEOUT_S = 300


class Began(TrainerCallback):
    """Keeps the step from which the training goes on."""

    def __init__(self) -> None:
        self.at: int | None = None

    def on_train_begin(self, _arguments: Any, state: TrainerState, _control: Any, **_more: Any) -> None:
        self.at = state.global_step


def resume(root: Path, output: Path, how: recipes.How, step: int, steps: int) -> tuple[int | None, int]:
    """Run the lines; the step from which the training went on, and where it ended."""
    known = {"attempt": 1, "created": "", "world": 1, "groups": [], "tensors": 1, "files": 1, "bytes": 1, "metrics": {}}
    made = bodies.CheckpointInfo(run="r", step=step, verified=True, **known)
    (lines,) = (one.lines for one in recipes.resume(made, how, str(root)) if one.key == "trainer")
    rows = [{"input_ids": torch.arange(8), "labels": torch.arange(8)} for _ in range(64)]
    arguments = TrainingArguments(str(output), max_steps=steps, save_steps=2, use_cpu=True, report_to="none")
    began = Began()
    names: dict[str, Any] = {
        "Trainer": partial(Trainer, callbacks=[began]),
        "model": GPT2LMHeadModel(GPT2Config(n_embd=16, n_layer=1, n_head=2, n_positions=8, vocab_size=32)),
        "arguments": arguments,
        "data": rows,
    }
    exec(lines, names)
    return began.at, names["trainer"].state.global_step


@pytest.mark.parametrize(("how", "step"), [("newest", 4), ("healthy", 4), ("step", 2)])
def test_they_go_on_from_the_step(tmp_path: Path, how: recipes.How, step: int) -> None:
    """The newest, the newest healthy, and one by its number."""
    with running(tmp_path / "root", listen="127.0.0.1:0") as daemon:
        assert resume(daemon.root, tmp_path / "out", "newest", 0, 4) == (0, 4)
        newest = f"{daemon.url}/v1/runs/r/checkpoints/4"
        wait_until(lambda: httpx.get(newest, trust_env=False).json()["verified"], TIMEOUT_S)
        assert resume(daemon.root, tmp_path / "out", how, step, 6) == (step, 6)
