"""Trains a tiny model with DeepSpeed from wherever the last save was, and keeps a record: the script of E1.

This is also the example of docs/integrations/deepspeed.md.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import Dataset
from torchdata.stateful_dataloader import StatefulDataLoader

from holdfast.integrations import deepspeed as holdfast_deepspeed
from tests.integrations.deepspeed import engines
from tests.integrations.recording import Record

ROWS, EVERY = 56, 3


class Rows(Dataset[Any]):
    """Rows of numbers that say which row they are."""

    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, index: int) -> tuple[int, torch.Tensor]:
        return index, torch.randint(0, engines.VOCABULARY, (7,), generator=torch.Generator().manual_seed(index))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--work", type=Path)
    parser.add_argument("--stage", type=int, default=1)
    parser.add_argument("--kind", default="fp32")
    parser.add_argument("--workers", type=int, default=0)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--accumulate", type=int, default=1)
    chosen = parser.parse_args()
    record = Record()
    config = engines.config(chosen.stage, chosen.kind, gradient_accumulation_steps=chosen.accumulate)
    engine = engines.engine(config)
    torch.manual_seed(engine.global_rank)
    loader = StatefulDataLoader(Rows(), batch_size=4, shuffle=True, num_workers=chosen.workers)
    holdfast_deepspeed.attach(engine, "run", at=chosen.work / "checkpoints", state={"loader": loader})
    _, client_state = engine.load_checkpoint(chosen.work / "saves")
    epoch = client_state["epoch"] if client_state else 0
    record.began(engine.global_steps)
    while engine.global_steps < chosen.steps:
        losses, seen = [], []
        for rows, data in loader:
            losses.append(engines.step(engine, data))
            seen += rows.tolist()
            if engine.micro_steps % chosen.accumulate == 0:
                if engine.global_steps % EVERY == 0:
                    engine.save_checkpoint(chosen.work / "saves", client_state={"epoch": epoch})
                record.step(engine.global_steps, sum(losses), seen)
                losses, seen = [], []
            if engine.global_steps >= chosen.steps:
                break
        epoch += 1
    record.ended(engines.tensors(engine), {"epoch": epoch, "scale": engine.loss_scale() if chosen.kind == "fp16" else 1})


if __name__ == "__main__":
    main()
