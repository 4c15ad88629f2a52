"""Plain tensors that are local ones of a declared layout: what is stored of them, and what a checkpoint is to them.

A rank of a Megatron-, Paddle- or vLLM-like program holds fused, cut and padded tensors that do not say so themselves. Here
the layout says it. On save every local tensor becomes pieces of the tensors that are stored; on restore the checkpoint is
shown as this rank alone would have saved it, so that all between sees one set of names and shapes, its own.

What an optimizer keeps of a parameter follows the parameter: in its shape, as the same part of it; a single number, as one
of every tensor that the parameter is made of.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from functools import partial
from math import prod
from typing import Any, NamedTuple

import torch

from holdfast_formats import holding, layouts, padding
from holdfast_formats.errors import InvalidRequest
from holdfast_formats.layouts import Layout
from holdfast_formats.parts import LocalTensor, Part
from holdfast_formats.parts import strides as row_major
from holdfast_formats.region import Shape, whole
from holdfast_formats.rules import Rules
from holdfast_formats.tensors import TensorSpec

from . import optimizer_names, rulebook
from .fragments import Piece
from .launch import Launch
from .leaves import Content, Key, Leaf, Stored
from .restoration import Restoration
from .rulebook import LayoutSource, RulesSource
from .torch_dtypes import packing

MODEL, MASTER, EMA, OPTIM = "model", "master", "ema", "optim"
_NAMED = (MODEL, MASTER, EMA)  # what optimizers keep follows these

Specs = dict[str, tuple[str, Shape]]
Place = tuple[TensorSpec, Part]  # a part of a stored tensor, and where it stands in the local one
Source = tuple[Leaf, Place | None]  # None: the leaf is stored as it is


class Group(NamedTuple):
    """The local tensors of one group, and what each is made of."""

    local: Specs
    places: Mapping[str, Sequence[Place]]
    aliases: Mapping[str, str]


class View(NamedTuple):
    """A checkpoint in a rank's own terms, and the local tensors behind its names."""

    stored: Stored
    held: Mapping[Key, LocalTensor]
    notes: tuple[str, ...]


class Declared:
    """The layout of one rank's plain tensors. It remembers what it worked out for tensors that stay the same."""

    def __init__(self, layout: Layout, rank: int, config: Mapping[str, Any] | None, rules: RulesSource) -> None:
        self.layout, self.rank, self.config = layout, rank, config
        self._extra = rulebook.read_rules(rules)
        self._placement = layouts.text(layout)
        self._groups: dict[str, Group] = {}
        self._made: dict[Key, tuple[tuple[Leaf, ...], Leaf]] = {}
        self._renamed: dict[str, tuple[str, str]] = {}

    @property
    def mesh(self) -> dict[str, int]:
        """What a manifest says of the mesh: the axes in the order that numbers the ranks, then those of experts and chunks."""
        mesh = self.layout.mesh
        return {axis: getattr(mesh, axis) for axis in (*mesh.order, "etp", "vpp")}

    def outward(self, content: Content) -> Content:
        """The same content with what is stored in the place of what is local.

        Raises `StateMismatch` or `InvalidRequest` by name for a tensor that is not what the layout says.
        """
        groups = {group: self._declare(group, content) for group in _NAMED}
        if any(known.local and known is not groups[group] for group, known in self._groups.items()):
            self._made = {}  # what a tensor is made of may depend on what else there is
        self._groups = groups
        gathered: dict[Key, list[Source]] = {}
        for leaf in content.leaves.values():
            for place in _places(leaf, groups):
                key = leaf.key if place is None else (place[0].group, place[0].name)
                gathered.setdefault(key, []).append((leaf, place))
        leaves = {key: self._leaf(key, sources) for key, sources in gathered.items()}
        self._made = {key: made for key, made in self._made.items() if key in leaves}
        aliases = {group: _aliases(tied, groups.get(group)) for group, tied in content.aliases.items()}
        for group, found in groups.items():
            aliases[group] = {**_ties(found), **aliases.get(group, {})}
        return Content(leaves, content.values, {group: tied for group, tied in aliases.items() if tied}, self.mesh)

    def outward_text(self, key: str, text: str) -> str:
        """An optimizer's document with the names of stored tensors; of what `outward` met last."""
        known = self._renamed.get(key)
        if known is None or known[0] != text:
            names = {
                name: tuple(dict.fromkeys(spec.name for spec, _ in places))
                for group in (MASTER, MODEL)
                for name, places in self._groups[group].places.items()
            }
            known = self._renamed[key] = text, optimizer_names.renamed(text, names)
        return known[1]

    def inward(self, stored: Stored, groups: Collection[str], foreign: Collection[Key]) -> View:
        """These groups of the checkpoint as this rank alone would have saved them.

        Tensors of `foreign` names say themselves where they lie.

        Raises `StateMismatch` or `InvalidRequest` naming a tensor that cannot be cut as the layout says.
        """
        rules = self._rules(stored.config or self.config, stored.specs.get(MODEL) or stored.specs.get(MASTER) or {})
        specs: dict[str, Mapping[str, tuple[str, Shape]]] = dict(stored.specs)
        aliases = dict(stored.aliases)
        held: dict[Key, LocalTensor] = {}
        notes: list[str] = []
        for group in (*_NAMED, OPTIM):
            if not stored.specs.get(group) or not (group in groups or (group in (MODEL, MASTER) and OPTIM in groups)):
                continue
            found = holding.hold(self.layout, self.rank, group, stored.specs[group], rules)
            own = {local.name: local for local in found.tensors if not _is_foreign(group, local.name, foreign)}
            others = {name: spec for name, spec in stored.specs[group].items() if _is_foreign(group, name, foreign)}
            specs[group] = {**others, **{name: (local.dtype, local.shape) for name, local in own.items()}}
            tied = {**stored.aliases.get(group, {}), **found.aliases}
            aliases[group] = {a: name for a, name in tied.items() if name in specs[group] and a not in specs[group]}
            held.update({(group, name): local for name, local in own.items()})
            notes += [note for note in found.notes if note not in notes]
        values = {**stored.values, OPTIM: self._inward_texts(stored, held)} if OPTIM in stored.values else stored.values
        return View(stored._replace(specs=specs, aliases=aliases, values=values), held, tuple(notes))

    def _inward_texts(self, stored: Stored, held: Mapping[Key, LocalTensor]) -> dict[str, str]:
        names: dict[str, list[str]] = {}
        for group in (MASTER, MODEL):
            for (of, name), local in held.items():
                for tensor in dict.fromkeys(part.tensor for part in local.parts) if of == group else ():
                    if name not in names.setdefault(tensor, []):
                        names[tensor].append(name)
        return {key: optimizer_names.renamed(text, names) for key, text in stored.values[OPTIM].items()}

    def _declare(self, group: str, content: Content) -> Group:
        local = {leaf.name: (leaf.dtype, leaf.shape) for leaf in content.leaves.values() if leaf.group == group and leaf.plain}
        tied = content.aliases.get(group, {})
        local |= {alias: local[canonical] for alias, canonical in tied.items() if canonical in local}
        known = self._groups.get(group)
        if known is not None and known.local == local:
            return known
        rules = self._rules(self.config, local)
        places = holding.declare(self.layout, self.rank, group, rules, local) if local else {}
        return Group(local, places, rules.aliases())

    def _rules(self, config: Mapping[str, Any] | None, names: Iterable[str]) -> Rules:
        return rulebook.choose(config, names, self.layout, self._extra)

    def _leaf(self, key: Key, sources: Sequence[Source]) -> Leaf:
        """The stored tensor's leaf; the very one of the last save where it is made of the same."""
        leaves = tuple(leaf for leaf, _ in sources)
        known = self._made.get(key)
        if known is not None and len(known[0]) == len(leaves) and all(a is b for a, b in zip(known[0], leaves, strict=True)):
            return known[1]
        made = self._joined(sources)
        self._made[key] = leaves, made
        return made

    def _joined(self, sources: Sequence[Source]) -> Leaf:
        first, place = sources[0]
        if place is None:
            return first
        spec = place[0]
        pieces: dict[object, Piece] = {}
        for leaf, at in sources:
            if at is None or at[0] != spec or leaf.dtype != spec.dtype:
                raise InvalidRequest(f"{leaf.path} and {first.path} do not agree on the stored tensor {spec.name!r}")
            if at[1].box.volume:
                pieces.setdefault(at[1].box, Piece(at[1].box, view(leaf, at[1])))  # the same box twice is tied tensors
        return Leaf(spec.group, spec.name, spec.dtype, spec.shape, tuple(pieces.values()), self._placement)


def declare(
    layout: LayoutSource, launch: Launch, config: tuple[Mapping[str, Any] | None, Mapping[str, bytes]], rules: RulesSource
) -> Declared:
    """The layout of a launch's rank; the config is the one given, else that among the assets, else not known.

    Raises `InvalidRequest` for what is no layout, or one of another number of ranks.
    """
    wanted = rulebook.layout_of(layout)
    if wanted.mesh.world != launch.world:
        raise InvalidRequest(
            f"the layout {layouts.text(wanted)} is of {wanted.mesh.world} ranks, and there are {launch.world}",
            hint="the product of tp, cp, sharding, dp and pp is the number of ranks",
        )
    given, assets = config
    if given is None and rulebook.CONFIG in assets:
        given = rulebook.parse_config(assets[rulebook.CONFIG], "the assets")
    return Declared(wanted, launch.rank, given, rules)


def land(restoration: Restoration, shown: View) -> Restoration:
    """The restoration with stored tensors' boxes where local tensors were wanted. Padding is zeroed once all is filled."""
    leaves: list[Leaf] = []
    zeroed = []
    for leaf in restoration.leaves:
        local = shown.held.get(leaf.key) if leaf.plain else None
        if local is None:
            leaves.append(leaf)
            continue
        for part in local.parts:
            shape = tuple(o + n for o, n in zip(*part.box, strict=True))  # only where its bytes go matters from here on
            piece = Piece(part.box, view(leaf, part))
            leaves.append(Leaf(leaf.group, part.tensor, leaf.dtype, shape, (piece,), leaf.placement))
        if local.padding:
            zeroed.append(partial(_zero, leaf, padding.gaps(local)))
    notes = [*restoration.notes, *shown.notes]
    return restoration._replace(leaves=tuple(leaves), notes=notes, actions=(*zeroed, *restoration.actions))


def view(leaf: Leaf, part: Part) -> torch.Tensor:
    """The part's place in the live memory of its local tensor; `InvalidRequest` by name where that is not contiguous."""
    if not leaf.pieces:
        raise InvalidRequest(f"{leaf.path} has no elements, and the layout says that it has {part.box.volume}")
    tensor = leaf.pieces[0].tensor
    if part.start == 0 and part.box.shape == leaf.shape and part.strides == row_major(leaf.shape):
        return tensor
    factor = packing(tensor.dtype)
    shape, steps, start = part.box.shape, part.strides, part.start
    if factor > 1:
        if any(n % factor for n in (start, *shape[-1:], *steps[:-1])) or not shape or steps[-1] != 1:
            raise InvalidRequest(f"{leaf.path}: the part of {part.tensor!r} in it begins or ends inside a byte")
        shape, start = (*shape[:-1], shape[-1] // factor), start // factor
        steps = (*(step // factor for step in steps[:-1]), 1)
    if not tensor.is_contiguous():
        raise InvalidRequest(
            f"{leaf.path} is not contiguous, and holds parts of {part.tensor!r} and others", hint="make it contiguous()"
        )
    return tensor.as_strided(shape, steps, tensor.storage_offset() + start)


def _zero(leaf: Leaf, ranges: Sequence[tuple[int, int]]) -> None:
    if not leaf.pieces:
        return
    tensor = leaf.pieces[0].tensor
    factor = packing(tensor.dtype)
    if not tensor.is_contiguous():
        raise InvalidRequest(f"{leaf.path} is not contiguous, and has padding", hint="make it contiguous()")
    octets = tensor.view(-1).view(torch.uint8)
    width = tensor.element_size()
    with torch.no_grad():
        for start, stop in ranges:
            octets[start * width // factor : stop * width // factor].zero_()


def _is_foreign(group: str, name: str, foreign: Collection[Key]) -> bool:
    """Whether a name's tensor is no local one; what an optimizer keeps is what its parameter is."""
    if group != OPTIM:
        return (group, name) in foreign
    owner = name.rpartition("/")[0]
    return any((of, owner) in foreign for of in (MASTER, MODEL))


def _places(leaf: Leaf, groups: Mapping[str, Group]) -> Iterator[Place | None]:
    """The stored tensors of which a leaf has parts; None where it is stored as it is."""
    if not leaf.plain or leaf.group not in (*_NAMED, OPTIM):
        yield None
    elif leaf.group == OPTIM:
        yield from _kept_places(leaf, groups)
    elif leaf.name in groups[leaf.group].places:
        yield from (_unchanged(leaf, place) for place in groups[leaf.group].places[leaf.name])
    else:
        yield None


def _kept_places(leaf: Leaf, groups: Mapping[str, Group]) -> Iterator[Place | None]:
    """Where what an optimizer keeps of a parameter belongs: where the parameter does, or at each tensor that is part of it."""
    owner, _, key = leaf.name.rpartition("/")
    owners = [groups[group] for group in (MASTER, MODEL) if owner in groups[group].places]
    if not owners:
        yield None
        return
    alike = next((group for group in owners if group.local[owner][1] == leaf.shape), None)
    if alike is not None:
        for spec, part in alike.places[owner]:
            followed = TensorSpec(OPTIM, f"{spec.name}/{key}", leaf.dtype, spec.shape)
            yield _unchanged(leaf, (followed, part._replace(tensor=followed.name)))
        return
    names = dict.fromkeys(spec.name for group in owners[:1] for spec, _ in group.places[owner])
    if prod(leaf.shape) == 1:
        box = whole(leaf.shape)
        for name in names:
            spec = TensorSpec(OPTIM, f"{name}/{key}", leaf.dtype, leaf.shape)
            yield _unchanged(leaf, (spec, Part(spec.name, box, 0, row_major(leaf.shape))))
        return
    places = owners[0].places[owner]
    if len(places) != 1 or places[0][0].name != owner or places[0][0].shape != owners[0].local[owner][1]:
        raise InvalidRequest(
            f"{leaf.path} has the shape {list(leaf.shape)}, its parameter here {list(owners[0].local[owner][1])}: "
            "the layout does not say which part of what it is",
            hint="keep such state in a Fragment or DTensor, or out of the state",
        )
    yield None


def _unchanged(leaf: Leaf, place: Place) -> Place | None:
    """None where the whole stored tensor stands in the local one of the same name and shape."""
    spec, part = place
    same = spec.name == leaf.name and spec.shape == leaf.shape == part.box.shape and part.strides == row_major(leaf.shape)
    return None if same else place


def _aliases(tied: Mapping[str, str], group: Group | None) -> dict[str, str]:
    """What is tied here, among stored names: tensor by tensor of what both are made of."""
    found: dict[str, str] = {}
    for alias, canonical in tied.items():
        names = [_stored_names(group, name) for name in (alias, canonical)]
        found.update((a, name) for a, name in zip(*names, strict=True) if a != name)
    return found


def _stored_names(group: Group | None, name: str) -> list[str]:
    places = () if group is None else group.places.get(name, ())
    return list(dict.fromkeys(spec.name for spec, _ in places)) or [name]


def _ties(group: Group) -> dict[str, str]:
    """Names that the model ties to others: this rank holds the other's tensor under them."""
    pairs = ((name, group.aliases.get(name)) for name in group.places)
    return {name: target for name, target in pairs if target is not None and _stored_names(group, name) == [target]}
