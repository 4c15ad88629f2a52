"""Roots with checkpoints of small models, for tests that ask for shards of them."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from holdfast_formats import naming
from tests.checkpoints import Built, build
from tests.layouts.models import Model

PLAIN = {"Accept-Encoding": "identity"}


@dataclass(frozen=True, repr=False)
class Root:
    """A root directory and what was built in it, without a representation of a megabyte."""

    path: Path
    made: dict[str, Built]


def save(root: Path, model: Model) -> Built:
    arrays = {"model": model.arrays(0), "master": model.arrays(1)}
    directory = root / naming.checkpoint_path(model.name, 5)
    return build(directory, arrays, run=model.name, config=json.dumps(model.config).encode())


def path_of(run: str, step: str = "5") -> str:
    return f"/v1/runs/{run}/checkpoints/{step}/shard"
