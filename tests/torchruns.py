"""Ranks as real processes over gloo: by torchrun, or with what torchrun would tell them and none of its start-up."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
import uuid
from pathlib import Path
from typing import NoReturn

import torch.distributed as dist

from tests.daemons import free_port
from tests.forked import Forked

TIMEOUT_S = 300
TOP = Path(__file__).parents[1]


def torchrun(ranks: int, module: str, *arguments: str) -> None:
    """Run a module of the tests on that many ranks; a failure shows its output."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}", "-m", module]
    done = subprocess.run(
        [*command, *arguments], capture_output=True, text=True, timeout=TIMEOUT_S, env=_environment(), check=False
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-6000:]


def launch(ranks: int, module: str, *arguments: str) -> None:
    """The same by forks of a process that has torch already, with the environment that torchrun makes."""
    about = _environment() | {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(ranks),
        "TORCHELASTIC_RUN_ID": uuid.uuid4().hex,
        "TORCHELASTIC_RESTART_COUNT": "0",
    }
    with tempfile.TemporaryFile() as output:
        processes = [
            Forked(["-m", module, *arguments], about | {"RANK": str(i), "LOCAL_RANK": str(i)}, output=output.fileno())
            for i in range(ranks)
        ]
        limit = time.monotonic() + TIMEOUT_S
        while any(process.poll() is None for process in processes):
            if time.monotonic() > limit or any(process.poll() for process in processes):
                break  # the others would wait for it
            time.sleep(0.02)
        ends = [process.poll() for process in processes]
        for process in processes:
            process.kill()
            process.wait()
        output.seek(0)
        said = output.read().decode(errors="replace")
    assert ends == [0] * ranks, f"ranks ended with {ends}: {said[-8000:]}"


def _environment() -> dict[str, str]:
    path = os.pathsep.join([str(TOP), *filter(None, [os.environ.get("PYTHONPATH")])])
    return {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path}


def leave() -> NoReturn:
    """End a rank in which all went well."""
    dist.destroy_process_group()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # gloo's threads abort now and then while an interpreter unwinds (torch 2.13)
