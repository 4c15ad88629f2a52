"""A script that trains with accelerate, saves every few steps and after every epoch, and goes on from the newest save.

Its lines between the marks are those of docs/integrations/accelerate.md.
"""

from __future__ import annotations

import argparse
import random
from pathlib import Path

import numpy as np
import torch
from accelerate import Accelerator, DataLoaderConfiguration
from torch import nn
from torch.utils.data import DataLoader, Dataset

from holdfast.integrations.accelerate import attach
from tests.integrations.recording import Record, optimizer_tensors

ROWS, WIDTH, SAVE_EVERY = 44, 8, 2


class Rows(Dataset):
    """Rows with their number; `noisy` ones are augmented by the process's own random streams."""

    def __init__(self, noisy: bool) -> None:
        self._data = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(7))
        self._noisy = noisy

    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, index: int) -> tuple[int, torch.Tensor]:
        row = self._data[index]
        if self._noisy:
            row = row + torch.randn(WIDTH) + random.random() + float(np.random.rand())
        return index, row


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--workers", type=int, default=0)
    parser.add_argument("--accumulate", type=int, default=1)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--stateful", action="store_true")
    parser.add_argument("--seedable", action="store_true")
    parser.add_argument("--noisy", action="store_true")
    return parser.parse_args()


def main() -> None:
    chosen, record = arguments(), Record()
    torch.manual_seed(11)
    random.seed(11)
    np.random.seed(11)
    model = nn.Sequential(nn.Linear(WIDTH, 16), nn.Dropout(0.3), nn.Linear(16, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 40)
    config = DataLoaderConfiguration(use_stateful_dataloader=chosen.stateful, use_seedable_sampler=chosen.seedable)
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=chosen.accumulate, dataloader_config=config)
    loader = DataLoader(Rows(chosen.noisy), batch_size=2, shuffle=True, num_workers=chosen.workers)
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
    attach(accelerator, "run", at=chosen.work / "root")

    steps = accelerator.load_state()
    record.began(steps)
    per_epoch = -(-len(loader) // chosen.accumulate)  # steps
    for epoch in range(steps // per_epoch, chosen.epochs):
        left = loader
        if steps % per_epoch and not chosen.stateful:
            left = accelerator.skip_first_batches(loader, steps % per_epoch * chosen.accumulate)
        rows: list[int] = []
        for index, batch in left:
            rows += index.tolist()
            with accelerator.accumulate(model):
                loss = model(batch).square().mean()
                accelerator.backward(loss)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            if accelerator.sync_gradients:
                steps += 1
                record.step(steps, loss.item(), rows)
                rows = []
                if steps % SAVE_EVERY == 0:
                    accelerator.save_state(chosen.work / "out" / f"step_{steps}")
        accelerator.save_state(chosen.work / "out" / f"epoch_{epoch}")
    accelerator.end_training()
    plain = accelerator.unwrap_model(model)
    record.ended({**plain.state_dict(), **optimizer_tensors(optimizer.optimizer)}, scheduler.state_dict()["last_epoch"])


if __name__ == "__main__":
    main()
