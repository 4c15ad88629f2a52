"""Orbax's CheckpointManager with its defaults, which save in the background; the same bytes as jax arrays."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from typing import Any

import jax
import ml_dtypes
import numpy as np
import orbax.checkpoint as ocp
import torch

from benchmarks.state import State

DTYPES = {torch.bfloat16: np.dtype(ml_dtypes.bfloat16), torch.float32: np.dtype(np.float32)}


class OrbaxManager:
    def __init__(self, directory: Path, state: State) -> None:
        self._state = state
        self._manager = ocp.CheckpointManager(directory.absolute())

    def save(self, step: int) -> None:
        tree = self._tree(lambda tensor: jax.numpy.array(_array(tensor), copy=True))
        self._manager.save(step, args=ocp.args.StandardSave(tree))

    def wait(self) -> None:
        self._manager.wait_until_finished()

    def close(self) -> None:
        self._manager.close()

    def resume(self) -> int:
        step = self._manager.latest_step()
        if step is None:
            return 0
        self.load(step)
        return int(step)

    def load(self, step: int) -> None:
        like = self._tree(lambda tensor: jax.ShapeDtypeStruct(tuple(tensor.shape), DTYPES[tensor.dtype]))
        found = self._manager.restore(step, args=ocp.args.StandardRestore(like))
        for name, tensor in self._state.tensors.items():
            group, _, rest = name.partition("/")
            _array(tensor)[...] = np.asarray(found[group][rest])

    def _tree(self, convert: Any) -> dict[str, dict[str, Any]]:
        tree: dict[str, dict[str, Any]] = defaultdict(dict)
        for name, tensor in self._state.tensors.items():
            group, _, rest = name.partition("/")
            tree[group][rest] = convert(tensor)
        return dict(tree)


def _array(tensor: torch.Tensor) -> np.ndarray:
    """The tensor's own memory; torch hands bfloat16 to numpy as raw words only."""
    array: np.ndarray = tensor.view(torch.uint8).numpy().view(DTYPES[tensor.dtype]).reshape(tuple(tensor.shape))
    return array


def open_peer(directory: Path, state: State, variant: str) -> OrbaxManager:
    return OrbaxManager(directory, state)
