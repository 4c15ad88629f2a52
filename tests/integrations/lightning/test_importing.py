"""Lightning's own `.ckpt`, imported: a Trainer with our callback goes on from it as the one that wrote it did."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from holdfast.integrations.lightning import HoldfastCheckpoint
from tests.daemons import RunningDaemon
from tests.kit.commands import call
from tests.kit.daemons import own_daemon, run

__all__ = ["run"]

daemon = own_daemon()
FIRST, EPOCHS, BATCHES = 20, 4, 10


class Module(L.LightningModule):
    """Two groups of parameters, whose optimizer has no names, and a schedule."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.net = nn.Sequential(nn.Linear(4, width), nn.ReLU(), nn.Linear(width, 1))
        self.losses: list[float] = []

    def training_step(self, batch: Any, index: int) -> torch.Tensor:
        loss = (self.net(batch[0]) - 1).square().mean()
        self.losses.append(float(loss.detach()))
        return loss

    def configure_optimizers(self) -> Any:
        vectors = [one for one in self.parameters() if one.dim() == 1]
        matrices = [one for one in self.parameters() if one.dim() > 1]
        optimizer = torch.optim.AdamW([{"params": matrices}, {"params": vectors, "weight_decay": 0.0}], lr=1e-2)
        return [optimizer], [torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 100)]


def fitted(place: Path, callback: Any, resumed: str | None = None) -> Module:
    torch.manual_seed(1)
    module = Module()
    rows = DataLoader(TensorDataset(torch.arange(80.0).reshape(20, 4) / 100), batch_size=2)
    quiet: dict[str, Any] = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    trainer = L.Trainer(default_root_dir=place, max_epochs=EPOCHS, accelerator="cpu", callbacks=[callback], **quiet)
    trainer.fit(module, rows, ckpt_path=resumed)
    return module


def test_the_next_twenty_steps_are_equal(daemon: RunningDaemon, run: str, tmp_path: Path) -> None:
    """From the end of an epoch, where Lightning's own file has all of the position."""
    original = fitted(
        tmp_path / "own", ModelCheckpoint(tmp_path / "own", every_n_epochs=1, save_top_k=-1, filename="{step}")
    )
    source = tmp_path / "source"
    source.mkdir()
    (tmp_path / "own" / f"step={FIRST}.ckpt").rename(source / "last.ckpt")
    result = call("import", source, f"{run}@{FIRST}", "--root", daemon.root)
    assert result.exit_code == 0, result.output
    module = fitted(tmp_path / "again", HoldfastCheckpoint(run, at=daemon.root), resumed="last")
    assert len(module.losses) == EPOCHS * BATCHES - FIRST
    assert module.losses == original.losses[FIRST:]
    held = original.state_dict()
    assert all(torch.equal(value, held[name]) for name, value in module.state_dict().items())
