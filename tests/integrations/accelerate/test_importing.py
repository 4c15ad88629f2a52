"""What accelerate's own `save_state()` wrote, imported: a script goes on from it as the one that wrote it did."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator, DataLoaderConfiguration
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from holdfast.integrations.accelerate import attach
from tests.daemons import RunningDaemon
from tests.kit.commands import call
from tests.kit.daemons import own_daemon, run

__all__ = ["run"]

daemon = own_daemon(listen="none")
FIRST, STEPS = 6, 26


class Counter:
    """An object that scripts register."""

    def __init__(self) -> None:
        self.held: dict[str, Any] = {"seen": 0, "sums": torch.zeros(2)}

    def state_dict(self) -> dict[str, Any]:
        return self.held

    def load_state_dict(self, held: dict[str, Any]) -> None:
        self.held = held


class Script:
    """Two models and optimizers, one of two groups, with dropout and shuffled rows."""

    def __init__(self) -> None:
        torch.manual_seed(3)
        self.accelerator = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(use_seedable_sampler=True))
        model = nn.Sequential(nn.Linear(4, 16), nn.Dropout(0.3), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 1))
        second = nn.Linear(1, 1)
        vectors = [one for one in model.parameters() if one.dim() == 1]
        matrices = [one for one in model.parameters() if one.dim() > 1]
        optimizer = torch.optim.AdamW([{"params": matrices}, {"params": vectors, "weight_decay": 0.0}], lr=1e-2)
        other = torch.optim.SGD(second.parameters(), lr=1e-2, momentum=0.9)
        loader = DataLoader(TensorDataset(torch.arange(120.0).reshape(30, 4) / 100), batch_size=1, shuffle=True)
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 100)
        self.counter, self.losses = Counter(), list[float]()
        prepared = self.accelerator.prepare(model, second, optimizer, other, loader, scheduler)
        self.model, self.second, self.optimizer, self.other, self.loader, self.scheduler = prepared
        self.accelerator.register_for_checkpointing(self.counter)

    def train(self, first: int = 0, save: Path | None = None) -> None:
        rows: Any = self.accelerator.skip_first_batches(self.loader, first) if first else self.loader
        for number, (batch,) in enumerate(rows, first + 1):
            self.optimizer.zero_grad()
            self.other.zero_grad()
            loss = (self.second(self.model(batch)) - 1).square().mean()
            self.accelerator.backward(loss)
            self.optimizer.step()
            self.other.step()
            self.scheduler.step()
            self.losses.append(float(loss.detach()))
            self.counter.held["seen"] += 1
            if number == FIRST and save is not None:
                self.accelerator.save_state(str(save))
            if number == STEPS:
                return


def test_the_next_twenty_steps_are_equal(daemon: RunningDaemon, run: str, tmp_path: Path) -> None:
    """The streams of the save begin with the first batch that is not skipped, which accelerate's own files do not do."""
    original = Script()
    original.train(save=tmp_path / "saved")
    result = call("import", tmp_path / "saved", f"{run}@{FIRST}", "--root", daemon.root)
    assert result.exit_code == 0, result.output
    script = Script()
    checkpoints = attach(script.accelerator, run, at=daemon.root)
    assert script.accelerator.load_state() == FIRST == checkpoints.optimizer_steps
    assert script.counter.held["seen"] == FIRST
    script.train(first=FIRST)
    script.accelerator.end_training()
    assert len(script.losses) == STEPS - FIRST and script.losses == original.losses[FIRST:]
    assert script.counter.held["seen"] == STEPS
    for one, two in ((script.model, original.model), (script.second, original.second)):
        held = two.state_dict()
        assert all(torch.equal(value, held[name]) for name, value in one.state_dict().items())
