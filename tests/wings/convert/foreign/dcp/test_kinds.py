"""A directory is recognised by its files, and every file in it has a use."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint import HuggingFaceStorageWriter

from holdfast_formats.errors import LimitExceeded, NotCommitted, StateMismatch
from holdfast_formats.rest.jobs import ReadOptions
from holdfast_service.wings.convert.foreign.dcp import directories, kinds
from holdfast_service.wings.convert.foreign.kinds import choose
from holdfast_service.wings.convert.foreign.known_kinds import KINDS
from tests.wings.convert.foreign.dcp.directories import DirectoryFiles
from tests.wings.convert.foreign.dcp.saving import save_ranks

STATE: dict[str, Any] = {"model": {"x": torch.ones(2)}, "epoch": 1}


def _chosen(path: Path) -> str:
    return choose(DirectoryFiles(path), None, KINDS).name


def test_recognised(tmp_path: Path) -> None:
    """By `.metadata`, by Megatron's metadata.json beside it, and by NeMo's directory weights."""
    plain, mcore, nemo, other = (tmp_path / name for name in ("plain", "mcore", "nemo", "other"))
    config = json.dumps({"sharded_backend": "torch_dist", "sharded_backend_version": 1})
    for path in (plain, mcore, nemo / "weights"):
        save_ranks(path, [STATE])
    (mcore / "metadata.json").write_text(config)
    for place in (plain / "meta.pt", mcore / "common.pt", nemo / "weights" / "common.pt"):
        torch.save({"x": torch.ones(1)}, place)
    writer = HuggingFaceStorageWriter(str(tmp_path / "shards"), save_distributed=True)
    save_ranks(tmp_path / "shards", [{"x": torch.ones(2)}], [writer])
    (nemo / "weights" / "metadata.json").write_text(config)
    other.mkdir()
    (other / "0_0.distcp").write_bytes(b"")  # Paddle's
    (other / "0.metadata").write_bytes(b"")
    assert (_chosen(plain), _chosen(mcore), _chosen(nemo)) == ("dcp", "megatron", "nemo")
    assert _chosen(tmp_path / "shards") == "dcp"
    with pytest.raises(StateMismatch, match="no known kind of checkpoint"):
        _chosen(other)
    (plain / "metadata.json").write_text("[1]")  # somebody else's
    assert _chosen(plain) == "dcp"


def test_saves_that_did_not_end(tmp_path: Path) -> None:
    """They are recognised, to be refused: no metadata, metadata of single ranks, another format of Megatron's."""
    save_ranks(tmp_path, [STATE])
    (tmp_path / ".metadata").rename(tmp_path / "__0.metadata")
    files = DirectoryFiles(tmp_path)
    assert kinds.is_dcp(files)
    with pytest.raises(StateMismatch, match="each rank wrote its own metadata"):
        kinds.read_dcp(files, ReadOptions())
    (tmp_path / "__0.metadata").rename(tmp_path / ".metadata.tmp")
    assert kinds.is_dcp(files)
    with pytest.raises(NotCommitted, match=r"\.metadata is missing, which a save writes last"):
        kinds.read_dcp(files, ReadOptions())
    with pytest.raises(NotCommitted, match=r"there is no metadata\.json, which Megatron-core writes last"):
        kinds.read_megatron(files, ReadOptions())
    (tmp_path / "metadata.json").write_text('{"sharded_backend": "zarr"}')
    with pytest.raises(StateMismatch, match="its format is 'zarr'; only torch_dist can be imported"):
        kinds.read_megatron(files, ReadOptions())


def test_every_file_has_a_use(tmp_path: Path) -> None:
    """Files of an earlier save with more ranks, what a save left, configuration, and what nobody knows."""
    save_ranks(tmp_path, [STATE, {"model": {"y": torch.ones(2)}}, {"note": "values alone"}])
    (tmp_path / "__7_0.distcp").write_bytes(b"old")
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / ".metadata.tmp").write_bytes(b"")
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "log.txt").write_text("")
    listing = kinds.read_dcp(DirectoryFiles(tmp_path), ReadOptions())
    found = {use.file: (use.use, use.reason) for use in listing.files}
    assert set(found) == {path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*") if path.is_file()}
    uses = {name: use for name, (use, _) in found.items()}
    assert uses == {
        ".metadata": "state",
        ".metadata.tmp": "unused",
        "__0_0.distcp": "tensors",
        "__1_0.distcp": "tensors",
        "__2_0.distcp": "state",
        "__7_0.distcp": "unused",
        "config.json": "asset",
        "logs/log.txt": "unused",
    }
    assert "an earlier save" in found["__7_0.distcp"][1]
    assert all(reason for use, reason in found.values() if use == "unused")
    assert listing.assets == ("config.json",)


def test_directories_without_end(tmp_path: Path) -> None:
    """A directory that is too deep is refused."""
    (tmp_path / "/".join("abcdefghij")).mkdir(parents=True)
    (tmp_path / "/".join("abcdefghij") / "x").write_text("")
    with pytest.raises(LimitExceeded, match="deeper than 8"):
        list(directories.walk(DirectoryFiles(tmp_path)))
