"""A script that trains with Lightning as its options say, and goes on from the newest save; example.py is the short one."""

from __future__ import annotations

import argparse
import random
from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
import torch
from lightning.pytorch.callbacks import Callback, EMAWeightAveraging, ModelCheckpoint
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset
from torchdata.stateful_dataloader import StatefulDataLoader

from holdfast.integrations.lightning import HoldfastCheckpoint
from tests.integrations.recording import Record, optimizer_tensors

ROWS, WIDTH, SAVE_EVERY = 44, 8, 2


class Rows(Dataset):
    """Rows with their number; `noisy` ones are augmented by the process's own random streams."""

    def __init__(self, noisy: bool = False) -> None:
        self._data = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(7))
        self._noisy = noisy

    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, index: int) -> tuple[int, torch.Tensor]:
        row = self._data[index]
        if self._noisy:
            row = row + torch.randn(WIDTH) + random.random() + float(np.random.rand())
        return index, row


class Stream(IterableDataset):
    """Rows without a length, in an order drawn from the process's own streams, which knows where it is."""

    def __init__(self, stateful: bool) -> None:
        self._rows, self._stateful, self._order, self._given = Rows(), stateful, [], 0

    def __iter__(self) -> Any:
        if not self._order or self._given == len(self._order):
            self._order, self._given = torch.randperm(ROWS).tolist(), 0
        while self._given < len(self._order):
            self._given += 1
            index, row = self._rows[self._order[self._given - 1]]
            yield index, row + torch.randn(WIDTH)
        self._order = []

    def state_dict(self) -> dict[str, Any]:
        return {"order": self._order, "given": self._given}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._order, self._given = list(state["order"]), state["given"]


class Tiny(L.LightningModule):
    """Dropout, a schedule, a hook that changes weights after the step, and losses and rows for the record."""

    def __init__(self, options: argparse.Namespace) -> None:
        super().__init__()
        self.save_hyperparameters({"width": WIDTH})
        self.net = nn.Sequential(nn.Linear(WIDTH, 16), nn.BatchNorm1d(16), nn.Dropout(0.3), nn.Linear(16, 1))
        self.register_buffer("slow", torch.zeros(16, WIDTH))
        self.options = options
        self.rows: list[int] = []
        self.losses: list[float] = []
        self.automatic_optimization = not options.manual

    def configure_model(self) -> None:
        if self.options.strategy == "fsdp2" and self.options.world > 1:
            from torch.distributed.fsdp import fully_shard

            fully_shard(self.net[0], mesh=self.device_mesh["data_parallel"])
            fully_shard(self.net, mesh=self.device_mesh["data_parallel"])

    def configure_optimizers(self) -> Any:
        if self.options.manual:
            body = torch.optim.AdamW(self.net[0].parameters(), lr=0.01)
            return [body, torch.optim.SGD(self.net[3].parameters(), lr=0.01, momentum=0.9)]
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.01)
        if self.options.plateau:
            schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, factor=0.7)
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "monitor": "val_loss"}}
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 80)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    def _loss(self, batch: Any) -> torch.Tensor:
        index, rows = batch
        self.rows += index.tolist()
        loss = self.net(rows).square().mean()
        self.losses.append(float(loss.detach()))
        return loss

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor | None:
        loss = self._loss(batch)
        if not self.options.manual:
            return loss
        self.manual_backward(loss)
        optimizers = self.optimizers()
        optimizers[batch_idx % 2].step()
        for optimizer in optimizers:
            optimizer.zero_grad()
        return None

    def on_train_batch_end(self, *_: Any) -> None:
        if self.options.strategy != "fsdp2":
            self.slow.lerp_(self.net[0].weight.detach(), 0.1 + 0.1 * torch.rand(()).item())

    def on_train_epoch_end(self) -> None:
        torch.rand(1)

    def on_train_epoch_start(self) -> None:
        torch.rand(2)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.net(batch[1]).square().mean(), batch_size=2)


class Notes(Callback):
    """Writes the record: a line for every step of the optimizer."""

    def __init__(self, record: Record) -> None:
        self._record, self._done = record, 0

    def on_train_start(self, trainer: Any, module: Any) -> None:
        self._done = trainer.global_step
        self._record.began(self._done)

    def on_train_batch_end(self, trainer: Any, module: Any, *_: Any) -> None:
        """Before anything is saved of this step."""
        if trainer.global_step > self._done:
            self._flush(trainer, module)

    def _flush(self, trainer: Any, module: Any) -> None:
        self._done = trainer.global_step
        losses, rows = list(module.losses), list(module.rows)
        module.losses.clear()
        module.rows.clear()
        self._record.step(self._done, sum(losses), rows)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--work", type=Path, required=True)
    for name, default in (("workers", 0), ("accumulate", 1), ("epochs", 3), ("world", 1), ("max-steps", -1)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--val-every", type=float, default=1.0)
    parser.add_argument("--strategy", default="auto")
    flags = "stateful", "noisy", "stream", "validate", "plateau", "manual", "ema", "best", "top", "every-epoch", "persistent"
    for flag in flags:
        parser.add_argument(f"--{flag}", action="store_true")
    return parser.parse_args()


def loader(options: argparse.Namespace) -> DataLoader:
    kind = StatefulDataLoader if options.stateful else DataLoader
    if options.stream:
        return kind(Stream(options.stateful), batch_size=2, num_workers=options.workers)
    more = {"num_workers": options.workers, "persistent_workers": options.persistent}
    return kind(Rows(options.noisy), batch_size=2, shuffle=True, drop_last=True, **more)


def trainer_of(options: argparse.Namespace, callbacks: list[Any]) -> L.Trainer:
    chosen: dict[str, Any] = {"auto": "ddp" if options.world > 1 else "auto", "fsdp2": "auto"}
    strategy = chosen.get(options.strategy, options.strategy)
    if options.strategy == "fsdp2" and options.world > 1:
        strategy = ModelParallelStrategy(data_parallel_size=options.world, tensor_parallel_size=1)
    validation = {"val_check_interval": int(options.val_every) if options.val_every > 1 else options.val_every}
    return L.Trainer(
        accelerator="cpu",
        devices=options.world,
        strategy=strategy,
        max_epochs=options.epochs if options.max_steps < 0 else None,
        max_steps=options.max_steps,
        accumulate_grad_batches=options.accumulate,
        callbacks=callbacks,
        default_root_dir=options.work / "out",
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        limit_val_batches=None if options.validate else 0,
        num_sanity_val_steps=0,
        **(validation if options.validate else {}),
    )


def main() -> None:
    options, record = arguments(), Record()
    L.seed_everything(11, verbose=False)
    how: dict[str, Any] = {"every_n_train_steps": SAVE_EVERY, "save_last": True}
    if options.every_epoch:
        how = {"every_n_epochs": 1}
    if options.best:
        how = {"monitor": "val_loss", "save_top_k": 2}
    saves = HoldfastCheckpoint("run", at=options.work / "root", **how)
    callbacks = [Notes(record), saves]
    if options.top:
        callbacks.append(ModelCheckpoint(options.work / "top", monitor="val_loss", save_top_k=2))
    if options.ema:
        callbacks.append(EMAWeightAveraging(decay=0.9))
    model = Tiny(options)
    trainer = trainer_of(options, callbacks)
    held_out = DataLoader(Rows(), batch_size=2) if options.validate else None
    trainer.fit(model, loader(options), held_out, ckpt_path="last")
    tensors = {name: value.full_tensor() if hasattr(value, "full_tensor") else value for name, value in _tensors(model)}
    for index, optimizer in enumerate(trainer.optimizers):
        for name, value in optimizer_tensors(optimizer, f"optim{index}").items():
            tensors[name] = value.full_tensor() if hasattr(value, "full_tensor") else value
    rates = [group["lr"] for optimizer in trainer.optimizers for group in optimizer.param_groups]
    names = sorted(str(path.relative_to(options.work)) for path in options.work.glob("*/**/*.ckpt"))
    record.ended(tensors, [rates, names, trainer.current_epoch, trainer.global_step])


def _tensors(model: nn.Module) -> list[tuple[str, torch.Tensor]]:
    return list(model.state_dict().items())


if __name__ == "__main__":
    main()
