"""DistributedDataParallel on two ranks, with a moving average of the weights that the daemon computes.

torchrun --nproc-per-node 2 examples/ddp_ema.py
"""

import argparse

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from holdfast import Checkpointer, Ema

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=200)
parser.add_argument("--at", help="directory of the checkpoints (default: your daemon's, else ./holdfast-data)")
options = parser.parse_args()

cuda = torch.cuda.is_available()
dist.init_process_group("nccl" if cuda else "gloo")
device = torch.device("cuda", dist.get_node_local_rank()) if cuda else torch.device("cpu")
torch.manual_seed(dist.get_rank())
model = nn.Sequential(nn.Linear(32, 256), nn.GELU(), nn.Linear(256, 1)).to(device)
ddp = DistributedDataParallel(model)
optimizer = torch.optim.AdamW(ddp.parameters(), lr=1e-3)


def train() -> float:
    rows = torch.randn(64, 32, device=device)
    loss = nn.functional.mse_loss(ddp(rows), rows.sum(dim=1, keepdim=True))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()  # every fifth step is added to the average in the background
    return loss.item()


# Pass the module and not its DDP wrapper, so that the checkpoint has the model's own tensor names.
state = {"model": model, "optim": optimizer}
with Checkpointer("ddp-ema", state, at=options.at, ema=Ema(decay=0.99, of="model", every=5)) as checkpointer:
    first = checkpointer.restore() + 1
    for step in range(first, options.steps + 1):
        loss = train()
        if step % 20 == 0 or step == options.steps:
            checkpointer.save(step, metrics={"loss": loss})
            if dist.get_rank() == 0:
                print(f"step {step} loss {loss:.9f} average of {checkpointer.ema.n} updates", flush=True)
dist.destroy_process_group()
# To export the average as a model:   holdfast export ddp-ema@200 DIRECTORY --as hf --weights ema
