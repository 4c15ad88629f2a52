"""The example of docs/integrations/transformers.md as it stands there, and the tutorial."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

from transformers import AutoModelForCausalLM

from tests import snippets
from tests.integrations.environments import TOP

EXAMPLE = Path(__file__).with_name("example.py")


def test_the_example_is_that_of_the_documents() -> None:
    for page in ("transformers.md", "transformers.zh-CN.md"):
        assert EXAMPLE.read_text() in (TOP / "docs" / "integrations" / page).read_text()


def test_the_example_saves_and_goes_on(tmp_path: Path) -> None:
    """Its second start has nothing left to do, and its checkpoint is a model."""
    about = os.environ | {"PYTHONPATH": str(TOP), "OMP_NUM_THREADS": "1"}
    for _ in range(2):
        done = subprocess.run(
            [sys.executable, EXAMPLE], cwd=tmp_path, env=about, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr
    assert "'loss'" not in done.stdout and "'train_runtime'" in done.stdout
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "output" / "checkpoint-30")
    assert model.config.n_embd == 16


def test_the_tutorial_runs() -> None:
    """Its training is killed, goes on by itself from a step that was saved, and is a model in the end."""
    said = snippets.run(TOP / "docs" / "tutorials" / "trainer.md")
    first, second = map(int, re.findall(r"^the training begins after step (\d+)$", said, re.MULTILINE))
    assert first == 0 and 100 <= second < 600
    assert "parameters: 7232" in said
