"""Loads a Holdfast checkpoint into a DCP state dict."""

from __future__ import annotations

import dataclasses
import io
import logging
import os
from collections.abc import Iterable, Mapping, Sequence
from contextlib import closing
from typing import Any, NamedTuple, SupportsIndex

import torch
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future
from torch.utils._pytree import tree_map_only

from holdfast.integrations.dcp import runs, steps
from holdfast.integrations.dcp.stored import KEPT, StoredLeaf, StoredState
from holdfast.launch import answer_of_rank_0
from holdfast.left_out import LeftOutWarning
from holdfast.link import address
from holdfast.read.checkpoint_index import CheckpointIndex, ServiceIndex, open_library
from holdfast.read.directory_root import DirectoryRoot
from holdfast.read.reader import CheckpointReader
from holdfast.read.root_directory import living_steps
from holdfast.read.root_index import RootIndex
from holdfast.rest.api import Api
from holdfast.restore.load import RestoreTarget, finish, targets_of
from holdfast.save_warning import warn
from holdfast.stage.save_request import check_step
from holdfast.tensors.fragments import Fragment
from holdfast.tensors.leaves import describe
from holdfast.tensors.matching import LISTED_MAX
from holdfast.tensors.torch_dtypes import local_shape, torch_dtype
from holdfast_formats import naming
from holdfast_formats.errors import (
    Damaged,
    InvalidRequest,
    NoSuchCheckpoint,
    NotFound,
    StateMismatch,
)

log = logging.getLogger(__name__)

ANSWER_WAIT_S = 120.0


class HoldfastStorageReader(StorageReader):
    """A storage reader for `dcp.load`, also of checkpoints that a Checkpointer saved.

    `at` is the directory that the daemon serves, or its address. Without `step`, rank 0 takes the newest committed
    checkpoint for all ranks; every rank must then construct its readers in the same order. Each byte is checked against
    its digest.
    """

    def __init__(self, run: str, *, at: str | os.PathLike[str] | None = None, step: SupportsIndex | None = None) -> None:
        """Reads nothing yet. Raises `InvalidRequest` for an invalid name or place."""
        self.run = naming.check_run(run)
        self._place = address.place(at)
        if self._place.socket is not None:
            raise InvalidRequest(
                f"at={str(at)!r} is a socket, but checkpoints are read from a directory or over HTTP",
                hint="pass the directory that the daemon serves, or its address",
            )
        self._at = at
        self._named = None if step is None else check_step(step)
        self._newest: tuple[int | None] | None = None  # once rank 0 has answered
        self._reader: CheckpointReader | None = None
        self._stored: StoredState | None = None
        self._library_read: CheckpointIndex | None = None

    def __getstate__(self) -> dict[str, Any]:
        """A copy, also in another process, opens the same checkpoint itself."""
        return {**vars(self), "_reader": None, "_stored": None, "_library_read": None}

    @property
    def step(self) -> int:
        """The step that a load restores, the same on all ranks; 0 if the run has no checkpoint yet."""
        return self._chosen() or 0

    @property
    def checkpoint_id(self) -> str:
        """The checkpoint as DCP logs it: RUN@STEP."""
        known = self._named if self._newest is None else self._newest[0]
        return f"{self.run}@{'newest' if known is None else known}"

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Begin another load. A `checkpoint_id` is its step: a number, or a path that ends in one."""
        self.close()
        if checkpoint_id is not None:
            self._named = steps.of_id(checkpoint_id)

    def read_metadata(self, *args: Any, **options: Any) -> Metadata:
        """Open the checkpoint. Raises `NoSuchCheckpoint`, or `Damaged` for an incomplete one."""
        self.close()
        step = self._chosen()
        if step is None:
            raise NoSuchCheckpoint(f"the run {self.run} has no checkpoint", hint="load only if reader.step is not 0")
        self._library_read = self._library()
        self._reader = CheckpointReader.open(self._library_read.source(self.run, step))
        self._stored = StoredState(self._reader.contents, self._reader.state, _rank())
        metadata = self._stored.metadata()
        metadata.storage_meta = StorageMeta(checkpoint_id=self.checkpoint_id)
        return metadata

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **options: Any) -> None:
        """No set-up is needed."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        return dataclasses.replace(plan, storage_data=self.step)

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """`StateMismatch` if ranks load different steps."""
        places = sorted({plan.storage_data for plan in plans})
        if len(places) > 1:
            raise StateMismatch(
                f"the ranks load different steps of {self.run}: {places}", hint="give all ranks' readers the same step"
            )
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Fill the tensors and values of the plan. `CorruptExtent` names file, tensor and range, which is zero then."""
        if self._reader is None or self._stored is None:
            raise InvalidRequest("read_data() without read_metadata()", hint="use the reader through dcp.load()")
        reader, stored = self._reader, self._stored
        self._warn_of_unused(stored.unused({item.storage_index.fqn for item in plan.items}))
        entries = [(item, stored.find(item.storage_index.fqn)) for item in plan.items]
        filled = [_filled(item, value, planner, stored) for item, value in entries if item.type == LoadItemType.TENSOR]
        try:
            self._load([target for one in filled for target in one.targets])
            for one in filled:
                one.hand_over(planner)
            for item, value in entries:
                if item.type == LoadItemType.BYTE_IO and value is not KEPT:
                    planner.load_bytes(item, self._pickled(value))
        except Damaged as damage:
            damage.hint = f"{damage.hint}; an older step: HoldfastStorageReader({self.run!r}, step=…)".lstrip("; ")
            raise
        groups = {group for group, held in reader.manifest.tensors.items() if held}
        read = {value.group for _, value in entries if isinstance(value, StoredLeaf)}
        runs.of(self.run, self._at).note_loaded(reader.manifest.step, whole=groups <= read)
        self.close()
        done: Future[None] = Future()
        done.set_result(None)
        return done

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        try:
            steps.of_id(checkpoint_id)
        except InvalidRequest:
            return False
        return True

    def close(self) -> None:
        """Close the files of a load that was begun."""
        for held in (self._reader, self._library_read):
            if held is not None:
                held.close()
        self._reader = self._stored = self._library_read = None

    def _warn_of_unused(self, unused: Mapping[str, Sequence[str]]) -> None:
        """`StateMismatch` if only an optimizer's hyper-parameters would be loaded; with several ranks a warning,
        because this one may have no part of its tensors.
        """
        for key, names in unused.items():
            text = f"the state dict requests none of the tensors that {self.checkpoint_id} has for {key}: "
            text += ", ".join(names[:LISTED_MAX]) + ", …" * (len(names) > LISTED_MAX)
            hint = (
                "make the state dict with torch.distributed.checkpoint.state_dict.get_state_dict(), because "
                "optimizer.state_dict() "
            )
            hint += "has no tensors before the first step; or leave the optimizer out of the state dict"
            if _world() == 1:
                raise StateMismatch(text, hint=hint, unexpected=names)
            warn(f"{text}; {hint}", LeftOutWarning)

    def _load(self, targets: list[RestoreTarget]) -> None:
        assert self._reader is not None
        self._reader.load([target.want for target in targets])
        finish(targets)

    def _pickled(self, value: Any) -> io.BytesIO:
        """A value in the form that planners take, made here from JSON: no stored bytes are unpickled."""
        bytes_io = io.BytesIO()
        torch.save(tree_map_only(StoredLeaf, self._tensor, value), bytes_io)
        bytes_io.seek(0)
        return bytes_io

    def _tensor(self, stored: StoredLeaf) -> Any:
        """A tensor or array inside a value."""
        assert self._stored is not None
        entry = self._stored.entry(stored)
        dtype = torch_dtype(entry.dtype, stored.name)
        tensor = torch.empty(local_shape(dtype, tuple(entry.shape)), dtype=dtype, device="cpu")
        self._load(_targets(stored, tensor, tensor.shape, (0,) * tensor.dim()))
        return tensor.numpy() if stored.array else tensor

    def _library(self) -> CheckpointIndex:
        if self._place.url is not None:
            return ServiceIndex(Api(self._place.url))
        root = self._place.root
        return RootIndex(DirectoryRoot(root)) if root is not None else open_library(None, None)

    def _chosen(self) -> int | None:
        if self._named is not None:
            return self._named
        if self._newest is None:
            self._newest = (answer_of_rank_0(f"dcp/{self.run}", self._find_newest, ANSWER_WAIT_S),)
        return self._newest[0]

    def _find_newest(self) -> int | None:
        """The newest committed step that can be opened, None if the run has no checkpoint."""
        root = self._place.root
        steps_there = [None] if root is None else living_steps(DirectoryRoot(root), self.run)
        damages: list[Damaged] = []
        for step in steps_there:
            try:
                with closing(self._library()) as library, CheckpointReader.open(library.source(self.run, step)) as reader:
                    return reader.manifest.step
            except Damaged as damage:
                log.warning("%s@%s is damaged, looking for an older step: %s", self.run, step, damage.detail)
                damages.append(damage)
            except NotFound:
                return None
        if damages:
            raise damages[0]
        return None


class _Filled(NamedTuple):
    item: ReadItem
    tensor: torch.Tensor
    memory: torch.Tensor
    targets: list[RestoreTarget]

    def hand_over(self, planner: LoadPlanner) -> None:
        if self.memory is not self.tensor:
            with torch.no_grad():
                self.tensor.copy_(self.memory)
        planner.commit_tensor(self.item, self.tensor)


def _filled(item: ReadItem, stored: Any, planner: LoadPlanner, state: StoredState) -> _Filled:
    """Fill the planner's tensor directly, or separate memory if the dtype differs, which DCP converts."""
    assert isinstance(stored, StoredLeaf)  # a planner makes tensor items of tensors
    tensor = planner.resolve_tensor(item).detach()
    if tensor.shape != item.lengths:
        raise StateMismatch(
            f"{item.dest_index.fqn}: the planner gives a tensor of shape {list(tensor.shape)} for a chunk of "
            f"{list(item.lengths)}"
        )
    entry = state.entry(stored)
    dtype = torch_dtype(entry.dtype, stored.name)
    direct = type(tensor) is torch.Tensor and tensor.dtype == dtype
    memory = tensor if direct else torch.empty(tensor.shape, dtype=dtype, device="cpu")
    whole = local_shape(dtype, tuple(entry.shape))
    return _Filled(item, tensor, memory, _targets(stored, memory, whole, item.storage_offsets))


def _targets(stored: StoredLeaf, memory: torch.Tensor, shape: Iterable[int], offset: Iterable[int]) -> list[RestoreTarget]:
    leaf, _ = describe(stored.group, stored.name, Fragment(memory, tuple(shape), offset=tuple(offset)))
    return targets_of([leaf])


def _world() -> int:
    together = torch.distributed.is_available() and torch.distributed.is_initialized()
    return torch.distributed.get_world_size() if together else 1


def _rank() -> int:
    together = torch.distributed.is_available() and torch.distributed.is_initialized()
    return torch.distributed.get_rank() if together else 0
