"""The demo's text: Python's own standard library as bytes, in a resumable order."""

from __future__ import annotations

import random
import sysconfig
from pathlib import Path
from typing import Any

import numpy as np

TEXT_BYTES = 200_000
PAD, END, FIRST_BYTE = 0, 1, 3  # tokens of `ByT5Tokenizer`
VOCABULARY = FIRST_BYTE + 256
NOISE = 0.02  # share of input bytes replaced, so that numpy's generator matters


def read_text(limit: int = TEXT_BYTES) -> np.ndarray:
    """The first `limit` tokens of the standard library's top-level modules, in order of their names."""
    pieces: list[np.ndarray] = []
    length = 0
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        if length >= limit:
            break
        source = np.frombuffer(path.read_bytes(), np.uint8).astype(np.int64)
        pieces.append(np.append(source + FIRST_BYTE, END))
        length += len(pieces[-1])
    return np.concatenate(pieces)[:limit]


class ShuffledWindows:
    """Batches of windows of a text, shuffled again in every epoch; each rank takes its share of each batch.

    The order is global, so that the position means the same for any number of ranks.
    """

    def __init__(self, text: np.ndarray, window: int, batch: int, seed: int) -> None:
        self._text, self._window, self._batch, self._seed = text, window, batch, seed
        self._begin_epoch(0)

    def next_batch(self, rank: int, world: int) -> tuple[np.ndarray, np.ndarray]:
        """This rank's inputs, a few bytes of them replaced by noise, and targets of the next global batch."""
        if self._position + self._batch * world > len(self._order):
            self._begin_epoch(self._epoch + 1)
        mine = self._order[self._position + rank : self._position + self._batch * world : world]
        self._position += self._batch * world
        starts = [index * self._window + random.randrange(self._window) for index in mine]
        targets = np.stack([self._text[start : start + self._window] for start in starts])
        noise = np.random.random(targets.shape) < NOISE
        return np.where(noise, np.random.randint(FIRST_BYTE, VOCABULARY, targets.shape), targets), targets

    def state_dict(self) -> dict[str, Any]:
        return {"seed": self._seed, "epoch": self._epoch, "position": self._position}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._seed = state["seed"]
        self._begin_epoch(state["epoch"])
        self._position = state["position"]

    def _begin_epoch(self, epoch: int) -> None:
        self._epoch, self._position = epoch, 0
        self._order = list(range(len(self._text) // self._window - 1))
        random.Random(f"{self._seed} {epoch}").shuffle(self._order)
