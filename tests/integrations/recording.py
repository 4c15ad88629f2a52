"""What a training script of these tests writes down: every step's loss and rows, and in the end a digest of everything."""

from __future__ import annotations

import hashlib
import json
import os
import signal
from collections.abc import Iterable, Mapping
from pathlib import Path

import torch

RECORD, DIE_AT = "RECORD", "DIE_AT"  # names in the environment of a script


class Record:
    """Lines of JSON in the file that the environment names; also those of starts that were killed stay in it.

    The process kills itself, at once and by SIGKILL, after the step that the environment names, or a later one if it begins
    there.
    """

    def __init__(self) -> None:
        self._path = Path(os.environ[RECORD])
        self._die_at = int(os.environ.get(DIE_AT, "-1"))  # -1: at none

    def began(self, step: int) -> None:
        """Training begins behind this step: 0 if it begins anew."""
        self._add({"began": step})

    def step(self, step: int, loss: float, rows: Iterable[int] = ()) -> None:
        """A step was made, on these rows of the data."""
        self._add({"step": step, "loss": float(loss).hex(), "rows": [int(row) for row in rows]})
        if 0 <= self._die_at <= step:
            os.kill(os.getpid(), signal.SIGKILL)

    def ended(self, tensors: Mapping[str, torch.Tensor], values: object = None) -> None:
        """Training has come to its end with these tensors; `values` is anything else, as JSON."""
        digests = {name: digest(tensor) for name, tensor in sorted(tensors.items())}
        self._add({"end": digests, "values": values})

    def _add(self, line: Mapping[str, object]) -> None:
        with self._path.open("a") as file:
            file.write(json.dumps(line) + "\n")


def digest(tensor: torch.Tensor) -> str:
    """Shape, dtype and every bit of a tensor."""
    plain = tensor.detach().cpu().contiguous()
    data = plain.reshape(-1).view(torch.uint8).numpy().tobytes() if plain.numel() else b""
    return f"{plain.dtype} {list(plain.shape)} {hashlib.sha256(data).hexdigest()}"


def optimizer_tensors(optimizer: torch.optim.Optimizer, prefix: str = "optim") -> dict[str, torch.Tensor]:
    """The tensors of an optimizer's state, by the position of their parameter."""
    state = optimizer.state_dict()["state"]
    return {
        f"{prefix}.{index}.{key}": value
        for index, kept in state.items()
        for key, value in kept.items()
        if isinstance(value, torch.Tensor)
    }
