"""A small GPT-2, and data for it, for the training scripts of these tests."""

from __future__ import annotations

import random

import numpy as np
import torch
from torch.utils.data import Dataset
from transformers import GPT2Config, GPT2LMHeadModel

ROWS, TOKENS, WORDS = 22, 8, 32


class Sentences(Dataset):
    """Rows of tokens that follow from their number. If `drawn`, an item also draws from every global generator."""

    def __init__(self, drawn: bool = False, rows: int = ROWS) -> None:
        self.drawn, self.rows = drawn, rows

    def __len__(self) -> int:
        return self.rows

    def __getitem__(self, row: int) -> dict[str, torch.Tensor]:
        if row >= self.rows:
            raise IndexError(row)  # a plain `for` ends by it
        tokens = torch.tensor([(row * 7 + place * 3) % WORDS for place in range(TOKENS)])
        if self.drawn:
            tokens[random.randrange(TOKENS)] = int(np.random.randint(WORDS))
            tokens[int(torch.randint(TOKENS, ()))] = int(torch.randint(WORDS, ()))
        return {"input_ids": tokens, "labels": tokens.clone(), "row": torch.tensor(row)}


def small_model() -> GPT2LMHeadModel:
    """About eight thousand parameters, with dropout."""
    torch.manual_seed(0)
    shape = {"n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": TOKENS, "vocab_size": WORDS}
    return GPT2LMHeadModel(GPT2Config(**shape, resid_pdrop=0.1, embd_pdrop=0.1, attn_pdrop=0.1))
