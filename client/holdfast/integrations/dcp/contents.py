"""One rank's part of a DCP save: its tensors in the plan as Fragments, and values as JSON."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem, WriteItemType

from holdfast.integrations.dcp import names
from holdfast.state.named_entries import NamedSnapshot
from holdfast.tensors.fragments import Fragment, FragmentList
from holdfast.tensors.leaves import Key
from holdfast.tensors.torch_dtypes import has_memory, overlaps
from holdfast_formats.errors import InvalidRequest, StateMismatch

Place = tuple[str, tuple[int, ...]]  # a tensor's DCP name and a chunk's offset


class ChunkFragments:
    """Makes Fragments of the chunks. The same memory gets the same Fragment, which a later save need not examine again."""

    def __init__(self) -> None:
        self._before: dict[Place, Fragment] = {}
        self._known: dict[Place, Fragment] = {}

    def begin(self) -> None:
        """Begin a save: forget fragments that the last one did not have."""
        self._before, self._known = self._known, {}

    def fragment(self, item: WriteItem, local: object) -> Fragment:
        """The chunk of an item; `StateMismatch`, with the name, for a tensor that differs from the plan."""
        about = item.tensor_data
        if about is None or not isinstance(local, torch.Tensor):
            raise StateMismatch(f"{item.index.fqn}: the planner gives a {type(local).__name__} where its plan has a tensor")
        local, offset = local.detach(), tuple(about.chunk.offsets)
        if has_memory(local) and overlaps(local):  # DCP stores what an expanded tensor shows
            local = local.contiguous()
        if local.shape != about.chunk.sizes:
            raise StateMismatch(
                f"{item.index.fqn}: the planner gives a tensor of shape {list(local.shape)} for a chunk of "
                f"{list(about.chunk.sizes)}",
                hint="use a planner whose resolve_data() returns the tensors that its plan describes",
            )
        known = self._before.get((item.index.fqn, offset))
        if known is None or known.shape != tuple(about.size) or _form(known.tensor) != _form(local):
            known = Fragment(local, about.size, offset=offset)
        self._known[item.index.fqn, offset] = known
        return known


def _form(tensor: torch.Tensor) -> tuple[object, ...]:
    if type(tensor) is not torch.Tensor or tensor.layout != torch.strided:
        return (id(tensor),)
    return tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride(), tensor.device


def contents(plan: SavePlan, planner: SavePlanner, parts: ChunkFragments, groups: frozenset[str]) -> NamedSnapshot:
    """Everything that this rank stores; `InvalidRequest` or `StateMismatch` for what cannot be stored."""
    named = _named(plan, planner)
    parts.begin()
    fragments: dict[Key, list[Fragment]] = {}
    for item in plan.items:
        if item.type != WriteItemType.BYTE_IO:
            fragments.setdefault(named.tensors[item.index.fqn], []).append(parts.fragment(item, planner.resolve_data(item)))
    tensors: dict[Key, Any] = dict(named.arrays)
    for key, held in fragments.items():
        filled = [part for part in held if part.tensor.numel()] or held[:1]
        tensors[key] = FragmentList(filled, "/".join(key)) if len(filled) > 1 else filled[0]
    return NamedSnapshot(groups, tensors, named.values)


def _named(plan: SavePlan, planner: SavePlanner) -> names.NamedContents:
    """Names of everything in this rank's state dict. Every rank stores its values, and gets its own back."""
    naming = names.Naming()
    paths = _paths(plan)
    held = getattr(planner, "state_dict", None)
    if not isinstance(held, Mapping) or not held.keys() >= {item.index.fqn for item in plan.items}:
        held = _looked_up(plan, planner)
    for fqn, value in held.items():
        path = paths.get(fqn, (fqn,))
        if isinstance(value, torch.Tensor):
            naming.tensor(fqn, path)
        else:
            naming.value(path, value)
    return naming.finish()


def _paths(plan: SavePlan) -> Mapping[str, names.Path]:
    """Paths recorded by a flattening planner; without one, each name is a key of its own."""
    noted = plan.planner_data
    if noted is None:
        return {}
    known = isinstance(noted, Mapping) and all(isinstance(p, tuple) and p and isinstance(p[0], str) for p in noted.values())
    if not known:
        raise InvalidRequest(
            f"the planner's data, of type {type(noted).__name__}, has no key paths",
            hint="use DefaultSavePlanner or a planner derived from it",
        )
    return dict(noted)


def _looked_up(plan: SavePlan, planner: SavePlanner) -> dict[str, Any]:
    lookup = getattr(planner, "lookup_object", None)
    values: dict[str, Any] = {}
    for item in plan.items:
        if item.type != WriteItemType.BYTE_IO:
            values[item.index.fqn] = torch.empty(0)
        elif callable(lookup):
            values[item.index.fqn] = lookup(MetadataIndex(item.index.fqn))
        else:
            raise InvalidRequest(
                f"{item.index.fqn}: {type(planner).__name__} provides this value only as a pickle, which Holdfast "
                "does not store",
                hint="derive the planner from DefaultSavePlanner, which has lookup_object()",
            )
    return values
