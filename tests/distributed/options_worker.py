"""A rank of two under FSDP2, then DDP: weights of another dtype, masters from them, names left out, its own streams."""

from __future__ import annotations

import sys
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from holdfast import Checkpointer
from holdfast_formats import naming
from holdfast_formats.errors import InvalidRequest, StateMismatch
from tests.client.test_trainer_options import Mixed


def made(kind: str, seed: int, dtype: torch.dtype) -> dict[str, Any]:
    """A model with tied and frozen weights and a table, under this kind of parallelism, and an optimizer with masters."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(6, 6, bias=False), nn.Linear(6, 6, bias=False), nn.Linear(6, 5)).to(dtype)
    model[1].weight = model[0].weight
    model[2].bias.requires_grad_(False)
    model.register_buffer("rotary", torch.full((3,), float(seed)))
    if kind == "fsdp2":
        fully_shard(model)
        return {"model": model, "optim": Mixed([p for p in model.parameters() if p.requires_grad])}
    wrapped = DistributedDataParallel(model)
    return {"model": wrapped, "optim": Mixed([p for p in wrapped.parameters() if p.requires_grad])}


def whole(tensor: torch.Tensor) -> torch.Tensor:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


def main(socket: str) -> None:
    dist.init_process_group("gloo")
    for kind in ("fsdp2", "ddp"):
        go_through(socket, kind, dist.get_rank())
    dist.destroy_process_group()


def go_through(socket: str, kind: str, rank: int) -> None:
    saved = made(kind, 1, torch.float32)
    shuffle = torch.Generator().manual_seed(100 + rank)
    with Checkpointer(kind, {**saved, "shuffle": shuffle}, at=socket) as checkpointer:
        try:
            checkpointer.save(1, exclude=("model/0.*",))
        except InvalidRequest as refusal:
            assert "model/0.weight, and" in refusal.detail, refusal
        else:
            raise AssertionError("a trained weight was left out")
        for step in (1, 2):
            checkpointer.save(step, exclude=("model/rotary", "model/2.bias"), every={"optim": 2}, wait="durable")
    drawn = torch.rand(5, generator=shuffle)
    weights = [whole(p) for p in saved["model"].parameters() if p.requires_grad]

    live = made(kind, 2, torch.bfloat16)
    live["optim"].step()
    again = torch.Generator().manual_seed(7)
    names = ("model/rotary", "model/2.bias")
    with Checkpointer(kind, {**live, "shuffle": again}, at=socket) as checkpointer:
        before = [whole(p) for p in live["model"].parameters()]
        try:
            checkpointer.restore(2, groups=("model", "extra"), exclude=names, cast=True)
        except StateMismatch as refusal:
            assert "full-precision masters (0.weight" in refusal.detail, refusal
        else:
            raise AssertionError("masters stayed behind")
        assert all(map(torch.equal, before, map(whole, live["model"].parameters())))
        checkpointer.restore(2, groups=("model", "extra"), exclude=names, cast=True, masters="from-model")
        trained = [p for p in live["model"].parameters() if p.requires_grad]
        for expected, parameter in zip(weights, trained, strict=True):
            assert torch.equal(whole(parameter), expected.bfloat16())
            assert torch.equal(whole(live["optim"].state[parameter]["master_param"]), expected.bfloat16().float())
        assert torch.equal(torch.rand(5, generator=again), drawn), f"rank {rank} continues with another stream"
        assert live["model"].get_buffer("module.rotary" if kind == "ddp" else "rotary").eq(2.0).all()
        live["optim"].step()
    from_masters(socket, kind, live)


def from_masters(socket: str, kind: str, live: dict[str, Any]) -> None:
    """Weights that are not copied are stored as if they were."""
    found = []
    options: Any
    for run, options in ((f"{kind}-copied", {}), (f"{kind}-rounded", {"model": "from-master"})):
        with Checkpointer(run, live, at=socket, **options) as checkpointer:
            ticket = checkpointer.save(3, wait="durable")
            root = checkpointer.root()
        assert root is not None
        assert any("1 of the model's tensors were copied (2.bias)" in note for note in ticket.notes) == bool(options)
        directory = root / naming.checkpoint_path(run, 3)
        found.append({file.name: file.read_bytes() for file in directory.glob("*.safetensors*")})
    assert found[0] == found[1] and "model.safetensors" in found[0]


if __name__ == "__main__":
    main(*sys.argv[1:])
