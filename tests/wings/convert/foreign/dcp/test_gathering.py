"""Names are taken once, and values that are not plain leave nothing behind."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from holdfast_formats.errors import StateMismatch
from holdfast_formats.tensors import TensorSpec
from holdfast_service.wings.convert.foreign.dcp.gathering import BYTES_MAX, GatheredListing, Unread
from holdfast_service.wings.convert.foreign.dcp.metadata import StoredAt
from tests.wings.convert.foreign.dcp.directories import DirectoryFiles


def test_names_are_taken_once(tmp_path: Path) -> None:
    """A tensor or a document of the same name is refused."""
    gathered = GatheredListing(DirectoryFiles(tmp_path))
    spec = TensorSpec("model", "x", "F32", (0,))
    gathered.add(spec, ())
    gathered.document("extra", "a", 1)
    with pytest.raises(StateMismatch, match="two entries would be stored as model/x"):
        gathered.add(spec, ())
    with pytest.raises(StateMismatch, match="two values would be stored as extra/a"):
        gathered.document("extra", "a", 1)


def test_values_that_are_not_plain(tmp_path: Path) -> None:
    """Tensors before the part that is not plain are not listed either; equal values are read once."""
    torch.save([torch.ones(2), bytes(BYTES_MAX + 1)], tmp_path / "a.pt")
    torch.save((1, {"x": 2.5}), tmp_path / "b.pt")
    gathered = GatheredListing(DirectoryFiles(tmp_path))
    found = gathered.encoded(StoredAt("a.pt", 0, (tmp_path / "a.pt").stat().st_size), "extra", "a")
    assert isinstance(found, Unread)
    assert str(BYTES_MAX + 1) in found.reason
    assert gathered.tensors == {}
    at = StoredAt("b.pt", 0, (tmp_path / "b.pt").stat().st_size)
    first = gathered.encoded(at, "extra", "b")
    assert first == {"$tuple": [1, {"x": 2.5}]}
    assert gathered.encoded(at, "extra", "other") is first
