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
tops = [one.name for one in pkgutil.iter_modules(holdfast.__path__) if one.name != "integrations"]
packages = [adapter, *(importlib.import_module(f"holdfast.{name}") for name in tops)]
for package in (one for one in packages if hasattr(one, "__path__")):
    for found in pkgutil.walk_packages(package.__path__, package.__name__ + "."):
        if "._native_" not in found.name:
            importlib.import_module(found.name)
import torch
holdfast.Checkpointer("run", {"model": torch.nn.Linear(2, 2)}).close(wait=False)
"""


def test_paddle_is_imported_only_when_it_is_used() -> None:
    """Neither by the client, the service and its wings, nor by importing the adapter itself."""
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
