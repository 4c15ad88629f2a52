"""The example of docs/integrations/dcp.md as a training run: dropout, shuffled data in the middle of an epoch, FSDP2 or one
process; saved by dcp.save or dcp.async_save.
"""

from __future__ import annotations

import argparse
import random
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.utils.data import DistributedSampler
from torchdata.stateful_dataloader import StatefulDataLoader

from holdfast.integrations.dcp import HoldfastStorageReader, HoldfastStorageWriter
from tests.integrations.environments import stand_alone
from tests.integrations.recording import Record
from tests.torchruns import leave

RUN, LAST, EVERY, ROWS, BATCH = "train", 30, 2, 48, 4


class Rows(torch.utils.data.Dataset[Any]):
    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, row: int) -> tuple[int, torch.Tensor]:
        return row, torch.randn(16, generator=torch.Generator().manual_seed(row))


class Training:
    """Model, optimizer, schedule, data and random state of one rank, as a stateful object for DCP."""

    def __init__(self, rank: int, workers: int) -> None:
        torch.manual_seed(1)
        self.model = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Dropout(0.2), nn.Linear(64, 16))
        if dist.is_initialized():
            fully_shard(self.model)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)
        self.schedule = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, LAST)
        self.sampler = DistributedSampler(Rows(), 1, 0, seed=100 + rank)  # every rank has all rows, in an order of its own
        own = torch.Generator()  # else each epoch draws from the stream of the dropout
        self.loader = StatefulDataLoader(Rows(), BATCH, sampler=self.sampler, num_workers=workers, generator=own)
        self.epoch = 0
        self.rank = rank
        self.step = 0
        torch.manual_seed(50 + rank)
        random.seed(60 + rank)

    def state_dict(self) -> dict[str, Any]:
        model, optim = get_state_dict(self.model, self.optimizer)
        # a tuple is one value for DCP, which else loads the keys that the loader has now
        own = (self.loader.state_dict(), self.epoch, torch.get_rng_state(), random.getstate())
        schedule = (self.schedule.state_dict(),)
        return {"model": model, "optim": optim, "schedule": schedule, f"rank_{self.rank}": own, "step": self.step}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        set_state_dict(self.model, self.optimizer, model_state_dict=state["model"], optim_state_dict=state["optim"])
        self.schedule.load_state_dict(state["schedule"][0])
        loader, self.epoch, stream, python = state[f"rank_{self.rank}"]
        self.loader.load_state_dict(loader)
        self.step = state["step"]
        torch.set_rng_state(stream)
        random.setstate(python)

    def train(self, rows: torch.Tensor) -> float:
        loss = (self.model(rows) - rows).square().mean() * (1 + random.random())
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.schedule.step()
        self.step += 1
        return loss.item()


def save(training: Training, at: str, how: str, group: Any) -> Any:
    writer = HoldfastStorageWriter(RUN, step=training.step, at=at)
    if how == "sync":
        return dcp.save(training.state_dict(), storage_writer=writer)
    kind = AsyncCheckpointerType.PROCESS if how == "process" else AsyncCheckpointerType.THREAD
    return dcp.async_save(training.state_dict(), storage_writer=writer, async_checkpointer_type=kind, process_group=group)


def whole(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--save", choices=("sync", "thread", "process"), default="sync")
    parser.add_argument("--world", type=int, default=1)
    parser.add_argument("--workers", type=int, default=0)
    chosen = parser.parse_args()
    warnings.simplefilter("ignore")
    if chosen.world > 1 or chosen.save == "process":
        stand_alone()
        dist.init_process_group("gloo")
    # the collectives of a thread that saves must not meet those of the training
    group = dist.new_group(backend="gloo") if chosen.save != "sync" else None
    at, record = str(chosen.work / "root"), Record()
    training = Training(dist.get_rank() if dist.is_initialized() else 0, chosen.workers)
    reader = HoldfastStorageReader(RUN, at=at)
    if reader.step:
        state = training.state_dict()
        dcp.load(state, storage_reader=reader)
        training.load_state_dict(state)
    record.began(training.step)
    running = None
    while training.step < LAST:
        training.sampler.set_epoch(training.epoch)
        for numbers, rows in training.loader:
            loss = training.train(rows)
            record.step(training.step, loss, numbers)
            if training.step % EVERY == 0:
                if chosen.save != "sync" and running is not None:
                    running.result()
                running = save(training, at, chosen.save, group)
            if training.step == LAST:
                break
        training.epoch += 1
    if chosen.save != "sync" and running is not None:
        running.result()
    model, optim = get_state_dict(training.model, training.optimizer)
    moments = {f"{name}.{key}": whole(kept) for name, held in optim["state"].items() for key, kept in held.items()}
    weights = {name: whole(value) for name, value in model.items()}
    record.ended({**weights, **moments}, training.schedule.state_dict()["_last_lr"])
    if dist.is_initialized():
        dist.barrier()
        leave()


if __name__ == "__main__":
    main()
