"""Run by torchrun: under FSDP1, each rank keeps the masters of other parameters. They are restored with the weights alone,
and with everything, before and after the first forward pass.

    flat_masters_worker.py SOCKET
"""

from __future__ import annotations

import sys
import warnings
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel

from holdfast import Checkpointer
from tests.torchruns import leave

Kept = dict[str, dict[str, torch.Tensor]]


class WithMasters(torch.optim.Optimizer):
    """Momentum on float32 copies, which it makes at a parameter's first step."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for parameter in self.param_groups[0]["params"]:
            if parameter.grad is None:
                continue
            state = self.state[parameter]
            if not state:
                state["momentum"] = torch.zeros_like(parameter, dtype=torch.float32)
                state["master_param"] = parameter.detach().float().clone()
            state["momentum"].mul_(0.9).add_(parameter.grad.float())
            state["master_param"].sub_(0.1 * state["momentum"])
            parameter.copy_(state["master_param"])


class Training:
    def __init__(self, seed: int) -> None:
        torch.manual_seed(seed)
        layers = nn.Sequential(nn.Linear(4, 7), nn.Linear(7, 3), nn.Linear(3, 2)).bfloat16()
        self.model = FullyShardedDataParallel(layers, use_orig_params=True, device_id=torch.device("cpu"))
        self.optimizer = WithMasters(self.model.parameters())
        self.state = {"model": self.model, "optim": self.optimizer}

    def step(self) -> None:
        self.optimizer.zero_grad()
        self.model(torch.ones(2, 4, dtype=torch.bfloat16)).float().square().mean().backward()
        self.optimizer.step()

    def kept(self) -> Kept:
        """Copies of this rank's part of each weight, and what the optimizer keeps of it."""
        return {
            name: {
                "weight": one.detach().clone(),
                **{key: value.clone() for key, value in self.optimizer.state[one].items()},
            }
            for name, one in self.model.named_parameters()
            if one.numel() or one in self.optimizer.state
        }


def assert_equal(one: Kept, other: Kept, but: str = "") -> None:
    assert one.keys() == other.keys(), (one.keys(), other.keys())
    for name, kept in one.items():
        assert kept.keys() == other[name].keys(), (name, kept.keys(), other[name].keys())
        assert all(torch.equal(value, other[name][key]) for key, value in kept.items() if key != but), name


def main() -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    trained = Training(0)
    with Checkpointer("masters", trained.state, at=sys.argv[1]) as checkpointer:
        assert checkpointer.restore() == 0
        trained.step()
        trained.step()
        checkpointer.save(2, wait="durable")
    saved = trained.kept()
    masters = [name for name, kept in saved.items() if "master_param" in kept]
    assert 0 < len(masters) < 6, "each rank keeps some of them"
    fresh = Training(1)
    with Checkpointer("masters", fresh.state, at=sys.argv[1]) as checkpointer:
        assert checkpointer.restore() == 2
        assert_equal(fresh.kept(), saved)
        fresh.step()
        trained.step()
        assert_equal(fresh.kept(), trained.kept())
        assert checkpointer.restore(groups=("model", "master")) == 2
        assert_equal(fresh.kept(), saved, but="momentum")
    dist.barrier()
    leave()


if __name__ == "__main__":
    main()
