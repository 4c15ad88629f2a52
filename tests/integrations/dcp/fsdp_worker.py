"""A rank with FSDP2 that trains two steps and saves by `dcp.save`; rank 0 also keeps everything as whole tensors."""

from __future__ import annotations

import sys
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from tests.torchruns import leave


def main(work: Path) -> None:
    dist.init_process_group("gloo")
    torch.manual_seed(5)
    model = torch.nn.Sequential(torch.nn.Linear(3, 5), torch.nn.Linear(5, 1))
    fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
    optimizer = torch.optim.AdamW(model.parameters())
    for step in range(2):
        model(torch.full((2, 3), float(step + 1))).sum().backward()
        optimizer.step()
    weights, state = get_state_dict(model, optimizer)
    dcp.save({"model": weights, "optim": state}, checkpoint_id=work / "saved")
    whole = get_state_dict(model, optimizer, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    if dist.get_rank() == 0:
        torch.save({"model": whole[0], "optim": whole[1]}, work / "whole.pt")
    dist.barrier()
    leave()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
