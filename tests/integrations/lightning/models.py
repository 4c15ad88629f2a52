"""Small modules and Trainers for tests in one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning as L
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from holdfast.integrations.lightning import HoldfastCheckpoint
from tests.daemons import RunningDaemon


class Small(L.LightningModule):
    """One layer, Adam, a validation; what it draws is its own."""

    def __init__(self, width: int = 4, rate: float = 0.05) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.net = nn.Linear(width, 2)

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=self.hparams["rate"])

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return self.net(batch[0]).square().mean()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.net(batch[0]).square().mean())

    test_step = validation_step

    def weights(self) -> dict[str, torch.Tensor]:
        return {name: value.detach().clone() for name, value in self.state_dict().items()}


def loader(rows: int = 12) -> DataLoader:
    return DataLoader(TensorDataset(torch.randn(rows, 4, generator=torch.Generator().manual_seed(1))), batch_size=2)


def trainer(directory: Path, *callbacks: Any, **options: Any) -> L.Trainer:
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False, "num_sanity_val_steps": 0}
    given = {"accelerator": "cpu", "max_epochs": 1, "callbacks": list(callbacks), "default_root_dir": directory}
    return L.Trainer(**(quiet | given | options))


def saves(daemon: RunningDaemon, run: str, **options: Any) -> HoldfastCheckpoint:
    return HoldfastCheckpoint(run, at=daemon.socket, **options)


def steps(daemon: RunningDaemon, run: str) -> list[int]:
    """The committed steps of a run."""
    place = daemon.root / run / "checkpoints"
    return sorted(int(path.name.removeprefix("step-")) for path in place.iterdir()) if place.is_dir() else []


def equal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(value, other[name]) for name, value in one.items())
