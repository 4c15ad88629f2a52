"""Imports and conversions without a daemon; `tests/client/commands` has them as a user calls them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from holdfast_formats.errors import AlreadyCommitted, InvalidRequest
from holdfast_service.daemon.copying.progress import Quiet
from holdfast_service.wings.convert import offline
from tests.job_requests import a_conversion, an_import


@pytest.fixture
def source(tmp_path: Path) -> Path:
    directory = tmp_path / "hf"
    directory.mkdir()
    save_file({"a.weight": np.ones((2, 2), np.float32)}, directory / "model.safetensors", {"format": "pt"})
    return directory


def test_a_dry_run_of_an_import_makes_no_root(tmp_path: Path, source: Path) -> None:
    """And it refuses a step that is committed."""
    root = tmp_path / "root"
    assert offline.foretell(root, an_import("r", 1, **{"from": str(source)}))["tensors"] == 1
    assert not root.exists()
    (root / "r" / "checkpoints" / "step-00000001").mkdir(parents=True)
    (root / "r" / "checkpoints" / "step-00000001" / "COMMIT").touch()
    with pytest.raises(AlreadyCommitted):
        offline.foretell(root, an_import("r", 1, **{"from": str(source)}))


def test_a_conversion_is_not_put_into_its_source(source: Path) -> None:
    with pytest.raises(InvalidRequest, match="inside the checkpoint"):
        offline.convert(a_conversion(source=str(source), to=str(source / "out"), form="hf"), Quiet())
    report = offline.convert(a_conversion(source=str(source), to=str(source.parent / "out"), form="hf"), Quiet())
    assert report["tensors"] == 1 and (source.parent / "out" / "model.safetensors").exists()
