"""Run on two ranks: a model in torchtitan's names under FSDP2, saved and restored through a mapping program."""

from __future__ import annotations

import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

from holdfast import Checkpointer, ParallelLayout
from holdfast_formats.programs import load
from tests.formats.programs.test_remade import LLAMA, remade


def decoder(scale: float) -> nn.Module:
    """A module whose parameters have torchtitan's names, with the values that the program makes; sharded."""
    top = nn.Module()
    for name, values in remade(load("hf-titan"), LLAMA.arrays(), LLAMA.config).items():
        *path, last = name.split(".")
        at = top
        for part in path:
            if not hasattr(at, part):
                at.add_module(part, nn.Module())
            at = getattr(at, part)
        at.register_parameter(last, nn.Parameter(torch.from_numpy(values) * scale))
    fully_shard(top)
    return top


def main(socket: str) -> None:
    dist.init_process_group("gloo")
    layout = ParallelLayout("dp=2", config=LLAMA.config, program="hf-titan")
    model = decoder(1)
    optim = torch.optim.AdamW(model.parameters(), lr=0.1)
    with Checkpointer("fsdp", {"model": model, "optim": optim}, at=socket, layout=layout) as checkpointer:
        checkpointer.save(1, wait="durable")
        for parameter in model.parameters():
            parameter.grad = parameter.detach().sin()
        optim.step()
        checkpointer.save(2, wait="durable")
    fresh = decoder(0)
    again = torch.optim.AdamW(fresh.parameters(), lr=0.1)
    with Checkpointer("fsdp", {"model": fresh, "optim": again}, at=socket, layout=layout) as checkpointer:
        assert checkpointer.restore() == 2
    for (name, mine), other in zip(model.named_parameters(), fresh.parameters(), strict=True):
        assert torch.equal(mine.to_local(), other.to_local()), name
        for key, kept in optim.state[mine].items():
            found = again.state[other][key]
            assert torch.equal(*(t.to_local() if hasattr(t, "to_local") else t for t in (kept, found))), (name, key)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
