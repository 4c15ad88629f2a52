"""Run by ranks: optimizers whose state is not cut as their parameters are, saved in one world and restored in others.

    shared_state_worker.py SOCKET JSON

The JSON is a list of steps: `do`, "save" or "restore"; `run`; `kind`, a key of `KINDS`; `mesh`; `stepped`. After a
restore, the weights of the next steps are those of the run that was not interrupted: bit for bit on `exact` ranks.
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
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import holdfast
from holdfast import Checkpointer, Fragment, OptimizerShards
from holdfast_formats.errors import ReplicasDiffer
from tests.torchruns import leave


def local(tensor: Any) -> Any:
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def whole(tensor: Any) -> Any:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, 10), nn.Linear(10, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.up(x).tanh())


class _Optimizer(torch.optim.Optimizer):
    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                self.one(parameter, self.state[parameter])


class Preconditioned(_Optimizer):
    """As SOAP: lists of statistics, which are sharded as the parameter, replicated in its mesh, or absent."""

    def one(self, parameter: torch.Tensor, state: dict[str, Any]) -> None:
        if not state:
            state["step"], state["GG"] = 0, [torch.zeros_like(parameter), self.square(parameter), None]
        state["step"] += 1
        state["GG"][0].mul_(0.9).add_(parameter.grad)
        state["GG"][1].add_(1)
        parameter.sub_(0.1 * state["GG"][0] / local(state["GG"][1])[0, 0])

    def square(self, parameter: torch.Tensor) -> torch.Tensor:
        made = torch.zeros(3, 3)
        if not isinstance(parameter, DTensor):
            return made
        mesh = parameter.device_mesh
        return DTensor.from_local(made, mesh, [Replicate()] * mesh.ndim, run_check=False)


class Projector:
    """As GaLore's: an object with numbers and a matrix, in the state of each parameter."""

    def __init__(self, rank: int) -> None:
        self.rank, self.matrix = rank, None

    @staticmethod
    def again(kept: dict[str, Any]) -> Projector:
        made = Projector(kept["rank"])
        made.matrix = kept["matrix"].clone()
        return made


class Projected(_Optimizer):
    def one(self, parameter: torch.Tensor, state: dict[str, Any]) -> None:
        if not state:
            state["projector"] = Projector(2)
            state["projector"].matrix = torch.full((2, 2), 0.5)
        state["projector"].matrix = state["projector"].matrix * 1.5
        parameter.sub_(parameter.grad * float(state["projector"].matrix[0, 0]) * 0.1)


class Owners(_Optimizer):
    """As Muon: each rank steps its own parameters, has the state of these only, and gives them to the others."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for number, parameter in enumerate(self.param_groups[0]["params"]):
            owner = number % dist.get_world_size()
            if owner == dist.get_rank():
                state = self.state[parameter]
                if not state:
                    state["step"], state["momentum"] = 0, torch.zeros_like(parameter)
                state["step"] += 1
                state["momentum"].mul_(0.9).add_(parameter.grad)
                parameter.sub_(0.1 * state["momentum"] / state["step"])
            dist.broadcast(parameter.data, owner)
            parameter.add_(0)


class Rows(_Optimizer):
    """As Adafactor on local shards: a statistic of each row that this rank has."""

    def one(self, parameter: torch.Tensor, state: dict[str, Any]) -> None:
        part, grad = local(parameter), local(parameter.grad)
        if not state:
            state["step"], state["row"] = torch.tensor(0.0), torch.zeros(part.shape[0])
        state["step"] += 1
        state["row"].mul_(0.9).add_(grad.square() if grad.dim() < 2 else grad.square().mean(1))
        part.sub_(0.1 * grad / (state["row"].sqrt() + 1).reshape(-1, *[1] * (part.dim() - 1)))

    def declared(self, model: nn.Module) -> OptimizerShards:
        parameters = dict(model.named_parameters())
        for parameter in parameters.values():  # parts to restore into
            if parameter not in self.state:
                made = {"step": torch.tensor(0.0), "row": torch.zeros(local(parameter).shape[0])}
                self.state[parameter] = made

        def state() -> dict[str, dict[str, Any]]:
            found = {}
            for name, parameter in parameters.items():
                kept, rows = self.state[parameter], len(parameter)
                first = -(-rows // dist.get_world_size()) * dist.get_rank() if isinstance(parameter, DTensor) else 0
                place = Fragment(kept["row"], (rows,), offset=(min(first, rows),))
                found[name] = {"step": kept["step"], "row": place}
            return found

        groups = [{"params": list(parameters), "lr": 0.1}]
        return OptimizerShards(groups=lambda: groups, state=state, install=lambda groups, values: None, hooks=[self])


KINDS = {"lists": Preconditioned, "objects": Projected, "owners": Owners, "rows": Rows, "undeclared": Rows}


class Trainer:
    def __init__(self, kind: str, mesh: str, seed: int) -> None:
        torch.manual_seed(seed)
        self.model = Model()
        world = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=(mesh,))
        if mesh == "fsdp":
            fully_shard(self.model, mesh=world)
        if mesh == "tp":
            parallelize_module(self.model, world, {"up": ColwiseParallel(), "down": RowwiseParallel()})
        self.optimizer = KINDS[kind](self.model.parameters())
        declared = self.optimizer.declared(self.model) if kind == "rows" else self.optimizer
        self.state = {"model": self.model, "optim": declared}

    def train(self, *steps: int) -> None:
        for step in steps:
            self.optimizer.zero_grad()
            self.model(torch.randn(4, 6, generator=torch.Generator().manual_seed(step))).square().mean().backward()
            self.optimizer.step()

    def weights(self) -> list[torch.Tensor]:
        return [whole(parameter.detach()).clone() for parameter in self.model.parameters()]


def restore(socket: str, do: dict[str, Any], later: list[torch.Tensor]) -> None:
    trainer = Trainer(do["kind"], do["mesh"], seed=2)
    if do.get("stepped"):
        trainer.train(7)
    with Checkpointer(do["run"], trainer.state, at=socket) as checkpointer:
        assert checkpointer.restore(3) == 3
        if do["kind"] == "owners":
            checkpointer.save(30, wait="durable")  # before a step, state of other ranks' parameters is theirs
        trainer.train(4, 5)
        assert all(map(torch.allclose, trainer.weights(), later)), do
        if dist.get_world_size() == do["exact"]:
            assert all(map(torch.equal, trainer.weights(), later)), do
        checkpointer.save(31, wait="durable")
    if do["kind"] == "owners" and dist.get_world_size() > 1:
        held = [bool(trainer.optimizer.state.get(parameter)) for parameter in trainer.model.parameters()]
        assert held == [number % dist.get_world_size() == dist.get_rank() for number in range(len(held))]


def save(socket: str, do: dict[str, Any], path: Path) -> None:
    trainer = Trainer(do["kind"], do["mesh"], seed=1)
    trainer.train(1, 2, 3)
    try:
        with Checkpointer(do["run"], trainer.state, at=socket) as checkpointer:
            checkpointer.save(3, wait="durable")
    except ReplicasDiffer as error:
        assert do["kind"] == "undeclared" and "row" in str(error), error
        return
    assert do["kind"] != "undeclared", "parts of statistics were saved as whole ones"
    trainer.train(4, 5)
    weights = trainer.weights()
    if dist.get_rank() == 0:
        torch.save(weights, path)


def main() -> None:
    socket, steps = sys.argv[1:]
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    holdfast.register_class(Projector, vars, Projector.again)
    for do in json.loads(steps):
        path = Path(socket).with_name(do["run"] + ".pt")
        if do["do"] == "save":
            save(socket, do, path)
        else:
            restore(socket, do, torch.load(path))
        dist.barrier()
    leave()


if __name__ == "__main__":
    main()
