"""Checkpoints of Orbax become groups by the first name of their paths, and nothing of them is left out silently."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from safetensors import deserialize

from holdfast_formats import naming
from holdfast_formats.errors import CorruptManifest, NotCommitted, StateMismatch
from holdfast_formats.mapping.listing import ForeignListing
from holdfast_formats.rest.jobs import ReadOptions
from holdfast_formats.rest.offline import RootJob
from holdfast_service.offline.__main__ import main
from holdfast_service.wings.convert.foreign.kinds import choose
from holdfast_service.wings.convert.foreign.known_kinds import KINDS
from holdfast_service.wings.convert.foreign.orbax import kinds
from tests.job_requests import an_import
from tests.wings.convert.foreign.directories import OnDisk
from tests.wings.convert.foreign.orbax import files as by_hand
from tests.wings.convert.foreign.orbax.files import put

W = np.arange(24, dtype=np.float32).reshape(4, 6).astype(ml_dtypes.bfloat16)
ARRAYS = {
    "params.params.decoder.w": W,
    "opt_state.0.mu.params.decoder.w": W.astype(np.float32),
    "step": np.asarray(7, np.int64),
}
FINISHED = {"_CHECKPOINT_METADATA": b'{"commit_timestamp_nsecs": 1}'}


def stored(**arrays: np.ndarray[Any, Any]) -> dict[str, bytes]:
    chunks = {name: tuple(max(side // 2, 1) for side in array.shape) for name, array in arrays.items()}
    return {key: data for name, one in arrays.items() for key, data in by_hand.zarr(name, one, chunks[name]).items()}


def an_item(database: bool = True) -> dict[str, bytes]:
    held = stored(**ARRAYS)
    texts = {"_strings.json": b'{"name": "a text"}'}
    return (by_hand.database(held) if database else held) | by_hand.tree(*ARRAYS, "name") | texts


def below(directory: str, files: dict[str, bytes]) -> dict[str, bytes]:
    return {f"{directory}/{name}": data for name, data in files.items()}


def read(directory: Path, files: dict[str, bytes], **options: Any) -> ForeignListing:
    on_disk: Any = OnDisk(put(directory, files))
    kind = choose(on_disk, None, KINDS)
    assert kind is kinds.KIND
    return kind.read(on_disk, ReadOptions(**options))


@pytest.mark.parametrize("database", [True, False], ids=["ocdbt", "zarr"])
@pytest.mark.parametrize("step", [True, False], ids=["a step", "an item"])
def test_a_training_to_the_bit(tmp_path: Path, database: bool, step: bool) -> None:
    """Weights, optimizer and counters in their groups, a text as a value; the report has the step and every file."""
    item = an_item(database)
    put(tmp_path / "source", FINISHED | (below("items", item) if step else item))
    job = an_import("m", 1, **{"from": str(tmp_path / "source")})
    assert main(RootJob(root=str(tmp_path / "root"), job=job).model_dump_json(by_alias=True)) == 0
    checkpoint = tmp_path / "root" / naming.checkpoint_path("m", 1)
    found = {}
    for file in checkpoint.glob("*.safetensors"):
        found |= {(file.name.partition(".")[0], name): one for name, one in deserialize(file.read_bytes())}
    groups = {"params.params.decoder.w": "model", "opt_state.0.mu.params.decoder.w": "optim", "step": "extra"}
    assert {key: bytes(one["data"]) for key, one in found.items()} == {
        (groups[name], name): array.tobytes() for name, array in ARRAYS.items()
    }
    state = json.loads((checkpoint / naming.STATE).read_bytes())
    assert state["source"]["kind"] == "orbax" and state["source"]["step"] == 7 and '"a text"' in json.dumps(state)
    on_disk = {
        path.relative_to(tmp_path / "source").as_posix() for path in (tmp_path / "source").rglob("*") if path.is_file()
    }
    assert {use["file"] for use in state["source"]["files"]} == on_disk


def test_items(tmp_path: Path) -> None:
    """Several items of arrays have their names before the paths; one of JSON is a value; no other is left out silently."""
    files = FINISHED | below("params", stored(w=W) | by_hand.tree("w")) | below("state", stored(n=W) | by_hand.tree("n"))
    listing = read(tmp_path, files | {"about/metadata": b'{"a": 1}'})
    assert {(key.group, key.name) for key in listing.tensors} == {("model", "params.w"), ("model", "state.n")}
    assert listing.documents["extra"]["about"] == {"a": 1}
    with pytest.raises(StateMismatch, match="iter is an item") as refused:
        read(tmp_path, files | {"iter/process_0-of-1.json": b"{}"})
    assert "--leave-out iter" in (refused.value.hint or "")
    assert len(read(tmp_path, {}, leave_out=["iter"]).tensors) == 2


def test_parts_that_are_refused_can_be_left_out(tmp_path: Path) -> None:
    """An array of another compression, and the file of an older layout."""
    held = stored(**ARRAYS)
    held["step/.zarray"] = held["step/.zarray"].replace(b"zstd", b"lzma")
    files = held | by_hand.tree(*ARRAYS) | {"checkpoint": b"\x80"}
    with pytest.raises(StateMismatch, match="'lzma'") as refused:
        read(tmp_path, files)
    assert "--leave-out step --leave-out checkpoint" in (refused.value.hint or "")
    assert len(read(tmp_path, files, leave_out=["step", "checkpoint"]).tensors) == 2
    with pytest.raises(StateMismatch, match="an older layout"):
        read(tmp_path, files, leave_out=["step"])


def test_what_the_tree_names_must_be_there(tmp_path: Path) -> None:
    """An array, and each of its chunks if Orbax stored zeros, too."""
    with pytest.raises(CorruptManifest, match="'lost'"):
        read(tmp_path / "array", stored(w=W) | by_hand.tree("w", "lost"))
    cut = stored(w=W)
    del cut["w/1.1"]
    assert len(read(tmp_path / "zeros", cut | by_hand.tree("w")).tensors) == 1
    with pytest.raises(CorruptManifest, match="1 chunks of 'w' are missing"):
        read(tmp_path / "chunk", cut | by_hand.tree("w", complete=True))


@pytest.mark.parametrize(
    "files",
    [
        {"_CHECKPOINT_METADATA": b'{"commit_timestamp_nsecs": null}', **an_item()},
        {"ocdbt.process_0/manifest.ocdbt": b"", "_METADATA": b"{}"},
        {"ocdbt.process_0/manifest.ocdbt": b""},
    ],
    ids=["no time", "parts with a tree", "parts"],
)
def test_a_save_that_is_not_finished(tmp_path: Path, files: dict[str, bytes]) -> None:
    with pytest.raises(NotCommitted, match="not finished"):
        read(tmp_path, files)


def test_a_tree_without_its_form(tmp_path: Path) -> None:
    with pytest.raises(CorruptManifest, match="an entry without"):
        read(tmp_path, stored(w=W) | {"_METADATA": b'{"tree_metadata": {"x": []}}'})
