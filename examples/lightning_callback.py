"""A Lightning Trainer with one callback in place of ModelCheckpoint. Needs: pip install lightning

python examples/lightning_callback.py
"""

import argparse

import lightning as L
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from holdfast.integrations.lightning import HoldfastCheckpoint

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=60)
parser.add_argument("--at", help="directory of the checkpoints (default: your daemon's, else ./holdfast-data)")
options = parser.parse_args()


class Regression(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Dropout(0.1), nn.Linear(32, 1))

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
        rows, targets = batch
        return nn.functional.mse_loss(self.net(rows), targets)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=0.01)


rows = torch.randn(256, 8)
loader = DataLoader(TensorDataset(rows, rows.sum(dim=1, keepdim=True)), batch_size=16, shuffle=True)
saves = HoldfastCheckpoint("lightning", at=options.at, every_n_train_steps=10, save_last=True)
trainer = L.Trainer(
    max_steps=options.steps,
    callbacks=[saves],
    default_root_dir="lightning-output",
    logger=False,
    enable_progress_bar=False,
    enable_model_summary=False,
)
trainer.fit(Regression(), loader, ckpt_path="last")  # starts from step 0 if there is no checkpoint
print(f"ended at step {trainer.global_step}", flush=True)
