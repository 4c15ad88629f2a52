"""Ranks as real processes: torchrun on this machine, over gloo."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import NoReturn

import torch.distributed as dist

TIMEOUT_S = 300


def torchrun(ranks: int, module: str, *arguments: str) -> None:
    """Run a module of the tests on that many ranks; a failure shows its output."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}", "-m", module]
    path = os.pathsep.join([str(Path(__file__).parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path}
    done = subprocess.run(
        [*command, *arguments], capture_output=True, text=True, timeout=TIMEOUT_S, env=environment, check=False
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-6000:]


def leave() -> NoReturn:
    """End a rank in which all went well."""
    dist.destroy_process_group()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # gloo's threads abort now and then while an interpreter unwinds (torch 2.13)
