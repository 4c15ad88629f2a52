"""A file that is missing, a link, a pointer of Git LFS, a web page or an archive is told as what it is."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from holdfast_formats.errors import CheckpointError, CorruptManifest, InvalidRequest, StateMismatch
from holdfast_formats.rest.jobs import ReadOptions
from holdfast_service.storage import hub_snapshot
from holdfast_service.wings.convert.foreign.kinds import choose
from holdfast_service.wings.convert.foreign.known_kinds import KINDS
from holdfast_service.wings.convert.sources import check_source

POINTER = f"version https://git-lfs.github.com/spec/v1\noid sha256:{'a' * 64}\nsize 123456\n".encode()
PAGE = b"<!DOCTYPE html>\n<html><head><title>Sign in</title></head>" + b" " * 64


def read(directory: Path) -> CheckpointError:
    files = hub_snapshot.opened(directory)
    with pytest.raises(CheckpointError) as caught:
        choose(files, None, KINDS).read(files, ReadOptions())
    return caught.value


@pytest.mark.parametrize("name", ["model-00002-of-00002.safetensors", "model.safetensors-00002-of-00002.safetensors"])
def test_a_shard_that_the_index_names_is_missing(tmp_path: Path, name: str) -> None:
    """It is said to be missing, and a link is said to be one."""
    save_file({"a": np.ones(2, "f4")}, tmp_path / "model-00001-of-00002.safetensors", {"format": "pt"})
    placed = {"a": "model-00001-of-00002.safetensors", "b": name}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": placed}))
    (tmp_path / f"{name}.incomplete").write_bytes(b"x")
    error = read(tmp_path)
    assert isinstance(error, CorruptManifest)
    assert error.detail == f"{name} is missing, and model.safetensors.index.json names it"
    assert "link" not in error.hint
    (tmp_path / name).symlink_to(tmp_path / "model-00001-of-00002.safetensors")
    error = read(tmp_path)
    assert isinstance(error, InvalidRequest) and "links are not followed" in error.hint


@pytest.mark.parametrize("name", ["model.safetensors", "adapter_model.safetensors", "model.pt", "pytorch_model.bin"])
@pytest.mark.parametrize(("data", "said", "hint"), [(POINTER, "Git LFS", "git lfs pull"), (PAGE, "web page", "download")])
def test_what_stands_for_a_file(tmp_path: Path, name: str, data: bytes, said: str, hint: str) -> None:
    """A pointer of Git LFS, or the page that a download got instead."""
    (tmp_path / name).write_bytes(data)
    (tmp_path / "adapter_config.json").write_text('{"peft_type": "LORA"}')
    error = read(tmp_path)
    assert name in error.detail and said in error.detail and hint in error.hint


def test_archives(tmp_path: Path) -> None:
    """What to do with an archive in a directory, and with one that was named in place of a directory."""
    (tmp_path / "model.tar").write_bytes(b"x")
    with pytest.raises(InvalidRequest, match=r"model\.tar is a file that holds others") as caught:
        check_source(tmp_path / "model.tar")
    assert "unpack it" in caught.value.hint
    with pytest.raises(StateMismatch) as unknown:
        choose(hub_snapshot.opened(tmp_path), None, KINDS)
    assert "unpack it into a directory" in unknown.value.hint
