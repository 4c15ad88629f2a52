"""torch.save and safetensors as tutorials use them: a plain call with a path, and nothing around it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from benchmarks.state import State

STEP = "step"


class PlainFiles:
    """One file that each save overwrites, or a file for each step, of which the newest is loaded."""

    def __init__(self, directory: Path, state: State, variant: str) -> None:
        self._directory, self._state, self._variant = directory, state, variant
        self._suffix = "safetensors" if variant == "safetensors" else "pt"

    def save(self, step: int) -> None:
        if self._variant == "safetensors":
            save_file(self._state.tensors, self._file(step))
        else:
            torch.save({"model": self._state.tensors, STEP: step}, self._file(step))

    def wait(self) -> None:
        """It was complete when save() returned."""

    def close(self) -> None:
        """Nothing is held."""

    def resume(self) -> int:
        if self._variant == "one":
            return self._load(self._file(0)) if self._file(0).exists() else 0
        steps = [int(path.stem.partition("-")[2]) for path in self._directory.glob(f"checkpoint-*.{self._suffix}")]
        if not steps:
            return 0
        self.load(max(steps))
        return max(steps)

    def load(self, step: int) -> None:
        self._load(self._file(step))

    def _load(self, path: Path) -> int:
        """The step that the file says it is; 0 where it has no place to say so."""
        if self._variant == "safetensors":
            tensors, step = load_file(path), 0
        else:
            found: dict[str, Any] = torch.load(path, weights_only=True)
            tensors, step = found["model"], int(found[STEP])
        for name, tensor in self._state.tensors.items():
            tensor.copy_(tensors[name])
        return step

    def _file(self, step: int) -> Path:
        name = "checkpoint" if self._variant == "one" else f"checkpoint-{step}"
        return self._directory / f"{name}.{self._suffix}"


def open_peer(directory: Path, state: State, variant: str) -> PlainFiles:
    return PlainFiles(directory, state, variant)
