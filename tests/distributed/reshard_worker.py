"""Run by torchrun: train and save in one mesh, or restore in others and say what came back.

    reshard_worker.py save|restore SOCKET OUTPUT MESH[,MESH…]

Each rank checks nothing itself: rank 0 writes the digest of every full tensor, gathered by torch, to OUTPUT.MESH.json.
"""

from __future__ import annotations

import copy
import json
import sys
import warnings
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

from holdfast import Checkpointer
from holdfast_formats.digest import digest
from tests.torchruns import leave

WIDTH, ROWS = 24, 50  # ROWS does not divide by 3 or 4: uneven shards


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(ROWS, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.register_buffer("scale", torch.tensor(1.5))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return x * self.scale


def wrap(model: Model, mesh: str) -> nn.Module:
    """The model in a mesh: plain, ddp, fsdp, tp, hsdp (replicate x shard), or 2d (FSDP2 over tensor parallelism)."""
    world = dist.get_world_size()
    if mesh == "plain":
        return model
    if mesh == "ddp":
        return DistributedDataParallel(model)
    sizes = {"2d": (world // 2, 2), "hsdp": (world // 2, 2), "tp": (1, world), "fsdp": (world, 1)}[mesh]
    device_mesh = init_device_mesh("cpu", sizes, mesh_dim_names=("dp", "tp"))
    if mesh in ("2d", "tp"):
        for block in model.blocks:
            parallelize_module(block, device_mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    if mesh == "tp":
        return model
    shard_mesh = device_mesh if mesh == "hsdp" else device_mesh["dp"]
    for block in model.blocks:
        fully_shard(block, mesh=shard_mesh)
    return fully_shard(model, mesh=shard_mesh)


def build(mesh: str, seed: int) -> dict:
    """A model in its mesh, and everything that goes with it."""
    torch.manual_seed(seed)
    model = wrap(Model(), mesh)
    parameters = {name.removeprefix("module."): p for name, p in model.named_parameters()}
    ema = {name: copy.deepcopy(p.detach()) for name, p in parameters.items()}
    optim = torch.optim.AdamW(model.parameters(), lr=0.01, foreach=False)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optim, 10)
    return {"model": model, "optim": optim, "ema": ema, "scheduler": scheduler}


def train(state: dict, steps: int) -> None:
    for step in range(steps):
        tokens = torch.arange(8).reshape(2, 4) + 5 * step
        state["model"](tokens).square().mean().backward()
        state["optim"].step()
        state["optim"].zero_grad()
        state["scheduler"].step()
    for copied in state["ema"].values():
        copied.mul_(0.5)


def full(tensor: torch.Tensor) -> str:
    whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return f"{whole.dtype} {list(whole.shape)} {digest(whole.detach().contiguous().view(-1).view(torch.uint8).numpy())}"


def digests(state: dict) -> dict[str, str]:
    """The digest of every tensor of the state, gathered by torch's own means."""
    found = {f"model/{n.removeprefix('module.')}": full(t) for n, t in state["model"].state_dict().items()}
    found |= {f"ema/{name}": full(tensor) for name, tensor in state["ema"].items()}
    names = {p: name.removeprefix("module.") for name, p in state["model"].named_parameters()}
    for parameter, held in state["optim"].state.items():
        found |= {f"optim/{names[parameter]}/{key}": full(value) for key, value in held.items()}
    found["lr"] = repr([group["lr"] for group in state["optim"].param_groups])
    found["scheduler"] = repr(sorted(state["scheduler"].state_dict().items()))
    return found


def main() -> None:
    warnings.simplefilter("ignore")
    action, socket, output, meshes = sys.argv[1:]
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    for mesh in meshes.split(","):
        state = build(mesh, seed=1 if action == "save" else 2)
        if action == "save":
            train(state, 3)
            with Checkpointer("r", state, at=socket) as checkpointer:
                checkpointer.save(3, wait="durable")
        else:
            before = {id(p) for p in state["model"].parameters()}
            with Checkpointer("r", state, at=socket) as checkpointer:
                assert checkpointer.restore() == 3
                report = checkpointer.last_restore
                assert report is not None and not report.missing
            assert before == {id(p) for p in state["model"].parameters()}, "restored in place"
            with Checkpointer(f"again-{dist.get_world_size()}-{mesh}", state, at=socket) as checkpointer:
                checkpointer.save(3, wait="durable")
        found = digests(state)
        if dist.get_rank() == 0:
            Path(f"{output}.{mesh}.json").write_text(json.dumps(found))
        dist.barrier()
    leave()


if __name__ == "__main__":
    main()
