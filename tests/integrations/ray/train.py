"""A script that trains with Ray Train's TorchTrainer; its training function is that of docs/integrations/ray.md.

Workers kill themselves as often as `--die` has entries, and Ray starts them again: STEP is right after that step, STEP+0.2
so many seconds later, at any moment.
"""

from __future__ import annotations

import argparse
import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import ray
import ray.train
import torch
from ray.train.torch import TorchTrainer
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DistributedSampler
from torchdata.stateful_dataloader import StatefulDataLoader

from holdfast import Checkpointer
from holdfast.integrations import ray as holdfast_ray
from tests.integrations.recording import RECORD, Record, optimizer_tensors

RUN, ROWS, WIDTH, BATCH, LAST, EVERY = "run", 44, 8, 2, 24, 2


class Rows(torch.utils.data.Dataset[Any]):
    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, row: int) -> tuple[int, torch.Tensor]:
        return row, torch.randn(WIDTH, generator=torch.Generator().manual_seed(row))


class Epoch:
    """The number of the epoch, which is the order of its rows. It stands before the loader in the state: a restore gives the
    sampler its epoch before the loader begins the epoch anew.
    """

    def __init__(self, sampler: DistributedSampler[Any]) -> None:
        self.sampler = sampler

    def state_dict(self) -> dict[str, int]:
        return {"epoch": self.sampler.epoch}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.sampler.set_epoch(state["epoch"])


def train_func(config: dict[str, Any]) -> None:
    context = ray.train.get_context()
    rank, world, work = context.get_world_rank(), context.get_world_size(), Path(config["work"])
    os.environ |= {RECORD: str(work / f"record-{rank}.jsonl")}
    record = Record()
    torch.set_num_threads(1)
    torch.manual_seed(11)
    model: nn.Module = nn.Sequential(nn.Linear(WIDTH, 16), nn.Dropout(0.3), nn.Linear(16, WIDTH))
    if world > 1:
        model = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    sampler = DistributedSampler(Rows(), world, rank, seed=3)
    loader = StatefulDataLoader(Rows(), BATCH, sampler=sampler, num_workers=config["workers"])
    torch.manual_seed(50 + rank)
    state = {"model": model, "optim": optimizer, "epoch": Epoch(sampler), "loader": loader}
    with Checkpointer(RUN, state, at=config["at"], policy="wait", keep_last=1) as checkpointer:
        if config["from_ray"]:
            step = checkpointer.restore(holdfast_ray.step(ray.train.get_checkpoint(), RUN))
        else:
            step = checkpointer.restore()
        record.began(step)
        while step < config["last"]:
            for rows, batch in loader:
                step += 1
                loss = (model(batch) - batch).square().mean()
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                if step == config["differ"] and rank:
                    _change(model)
                record.step(step, loss.item(), rows)  # a death may come as soon as this step is committed
                if step % EVERY == 0:
                    holdfast_ray.report(checkpointer, step, {"loss": loss.item(), "step": step})
                _dies(work, rank, world, config["die"], step)
                time.sleep(config["pause"])
                if step == config["last"]:
                    break
            else:
                sampler.set_epoch(sampler.epoch + 1)
    plain = model.module if world > 1 else model
    record.ended({**plain.state_dict(), **optimizer_tensors(optimizer)}, [step, sampler.epoch])


def _change(model: nn.Module) -> None:
    """Make this rank's weights others than those of rank 0: the daemon refuses to commit them."""
    with torch.no_grad():
        next(model.parameters()).add_(1)


def _dies(work: Path, rank: int, world: int, plan: list[str], step: int) -> None:
    """Die, now or in a moment, if the next entry of the plan says so; of several ranks another one each time."""
    died = work / "died.txt"
    deaths = len(died.read_text().splitlines()) if died.exists() else 0
    if deaths >= len(plan) or deaths % world != rank:
        return
    when, _, delay = plan[deaths].partition("+")
    if step < int(when):
        return

    def die() -> None:
        with died.open("a") as file:
            file.write(f"{step} {rank}\n")
        os.kill(os.getpid(), signal.SIGKILL)

    if not delay:
        die()
    plan.clear()  # of this start
    timer = threading.Timer(float(delay), die)
    timer.daemon = True
    timer.start()


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--world", type=int, default=1)
    parser.add_argument("--workers", type=int, default=0)
    parser.add_argument("--last", type=int, default=LAST)
    parser.add_argument("--die", nargs="*", default=[])
    parser.add_argument("--pause", type=float, default=0.0, help="seconds after each step")
    parser.add_argument("--differ", type=int, default=0, help="the step at which the ranks' weights begin to differ")
    parser.add_argument("--failures", type=int, default=-1)
    parser.add_argument("--at", default="")
    parser.add_argument("--keep", type=int, default=2)
    parser.add_argument("--from-ray", action="store_true")
    return parser.parse_args()


def main() -> None:
    chosen = arguments()
    work = chosen.work.absolute()
    ray.init(num_cpus=chosen.world, include_dashboard=False, configure_logging=False)
    config = {"work": str(work), "at": chosen.at or str(work / "root"), "workers": chosen.workers, "last": chosen.last}
    config |= {"die": chosen.die, "from_ray": chosen.from_ray, "pause": chosen.pause, "differ": chosen.differ}
    trainer = TorchTrainer(
        train_func,
        train_loop_config=config,
        scaling_config=ray.train.ScalingConfig(num_workers=chosen.world),
        run_config=ray.train.RunConfig(
            name="experiment",
            storage_path=str(work / "ray"),
            failure_config=ray.train.FailureConfig(max_failures=chosen.failures),
            checkpoint_config=ray.train.CheckpointConfig(num_to_keep=chosen.keep),
        ),
    )
    result = trainer.fit()
    print("ended at", holdfast_ray.step(result.checkpoint, RUN), flush=True)
    ray.shutdown()


if __name__ == "__main__":
    main()
