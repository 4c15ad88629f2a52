"""Restores blocks of codes: as they are where this rank has the same blocks, or quantised once more if that is asked for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch

from holdfast.left_out import LeftOutNote
from holdfast.state.containers import ContainerKeeper
from holdfast.state.optimizers import Parameter
from holdfast.state.partitioned import blocks as forms
from holdfast.state.partitioned import values
from holdfast.state.partitioned.blocks import Blocks, PartKeys
from holdfast.state.partitioned.live import LiveBlocks, blocks_of
from holdfast.state.state_tensors import GROUP, LOCAL, device_of
from holdfast.tensors import wrapped
from holdfast.tensors.fragments import FragmentList, is_dtensor
from holdfast.tensors.leaves import OfferedLeaves, PartPlan, Selection
from holdfast.tensors.live_pieces import Shards, shards_of
from holdfast.tensors.torch_dtypes import local_shape, torch_dtype
from holdfast.tensors.wrapped import Description
from holdfast_formats.errors import StateMismatch
from holdfast_formats.region import Box, Shape, intersect, whole

LISTED_MAX = 5
_AGAIN = "restore(requantise=True) computes the values and quantises them again, with a note of how far they move; or "
_OTHERWISE = "restore on as many ranks as saved it, or leave the optimizer's state out: restore(groups=…)"


class StoredBlocks(NamedTuple):
    """The blocks of one state in a checkpoint. `description` is that of its wrapper, if it had one."""

    name: str
    parts: PartKeys
    blocks: Blocks
    specs: Mapping[str, tuple[str, Shape]]
    description: Description | None

    def dtype(self, key: str) -> torch.dtype:
        return torch_dtype(self.specs[key][0], f"{self.name}/{key}")


def stored_wrapper(stored: OfferedLeaves, name: str, key: str, description: Description, cut: object) -> StoredBlocks | None:
    """The blocks of a stored wrapper, of which the document says that they are `cut`; None for a wrapper without any."""
    parts = forms.parts_of_wrapper(key, description["inner"])
    specs = None if parts is None else _specs(stored, name, parts)
    if parts is None or specs is None:
        return None
    shape = tuple(description["shape"])
    elements, codes, scales = (whole(each).volume for each in (shape, specs[parts.codes][1], specs[parts.scale][1]))
    packed = 0 if specs[parts.codes][1] == shape else elements // max(codes, 1)
    size = elements // max(scales, 1)
    if not size or (packed != 2 and specs[parts.codes][1] != shape):
        return None
    return StoredBlocks(name, parts, _blocks(cut, size, packed, shape, f"{name}/{key}"), specs, description)


def stored_keys(stored: OfferedLeaves, name: str, keys: Mapping[str, Any], cut: Mapping[str, object]) -> list[StoredBlocks]:
    """The blocks that are stored as plain tensors of a parameter."""
    found = []
    for parts in forms.parts_of_keys(keys):
        specs = _specs(stored, name, parts)
        if specs is None or specs[parts.codes][0] != "U8" or len(specs[parts.scale][1]) != 1:
            continue
        shape = specs[parts.codes][1]
        size = forms.size_by_key(whole(shape).volume, specs[parts.scale][1][0])
        if size or parts.key in cut:
            made = _blocks(cut.get(parts.key), size or 0, 0, shape, f"{name}/{parts.key}")
            found.append(StoredBlocks(name, parts, made, specs, None))
    return found


def _specs(stored: OfferedLeaves, name: str, parts: PartKeys) -> dict[str, tuple[str, Shape]] | None:
    specs = {key: stored.spec(GROUP, f"{name}/{key}") for key in parts.all}
    return None if None in specs.values() else specs  # type: ignore[return-value]


def _blocks(cut: object, size: int, packed: int, shape: Shape, path: str) -> Blocks:
    return Blocks(size, packed, Shards(shape, (whole(shape),), 0)) if cut is None else forms.read(cut, shape, packed, path)


class _Target(NamedTuple):
    """Where blocks go: `live` has some; else `plain` has the values themselves. `new`, if the optimizer lacks it."""

    live: LiveBlocks | None
    plain: torch.Tensor | None
    new: bool

    def put(self, given: torch.Tensor) -> float:
        """Write values; return how far one moved, in units of the largest of its block."""
        if self.live is None:
            assert self.plain is not None
            self.plain.copy_(given)
            return 0.0
        return values.put(self.live, given)


class _Source(NamedTuple):
    """Stored blocks that overlap this rank's part: boxes, and new memory for codes and scales of each."""

    boxes: list[Box]
    codes: list[torch.Tensor]
    scales: list[torch.Tensor]
    table: torch.Tensor | None


class BlockResume:
    """Plans for the blocks of one optimizer, and installs them."""

    def __init__(
        self, key: str, stored: OfferedLeaves, selection: Selection, plan: PartPlan, keeper: ContainerKeeper
    ) -> None:
        self.key = key
        self.stored = stored
        self.selection = selection
        self.plan = plan
        self.keeper = keeper
        self.made: list[tuple[Parameter, StoredBlocks, _Target]] = []
        self.again: list[tuple[str, Any]] = []  # names of what is quantised again, with what does it
        self.done: set[tuple[str, str]] = set()

    def take(self, parameter: Parameter, one: StoredBlocks, kind: str) -> None:
        """Want stored blocks for what the optimizer has, or for new ones.

        Raises `StateMismatch`, by name, if this rank's blocks are others and `requantise` is not given.
        """
        path = f"{self.key}: {parameter.name}/{one.parts.key}"
        self.done |= {(GROUP, f"{one.name}/{key}") for key in (*one.parts.all, one.parts.key)}
        self.plan.claimed |= {(GROUP, f"{one.name}/{key}") for key in one.parts.all}
        shards = shards_of(parameter.value, path)
        if shards is None or shards.shape != one.blocks.shards.shape:
            now = "is cut in a way that is not known" if shards is None else f"has the shape {list(shards.shape)}"
            raise StateMismatch(
                f"{path} was stored in blocks of a tensor of shape {list(one.blocks.shards.shape)}; its parameter {now}",
                hint=_OTHERWISE,
            )
        target = self._target(parameter, one, shards, kind, path)
        if target.new:
            self.made.append((parameter, one, target))
        if shards.box is None:
            return
        unlike = self._unlike(one, target, shards.box, path)
        found = None if unlike or target.live is None else forms.runs(one.blocks, shards.box, target.live.blocks.size)
        if found is not None and target.live is not None:
            self._want(parameter, one, target.live, found, path)
        elif self.selection.requantise:
            source = self._source(parameter, one, shards.box, path)
            self.again.append((path, partial(self._quantise, one, source, target, shards.box, path)))
        else:
            text = unlike or (
                f"it was stored in {len(one.blocks.shards.boxes)} parts, in blocks of {one.blocks.size} values, and this "
                f"rank's part {list(shards.box.offset)}+{list(shards.box.shape)} does not consist of whole ones"
            )
            raise StateMismatch(f"{path}: {text}", hint=_AGAIN + _OTHERWISE)

    def install(self) -> dict[str, dict[str, Any]]:
        """Quantise what is quantised again, with a note, and return what the optimizer lacks, by name and key."""
        moved = [act() for _, act in self.again]
        if self.again:
            listed = ", ".join(path for path, _ in self.again[:LISTED_MAX]) + ", …" * (len(self.again) > LISTED_MAX)
            self.keeper.notes.append(
                LeftOutNote(
                    f"{len(self.again)} quantised tensors were quantised again in this rank's blocks ({listed}): no value "
                    f"moved by more than {max(moved):.2g} of the largest of its block"
                )
            )
        created: dict[str, dict[str, Any]] = {}
        for parameter, one, target in self.made:
            created.setdefault(parameter.name, {}).update(_given(parameter, one, target))
        return created

    def take_plain(self, parameter: Parameter, key: str, live: LiveBlocks) -> None:
        """Want stored plain values for live blocks; `StateMismatch`, by name, without `requantise`."""
        name, path = f"{parameter.name}/{key}", f"{self.key}: {parameter.name}/{key}"
        spec = self.stored.spec(GROUP, name)
        assert spec is not None
        if not self.selection.requantise or live.wrapper is None:
            other = f"a plain tensor was stored, but the live one is a {type(live.wrapper).__name__}"
            raise StateMismatch(f"{path}: {other}", hint=_AGAIN + _OTHERWISE)
        self.done |= {(GROUP, f"{parameter.name}/{part}") for part in (*live.parts.all, key)}
        self.plan.claimed.add((GROUP, name))
        read = torch.empty(live.wrapper.shape, dtype=torch_dtype(spec[0], name), device=device_of(parameter.weight))
        self.plan.want(GROUP, name, parameter.value, read)
        self.again.append((path, lambda: values.put(live, read)))

    def _target(self, parameter: Parameter, one: StoredBlocks, shards: Shards, kind: str, path: str) -> _Target:
        kept = parameter.kept
        live = {found.parts.key: found for found in blocks_of(parameter, kept, f"{self.key}: {parameter.name}")}
        if one.parts.key in live:
            return _Target(live[one.parts.key], None, False)
        held = wrapped.held_by(kept.get(one.parts.key))
        if isinstance(held, torch.Tensor):
            return _Target(None, held, False)
        return _fresh(parameter, one, shards, kind == LOCAL or not is_dtensor(parameter.value), path)

    def _unlike(self, one: StoredBlocks, target: _Target, box: Box, path: str) -> str:
        """Why the live form is another one; empty if it is the stored one."""
        if target.live is None:
            return f"blocks of {one.blocks.size} values were stored; this rank has plain values of shape {list(box.shape)}"
        if one.description is None or target.live.wrapper is None:
            return "" if one.description is None and target.live.wrapper is None else "another kind of blocks was stored"
        live, table = target.live, one.parts.table
        values_of_codes = 0 if live.parts.table is None else live.tensors[live.parts.table].numel()
        stored_values = 0 if table is None else whole(one.specs[table][1]).volume
        if (live.blocks.packed, values_of_codes) != (one.blocks.packed, stored_values):
            return f"codes of {stored_values} values were stored, and the live ones are of {values_of_codes}"
        try:
            wrapped.check_alike(target.live.wrapper, wrapped.reshaped(one.description, box.shape), path)
        except StateMismatch as error:
            return error.detail.removeprefix(f"{path}: ")
        return ""

    def _want(
        self, parameter: Parameter, one: StoredBlocks, live: LiveBlocks, found: Sequence[forms.SameBlocks], path: str
    ) -> None:
        codes, scale = live.tensors[live.parts.codes], live.tensors[live.parts.scale]
        if one.blocks.packed:
            self.plan.want(GROUP, f"{one.name}/{one.parts.codes}", forms.code_parts(codes, one.blocks, found, path))
        else:
            self.plan.want(GROUP, f"{one.name}/{one.parts.codes}", parameter.value, codes)
        cut = forms.scale_parts(scale, one.blocks.scale_starts[-1], found, path)
        self.plan.want(GROUP, f"{one.name}/{one.parts.scale}", cut)
        if one.parts.table is not None and live.parts.table is not None:
            self.plan.want(GROUP, f"{one.name}/{one.parts.table}", live.tensors[live.parts.table])

    def _source(self, parameter: Parameter, one: StoredBlocks, box: Box, path: str) -> _Source:
        blocks, device = one.blocks, device_of(parameter.weight)
        over = [number for number, part in enumerate(blocks.shards.boxes) if intersect(part, box) is not None]
        boxes = [blocks.shards.boxes[number] for number in over]
        sizes = [(part.volume // blocks.packed,) if blocks.packed else part.shape for part in boxes]
        codes = [torch.empty(size, dtype=one.dtype(one.parts.codes), device=device) for size in sizes]
        counts = [-(-part.volume // blocks.size) for part in boxes]
        scales = [torch.empty(count, dtype=one.dtype(one.parts.scale), device=device) for count in counts]
        cut = [blocks.codes_at(tensor, number) for tensor, number in zip(codes, over, strict=True)]
        self.plan.want(GROUP, f"{one.name}/{one.parts.codes}", FragmentList(cut, path))
        cut = [blocks.scale_at(tensor, number) for tensor, number in zip(scales, over, strict=True)]
        self.plan.want(GROUP, f"{one.name}/{one.parts.scale}", FragmentList(cut, path))
        table = None
        if one.parts.table is not None:
            table = _empty(one, one.parts.table, device)
            self.plan.want(GROUP, f"{one.name}/{one.parts.table}", table)
        return _Source(boxes, codes, scales, table)

    def _quantise(self, one: StoredBlocks, source: _Source, target: _Target, box: Box, path: str) -> float:
        made = torch.empty(box.shape, dtype=torch.float32, device=source.codes[0].device)
        kind = None if one.description is None else wrapped.find_class(one.description, path)
        for part, codes, scale in zip(source.boxes, source.codes, source.scales, strict=True):
            inner = {"codes": codes, "scale": scale} | ({} if source.table is None else {"qmap": source.table})
            if kind is None or one.description is None:
                found = values.of_keys(inner, one.blocks.size)
            else:
                wrapper = wrapped.build(kind, wrapped.reshaped(one.description, part.shape), inner, path)
                found = values.of_wrapper(wrapper, path)
            common = intersect(part, box)
            assert common is not None
            made[common.within(box).slices] = found[common.within(part).slices]
        if target.new and target.live is not None and source.table is not None and target.live.parts.table is not None:
            target.live.tensors[target.live.parts.table].copy_(source.table)
        return target.put(made)


def _empty(one: StoredBlocks, key: str, device: torch.device) -> torch.Tensor:
    dtype = one.dtype(key)
    return torch.empty(local_shape(dtype, one.specs[key][1]), dtype=dtype, device=device)


def _fresh(parameter: Parameter, one: StoredBlocks, shards: Shards, local: bool, path: str) -> _Target:
    """New memory in the stored form; plain values if this rank's part has no whole number of blocks."""
    device, shape = device_of(parameter.weight), tuple(parameter.local.shape)
    volume, blocks = parameter.local.numel(), one.blocks
    if one.description is not None and (volume % blocks.size or not volume):
        kind = wrapped.find_class(one.description, path)
        return _Target(None, torch.zeros(shape, dtype=values.appearance(kind, one.description, path), device=device), True)
    size = (volume // blocks.packed,) if blocks.packed else shape
    tensors = {
        one.parts.codes: torch.empty(size, dtype=one.dtype(one.parts.codes), device=device),
        one.parts.scale: torch.empty(-(-volume // blocks.size), dtype=one.dtype(one.parts.scale), device=device),
    }
    if one.parts.table is not None:
        tensors[one.parts.table] = _empty(one, one.parts.table, device)
    wrapper = None
    if one.description is not None:
        inner = {key.rpartition(".")[2]: tensor for key, tensor in tensors.items()}
        kind = wrapped.find_class(one.description, path)
        wrapper = wrapped.build(kind, wrapped.reshaped(one.description, shape), inner, path)
    made = LiveBlocks(one.parts, Blocks(blocks.size, blocks.packed, shards), tensors, wrapper, wrapper if local else None)
    return _Target(made, None, True)


def _given(parameter: Parameter, one: StoredBlocks, target: _Target) -> dict[str, Any]:
    """What the optimizer is given, by key."""
    if one.description is None and target.live is not None:
        return dict(target.live.tensors)
    held = target.plain if target.live is None else target.live.wrapper
    in_mesh = is_dtensor(parameter.value) and (target.live is None or target.live.given is None)
    return {one.parts.key: _in_mesh(parameter.tensor, held) if in_mesh else held}


def _in_mesh(parameter: torch.Tensor, held: Any) -> torch.Tensor:
    from torch.distributed.tensor import DTensor

    mesh, placements = parameter.device_mesh, parameter.placements  # type: ignore[attr-defined]
    shape, stride = parameter.shape, parameter.stride()
    return DTensor.from_local(held, mesh, placements, run_check=False, shape=shape, stride=stride)
