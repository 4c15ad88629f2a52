"""Your own loop on one process, with a save every 20 steps. Stop it in any way and start it again: it continues.

python examples/plain.py
"""

import argparse

import torch
from torch import nn

from holdfast import Checkpointer

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=200)
parser.add_argument("--at", help="directory of the checkpoints (default: your daemon's, else ./holdfast-data)")
options = parser.parse_args()

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(32, 256), nn.GELU(), nn.Dropout(0.1), nn.Linear(256, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 200)


def train() -> float:
    """One step on random data. Holdfast also saves and restores the state of the random generator."""
    rows = torch.randn(64, 32)
    loss = nn.functional.mse_loss(model(rows), rows.sum(dim=1, keepdim=True))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    scheduler.step()
    return loss.item()


state = {"model": model, "optim": optimizer, "scheduler": scheduler}
with Checkpointer("plain", state, at=options.at) as checkpointer:
    checkpointer.on_preemption()  # SIGTERM saves the current step and then ends the loop
    first = checkpointer.restore() + 1  # restore() returns 0 if there is no checkpoint yet
    print(f"starts with step {first}", flush=True)
    for step in range(first, options.steps + 1):
        loss = train()
        if step % 20 == 0 or step == options.steps:
            checkpointer.save(step, metrics={"loss": loss})
            print(f"step {step} loss {loss:.9f}", flush=True)
        if checkpointer.should_stop(step):
            break
