"""Run by ranks: train with a low-bit optimizer and save, or restore in another mesh; compare with what was saved.

    low_bit_worker.py SOCKET JSON

The JSON is a list of steps: `do`, "save" or "restore"; `run`, `kind` and `mesh`; of a restore also `stepped`, whether the
live optimizer has state; `again`, to quantise once more; and `refused`, words of an error that is expected. Whole values
are compared with those in `RUN.pt` beside the socket; bit for bit, or within half a step of the table with `again`.
"""

from __future__ import annotations

import json
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from holdfast import Checkpointer
from holdfast_formats.errors import StateMismatch
from tests.low_bit import KINDS, local
from tests.torchruns import leave


class Model(nn.Module):
    """Blocks of 64 are two rows of `up` and one row of `odd`; of `down`, 17 are its first 32 rows."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.odd, self.down = nn.Linear(32, 64), nn.Linear(64, 34), nn.Linear(34, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.odd(self.up(x)).tanh())


class Trainer:
    def __init__(self, kind: str, mesh: str, seed: int) -> None:
        torch.manual_seed(seed)
        self.model, self.mesh = Model(), mesh
        world = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=(mesh,))
        if mesh == "fsdp":
            fully_shard(self.model, mesh=world)
        if mesh == "tp":
            parallelize_module(self.model, world, {"up": ColwiseParallel(), "odd": RowwiseParallel()})
        self.optimizer = KINDS[kind](self.model.parameters())

    @property
    def state(self) -> dict[str, Any]:
        return {"model": self.model, "optim": self.optimizer}

    def train(self, *steps: int) -> None:
        for step in steps:
            self.optimizer.zero_grad()
            self.model(torch.randn(4, 32, generator=torch.Generator().manual_seed(step))).square().mean().backward()
            self.optimizer.step()

    def values(self) -> dict[str, torch.Tensor]:
        """The whole weights, and the whole momentum as the optimizer reads it."""
        found = {}
        for name, parameter in self.model.named_parameters():
            found[name] = parameter.detach()
            if state := self.optimizer.state.get(parameter, {}):
                part = self.optimizer.held(state)
                if isinstance(parameter, DTensor):
                    about = {"shape": parameter.shape, "stride": parameter.stride()}
                    part = DTensor.from_local(part, parameter.device_mesh, parameter.placements, run_check=False, **about)
                found[f"{name}/momentum"] = part
        return {name: one.full_tensor() if isinstance(one, DTensor) else one.clone() for name, one in found.items()}


def parts(trainer: Trainer) -> list[torch.Tensor]:
    """What this rank holds, bit for bit: codes and scales of wrappers too."""
    found = [local(parameter).clone() for parameter in trainer.model.parameters()]
    states = (trainer.optimizer.state.get(parameter, {}) for parameter in trainer.model.parameters())
    for state in states:
        for value in (local(state[key]) for key in sorted(state)):
            names = value.__tensor_flatten__()[0] if hasattr(value, "__tensor_flatten__") else ()
            found += [getattr(value, name).clone() for name in names] or [value.clone()]
    return found


def compare(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], again: bool, coarse: bool) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        step = (2 / 15 if coarse else 2 / 255) * value.abs().max() / 2 * 1.001
        same = torch.equal(found[name], value)
        assert same or (again and "/" in name and bool(((found[name] - value).abs() <= step).all())), name


def restore(socket: str, do: dict[str, Any], expected: dict[str, Any]) -> None:
    trainer = Trainer(do["kind"], do["mesh"], seed=2)
    if do.get("stepped"):
        trainer.train(7)
    with Checkpointer(do["run"], trainer.state, at=socket) as checkpointer:
        if words := do.get("refused"):
            before = parts(trainer)
            try:
                checkpointer.restore()
            except StateMismatch as error:
                assert words in str(error) and "restore(requantise=True)" in error.hint, error
            else:
                raise AssertionError(f"{do} was not refused")
            assert all(map(torch.equal, parts(trainer), before))
            return
        again = bool(do.get("again"))
        assert checkpointer.restore(requantise=again) == 3
        noted = [note for note in checkpointer.last_restore.notes if "quantised again" in note]
    assert bool(noted) == again and all("no value moved by more than" in note for note in noted), noted
    compare(trainer.values(), expected["values"], again, do["kind"] == "4-bit")
    if do["mesh"] == expected["mesh"] and dist.get_world_size() == expected["world"]:
        twin = torch.load(f"{expected['parts']}.{dist.get_rank()}.pt")
        assert all(map(torch.equal, parts(trainer), twin["held"]))
        trainer.train(4, 5)
        assert all(map(torch.equal, parts(trainer), twin["later"]))
    elif not again:
        with Checkpointer(f"{do['run']}-again", trainer.state, at=socket) as checkpointer:
            checkpointer.save(3, wait="durable", existing="replace")
    trainer.train(8)  # the state has the form in which the optimizer goes on


def save(socket: str, do: dict[str, Any], path: Path) -> None:
    trainer = Trainer(do["kind"], do["mesh"], seed=1)
    trainer.train(1, 2, 3)
    with Checkpointer(do["run"], trainer.state, at=socket) as checkpointer:
        checkpointer.save(3, wait="durable")
    values, held = trainer.values(), parts(trainer)
    about = {"values": values, "mesh": do["mesh"], "world": dist.get_world_size(), "parts": str(path)}
    if dist.get_rank() == 0:
        torch.save(about, f"{path}.pt")
    trainer.train(4, 5)
    torch.save({"held": held, "later": parts(trainer)}, f"{path}.{dist.get_rank()}.pt")


def main() -> None:
    socket, steps = sys.argv[1:]
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    for do in json.loads(steps):
        path = Path(socket).with_name(do["run"])
        if do["do"] == "save":
            save(socket, do, path)
        else:
            restore(socket, do, torch.load(f"{path}.pt"))
        dist.barrier()
    leave()


if __name__ == "__main__":
    main()
