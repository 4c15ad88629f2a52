"""Changed bytes in a DCP directory are refused by name, or change only values: never another error."""

from __future__ import annotations

import contextlib
import random
from pathlib import Path
from typing import Any

import pytest
import torch

from holdfast_formats.errors import CheckpointError
from holdfast_formats.mapping import reading
from holdfast_formats.rest.jobs import ReadOptions
from holdfast_service.wings.convert.foreign.dcp import kinds
from tests.wings.convert.foreign.dcp.directories import DirectoryFiles
from tests.wings.convert.foreign.dcp.saving import save_ranks


@pytest.mark.parametrize("name", [".metadata", "__0_0.distcp"])
def test_changed_bytes(tmp_path: Path, name: str) -> None:
    """A byte is changed, some are removed or doubled; what is listed then can be read, or names a file."""
    state: dict[str, Any] = {
        "model": {"x": torch.arange(6.0).reshape(2, 3)},
        "optim": {"state": {"x": {"exp_avg": torch.ones(2, 3)}}, "param_groups": [{"params": ["x"], "betas": (0.9, 0.95)}]},
        "loader": {"at": [1, {"a": torch.ones(2)}], "name": b"x"},
    }
    save_ranks(tmp_path, [state])
    file = tmp_path / name
    good, chance, refused = file.read_bytes(), random.Random(7), 0
    for _ in range(120):
        data = bytearray(good)
        at, length = chance.randrange(len(data)), chance.randrange(1, 9)
        kind = chance.randrange(3)
        if kind == 0:
            data[at] = chance.randrange(256)
        elif kind == 1:
            del data[at : at + length]
        else:
            data[at:at] = data[at : at + length]
        file.write_bytes(data)
        files = DirectoryFiles(tmp_path)
        with contextlib.suppress(CheckpointError):
            refused += 1
            listing = kinds.read_dcp(files, ReadOptions())
            for tensor in listing.tensors.values():
                reading.fetched(files, tensor)
            refused -= 1
    assert 0 < refused < 120
