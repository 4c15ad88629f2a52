"""Saves with torch's own planner and writer, as the ranks of a world do it together; without processes for them."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import DefaultSavePlanner, FileSystemWriter
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import SavePlanner, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import StorageWriter

from holdfast_formats.region import Box


class Sharded:
    """What one rank holds of a tensor: DCP asks it for its chunks as it asks a DTensor; `ShardPlanner` finds the data."""

    def __init__(self, whole: torch.Tensor, boxes: Sequence[Box], shape: tuple[int, ...] | None = None) -> None:
        self.whole, self.boxes = whole, boxes
        self.shape = tuple(whole.shape) if shape is None else shape

    def __create_write_items__(self, fqn: str, _: object) -> list[WriteItem]:
        return [
            WriteItem(
                MetadataIndex(fqn, torch.Size(box.offset)),
                WriteItemType.SHARD,
                tensor_data=TensorWriteData(
                    ChunkStorageMetadata(torch.Size(box.offset), torch.Size(box.shape)),
                    TensorProperties(self.whole.dtype),
                    torch.Size(self.shape),
                ),
            )
            for box in self.boxes
        ]

    def data(self, index: MetadataIndex) -> torch.Tensor:
        box = next(box for box in self.boxes if tuple(index.offset or ()) == box.offset)
        return self.whole[box.slices]


class ShardPlanner(DefaultSavePlanner):
    """torch's planner, which can look shards up."""

    def lookup_object(self, index: MetadataIndex) -> Any:
        found = self.state_dict[index.fqn]
        return found.data(index) if isinstance(found, Sharded) else super().lookup_object(index)


def edit(path: Path, change: Callable[[Metadata], None]) -> None:
    """Change what `.metadata` says."""
    file = path / ".metadata"
    held = pickle.loads(file.read_bytes())
    change(held)
    file.write_bytes(pickle.dumps(held))


def save_ranks(
    path: Path,
    states: Sequence[dict[str, Any]],
    writers: Sequence[StorageWriter] | None = None,
    planners: Sequence[SavePlanner] | None = None,
) -> None:
    """Save what each rank holds into one directory."""
    writers = writers or [FileSystemWriter(path, sync_files=False) for _ in states]
    planners = planners or [ShardPlanner() for _ in states]
    plans = []
    for rank, (state, writer, planner) in enumerate(zip(states, writers, planners, strict=True)):
        planner.set_up_planner(state, is_coordinator=rank == 0)
        writer.set_up_storage_writer(rank == 0, rank=rank, use_collectives=True)
        plans.append(writer.prepare_local_plan(planner.create_local_plan()))
    plans, metadata = planners[0].create_global_plan(plans)
    plans = writers[0].prepare_global_plan(plans)
    results = [
        writer.write_data(planner.finish_plan(plan), planner).wait()
        for plan, writer, planner in zip(plans, writers, planners, strict=True)
    ]
    writers[0].finish(metadata, results)
