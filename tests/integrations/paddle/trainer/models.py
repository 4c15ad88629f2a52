"""Small models of PaddleFormers or PaddleNLP and of Paddle, and data for them, for the training scripts of these tests."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import paddle
from paddle import nn
from paddle.nn import functional

from tests.integrations.paddle.trainer.library import IS_PADDLENLP, LlamaConfig, LlamaForCausalLM

ROWS, TOKENS, WORDS = 44, 8, 32


def item(row: int, drawn: bool) -> dict[str, np.ndarray]:
    """A row of tokens that follow from its number. If `drawn`, it also draws from the generators of Python and numpy."""
    tokens = np.array([(row * 7 + place * 3) % WORDS for place in range(TOKENS)])
    if drawn:
        tokens[random.randrange(TOKENS)] = np.random.randint(WORDS)
    return {"input_ids": tokens, "labels": tokens.copy(), "row": np.array(row)}


class Sentences(paddle.io.Dataset):
    def __init__(self, drawn: bool = False, rows: int = ROWS) -> None:
        self.drawn, self.rows = drawn, rows

    def __len__(self) -> int:
        return self.rows

    def __getitem__(self, row: int) -> dict[str, np.ndarray]:
        return item(row, self.drawn)


class Stream(paddle.io.IterableDataset):
    """Rows without end; `start` says where it begins, for a training that skips no data."""

    def __init__(self, drawn: bool, start: Callable[[], int] = lambda: 0) -> None:
        self.drawn, self.start = drawn, start

    def __iter__(self) -> Iterator[dict[str, np.ndarray]]:
        row = self.start()
        while True:
            yield item(row, self.drawn)
            row += 1


class HalfNet(nn.Layer):
    """Weights of bfloat16, which the optimizer keeps masters of; it computes in float32, as Paddle must on a CPU."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, 16)
        self.hidden, self.out = nn.Linear(16, 16), nn.Linear(16, WORDS)
        self.to(dtype="bfloat16")

    def forward(self, input_ids: Any, labels: Any) -> tuple[Any, Any]:
        embed, *rest = (one.astype("float32") for one in self.parameters())
        hidden = paddle.tanh(functional.linear(embed[input_ids], rest[0], rest[1]))
        logits = functional.linear(functional.dropout(hidden, 0.1, training=self.training), rest[2], rest[3])
        return functional.cross_entropy(logits, labels), logits


def small_llama(dropout: float = 0.1) -> LlamaForCausalLM:
    """About ten thousand parameters, with dropout in PaddleFormers."""
    paddle.seed(0)
    shape = {"vocab_size": WORDS, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 32}
    how = {"attention_dropout": dropout, "fuse_rms_norm": False, "_attn_implementation": "eager"}
    how = {"use_flash_attention": False} if IS_PADDLENLP else how
    return LlamaForCausalLM(LlamaConfig(**shape, **heads, **how))


def half_net() -> HalfNet:
    paddle.seed(0)
    return HalfNet()
