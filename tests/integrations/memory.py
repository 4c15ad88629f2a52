"""How much memory of its own a rank needs at most in steps without saves, and in steps with one each.

    build/integrations/deepspeed/bin/python -m tests.integrations.memory zero3|fsdp2 --work DIRECTORY

trains 100 million parameters on two ranks, and prints a line for each rank. Memory that is shared with the daemon, which a
save is copied into, is not counted: its size is chosen by `slots`, and it is taken once. Steps with and without saves take
turns, so that what a process keeps after its first steps counts for both.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from tests.daemons import free_port, running
from tests.integrations.environments import TOP

RANKS, LAYERS, WIDTH, STEPS = 2, 24, 2048, 16
WARM = 4  # steps before any count, with a save in the last of them
SAMPLE_S = 0.001
GAUGE = "RssAnon:"


class Net(nn.Module):
    """Square layers, 100 million parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS))

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            rows = rows + torch.tanh(layer(rows))
        return rows.float().square().mean()


def under_zero3(root: Path, work: Path) -> tuple[Callable[[], Any], Callable[[int], Any]]:
    """One step, and one save, of a DeepSpeed engine with the adapter."""
    from holdfast.integrations import deepspeed as holdfast_deepspeed
    from tests.integrations.deepspeed import engines

    engine = engines.engine(engines.config(3), model=Net)
    holdfast_deepspeed.attach(engine, "zero3", at=root)
    return lambda: engines.step(engine, torch.ones(4, WIDTH)), lambda step: engine.save_checkpoint(str(work / "saves"))


def under_fsdp2(root: Path, work: Path) -> tuple[Callable[[], Any], Callable[[int], Any]]:
    """One step, and one save, of a loop of one's own."""
    from torch.distributed.fsdp import fully_shard

    from holdfast import Checkpointer

    torch.distributed.init_process_group("gloo")
    model = Net()
    for layer in (*model.layers, model):
        fully_shard(layer)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)

    def step() -> None:
        model(torch.ones(4, WIDTH)).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step, Checkpointer("fsdp2", {"model": model, "optim": optimizer}, at=root).save


def rank(chosen: argparse.Namespace) -> None:
    """Train; what is being done stands in a file."""
    torch.set_num_threads(1)
    step, save = {"zero3": under_zero3, "fsdp2": under_fsdp2}[chosen.system](chosen.root, chosen.work)
    doing = chosen.work / f"doing-{os.environ['RANK']}"
    for number in range(1, WARM + STEPS + 1):
        saves = number >= WARM and number % 2 == 0
        doing.write_text("warm" if number <= WARM else "with" if saves else "without")
        step()
        if saves:
            save(number)
        step()  # with which the copy runs on
        torch.distributed.barrier()
        time.sleep(1.0)  # until nothing of a save is left
    torch.distributed.barrier()
    os._exit(0)


def sample(pids: list[int], work: Path, alive: Callable[[], bool]) -> list[dict[str, list[int]]]:
    """Bytes at most of each rank, in each stretch of the same doing."""
    peaks: list[dict[str, list[int]]] = [{} for _ in pids]
    last = [""] * len(pids)
    while alive():
        for number, pid in enumerate(pids):
            try:
                doing = (work / f"doing-{number}").read_text()
                status = Path(f"/proc/{pid}/status").read_text()
            except OSError:
                continue
            if GAUGE not in status or not doing:
                continue
            now = int(status.partition(GAUGE)[2].split()[0]) * 1024
            stretches = peaks[number].setdefault(doing, [])
            if doing != last[number]:
                stretches.append(now)
            stretches[-1], last[number] = max(stretches[-1], now), doing
        time.sleep(SAMPLE_S)
    return peaks


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("system", choices=["zero3", "fsdp2"])
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--root", type=Path)
    chosen = parser.parse_args()
    if chosen.root is not None:
        rank(chosen)
        return
    chosen.work.mkdir(parents=True, exist_ok=True)
    with running(chosen.work / "root") as daemon:
        about = dict(os.environ, WORLD_SIZE=str(RANKS), LOCAL_WORLD_SIZE=str(RANKS), MASTER_ADDR="127.0.0.1")
        about |= {"MASTER_PORT": str(free_port()), "HOLDFAST_LAUNCH": uuid.uuid4().hex, "OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-m", "tests.integrations.memory", chosen.system]
        command += ["--work", str(chosen.work), "--root", str(daemon.root)]
        ranks = [
            subprocess.Popen(command, cwd=TOP, env=about | {"RANK": str(number), "LOCAL_RANK": str(number)})
            for number in range(RANKS)
        ]
        peaks = sample([one.pid for one in ranks], chosen.work, lambda: any(one.poll() is None for one in ranks))
        assert all(one.returncode == 0 for one in ranks)
    for number, found in enumerate(peaks):
        told = {doing: max(stretches) for doing, stretches in found.items()}
        medians = {doing: statistics.median(stretches) / 2**20 for doing, stretches in found.items()}
        print(
            f"{chosen.system} rank {number}: MiB at most without saves {told['without'] / 2**20:.1f}, with"
            f" {told['with'] / 2**20:.1f}: {told['with'] / told['without']:.4f};"
            f" medians {medians['without']:.1f} and {medians['with']:.1f}"
        )


if __name__ == "__main__":
    main()
