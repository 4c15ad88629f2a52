"""`.metadata` is read as a whole or refused: by key and file, with what does not fit."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from pathlib import Path, PurePosixPath
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType

from holdfast_formats.errors import CheckpointError, NotCommitted, StateMismatch
from holdfast_formats.region import Box
from holdfast_service.wings.convert.foreign import pickle_writer
from holdfast_service.wings.convert.foreign.dcp import metadata
from holdfast_service.wings.convert.foreign.pickle_writer import MadeObject, NamedGlobal, ObjectKeys
from tests.wings.convert.foreign.dcp.directories import DirectoryFiles
from tests.wings.convert.foreign.dcp.saving import Sharded, edit, save_ranks

WHOLE = torch.arange(12.0).reshape(4, 3)
ROWS = [Box((0, 0), (1, 3)), Box((1, 0), (3, 3))]
FIRST = MetadataIndex("model.x", ROWS[0].offset)


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """Two ranks with a row and three of a tensor, and a value."""
    save_ranks(tmp_path, [{"model": {"x": Sharded(WHOLE, ROWS[:1])}, "step": 3}, {"model": {"x": Sharded(WHOLE, ROWS[1:])}}])
    return tmp_path


def _read(path: Path) -> metadata.SavedState:
    found = metadata.read(DirectoryFiles(path))
    for part in found.refused:
        raise part.error
    return found


def test_what_is_there(saved: Path) -> None:
    """Shapes, dtypes, chunks by rank, paths and values."""
    found = _read(saved)
    tensor = found.tensors["model.x"]
    assert (tensor.dtype, tensor.shape) == ("F32", (4, 3))
    assert [(chunk.box, chunk.at.file) for chunk in tensor.chunks] == [
        (ROWS[0], "__0_0.distcp"),
        (ROWS[1], "__1_0.distcp"),
    ]
    assert found.paths == {"model.x": ("model", "x"), "step": ("step",)}
    assert set(found.values) == {"step"}
    assert found.files == {"__0_0.distcp", "__1_0.distcp"}


def test_what_else_is_pickled_with_it(saved: Path) -> None:
    """Paths of any Python version, and the plans that Megatron-core keeps."""
    about = TensorWriteData(_chunk(*ROWS[0]), TensorProperties(torch.float32), WHOLE.size())
    item = WriteItem(FIRST, WriteItemType.SHARD, about)

    def change(held: Metadata) -> None:
        held.all_local_plans = [SavePlan([item])]  # type: ignore[attr-defined]
        assert held.storage_meta is not None
        held.storage_meta.checkpoint_id = PurePosixPath("/a/b")  # type: ignore[assignment]

    edit(saved, change)
    assert set(_read(saved).tensors) == {"model.x"}


def _of_tensor(**values: Any) -> Callable[[Metadata], None]:
    def change(held: Metadata) -> None:
        for name, value in values.items():
            setattr(held.state_dict_metadata["model.x"], name, value)

    return change


def _of_place(**values: Any) -> Callable[[Metadata], None]:
    def change(held: Metadata) -> None:
        for name, value in values.items():
            setattr(held.storage_data[FIRST], name, value)

    return change


def _chunk(offset: tuple[int, ...], shape: tuple[int, ...]) -> ChunkStorageMetadata:
    return ChunkStorageMetadata(torch.Size(offset), torch.Size(shape))


def _without(held: Metadata) -> None:
    del held.storage_data[FIRST]


def _nothing_of_it(held: Metadata) -> None:
    del held.state_dict_metadata["model.x"]


BROKEN: dict[str, tuple[Callable[[Metadata], Any], str]] = {
    "overlap": (
        _of_tensor(chunks=[_chunk((0, 0), (2, 3)), _chunk((1, 0), (3, 3))]),
        r"'model.x': the chunks at \[0, 0\] and \[1, 0\] overlap",
    ),
    "gap": (_of_tensor(chunks=[_chunk((0, 0), (1, 3))]), r"9 elements of \[4, 3\] are in no chunk"),
    "outside": (_of_tensor(chunks=[_chunk((0, 0), (1, 3)), _chunk((1, 0), (4, 3))]), "lies outside shape"),
    "other rank": (_of_tensor(chunks=[_chunk((0,), (1,))]), "lies outside shape"),
    "no chunks": (_of_tensor(chunks=None), "has no chunks of 'model.x'"),
    "strange chunk": (_of_tensor(chunks=[3]), "chunk of 'model.x' without offset or size"),
    "no size": (_of_tensor(size=("a",)), "does not describe the tensor 'model.x'"),
    "complex": (_of_tensor(properties=TensorProperties(torch.complex128)), "'model.x' is torch.complex128"),
    "file": (_of_place(relative_path="__7_0.distcp"), r"'model.x' is in __7_0.distcp, which is missing"),
    "parent": (_of_place(relative_path="../x"), r"places 'model.x' in '../x', outside the directory"),
    "absolute": (_of_place(relative_path="/etc/passwd"), "outside the directory"),
    "no file": (_of_place(relative_path=None), "outside the directory"),
    "long": (_of_place(length=10**9), r"at \d+\+1000000000, but that file has only \d+ bytes"),
    "negative": (_of_place(offset=-1), "has no valid location for 'model.x'"),
    "number": (_of_place(offset=1.5), "has no valid location for 'model.x'"),
    "zstd": (_of_place(transform_descriptors=["zstd"]), "'model.x' was transformed when it was written: zstd"),
    "no place": (_without, r"does not give a location for 'model.x' at \[0, 0\]"),
    "no tensor": (_nothing_of_it, "gives a location for 'model.x', but does not describe it"),
    "not a dict": (lambda held: setattr(held, "storage_data", None), "has no storage_data"),
    "no entries": (lambda held: setattr(held, "state_dict_metadata", [1]), "has no state_dict_metadata"),
    "entry": (lambda held: held.state_dict_metadata.update({"y": None}), "the entry of key 'y' is malformed"),
    "kind": (lambda held: held.state_dict_metadata.update({"y": _chunk((0,), (1,))}), "describes 'y' as .*Chunk"),
    "key": (lambda held: held.storage_data.update({1: None}), "has a malformed location entry"),
    "paths": (lambda held: held.planner_data.update({"y": 1}), "key paths that torch's planners do not write: 'y'"),
    "path": (lambda held: held.planner_data.update({"y": (None,)}), "key paths that torch's planners do not write"),
    "shape": (
        lambda held: setattr(held, "mcore_data", {"y": {"nd_reformulated_orig_global_shape": 1}}),
        "no valid original shape for 'y'",
    ),
}


@pytest.mark.parametrize("case", BROKEN)
def test_refused(saved: Path, case: str) -> None:
    """Each thing that does not fit, by name."""
    change, said = BROKEN[case]
    edit(saved, change)
    with pytest.raises(CheckpointError, match=said):
        _read(saved)


def test_two_places_of_one_chunk(saved: Path) -> None:
    """Python's dict keeps one of two equal keys; the reader sees both, and they must say the same."""
    names = "torch.distributed.checkpoint"

    def made(kind: str, **state: Any) -> MadeObject:
        return MadeObject(NamedGlobal(f"{names}.{kind}"), state or None)

    index = made("metadata.MetadataIndex", fqn="step", index=None)
    places = [made("filesystem._StorageInfo", relative_path="__0_0.distcp", offset=at, length=9) for at in (0, 0, 1)]
    entries = {"step": made("metadata.BytesStorageMetadata")}
    for count in (2, 3):
        stored = ObjectKeys([(index, place) for place in places[:count]])
        root = made("metadata.Metadata", state_dict_metadata=entries, storage_data=stored, planner_data=None)
        (saved / ".metadata").write_bytes(pickle_writer.dumps(root))
        if count == 2:
            assert _read(saved).values == {"step": metadata.StoredAt("__0_0.distcp", 0, 9)}
            continue
        with pytest.raises(StateMismatch, match=r"gives two locations for 'step' at None"):
            _read(saved)


def test_other_files(saved: Path) -> None:
    """No metadata, metadata of something else, and metadata that would run code."""
    file = saved / ".metadata"
    file.write_bytes(pickle.dumps(TensorStorageMetadata(TensorProperties(torch.float32), torch.Size(), [])))
    with pytest.raises(StateMismatch, match="does not hold the metadata of a DCP checkpoint"):
        _read(saved)
    file.write_bytes(b"cos\nsystem\n(S'true'\ntR.")
    with pytest.raises(StateMismatch, match="system"):
        _read(saved)
    file.unlink()
    with pytest.raises(NotCommitted, match="a save writes last"):
        _read(saved)
