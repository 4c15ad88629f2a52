"""A shard's file: standard safetensors, written through a small buffer, never half there."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

import holdfast
from holdfast.checkpoint import Checkpoint
from holdfast.export import shard_file
from holdfast.layout import shards
from holdfast_formats.errors import CorruptExtent, InvalidRequest, NoSpace, StorageFailed
from holdfast_formats.layout import language, parts
from holdfast_formats.layout.parts import LocalTensor
from tests.checkpoints import Built, build, flip
from tests.client import llama
from tests.local_tensors import padded


@pytest.fixture
def model(tmp_path: Path) -> Built:
    return build(tmp_path / "model", {"model": llama.arrays()}, config=llama.CONFIG_BYTES)


def write(checkpoint: Checkpoint, tensors: list[LocalTensor] | tuple[LocalTensor, ...], path: Path) -> list[int]:
    heard: list[int] = []
    file = shard_file.of(checkpoint.manifest, language.parse("tp=4"), 3, "model", tensors)
    shard_file.write(checkpoint.reader, "model", file, path, heard.append)
    assert sum(heard) == file.bytes == path.stat().st_size
    return heard


@pytest.mark.parametrize("buffer_bytes", [100, 1000, shard_file.BUFFER_BYTES])
def test_the_file_is_what_the_rank_holds(
    model: Built, tmp_path: Path, buffer_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever the buffer's size, the safetensors library reads the rank's tensors, padding as zeros."""
    monkeypatch.setattr(shard_file, "BUFFER_BYTES", buffer_bytes)
    path = tmp_path / "rank.safetensors"
    with holdfast.open(model.path) as checkpoint:
        heard = write(checkpoint, checkpoint.held("tp=4,vocab=8,qkv=ranks,gate_up=ranks", 3).tensors, path)
    assert (len(heard) > 5) == (buffer_bytes < 2000)
    expected = llama.fused(llama.cut(llama.arrays(), 4, 3, padding=32))
    found = load_file(path)
    assert set(found) == set(expected)
    for name, array in expected.items():
        assert torch.equal(found[name], torch.from_numpy(array)), name
    with safe_open(path, "pt") as opened:
        assert opened.metadata() == {
            "format": "pt",
            "run": "tiny",
            "step": "5",
            "layout": "tp=4",
            "rank": "3",
            "group": "model",
        }


def test_stale_bytes_of_the_buffer_do_not_become_padding(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A tensor with padding follows full ones through the same memory, and its padding is zero all the same."""
    monkeypatch.setattr(shard_file, "BUFFER_BYTES", 64)
    ones = np.ones((8, 8), np.float32)
    built = build(tmp_path / "c", {"model": {"a": ones, "b": ones}})
    path = tmp_path / "out"
    with holdfast.open(built.path) as checkpoint:
        local = padded(parts.full("b", "F32", (8, 8)), 20)
        write(checkpoint, [parts.full("a", "F32", (8, 8)), local], path)
    assert torch.equal(load_file(path)["b"], torch.cat([torch.ones(8, 8), torch.zeros(12, 8)]))


def test_verification_end_between_rows_where_they_can() -> None:
    """A piece is rows as long as one fits, then parts of a row; none is larger than asked for, all are the tensor."""
    local = parts.full("a", "BF16", (6, 5, 4))
    for limit in (2, 7, 8, 41, 80, 239, 240):
        found = list(shards.pieces(local, limit))
        assert all(shards.nbytes(piece) <= limit for piece in found)
        assert sum(piece.volume for piece in found) == local.volume
        row = 20 if limit >= 40 else 4 if limit >= 8 else 1
        assert all(piece.volume % row == 0 for piece in found)
    assert list(shards.pieces(local, 240)) == [local]


def test_what_is_there_is_not_overwritten(model: Built, tmp_path: Path) -> None:
    """A file, or a link, at the path is refused and left as it is."""
    path = tmp_path / "out"
    path.write_bytes(b"mine")
    link = tmp_path / "link"
    link.symlink_to(tmp_path / "elsewhere")
    with holdfast.open(model.path) as checkpoint:
        for taken in (path, link):
            with pytest.raises(InvalidRequest, match="already exists"):
                write(checkpoint, [], taken)
    assert path.read_bytes() == b"mine" and not (tmp_path / "elsewhere").exists()


def test_damage_leaves_no_file(model: Built, tmp_path: Path) -> None:
    """When an extent is damaged, the error names the tensor and the file is gone."""
    entry = model.manifest.tensors["model"]["model.norm.weight"]
    flip(model.path / entry.file, entry.start)
    with holdfast.open(model.path) as checkpoint, pytest.raises(CorruptExtent, match=r"model\.norm\.weight"):
        write(checkpoint, checkpoint.held("", 0).tensors, tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(("number", "error"), [(errno.ENOSPC, NoSpace), (errno.EIO, StorageFailed)])
def test_a_disk_that_fails_leaves_no_file(
    model: Built, tmp_path: Path, number: int, error: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A full or broken disk is an error by name, and nothing is left."""

    def fail(*_: object) -> int:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr("holdfast.export.copy.os.pwrite", fail)
    with holdfast.open(model.path) as checkpoint, pytest.raises(error):
        write(checkpoint, checkpoint.held("", 0).tensors, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_an_unfinished_file_is_no_safetensors_file(model: Built, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before its last write the file begins with zeros: whoever is killed there leaves what no reader takes."""
    path, seen = tmp_path / "out", []
    real = os.pwrite

    def look(descriptor: int, data: memoryview, offset: int) -> int:
        seen.append(path.read_bytes()[:8])
        return real(descriptor, data, offset)

    monkeypatch.setattr("holdfast.export.copy.os.pwrite", look)
    with holdfast.open(model.path) as checkpoint:
        write(checkpoint, checkpoint.held("", 0).tensors, path)
    assert len(seen) > 1 and all(head == bytes(8) for head in seen)
    assert path.read_bytes()[:8] != bytes(8)
