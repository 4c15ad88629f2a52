import lightning as L
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from holdfast.integrations.lightning import HoldfastCheckpoint


class Regression(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Dropout(0.1), nn.Linear(32, 1))

    def training_step(self, batch, batch_idx):
        rows, targets = batch
        return nn.functional.mse_loss(self.net(rows), targets)

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=0.01)


rows = torch.randn(256, 8)
loader = DataLoader(TensorDataset(rows, rows.sum(dim=1, keepdim=True)), batch_size=16, shuffle=True)
saves = HoldfastCheckpoint("example", at="checkpoints", every_n_train_steps=10, save_last=True)
trainer = L.Trainer(accelerator="cpu", max_epochs=3, callbacks=[saves], default_root_dir="output", logger=False)
trainer.fit(Regression(), loader, ckpt_path="last")
