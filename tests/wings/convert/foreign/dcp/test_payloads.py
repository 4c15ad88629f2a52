"""Chunks of any grid and of any ranks are found exactly, in each form in which DCP writes them."""

from __future__ import annotations

import io
import tempfile
from itertools import pairwise, product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save
from torch.distributed.checkpoint import FileSystemWriter
from torch.distributed.checkpoint.filesystem import SerializationFormat
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex

from holdfast_formats.errors import CorruptManifest, StateMismatch
from holdfast_formats.mapping import reading
from holdfast_formats.mapping.listing import ForeignTensor
from holdfast_formats.region import Box
from holdfast_formats.tensors import TensorSpec
from holdfast_service.wings.convert.foreign.dcp import metadata
from holdfast_service.wings.convert.foreign.dcp.payloads import Payloads
from tests.wings.convert.foreign.dcp.directories import DirectoryFiles, bytes_of
from tests.wings.convert.foreign.dcp.saving import Sharded, edit, save_ranks

SAFETENSORS = SerializationFormat.SAFETENSORS


def _found(root: Path, fqn: str) -> tuple[ForeignTensor, np.ndarray[Any, Any]]:
    files = DirectoryFiles(root)
    saved = metadata.read(files)
    payloads = Payloads(files, saved)
    tensor = saved.tensors[fqn]
    spec = TensorSpec("model", fqn, tensor.dtype, payloads.shape(tensor))
    made = ForeignTensor(spec, payloads.pieces(tensor))
    return made, reading.fetched(files, made)


def _cuts(data: st.DataObject, n: int) -> list[int]:
    """Where a dimension is cut, with empty parts."""
    return [0, *sorted(data.draw(st.lists(st.integers(0, n), max_size=2))), n]


def _grid(data: st.DataObject, shape: tuple[int, ...]) -> list[Box]:
    spans = [[(a, b - a) for a, b in pairwise(cuts)] for cuts in (_cuts(data, n) for n in shape)]
    return [Box(tuple(a for a, _ in one), tuple(n for _, n in one)) for one in product(*spans)]


@given(data=st.data(), shape=st.lists(st.integers(1, 7), max_size=3).map(tuple))
def test_any_grid_over_any_ranks(data: st.DataObject, shape: tuple[int, ...]) -> None:
    """Shards of a grid, uneven and empty ones too, each on some rank, and transposed in memory perhaps."""
    dtype = data.draw(st.sampled_from([torch.float32, torch.bfloat16, torch.int64, torch.bool]))
    whole = torch.randint(0, 2, shape).to(dtype) if dtype == torch.bool else torch.randint(-99, 99, shape).to(dtype)
    if data.draw(st.booleans()) and len(shape) > 1:
        whole = whole.transpose(0, 1).contiguous().transpose(0, 1)
    boxes = list({box.offset: box for box in _grid(data, shape) if box.volume}.values())
    ranks = data.draw(st.integers(1, 3))
    owners = [data.draw(st.integers(0, ranks - 1)) for _ in boxes]
    states = [
        {"x": Sharded(whole, [box for box, owner in zip(boxes, owners, strict=True) if owner == rank])}
        for rank in range(ranks)
    ]
    with tempfile.TemporaryDirectory() as directory:
        save_ranks(Path(directory), states)
        tensor, found = _found(Path(directory), "x")
        assert found.tobytes() == bytes_of(whole)
        assert tensor.spec.shape == shape


def test_shards_without_elements(tmp_path: Path) -> None:
    """A rank with nothing of a tensor has a chunk without elements, where FSDP cuts three rows over four ranks."""
    whole = torch.arange(6.0).reshape(3, 2)
    boxes = [Box((min(r, 3), 0), (1 if r < 3 else 0, 2)) for r in range(4)]
    save_ranks(tmp_path, [{"x": Sharded(whole, [box])} for box in boxes])
    assert _found(tmp_path, "x")[1].tolist() == whole.tolist()
    empty = tmp_path / "empty"
    save_ranks(empty, [{"x": torch.zeros(2, 0, 3)}])
    tensor, _ = _found(empty, "x")
    assert (tensor.spec.shape, tensor.pieces) == ((2, 0, 3), ())


def test_safetensors_in_a_file(tmp_path: Path) -> None:
    """The writer's other format: values first, then one safetensors part with all tensors of the rank."""
    whole = torch.arange(12.0).reshape(4, 3)
    states: list[dict[str, Any]] = [
        {"note": {"a": 1}, "x": Sharded(whole, [Box((0, 0), (1, 3))]), "y": torch.ones(2)},
        {"x": Sharded(whole, [Box((1, 0), (3, 3))])},
    ]
    writers = [FileSystemWriter(tmp_path, sync_files=False, serialization_format=SAFETENSORS) for _ in states]
    save_ranks(tmp_path, states, writers)
    assert _found(tmp_path, "x")[1].tolist() == whole.tolist()
    assert _found(tmp_path, "y")[1].tolist() == [1, 1]
    two = tmp_path / "two"  # a file holds one shard of a name: the other one is lost when it is saved
    boxes = [Box((0, 0), (1, 3)), Box((1, 0), (3, 3))]
    save_ranks(two, [{"x": Sharded(whole, boxes)}], [FileSystemWriter(two, serialization_format=SAFETENSORS)])
    with pytest.raises(StateMismatch, match=r"'x', __0_0.distcp at 0\+12: it is F32\[3, 3\] there, but F32\[1, 3\]"):
        _found(two, "x")


def test_payloads_of_other_tensors_are_refused(tmp_path: Path) -> None:
    """By key and file: another shape or dtype, a value, another shard, a file that is cut."""
    save_ranks(tmp_path, [{"x": torch.zeros(4, 3), "y": torch.ones(2)}])
    file = tmp_path / "__0_0.distcp"
    good = file.read_bytes()

    def replaced(value: Any) -> None:
        made = io.BytesIO()
        if isinstance(value, bytes):
            made.write(value)
        else:
            torch.save(value, made)
        file.write_bytes(good + made.getvalue())

        def change(held: Metadata) -> None:
            info = held.storage_data[MetadataIndex("x", (0, 0))]
            info.offset, info.length = len(good), len(made.getvalue())

        edit(tmp_path, change)

    for value, said in (
        (torch.zeros(4, 3, dtype=torch.int32), r"it is I32\[4, 3\] there, but F32\[4, 3\] in .metadata"),
        (torch.zeros(3, 4), r"it is F32\[3, 4\] there"),
        (5, "found a int instead of a tensor"),
        (save({"z": torch.zeros(4, 3)}), "the safetensors data there has no tensor of this name"),
        (save({"x": torch.zeros(4, 3)}, {"DCP_SHARDING_INFO": '{"x": {"saved_offsets": [4, 0]}}'}), "is the part at"),
        (save({"x": torch.zeros(4, 3)}, {"DCP_SHARDING_INFO": '{"x": {"saved_offsets": ["a"]}}'}), "are not numbers"),
        (save({"x": torch.zeros(4, 3)}, {"DCP_SHARDING_INFO": "[1]"}), "cannot be read"),
    ):
        replaced(value)
        with pytest.raises(StateMismatch, match=said):
            _found(tmp_path, "x")
    for broken in (bytes(100), b"PK" + bytes(200), save({"x": torch.zeros(4, 3)})[:-1]):
        replaced(broken)
        with pytest.raises((CorruptManifest, StateMismatch), match="__0_0"):
            _found(tmp_path, "x")
    replaced(torch.ones(4, 3).t().contiguous().t())
    assert _found(tmp_path, "x")[1].tolist() == [[1.0] * 3] * 4


def test_flat_ranges_of_cells(tmp_path: Path) -> None:
    """Megatron-core until 0.14 cut the optimizer's state flat, cell by cell of a grid over tensor-parallel ranks."""
    whole = torch.arange(4 * 6.0).reshape(4, 6)  # cells of [2, 3]
    cells = whole.reshape(2, 2, 2, 3).transpose(1, 2).reshape(2, 2, 6).contiguous()
    boxes = [Box((i, j, a), (1, 1, n)) for i in range(2) for j in range(2) for a, n in ((0, 1), (1, 4), (5, 1))]
    save_ranks(tmp_path, [{"x": Sharded(cells, boxes[:5])}, {"x": Sharded(cells, boxes[5:])}])

    def change(held: Metadata) -> None:
        held.mcore_data = {"x": {"nd_reformulated_orig_global_shape": (4, 6)}, "y": {}}  # type: ignore[attr-defined]

    edit(tmp_path, change)
    tensor, found = _found(tmp_path, "x")
    assert tensor.spec.shape == (4, 6)
    assert found.tolist() == whole.tolist()
    edit(tmp_path, lambda held: held.mcore_data["x"].update(nd_reformulated_orig_global_shape=(4, 7)))  # type: ignore[attr-defined]
    with pytest.raises(StateMismatch, match=r"'x': \[2, 2, 6\] is not a grid of cells of \[4, 7\]"):
        _found(tmp_path, "x")
