"""FSDP2 on any number of ranks. Start it on two ranks, stop it, and continue on three: each rank reads its own part.

torchrun --nproc-per-node 2 examples/fsdp2.py
"""

import argparse

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from holdfast import Checkpointer

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=200)
parser.add_argument("--at", help="directory of the checkpoints (default: your daemon's, else ./holdfast-data)")
options = parser.parse_args()

cuda = torch.cuda.is_available()
dist.init_process_group("nccl" if cuda else "gloo")
if cuda:
    torch.cuda.set_device(dist.get_node_local_rank())
device = "cuda" if cuda else "cpu"
mesh = init_device_mesh(device, (dist.get_world_size(),))
torch.manual_seed(0)
model = nn.Sequential(*(nn.TransformerEncoderLayer(64, 4, 128, batch_first=True) for _ in range(4))).to(device)
for layer in model:
    fully_shard(layer, mesh=mesh)
fully_shard(model, mesh=mesh)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)


def train() -> float:
    tokens = torch.randn(8, 16, 64, device=device)
    loss = nn.functional.mse_loss(model(tokens), tokens.flip(1))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss.item()


with Checkpointer("fsdp2", {"model": model, "optim": optimizer}, at=options.at) as checkpointer:
    first = checkpointer.restore() + 1
    if dist.get_rank() == 0:
        print(f"{dist.get_world_size()} ranks start with step {first}", flush=True)
    for step in range(first, options.steps + 1):
        loss = train()
        if step % 20 == 0 or step == options.steps:
            checkpointer.save(step, metrics={"loss": loss})
            if dist.get_rank() == 0:
                print(f"step {step} loss {loss:.9f}", flush=True)
dist.destroy_process_group()
