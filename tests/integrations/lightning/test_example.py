"""The example of docs/integrations/lightning.md, as it stands there."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.integrations.environments import TOP

EXAMPLE = Path(__file__).with_name("example.py")


def test_the_example_is_that_of_the_documents() -> None:
    for page in ("lightning.md", "lightning.zh-CN.md"):
        assert EXAMPLE.read_text() in (TOP / "docs" / "integrations" / page).read_text()


def test_the_example_saves_and_goes_on(tmp_path: Path) -> None:
    """Its second start has nothing left to do."""
    about = os.environ | {"PYTHONPATH": str(TOP), "OMP_NUM_THREADS": "1"}
    for _ in range(2):
        done = subprocess.run(
            [sys.executable, EXAMPLE], cwd=tmp_path, env=about, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr
    assert "Restored all states" in done.stderr
    links = sorted(path.name for path in (tmp_path / "output" / "checkpoints").iterdir())
    assert links == ["epoch=2-step=48.ckpt", "last.ckpt"] or links[-1] == "last.ckpt"
