"""A small real training run that saves as it goes: `python -m tests.wings.console.training SOCKET RUN` until it is ended.

With a step as the third argument, three values of one layer become NaN there: a fault that only numbers show.
"""

from __future__ import annotations

import sys
import time

import torch
from torch import nn

from holdfast import Checkpointer

SAVE_EVERY = 20
STEP_S = 0.02


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(64, 176, bias=False)
        self.up_proj = nn.Linear(64, 176, bias=False)
        self.down_proj = nn.Linear(176, 64, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(nn.functional.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.input_layernorm = nn.RMSNorm(64)
        self.mlp = Mlp()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.mlp(self.input_layernorm(x))


class Model(nn.Module):
    """A llama without attention: names that the layouts' rules know, so that it can be restored in any of them."""

    def __init__(self) -> None:
        super().__init__()
        self.model = nn.Module()
        self.model.embed_tokens = nn.Embedding(512, 64)
        self.model.layers = nn.ModuleList(Layer() for _ in range(6))
        self.model.norm = nn.RMSNorm(64)
        self.lm_head = nn.Linear(64, 512, bias=False)
        self.model.layers[2].register_buffer("scale", torch.ones(64))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.model.embed_tokens(tokens)
        for layer in self.model.layers:
            x = layer(x)
        return self.lm_head(self.model.norm(x))


def main(socket: str, run: str, broken_at: int | None = None) -> None:
    torch.manual_seed(0)
    torch.set_num_threads(1)
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    info = {"command": ["python", "train.py", "--run", run], "directory": "/home/ana/llama"}  # for the pictures
    with Checkpointer(run, {"model": model, "optim": optimizer}, at=socket, info=info) as checkpointer:
        step = checkpointer.restore()
        while True:
            step += 1
            tokens = torch.randint(0, 512, (8, 32))
            loss = nn.functional.cross_entropy(model(tokens).flatten(0, 1), (tokens * 7 % 512).flatten())
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            if step == broken_at:
                model.model.layers[2].scale[:3] = float("nan")
            if step % SAVE_EVERY == 0:
                checkpointer.save(step, metrics={"loss": loss.item()})
            time.sleep(STEP_S)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]) if len(sys.argv) > 3 else None)
