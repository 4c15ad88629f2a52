"""A small FSDP2 training over gloo: python fsdp_training.py RUN STEPS [DIES_AT]. HOLDFAST_SITE is where its daemon is."""

from __future__ import annotations

import os
import random
import sys

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from holdfast import Checkpointer

WIDTH, SAVE_EVERY = 256, 5


def main(run: str, steps: int, dies_at: int) -> None:
    """Train; the last rank dies without a word after `dies_at` steps."""
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    for seed in (random.seed, np.random.seed, torch.manual_seed):
        seed(0)
    model = torch.nn.Sequential(*[torch.nn.Sequential(torch.nn.Linear(WIDTH, WIDTH), torch.nn.ReLU()) for _ in range(4)])
    fully_shard(model, mesh=init_device_mesh("cpu", (world,)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    with Checkpointer(
        run, {"model": model, "optim": optimizer}, at=os.environ["HOLDFAST_SITE"], policy="wait"
    ) as checkpointer:
        start = checkpointer.restore() or 0
        if rank == 0:
            print(f"begins after {start}", flush=True)
        draws = torch.Generator()
        for step in range(start + 1, steps + 1):
            draws.manual_seed(1000 * step + rank)
            model(torch.randn(8, WIDTH, generator=draws)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            if step % SAVE_EVERY == 0:
                checkpointer.save(step)
            if step == dies_at and rank == world - 1:
                os._exit(9)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]) if len(sys.argv) > 3 else 0)
