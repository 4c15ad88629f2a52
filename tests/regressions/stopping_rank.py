"""A rank that trains until a signal ends the launch, and says after which step it stopped.

    python -m tests.regressions.stopping_rank AT KIND

KIND is `together`, with a collective in every step as under DDP, `apart`, without any, so that ranks drift apart, `brief`,
as `apart` with little time, or `deaf`: as `brief`, and the last rank does not call on_preemption().
"""

from __future__ import annotations

import os
import random
import signal
import sys
import time
import uuid
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn

from holdfast import Checkpointer
from holdfast_formats.errors import CheckpointError

GRACE_S = 360.0
BRIEF_GRACE_S = {"brief": 6.0, "deaf": 12.0}  # half of it is for the answers
STEPS = 100_000


def main(at: str, kind: str) -> None:
    rank = int(os.environ["RANK"])
    torch.set_num_threads(1)
    if kind == "together":
        dist.init_process_group("gloo", timeout=timedelta(seconds=100))
    draws, heard = random.Random(uuid.uuid4().int), []
    signal.signal(signal.SIGUSR1, lambda *_: heard.append("SIGUSR1"))
    torch.manual_seed(0)
    model = nn.Linear(16, 16)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    with Checkpointer("stops", {"model": model, "optim": optimizer}, at=at) as checkpointer:
        first = checkpointer.restore() + 1
        listens = kind != "deaf" or rank < int(os.environ["WORLD_SIZE"]) - 1
        if listens:
            checkpointer.on_preemption((signal.SIGTERM, signal.SIGUSR1), BRIEF_GRACE_S.get(kind, GRACE_S))
        print("FROM", first - 1, flush=True)
        for step in range(first, first + STEPS):
            optimizer.zero_grad()
            model(torch.full((4, 16), step % 7 / 7.0)).square().mean().backward()
            if kind == "together":
                for parameter in model.parameters():
                    dist.all_reduce(parameter.grad)
            optimizer.step()
            time.sleep(draws.random() / 200)
            try:
                if listens and checkpointer.should_stop(step):
                    break
            except CheckpointError as error:
                print("FAILED", error.detail, flush=True)
                os._exit(3)
        assert checkpointer.preempted
        print("STOPPED", step, *heard, model.weight.double().sum().item().hex(), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
