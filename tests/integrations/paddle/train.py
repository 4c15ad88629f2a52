"""Trains a small transformer in Paddle to step STEPS, from wherever the last save was.

`--how plain`: float32, AdamW with decay of some weights only. `--how half`: bfloat16 weights with masters, as in AMP O2,
and a GradScaler whose scale moves. Both accumulate two micro-batches, warm the learning rate up, draw dropout, and shuffle.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import paddle
import torch
from paddle import nn
from paddle.amp import grad_scaler
from paddle.nn import functional

from holdfast.integrations import paddle as holdfast_paddle
from tests.integrations.paddle.half import MasterAdamW, compute_in_float32
from tests.integrations.recording import Record

STEPS, SAVE_EVERY, ROWS, BATCH, ACCUMULATED = 200, 3, 96, 4, 2
WORDS, WIDTH = 32, 16


class Block(nn.Layer):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.query, self.key, self.value, self.out = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: Any) -> Any:
        h = self.norm(x)
        scores = functional.softmax(self.query(h) @ self.key(h).transpose([0, 2, 1]) / WIDTH**0.5, axis=-1)
        x = x + self.dropout(self.out(scores @ self.value(h)))
        return x + self.dropout(self.down(functional.gelu(self.up(x))))


class Model(nn.Layer):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.LayerList([Block() for _ in range(2)])
        self.idle = nn.Linear(WIDTH, 2)  # in no forward: it gets no gradient and no accumulators
        self.head = nn.Linear(WIDTH, WORDS)
        self.register_buffer("seen", paddle.zeros([1], dtype="int64"))

    def forward(self, words: Any) -> Any:
        self.seen += words.shape[0]
        x = self.embed(words)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Scaler(paddle.amp.GradScaler):
    """Paddle enables it on accelerators only, and checks no half precision on a CPU: that is done here in float32."""

    def scale(self, var: Any) -> Any:
        return var * self._scale

    def _unscale(self, optimizer: Any) -> None:
        gradients = [one.grad for one in optimizer._parameter_list if one.grad is not None]
        wide = [one.astype("float32") / self._scale for one in gradients]
        self._found_inf = paddle.to_tensor([not all(bool(one.isfinite().all()) for one in wide)])
        for gradient, value in zip(gradients, wide, strict=True):
            gradient.set_value(value.astype(gradient.dtype))


def scaler_of(how: str) -> Any:
    if how == "plain":
        return paddle.amp.GradScaler(enable=False)
    accelerated = SimpleNamespace(_expected_place=SimpleNamespace(is_gpu_place=lambda: True))
    with mock.patch.object(grad_scaler, "_dygraph_tracer", lambda: accelerated):
        return Scaler(init_loss_scaling=2.0**10, incr_every_n_steps=7)


class Sentences(paddle.io.Dataset):
    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, row: int) -> tuple[int, np.ndarray]:
        return row, np.random.RandomState(row).randint(0, WORDS, 9)


def batches(progress: dict[str, int]) -> Any:
    """Endless micro-batches, from the first row that was not consumed."""
    sampler = paddle.io.DistributedBatchSampler(Sentences(), BATCH, num_replicas=1, rank=0, shuffle=True, drop_last=True)
    while True:
        epoch, begun = divmod(progress["samples"], ROWS)
        sampler.set_epoch(epoch)
        left = list(sampler)[begun // BATCH :]
        yield from paddle.io.DataLoader(Sentences(), batch_sampler=left, places=paddle.CPUPlace())


def train(work: Path, how: str) -> None:
    paddle.set_device("cpu")
    paddle.seed(11)
    record, progress = Record(), {"samples": 0}
    model = Model()
    rate = paddle.optimizer.lr.LinearWarmup(paddle.optimizer.lr.CosineAnnealingDecay(0.01, STEPS), 10, 0.0, 0.01)
    if how == "half":
        model.to(dtype="bfloat16")
        compute_in_float32(model)
    optimizer = MasterAdamW(
        rate,
        parameters=model.parameters(),
        weight_decay=0.05,
        apply_decay_param_fun=lambda name: ".w_" in name,
        multi_precision=True,
        grad_clip=nn.ClipGradByGlobalNorm(1.0) if how == "plain" else None,
    )
    scaler = scaler_of(how)
    root = work / "root"
    attached = holdfast_paddle.attach(
        model, optimizer, "paddle", scaler=scaler, more={"progress": progress}, at=root, policy="wait", keep_last=3
    )
    began = attached.restore()
    record.began(began)
    rows_of = batches(progress)
    for step in range(began + 1, STEPS + 1):
        total, rows = 0.0, []
        for _ in range(ACCUMULATED):
            numbers, words = next(rows_of)
            loss = functional.cross_entropy(model(words[:, :-1]), words[:, 1:]) / ACCUMULATED
            scaler.scale(loss * (float("inf") if how == "half" and step % 13 == 0 else 1.0)).backward()
            total += float(loss)
            rows += numbers.tolist()
            progress["samples"] += BATCH
        scaler.step(optimizer)
        scaler.update()
        optimizer.clear_grad()
        rate.step()
        if step % SAVE_EVERY == 0:
            attached.save(step)
        record.step(step, total, rows)
    attached.close()
    record.ended(tensors(model, optimizer), {"scaler": repr(scaler.state_dict()), "rate": repr(rate.state_dict())})


def tensors(model: Any, optimizer: Any) -> dict[str, torch.Tensor]:
    """Everything that Paddle keeps, by its own names, and the next random numbers."""
    found = {f"model.{name}": tensor for name, tensor in model.state_dict().items()}
    for kind, by_owner in optimizer._accumulators.items():
        found.update({f"{kind}.{owner.removesuffix('_fp32_master_0')}": tensor for owner, tensor in by_owner.items()})
    found.update({f"master.{name}": tensor for name, tensor in optimizer._master_weights.items()})
    found["random"] = paddle.rand([4])
    return {name: torch.utils.dlpack.from_dlpack(tensor.detach()) for name, tensor in found.items()}


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--how", choices=["plain", "half"], default="plain")
    arguments = parser.parse_args()
    train(arguments.work, arguments.how)
