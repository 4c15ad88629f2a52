"""The leaves of a training state: named tensors with their pieces, collected together with the JSON beside them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any, NamedTuple

import torch

from holdfast.tensors import fragments
from holdfast.tensors.fragments import Fragment, FragmentList, Storable
from holdfast.tensors.live_pieces import LivePiece, PlacedPieces, pieces, pieces_like
from holdfast.tensors.torch_dtypes import has_memory, safetensors_name
from holdfast_formats.errors import InvalidRequest
from holdfast_formats.layout.successors import SavedRankChoice
from holdfast_formats.near_names import one_of
from holdfast_formats.region import Shape
from holdfast_formats.tensors import TensorSpec

RANK_PREFIX = "ranks/"  # tensors of one rank's process, not of the model: RNG, data loaders

Key = tuple[str, str]  # group, name


class Leaf(NamedTuple):
    """A global tensor and the pieces of it in this process; shape and boxes count the format's elements.

    `plain`: does not state its own place, unlike a DTensor or Fragments. `alone`: by its placements no other rank holds
    any of it. `rounded_from`: not copied, because the daemon rounds it from the tensor of the same name in that group.
    `frozen`: nothing in the state trains it, so its bytes are expected to stay.
    """

    group: str
    name: str
    dtype: str
    shape: Shape
    pieces: tuple[LivePiece, ...]
    placement: str
    plain: bool = False
    alone: bool = False
    rounded_from: str = ""
    frozen: bool = False

    @property
    def key(self) -> Key:
        return self.group, self.name

    @property
    def path(self) -> str:
        return f"{self.group}/{self.name}"


class OfferedLeaves(NamedTuple):
    """The contents of a checkpoint for this rank, by group and name."""

    specs: Mapping[str, Mapping[str, tuple[str, Shape]]]
    aliases: Mapping[str, Mapping[str, str]]
    values: Mapping[str, Mapping[str, str]]
    config: Mapping[str, Any] | None = None  # the model's config.json, if a layout needs it
    stream: SavedRankChoice | None = None  # the saved rank whose random streams this rank continues, if layouts determine it
    imported: bool = False  # converted from another program's checkpoint, of which no state needs to have every key
    notes: tuple[str, ...] = ()  # what was renamed for the live state

    def spec(self, group: str, name: str) -> tuple[str, Shape] | None:
        dtype_and_shape = self.specs.get(group, {}).get(name)
        return None if dtype_and_shape is None else (dtype_and_shape[0], tuple(dtype_and_shape[1]))

    def value(self, group: str, key: str) -> str | None:
        return self.values.get(group, {}).get(key)

    def canonical(self, group: str, name: str) -> str | None:
        """The name under which this tensor's bytes are stored: that of which it is an alias, or its own."""
        alias = self.aliases.get(group, {}).get(name)
        return name if alias is None and name in self.specs.get(group, {}) else alias


class Selection(NamedTuple):
    """The part of the state that an operation covers: some groups, without names that match a pattern on `group/name`.

    `cast`: floats of another dtype are rounded, too. `chosen`: the caller named the groups. `keep` are patterns over
    `key/hyper-parameter` of optimizers whose live values stay. `requantise`: blocks of codes may become other blocks.
    """

    groups: frozenset[str]
    ignore: tuple[str, ...] = ()
    cast: bool = False
    chosen: bool = False
    keep: tuple[str, ...] = ()
    requantise: bool = False

    def takes(self, group: str, name: str) -> bool:
        return group in self.groups and not any(covers(pattern, group, name) for pattern in self.ignore)


def covers(pattern: str, group: str, name: str) -> bool:
    """Whether a pattern matches this name, or the entry of the group `extra` that contains it."""
    if fnmatchcase(f"{group}/{name}", pattern):
        return True
    parts = name.split("/")
    entry = parts[2] if name.startswith(RANK_PREFIX) and len(parts) > 2 else parts[0]
    return group == "extra" and fnmatchcase(f"{group}/{entry}", pattern)


def is_ignored(group: str, ignore: Sequence[str]) -> bool:
    """Whether these patterns exclude every name that a group could have."""
    return any(all(fnmatchcase(f"{group}/{name}", pattern) for name in ("", "*", "\0\0")) for pattern in ignore)


class KnownLeaf(NamedTuple):
    value: Storable
    form: tuple[object, ...]
    leaf: Leaf
    mesh: dict[str, int]


@dataclass
class Content:
    """Everything collected of the live state: leaves, JSON texts by (group, key), aliases by group, mesh dimensions."""

    leaves: dict[Key, Leaf] = field(default_factory=dict)
    values: dict[Key, str] = field(default_factory=dict)
    aliases: dict[str, dict[str, str]] = field(default_factory=dict)
    mesh: dict[str, int] = field(default_factory=dict)
    known: dict[Key, KnownLeaf] = field(default_factory=dict)
    taken: Collection[Key] = ()  # names of leaves collected elsewhere
    frozen: Collection[Key] = ()  # names of leaves that nothing in the state trains

    def add(self, group: str, name: str, value: Storable, local: torch.Tensor | None = None) -> None:
        """Add a tensor; `local` replaces its memory, piece for piece. A second tensor of the same name is refused."""
        leaf, mesh = self._describe(group, name, value, local)
        if leaf.key in self.leaves or leaf.key in self.taken:
            raise InvalidRequest(
                f"two tensors in the state have the name {leaf.path!r}", hint="give them different names or keys"
            )
        self.leaves[leaf.key] = leaf
        for dimension, size in mesh.items():
            self.mesh.setdefault(dimension, size)

    def _describe(self, group: str, name: str, value: Storable, local: torch.Tensor | None) -> tuple[Leaf, dict[str, int]]:
        memory = () if local is None else (local,)
        if local is None or isinstance(value, FragmentList):  # the parts say where they are in the local tensor
            memory = (*memory, *fragments.local_tensors(value))
        if not all(map(has_memory, memory)):
            return describe(group, name, value, local)  # raises, with the name
        frozen = (group, name) in self.frozen
        form = (frozen, *((part.data_ptr(), part.dtype, part.shape, part.stride()) for part in memory))
        if isinstance(value, Fragment | FragmentList):
            form = (*form, *(part.place for part in fragments.parts_of(value) if isinstance(part, Fragment)))
        before = self.known.get((group, name))
        if before is None or fragments.objects(before.value) != fragments.objects(value) or before.form != form:
            leaf, mesh = describe(group, name, value, local)
            before = self.known[group, name] = KnownLeaf(value, form, leaf._replace(frozen=frozen), mesh)
        return before.leaf, before.mesh

    def add_value(self, group: str, key: str, text: str) -> None:
        if (group, key) in self.values:
            raise InvalidRequest(
                f"two values in the state have the name '{group}/{key}'", hint="give one of them another key"
            )
        self.values[group, key] = text


class LackingCopy(NamedTuple):
    """New memory for a full-precision copy, without which an optimizer cannot continue from what is restored."""

    name: str
    weight: Storable
    copy: Storable


@dataclass
class PartPlan:
    """What a part of the state needs from a checkpoint, and what it does once the wanted leaves are filled.

    `wanted` are live tensors, or new ones that `actions` install. `documents` are the JSON keys that it needs,
    `claimed` other names that it uses or omits on purpose. `lacking` is installed too, if it is filled. `conflicts` are
    stored values that exclude one another; `keepable` are the `keep=` patterns that would settle them.
    """

    wanted: list[Leaf] = field(default_factory=list)
    documents: list[Key] = field(default_factory=list)
    claimed: set[Key] = field(default_factory=set)
    aliases: dict[str, dict[str, str]] = field(default_factory=dict)
    missing: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    actions: list[Callable[[], None]] = field(default_factory=list)
    lacking: list[LackingCopy] = field(default_factory=list)
    conflicts: list[str] = field(default_factory=list)
    keepable: list[str] = field(default_factory=list)

    def want(self, group: str, name: str, value: Storable, local: torch.Tensor | None = None) -> None:
        leaf, _ = describe(group, name, value, local)
        self.wanted.append(leaf)


def describe(group: str, name: str, value: Storable, local: torch.Tensor | None = None) -> tuple[Leaf, dict[str, int]]:
    """The leaf of a live tensor and its mesh; refuses a tensor that no file can hold."""
    path = f"{group}/{name}"
    placed: PlacedPieces = pieces(value, path) if local is None else pieces_like(value, local, path)
    dtype = value.dtype if local is None else local.dtype
    leaf = Leaf(group, name, safetensors_name(dtype, path), *placed[:3], not fragments.is_sharded(value), placed.alone)
    TensorSpec(group, name, leaf.dtype, leaf.shape).check()
    return leaf, placed.mesh


def check_groups(groups: Collection[str] | None, known: Sequence[str]) -> frozenset[str]:
    """The groups of an operation: those requested, or all; `InvalidRequest` for one that the state does not have."""
    if groups is None:
        return frozenset(known)
    if isinstance(groups, str):
        raise InvalidRequest(f"groups must be a collection of names, not the text {groups!r}", hint=f"groups=({groups!r},)")
    unknown = sorted(set(groups) - set(known))
    if unknown:
        raise InvalidRequest(
            f"the state has no group {', '.join(unknown)}",
            hint=one_of(unknown[0], known, "its groups"),
        )
    return frozenset(groups)
