"""A llama3 of torchtitan with some ten thousand parameters, rows of numbers that are shuffled anew in every epoch, and a
configuration of torchtitan's Trainer for both.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tests.integrations.torchtitan.on_cpu  # noqa: F401 - before torchtitan

# isort: split
import torch
import torchtitan.distributed.utils
from torch.utils.data import IterableDataset
from torchtitan.components.checkpointer import BaseCheckpointManager
from torchtitan.components.dataloader import ParallelAwareDataloader
from torchtitan.components.loss import CrossEntropyLoss
from torchtitan.components.metrics import MetricsProcessor
from torchtitan.components.optimizer import LRSchedulersContainer, default_adamw
from torchtitan.components.tokenizer import BaseTokenizer
from torchtitan.components.validate import Validator
from torchtitan.config import ParallelismConfig, TrainingConfig
from torchtitan.config.configs import DebugConfig
from torchtitan.distributed.pipeline_parallel import pipeline_llm
from torchtitan.models.common import ComplexRoPE, Embedding, Linear, RMSNorm
from torchtitan.models.common.attention import ScaledDotProductAttention
from torchtitan.models.llama3 import (
    _EMBEDDING_INIT,
    _NORM_INIT,
    Llama3Model,
    _build_llama3_layers,
    _output_linear_init,
    parallelize_llama,
)
from torchtitan.models.llama3.state_dict_adapter import Llama3StateDictAdapter
from torchtitan.protocols.model_spec import ModelSpec
from torchtitan.trainer import Trainer

torchtitan.distributed.utils.set_pg_timeouts = lambda **_: None  # its barrier names a device, which gloo has not

VOCABULARY, WIDTH, LAYERS, HEADS, LENGTH, ROWS = 64, 32, 2, 4, 8, 44


class Words(BaseTokenizer):
    """Stands in for a tokenizer: the rows are numbers already."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseTokenizer.Config):
        pass

    def __init__(self, config: Config, *, tokenizer_path: str) -> None:
        super().__init__()

    def encode(self, *args: Any, **kwargs: Any) -> list[int]:
        return [int(word) for word in args[0].split()]

    def decode(self, *args: Any, **kwargs: Any) -> str:
        return " ".join(map(str, args[0]))

    def get_vocab_size(self) -> int:
        return VOCABULARY


class Rows(IterableDataset[tuple[dict[str, torch.Tensor], torch.Tensor]]):
    """Rows that begin with their number, for one data-parallel rank; each epoch has an order of its own, without an end."""

    def __init__(self, rank: int, world: int) -> None:
        self._data = torch.randint(0, VOCABULARY, (ROWS, LENGTH + 1), generator=torch.Generator().manual_seed(7))
        self._data[:, 0] = torch.arange(ROWS)
        self._rank, self._world = rank, world
        self._epoch, self._given = 0, 0

    def __iter__(self) -> Iterator[tuple[dict[str, torch.Tensor], torch.Tensor]]:
        while True:
            order = torch.randperm(ROWS, generator=torch.Generator().manual_seed(self._epoch)).tolist()
            mine = order[self._rank :: self._world]
            while self._given < len(mine):
                row = self._data[mine[self._given]]
                self._given += 1
                yield {"input": row[:-1]}, row[1:]
            self._epoch, self._given = self._epoch + 1, 0

    def state_dict(self) -> dict[str, int]:
        return {"epoch": self._epoch, "given": self._given}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self._epoch, self._given = state["epoch"], state["given"]


class RowLoader(ParallelAwareDataloader):
    """Batches of rows."""

    @dataclass(kw_only=True, slots=True)
    class Config(ParallelAwareDataloader.Config):
        pass

    def __init__(self, config: Config, *, dp_world_size: int, dp_rank: int, local_batch_size: int, **others: Any) -> None:
        super().__init__(
            Rows(dp_rank, dp_world_size),
            dp_rank,
            dp_world_size,
            batch_size=local_batch_size,
            num_workers=config.num_workers,
            snapshot_every_n_steps=others["snapshot_every_n_steps"],
        )


def world() -> int:
    """How many ranks train."""
    return int(os.environ["WORLD_SIZE"])


def model_config() -> Llama3Model.Config:
    layers = _build_llama3_layers(
        n_layers=LAYERS,
        dim=WIDTH,
        n_heads=HEADS,
        n_kv_heads=2,
        hidden_dim=2 * WIDTH,
        rope=ComplexRoPE.Config(dim=WIDTH // HEADS, max_seq_len=64, theta=10000, scaling="none"),
        attn_backend="flex",
    )
    for layer in layers:  # flex_attention is to be compiled, which these tests have no time for
        layer.attention.inner_attention = ScaledDotProductAttention.Config()
    return Llama3Model.Config(
        dim=WIDTH,
        vocab_size=VOCABULARY,
        tok_embeddings=Embedding.Config(num_embeddings=VOCABULARY, embedding_dim=WIDTH, param_init=_EMBEDDING_INIT),
        norm=RMSNorm.Config(normalized_shape=WIDTH, param_init=_NORM_INIT),
        lm_head=Linear.Config(in_features=WIDTH, out_features=VOCABULARY, param_init=_output_linear_init(WIDTH)),
        layers=layers,
    )


def trainer_config(
    work: Path, steps: int, checkpoint: BaseCheckpointManager.Config, workers: int = 0, **parallel: Any
) -> Trainer.Config:
    """A Trainer's configuration; everything that it writes is below `work`."""
    spec = ModelSpec(
        name="llama3",
        flavor="tiny",
        model=model_config(),
        parallelize_fn=parallelize_llama,
        pipelining_fn=pipeline_llm,
        post_optimizer_build_fn=None,
        state_dict_adapter=Llama3StateDictAdapter,
    )
    return Trainer.Config(
        model_spec=spec,
        hf_assets_path=str(work / "assets"),
        dump_folder=str(work / "out"),
        loss=CrossEntropyLoss.Config(global_vocab_size=VOCABULARY),
        metrics=MetricsProcessor.Config(log_freq=1, disable_color_printing=True),
        tokenizer=Words.Config(),
        dataloader=RowLoader.Config(num_workers=workers),
        optimizer=default_adamw(lr=0.01, fused=False, foreach=False),
        lr_scheduler=LRSchedulersContainer.Config(warmup_steps=3, total_steps=40),
        training=TrainingConfig(
            local_batch_size=2, seq_len=LENGTH, steps=steps, disable_cuda_graphs=True, mixed_precision_param="float32"
        ),
        parallelism=ParallelismConfig(**{"spmd_backend": "partial_dtensor", **parallel}),
        checkpoint=checkpoint,
        activation_checkpoint=None,
        validator=Validator.Config(enable=False),
        debug=DebugConfig(seed=11, enable_structured_logging=False),
    )
