"""A loop of torch's own with a `Checkpointer`: one process, DDP, FSDP2."""

from __future__ import annotations

import argparse
from typing import Any

import torch
import torch.distributed as dist

from holdfast import Checkpointer
from tests.integrations.matrix import acts, tiny


class Plain:
    """Transformers' Llama under torch's AdamW."""

    def __init__(self, system: str, chosen: argparse.Namespace, seed: int) -> None:
        if system != "one" and not dist.is_initialized():
            dist.init_process_group("gloo")
        self.root = chosen.root
        self.llama = self.model = tiny.llama(seed)
        if system == "ddp":
            self.model = torch.nn.parallel.DistributedDataParallel(self.llama)
        if system == "fsdp2":
            from torch.distributed.fsdp import fully_shard

            for layer in self.llama.model.layers:
                fully_shard(layer)
            fully_shard(self.llama)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)

    def _checkpointer(self, run: str) -> Checkpointer:
        state: dict[str, Any] = {"model": self.model, "optim": self.optimizer}
        return Checkpointer(run, state, at=self.root, assets=[self.llama.config])

    def train(self) -> None:
        for number in range(1, tiny.STEPS + 1):
            tokens = tiny.rows(number)
            self.optimizer.zero_grad()
            tiny.loss_of(self.model(tokens[:, :-1]).logits, tokens).backward()
            self.optimizer.step()

    def save(self, run: str) -> None:
        with self._checkpointer(run) as checkpointer:
            checkpointer.save(tiny.STEPS, wait="durable")

    def load(self, run: str, saved_by: str) -> None:
        with self._checkpointer(run) as checkpointer:
            assert checkpointer.restore(groups=("model", "optim")) == tiny.STEPS

    def loss(self) -> float:
        tokens = tiny.rows(0)
        with torch.no_grad():
            return float(tiny.loss_of(self.model(tokens[:, :-1]).logits, tokens))


if __name__ == "__main__":
    acts.main(Plain)
