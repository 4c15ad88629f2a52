"""Compares what two runs hold of model and optimizer: whole tensors, by name, dtype, shape and bytes."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from safetensors import safe_open

import holdfast
from tests.integrations.matrix.tiny import STEPS
from tests.integrations.recording import digest

GROUPS = ("model", "optim")
Contents = dict[str, str]  # dtype, shape and digest of the bytes, by `group/name`


class Cell(NamedTuple):
    """What one system made of another one's checkpoint: how many tensors are equal, or what is wrong."""

    tensors: int
    wrong: str = ""


def of_holdfast(root: Path, run: str) -> Contents:
    """What Holdfast's own reader finds."""
    found: Contents = {}
    with holdfast.open(f"{run}@{STEPS}", root=root) as checkpoint:
        for group in GROUPS:
            for name in checkpoint.tensors.get(group, ()):
                found[f"{group}/{name}"] = digest(checkpoint.read(name, group=group, framework="torch"))
    return found


def of_safetensors(root: Path, run: str) -> Contents:
    """What safetensors finds in the files, without Holdfast."""
    found: Contents = {}
    directory = root / run / "checkpoints" / f"step-{STEPS:08}"
    for group in GROUPS:
        for path in sorted(directory.glob(f"{group}*.safetensors")):
            with safe_open(path, "pt") as file:
                found |= {f"{group}/{name}": digest(file.get_tensor(name)) for name in file.keys()}  # noqa: SIM118
    return found


def compare(root: Path, saved: str, again: str) -> Cell:
    """Whether two runs hold the same, by both readers."""
    one, other = of_holdfast(root, saved), of_holdfast(root, again)
    wrong = sorted(name for name in one.keys() | other.keys() if one.get(name) != other.get(name))
    if wrong:
        first = wrong[0]
        return Cell(len(one), f"{len(wrong)} differ: {first} {one.get(first)} {other.get(first)}")
    for run, found in ((saved, one), (again, other)):
        if of_safetensors(root, run) != found:
            return Cell(len(one), f"safetensors reads something else from {run}")
    return Cell(len(one))
