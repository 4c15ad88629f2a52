"""Nothing imports Paddle that was not asked to."""

from __future__ import annotations

import subprocess
import sys

PROGRAM = """
import importlib, pkgutil, sys

class Watch:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("paddle", "paddleformers", "paddlenlp"):
            raise SystemExit(f"{name} is imported")

sys.meta_path.insert(0, Watch())
import holdfast, holdfast_service.wiring, holdfast_service.wings.convert
import holdfast.integrations.paddle as adapter
for package in (holdfast, adapter):
    for found in pkgutil.walk_packages(package.__path__, package.__name__ + "."):
        if "._native_" in found.name:
            continue
        if ".integrations." not in found.name or found.name.startswith("holdfast.integrations.paddle."):
            importlib.import_module(found.name)
import torch
holdfast.Checkpointer("run", {"model": torch.nn.Linear(2, 2)}).close(wait=False)
"""


def test_paddle_is_imported_only_when_it_is_used() -> None:
    """Neither by the client, the service and its wings, nor by importing the adapter itself."""
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
