"""Run on each rank: saves through DCP in one world, and loads in another.

    dcp_worker.py save|load ROOT WHOLE KINDS

KINDS is a list of kinds of parallelism, with commas, perhaps with `again`. `save` writes the whole tensors of all states
to the file WHOLE; `load` compares with them.
"""

from __future__ import annotations

import sys
import warnings
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

from holdfast import Checkpointer
from holdfast.integrations.dcp import HoldfastStorageReader, HoldfastStorageWriter
from tests.torchruns import leave

AGAIN = "again"
FLAT = StateDictOptions(flatten_optimizer_state_dict=True)


def trained(kind: str, steps: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A model in this kind of parallelism, whose optimizer has made these steps. All ranks have the same data."""
    torch.manual_seed(11 if steps else 12)
    model: nn.Module = nn.Sequential(nn.Linear(6, 10), nn.BatchNorm1d(10), nn.ReLU(), nn.Linear(10, 4))
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    if kind == "fsdp2":
        fully_shard(model, mesh=mesh)
    elif kind == "tp":
        parallelize_module(model, mesh, {"0": ColwiseParallel(use_local_output=False), "3": RowwiseParallel()})
        model = nn.Sequential(model[0], model[3])  # between them each rank has its columns only: of 10 on 3 ranks 4, 4 and 2
    elif kind == "ddp":
        model = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01 * (steps + 1))
    for _ in range(steps):
        inputs = torch.randn(5, 6, generator=torch.Generator().manual_seed(3))
        model(inputs).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer


def state_dict(kind: str, model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> dict[str, Any]:
    held, optim = get_state_dict(model, optimizer, options=FLAT if kind == "tp" else None)
    mine = {f"rank_{dist.get_rank()}": {"seen": [dist.get_rank()] * 3, "rows": torch.arange(4) + dist.get_rank()}}
    return {"model": held, "optim": optim, "step": step, "loader": mine}


def whole(tree: Any, path: str = "") -> dict[str, torch.Tensor]:
    """The whole tensors of a state dict."""
    if isinstance(tree, dict):
        return {name: value for key, item in tree.items() for name, value in whole(item, f"{path}.{key}").items()}
    if isinstance(tree, DTensor):
        return {path: tree.full_tensor()}
    return {path: tree.clone()} if isinstance(tree, torch.Tensor) else {}


def shared(tree: dict[str, Any]) -> dict[str, torch.Tensor]:
    return whole({"model": tree["model"], "optim": tree["optim"]})


def save(root: str, kinds: list[str]) -> dict[str, Any]:
    found = {}
    for kind in kinds:
        if kind == AGAIN:
            again(root)
            continue
        model, optimizer = trained(kind, 2)
        held = state_dict(kind, model, optimizer, 7)
        found[kind] = shared(held)
        dcp.save(held, storage_writer=HoldfastStorageWriter(kind, step=7, at=root))
    model, optimizer = trained("fsdp2", 2)
    with Checkpointer("plain", {"model": model, "optim": optimizer, "step": 7}, at=root) as checkpointer:
        checkpointer.save(7, wait="durable")
    refused(root)
    return found


def again(root: str) -> None:
    """One writer and planners with kept plans for several steps, in a thread and not; values are those of their save."""
    model, optimizer = trained("fsdp2", 1)
    writer = HoldfastStorageWriter("again", at=root)
    for step in (1, 2, 3, 3):
        held = state_dict("fsdp2", model, optimizer, step)
        planner = DefaultSavePlanner(enable_plan_caching=True)
        if step == 2:
            dcp.async_save(held, storage_writer=writer, checkpoint_id=f"x/step-{step}", planner=planner).result()
        else:
            dcp.save(held, storage_writer=writer, checkpoint_id=str(step), planner=planner)
    for step in (1, 2, 3):
        held = {"step": 0}
        dcp.load(held, storage_reader=HoldfastStorageReader("again", at=root, step=step))
        assert held == {"step": step}


def refused(root: str) -> None:
    """What one rank cannot save fails the save on all ranks, by name, and the next save is made; ranks may have nothing."""
    rank = dist.get_rank()
    for step in (1, 2):
        try:
            bad = {"model": {"w": torch.ones(3)}, "odd": object() if rank == 1 else 1}
            dcp.save(bad, storage_writer=HoldfastStorageWriter("odd", step=step, at=root))
        except CheckpointException as error:
            assert "odd" in str(error) and "object" in str(error), error
        else:
            raise AssertionError("an object was saved")
    mine = {"model": {"w": torch.ones(3)}, "n": 1} if rank == 0 else {}
    dcp.save(mine, storage_writer=HoldfastStorageWriter("odd", step=2, at=root))
    try:
        dcp.save(mine, storage_writer=HoldfastStorageWriter("odd", step=3 + rank, at=root))
    except CheckpointException as error:
        assert "different steps" in str(error), error
    else:
        raise AssertionError("ranks saved different steps as one")
    if rank == 1:
        dcp.save({"alone": torch.ones(2)}, storage_writer=HoldfastStorageWriter("alone", step=1, at=root), no_dist=True)
    assert HoldfastStorageReader("odd", at=root).step == 2


def load(root: str, found: dict[str, Any], kinds: list[str]) -> None:
    for kind in kinds:
        model, optimizer = trained(kind, 0)
        for run in (kind, "plain") if kind == "fsdp2" else (kind,):
            held = state_dict(kind, model, optimizer, 0)
            held.pop("loader")
            reader = HoldfastStorageReader(run, at=root)
            assert reader.step == 7
            dcp.load(held, storage_reader=reader)
            set_state_dict(
                model,
                optimizer,
                model_state_dict=held["model"],
                optim_state_dict=held["optim"],
                options=FLAT if kind == "tp" else None,
            )
            now = state_dict(kind, model, optimizer, held["step"])
            assert_same(shared(now), found[kind])
            assert now["step"] == 7 and optimizer.param_groups[0]["lr"] == 0.03
            for tensor in whole(held).values():
                tensor.zero_()
    model, optimizer = trained("fsdp2", 0)
    with Checkpointer("fsdp2", {"model": model, "optim": optimizer, "step": 0}, at=root) as checkpointer:
        assert checkpointer.restore(exclude=["extra/loader*"]) == 7
    assert_same(shared(state_dict("fsdp2", model, optimizer, 0)), found["fsdp2"])
    other = {"loader": {"rank_1": {"seen": [], "rows": torch.zeros(4, dtype=torch.int64)}}}
    dcp.load(other, storage_reader=HoldfastStorageReader("fsdp2", at=root))
    assert other["loader"]["rank_1"]["seen"] == [1, 1, 1] and other["loader"]["rank_1"]["rows"].tolist() == [1, 2, 3, 4]


def assert_same(one: dict[str, torch.Tensor], two: dict[str, torch.Tensor]) -> None:
    assert one.keys() == two.keys()
    assert not [name for name in one if not torch.equal(one[name], two[name])]


def main() -> None:
    what, root, file, kinds = sys.argv[1:]
    warnings.simplefilter("ignore")
    dist.init_process_group("gloo")
    if what == "save":
        found = save(root, kinds.split(","))
        if dist.get_rank() == 0:
            torch.save(found, file)
    else:
        load(root, torch.load(file), kinds.split(","))
    dist.barrier()  # rank 0 has the store
    leave()


if __name__ == "__main__":
    main()
