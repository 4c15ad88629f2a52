"""The demo's trainer: what it computes in, and that its state does not depend on that."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist

from holdfast.demo.model import VOCABULARY
from holdfast.demo.train import Trainer


@pytest.fixture
def alone() -> Iterator[None]:
    """A process group of this process only."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_the_passes_compute_in_float32_on_a_processor(alone: None) -> None:
    """The whole model does, from the embeddings to the logits, while the weights are bf16."""
    trainer = Trainer(4)
    logits = trainer.model(input_ids=torch.arange(8).reshape(1, 8)).logits
    assert logits.shape == (1, 8, VOCABULARY) and logits.dtype == torch.float32
    assert {weight.dtype for weight in trainer.weights.values()} == {torch.bfloat16}


def test_a_step_in_float32_keeps_weights_in_bf16_and_masters_in_fp32(alone: None) -> None:
    """What a checkpoint holds is the same whatever the passes compute in, and training moves it."""
    trainer = Trainer(4)
    before = {name: master.detach().to_local().clone() for name, master in trainer.master.items()}
    assert trainer.step() > 0
    assert {weight.dtype for weight in trainer.weights.values()} == {torch.bfloat16}
    for held in (trainer.master, trainer.ema):
        assert {tensor.dtype for tensor in held.values()} == {torch.float32}
    for name, master in trainer.master.items():
        local = master.detach().to_local()
        assert not torch.equal(local, before[name]), name
        assert torch.equal(trainer.weights[name].detach().to_local(), local.bfloat16()), name
