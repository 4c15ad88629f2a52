"""Run by ranks: torchao's optimizers under FSDP2 and tensor parallelism, saved in one mesh and restored in others.

    sharded_worker.py SOCKET KIND MESH [again]

Without a checkpoint it trains three steps and saves. Otherwise it restores, compares the moments with the saved ones, bit
for bit or, with `again`, within the noted distance, and takes two more steps, which are compared on as many ranks of the
same mesh.
"""

from __future__ import annotations

import re
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torchao.optim
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from holdfast import Checkpointer
from holdfast_formats.errors import StateMismatch
from tests.torchruns import leave

BOUND = {"AdamW8bit": 0.02, "AdamW4bit": 0.2, "AdamWFp8": 0.07}  # of the largest value of a block


class Trainer:
    def __init__(self, kind: str, mesh: str, seed: int) -> None:
        torch.manual_seed(seed)
        self.model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 64))
        world = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=(mesh,))
        if mesh == "fsdp":
            fully_shard(self.model, mesh=world)
        if mesh == "tp":
            parallelize_module(self.model, world, {"0": ColwiseParallel(), "2": RowwiseParallel()})
        self.optimizer = getattr(torchao.optim, kind)(self.model.parameters(), lr=1e-2)
        self.state = {"model": self.model, "optim": self.optimizer}

    def train(self, *steps: int) -> None:
        for step in steps:
            self.optimizer.zero_grad()
            batch = torch.randn(8, 64, generator=torch.Generator().manual_seed(step))
            (self.model(batch) - batch).square().mean().backward()
            self.optimizer.step()

    def moments(self) -> dict[str, torch.Tensor]:
        """Whole, as the optimizer computes with them."""
        found = {}
        for name, parameter in self.model.named_parameters():
            for key in ("exp_avg", "exp_avg_sq"):
                value = self.optimizer.state[parameter][key]
                held = value._local_tensor if isinstance(value, DTensor) else value
                part = held.float() if type(held) is torch.Tensor else held.dequantize()
                if isinstance(value, DTensor):
                    about: dict[str, Any] = {"shape": parameter.shape, "stride": parameter.stride()}
                    part = DTensor.from_local(
                        part, value.device_mesh, value.placements, run_check=False, **about
                    ).full_tensor()
                found[f"{name}/{key}"] = part.clone()
        return found

    def weights(self) -> list[torch.Tensor]:
        return [p.full_tensor() if isinstance(p, DTensor) else p.detach().clone() for p in self.model.parameters()]


def save(socket: str, kind: str, mesh: str, path: Path) -> None:
    trainer = Trainer(kind, mesh, 1)
    trainer.train(1, 2, 3)
    with Checkpointer(kind, trainer.state, at=socket) as checkpointer:
        checkpointer.save(3, wait="durable")
    saved = {"mesh": (mesh, dist.get_world_size()), "moments": trainer.moments()}
    trainer.train(4, 5)
    saved["weights"] = trainer.weights()
    if dist.get_rank() == 0:
        torch.save(saved, path)


def restore(socket: str, kind: str, mesh: str, saved: dict[str, Any], again: bool) -> None:
    trainer = Trainer(kind, mesh, 2)
    with Checkpointer(kind, trainer.state, at=socket) as checkpointer:
        if again:
            try:
                checkpointer.restore()
            except StateMismatch as error:
                assert "2.weight/exp_avg" in str(error) and "restore(requantise=True)" in error.hint, error
            else:
                raise AssertionError("other blocks were not refused")
        assert checkpointer.restore(requantise=again) == 3
        notes = [note for note in checkpointer.last_restore.notes if "quantised again" in note]
    assert len(notes) == again
    moved = float(re.search(r"more than (\S+) of", notes[0])[1]) if again else 0.0
    assert moved <= BOUND[kind], moved
    for name, value in trainer.moments().items():
        before = saved["moments"][name]
        assert torch.equal(value, before) or (again and (value - before).abs().max() <= BOUND[kind] * before.abs().max()), (
            name
        )
    trainer.train(4, 5)
    if (mesh, dist.get_world_size()) == saved["mesh"]:
        assert all(map(torch.equal, trainer.weights(), saved["weights"]))


def main() -> None:
    socket, kind, mesh, *again = sys.argv[1:]
    warnings.simplefilter("ignore")
    torch.compiler.set_stance("force_eager")
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    path = Path(socket).with_name(f"{kind}.pt")
    saved = torch.load(path) if path.exists() else None
    dist.barrier()
    if saved is None:
        save(socket, kind, mesh, path)
    else:
        restore(socket, kind, mesh, saved, bool(again))
    leave()


if __name__ == "__main__":
    main()
