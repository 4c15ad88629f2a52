"""A rank under torchrun that trains with workers of a DataLoader until the launcher is told to stop.

    python -m torch.distributed.run … -m tests.regressions.torchrun_training SOCKET DIRECTORY WORKERS

Writes into DIRECTORY that it has begun, and after which step it stopped. WORKERS are `deaf`, which the signal does not end,
as saving.md says, or `mortal`.
"""

from __future__ import annotations

import os
import signal
import sys
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset

from holdfast import Checkpointer

GRACE_S = 25.0
ROWS = 100_000


class Rows(Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((16,), float(index % 7))


def ignore_sigterm(worker: int) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)


def main(socket: str, directory: str, workers: str) -> None:
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    torch.set_num_threads(1)
    torch.manual_seed(0)
    rank, said = dist.get_rank(), Path(directory)
    model = DistributedDataParallel(nn.Linear(16, 16))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    begun = ignore_sigterm if workers == "deaf" else None
    loader = DataLoader(Rows(), batch_size=4, num_workers=2, worker_init_fn=begun, multiprocessing_context="fork")
    with Checkpointer("torchrun", {"model": model, "optim": optimizer}, at=socket) as checkpointer:
        checkpointer.restore()
        checkpointer.on_preemption(grace_s=GRACE_S)
        for step, batch in enumerate(loader, 1):
            optimizer.zero_grad()
            model(batch).square().mean().backward()
            optimizer.step()
            if step == 5:
                (said / f"begun-{rank}").touch()
            if checkpointer.should_stop(step):
                (said / f"stopped-{rank}").write_text(str(step))
                break
    del loader
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main(*sys.argv[1:])
