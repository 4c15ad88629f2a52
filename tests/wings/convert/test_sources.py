"""What an import reads from: a directory, one file and what belongs to it, or the snapshot of a model in a hub's cache."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.numpy import save_file

from holdfast_formats.errors import InvalidRequest
from holdfast_formats.files import Files
from holdfast_formats.rest.jobs import ReadOptions
from holdfast_service.storage import HubSnapshot, PosixTier
from holdfast_service.wings.convert.foreign.kinds import choose
from holdfast_service.wings.convert.foreign.known_kinds import KINDS
from holdfast_service.wings.convert.sources import open_below, open_source

WEIGHTS = {"w": np.arange(6, dtype=np.float32).reshape(2, 3)}
COMMIT = "0123abc"


def opened(place: Path, below: str, way: str) -> Files:
    return open_source(place / below) if way == "path" else open_below(place, below)


def a_model(directory: Path) -> Path:
    """A model's files, a training's, and others that no file of weights needs."""
    directory.mkdir(parents=True)
    save_file(WEIGHTS, directory / "model.safetensors")
    torch.save({"state_dict": {"w": torch.ones(2)}, "epoch": 3}, directory / "last.ckpt")
    torch.save({"w": torch.ones(2)}, directory / "other.pt")
    for name in ("config.json", "tokenizer.json", "tokenizer.model", "train.log", "optimizer.json"):
        (directory / name).write_text("{}")
    return directory


@pytest.mark.parametrize("way", ["path", "below"])
@pytest.mark.parametrize(("name", "kind"), [("last.ckpt", "torch"), ("other.pt", "torch"), ("model.safetensors", "hf")])
def test_one_file(tmp_path: Path, name: str, kind: str, way: str) -> None:
    """The file, with configuration and tokenizer beside it, and nothing else of its directory."""
    a_model(tmp_path / "models" / "tiny")
    files = opened(tmp_path / "models", f"tiny/{name}", way)
    listing = choose(files, None, KINDS).read(files, ReadOptions())
    assert (listing.kind, listing.assets) == (kind, ("config.json", "tokenizer.json", "tokenizer.model"))
    assert {use.file for use in listing.files} == {name, *listing.assets} == set(files.list(""))
    assert files.size("train.log") is None and files.stamp("train.log") == "" and files.list("more") == []
    assert [key.name for key in listing.tensors] == ["w"] and files.size(name) == (
        tmp_path / "models/tiny" / name
    ).stat().st_size


@pytest.mark.parametrize("way", ["path", "below"])
@pytest.mark.parametrize("name", ["LAST.CKPT", "other.PTH", "Other.BIN", "Model.SafeTensors"])
def test_one_file_in_capitals(tmp_path: Path, name: str, way: str) -> None:
    """Endings mean the same in capitals, as a source and in a directory."""
    (tmp_path / "tiny").mkdir()
    if name.lower().endswith("safetensors"):
        save_file(WEIGHTS, tmp_path / "tiny" / name)
    else:
        torch.save({"w": torch.ones(2)}, tmp_path / "tiny" / name)
    for below in (f"tiny/{name}", "tiny"):
        files = opened(tmp_path, below, way)
        assert [key.name for key in choose(files, None, KINDS).read(files, ReadOptions()).tensors] == ["w"]


@pytest.mark.parametrize("way", ["path", "below"])
@pytest.mark.parametrize(
    "name",
    ["model-00001-of-00002.safetensors", "pytorch_model-00002-of-00002.bin", "model.safetensors.index.json", "__0_0.distcp"],
)
def test_one_file_of_several(tmp_path: Path, name: str, way: str) -> None:
    """A part of a model, or what lists its parts: the directory is named that has them all."""
    (tmp_path / "a" / "tiny").mkdir(parents=True)
    (tmp_path / "a" / "tiny" / name).write_bytes(b"x")
    with pytest.raises(InvalidRequest, match="is only a part of a checkpoint") as refused:
        opened(tmp_path / "a", f"tiny/{name}", way)
    assert refused.value.hint == f"import its directory: {tmp_path / 'a' / 'tiny' if way == 'path' else 'tiny'}"
    save_file(WEIGHTS, tmp_path / "a" / "tiny" / "model-00001-of-00001.safetensors")
    only = opened(tmp_path / "a", "tiny/model-00001-of-00001.safetensors", way)
    assert [key.name for key in choose(only, None, KINDS).read(only, ReadOptions()).tensors] == ["w"]


def test_a_link_to_a_file(tmp_path: Path) -> None:
    """A path of this user's own is followed; what a job names is not."""
    a_model(tmp_path / "tiny")
    (tmp_path / "best.ckpt").symlink_to(tmp_path / "tiny" / "last.ckpt")
    assert open_source(tmp_path / "best.ckpt").list("")[1] == "last.ckpt"
    for below in ("best.ckpt", "tiny/missing", "missing/last.ckpt"):
        with pytest.raises(InvalidRequest, match="below the export root"):
            open_below(tmp_path, below)
    assert not (tmp_path / "missing").exists()


def a_hub(cache: Path, *commits: str, main: str = "") -> Path:
    """The cache of one model, as huggingface_hub has it."""
    there = cache / "models--org--tiny"
    (there / "blobs").mkdir(parents=True)
    blob = there / "blobs" / ("a" * 64)
    save_file(WEIGHTS, blob)
    for commit in commits:
        (there / "snapshots" / commit).mkdir(parents=True)
        (there / "snapshots" / commit / "model.safetensors").symlink_to(Path("../..") / "blobs" / blob.name)
    if main:
        (there / "refs").mkdir()
        (there / "refs" / "main").write_text(main)
    return there


@pytest.mark.parametrize("way", ["path", "below"])
@pytest.mark.parametrize(
    ("commits", "main"), [((COMMIT,), ""), ((COMMIT, "9999"), COMMIT), ((COMMIT,), "gone")], ids=["only", "main", "old"]
)
def test_a_model_in_a_hubs_cache(tmp_path: Path, commits: tuple[str, ...], main: str, way: str) -> None:
    """Its directory means the snapshot that refs/main names, or the only one."""
    a_hub(tmp_path / "hub", *commits, main=main)
    files = opened(tmp_path, "hub/models--org--tiny", way)
    assert isinstance(files, HubSnapshot) and files.list("") == ["model.safetensors"]
    one = opened(tmp_path, f"hub/models--org--tiny/snapshots/{COMMIT}/model.safetensors", way)
    assert [key.name for key in choose(one, None, KINDS).read(one, ReadOptions()).tensors] == ["w"]


@pytest.mark.parametrize("way", ["path", "below"])
def test_several_snapshots(tmp_path: Path, way: str) -> None:
    """Without a name for one of them, they are named."""
    a_hub(tmp_path / "hub", "0123", "4567", main="89ab")
    with pytest.raises(InvalidRequest, match="2 snapshots, and refs/main names none") as refused:
        opened(tmp_path, "hub/models--org--tiny", way)
    assert "snapshots/0123, snapshots/4567" in refused.value.hint


def test_what_is_not_there(tmp_path: Path) -> None:
    """A missing directory is not made."""
    with pytest.raises(InvalidRequest, match="there is no directory or file"):
        open_source(tmp_path / "missing")
    assert not (tmp_path / "missing").exists()
    assert isinstance(open_source(tmp_path), PosixTier)
