"""Directories of torch's `HuggingFaceStorageWriter`, whose shards are safetensors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch.distributed.checkpoint import HuggingFaceStorageWriter

from holdfast_formats.errors import StateMismatch
from holdfast_formats.mapping.listing import ForeignListing
from holdfast_formats.region import Box
from holdfast_formats.rest.jobs import ReadOptions
from holdfast_service.wings.convert.foreign.dcp import kinds
from tests.wings.convert.foreign.dcp.directories import DirectoryFiles, assert_same
from tests.wings.convert.foreign.dcp.saving import Sharded, save_ranks

WHOLE = torch.arange(12.0).reshape(4, 3)


def _saved(path: Path, **options: Any) -> None:
    rows = [Box((0, 0), (3, 3)), Box((3, 0), (1, 3))]
    states: list[dict[str, Any]] = [{"x": Sharded(WHOLE, [row])} for row in rows]
    states[0]["y"] = torch.ones(2).bfloat16()
    states[1]["empty"] = torch.zeros(0, 2)
    save_ranks(path, states, [HuggingFaceStorageWriter(str(path), **options) for _ in states])


def _listing(path: Path, shards: int | None = 2) -> ForeignListing:
    return kinds.read_dcp(DirectoryFiles(path), ReadOptions(shards=shards))


def test_shards_of_ranks(tmp_path: Path) -> None:
    """A file for each rank, with the offset of every shard in its header."""
    _saved(tmp_path, save_distributed=True)
    assert len(list(tmp_path.iterdir())) == 2
    assert kinds.is_dcp(DirectoryFiles(tmp_path))
    listing = _listing(tmp_path)
    wanted = {"x": WHOLE, "y": torch.ones(2).bfloat16(), "empty": torch.zeros(0, 2)}
    assert_same(tmp_path, listing, "model", wanted)
    assert [use.use for use in listing.files] == ["tensors", "tensors"]
    for shards, said in ((None, "the directory does not record how many"), (3, "but --shards is 3")):
        with pytest.raises(StateMismatch, match=rf"shards of 2 ranks.*{said}"):
            _listing(tmp_path, shards)
    max(tmp_path.iterdir()).unlink()  # the last shard of a tensor is missing: it would be a smaller one
    with pytest.raises(StateMismatch, match=r"shards of 1 ranks.*but --shards is 2"):
        _listing(tmp_path)


def test_whole_files_are_an_ordinary_model(tmp_path: Path) -> None:
    """Without shards it is a Hugging Face directory, which is another kind's."""
    save_ranks(tmp_path, [{"x": WHOLE}], [HuggingFaceStorageWriter(str(tmp_path))])
    assert (tmp_path / "model-00001-of-00001.safetensors").is_file()
    assert not kinds.is_dcp(DirectoryFiles(tmp_path))


def test_refused(tmp_path: Path) -> None:
    """A shard that is missing before others, the same one twice, another dtype, and one that has no place."""
    _saved(tmp_path, save_distributed=True)
    first, second = sorted(tmp_path.iterdir())
    held = first.read_bytes()
    first.unlink()
    with pytest.raises(StateMismatch, match=r"'x': 9 elements of \[4, 3\] are in no chunk"):
        _listing(tmp_path, 1)
    first.write_bytes(held)
    third = tmp_path / second.name.replace("00002", "00003", 1)
    third.write_bytes(second.read_bytes())
    with pytest.raises(StateMismatch, match=r"'x': the chunks at \[3, 0\] and \[3, 0\] overlap"):
        _listing(tmp_path, 3)
    about = {"DCP_SHARDING_INFO": '{"x": {"saved_offsets": [4, 0]}}'}
    save_file({"x": torch.ones(1, 3, dtype=torch.int32)}, third, about)
    with pytest.raises(StateMismatch, match=r"'x' is I32 in shard-00003-.*, but F32 in an earlier shard"):
        _listing(tmp_path, 3)
    save_file({"x": torch.ones(1, 3)}, third)
    with pytest.raises(StateMismatch, match="does not give the position of the shard of 'x'"):
        _listing(tmp_path, 3)
