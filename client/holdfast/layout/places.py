"""Maps a rank's live tensors to the stored tensors that they are parts of."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from math import prod
from typing import NamedTuple

from holdfast.layout.local_views import whole_views
from holdfast.layout.rank_view import MASTER, MODEL, OPTIM
from holdfast.tensors.leaves import Leaf
from holdfast.tensors.live_pieces import LivePiece
from holdfast_formats.errors import InvalidRequest
from holdfast_formats.layout.parts import Part, strides
from holdfast_formats.programs.saving import WholeTensor
from holdfast_formats.region import Shape, whole
from holdfast_formats.tensors import TensorSpec

Specs = dict[str, tuple[str, Shape]]
PlainPlace = tuple[TensorSpec, Part]  # a stored tensor, and which part of it is where in the local one
Place = PlainPlace | tuple[TensorSpec, LivePiece]  # the latter of tensors that state their own place
Places = dict[str, list[PlainPlace]]  # by local name
Source = tuple[Leaf, Place | None]  # None: the leaf is stored as it is


class Group(NamedTuple):
    """The local tensors of one group, the parts of each, and the names that the model ties to others.

    `ties` are names of this rank's tensors, `stored_ties` of stored ones. `wholes` describe how a program makes tensors
    that state their own place, as whole tensors.
    """

    local: Specs
    places: Places
    ties: Mapping[str, str]
    stored_ties: Mapping[str, str] = {}
    wholes: Mapping[str, WholeTensor] = {}
    foreign: Mapping[str, tuple[str, Shape]] = {}  # the tensors that state their own place

    def knows(self, name: str) -> bool:
        """Whether the stored tensors of a live one are known."""
        return (name in self.places and name in self.local) or name in self.wholes

    def stored_names(self, name: str) -> list[str]:
        """The stored tensors of which a local one has parts; its own name if the layout does not know it."""
        if name in self.wholes:
            return list(dict.fromkeys(move.source.name for move in self.wholes[name].moves))
        return list(dict.fromkeys(spec.name for spec, _ in self.places[name])) if name in self.places else [name]

    def is_kept(self, name: str) -> bool:
        """Whether a local tensor is stored under its name, with its shape."""
        places, spec = self.places.get(name, ()), self.local.get(name)
        return spec is not None and [(of.name, of.shape) for of, _ in places] == [(name, spec[1])]

    def is_renamed(self, name: str) -> bool:
        """Whether a local tensor is the whole of a stored one, under another name perhaps."""
        places, shape = self.places[name], self.local[name][1]
        return len(places) == 1 and places[0][0].shape == shape and places[0][1] == _full(places[0][0])


def own_places(leaf: Leaf, group: Group) -> Iterator[Place] | None:
    """The stored tensors of which a tensor of this group has parts; None if the layout does not know it."""
    if leaf.plain:
        places = group.places.get(leaf.name)
        return None if places is None else iter(places)
    mapped = group.wholes.get(leaf.name)
    return None if mapped is None else _in_whole(leaf, mapped, "")


def kept_places(leaf: Leaf, groups: Mapping[str, Group]) -> Iterator[Place | None]:
    """The place of optimizer state: that of its parameter, or each tensor of which the parameter has parts."""
    owner, _, key = leaf.name.rpartition("/")
    owners = [group for group in (groups[MASTER], groups[MODEL]) if group.knows(owner)]
    if not owners:
        yield None
        return
    alike = next((group for group in owners if leaf.plain and group.local.get(owner, ("",))[1:] == (leaf.shape,)), None)
    mapped = next((group.wholes[owner] for group in owners if owner in group.wholes), None)
    if alike is not None:
        for spec, part in alike.places[owner]:
            followed = TensorSpec(OPTIM, f"{spec.name}/{key}", leaf.dtype, spec.shape)
            yield followed, part._replace(tensor=followed.name)
    elif mapped is not None and leaf.shape == mapped.spec.shape:
        yield from _in_whole(leaf, mapped, f"/{key}")
    elif prod(leaf.shape) == 1:
        for name in owners[0].stored_names(owner):
            spec = TensorSpec(OPTIM, f"{name}/{key}", leaf.dtype, leaf.shape)
            yield spec, _full(spec)
    elif owners[0].is_kept(owner):
        yield None  # the rank holds the whole parameter, and so all of its state
    else:
        yield _renamed_place(leaf, owners[0], owner, key)


def _in_whole(leaf: Leaf, mapped: WholeTensor, end: str) -> Iterator[Place]:
    """The parts of stored tensors in a tensor that states its own place, or in its optimizer state."""
    shapes = mapped.stored
    for name, piece in whole_views(leaf, mapped.moves):
        yield TensorSpec(leaf.group, name + end, leaf.dtype, shapes[name]), piece


def _renamed_place(leaf: Leaf, group: Group, owner: str, key: str) -> Place:
    """The place of state of a shape of its own, which only follows another name."""
    names = group.stored_names(owner)
    if owner not in group.local or not group.is_renamed(owner):
        shape = group.local[owner][1] if owner in group.local else group.wholes[owner].spec.shape
        raise InvalidRequest(
            f"{leaf.path} has shape {list(leaf.shape)}, but its parameter has shape {list(shape)} on this rank, so the "
            "layout does not say how it is sharded",
            hint="put it into a Fragment or DTensor, or leave it out of the state",
        )
    spec = TensorSpec(OPTIM, f"{names[0]}/{key}", leaf.dtype, leaf.shape)
    return spec, _full(spec)


def _full(spec: TensorSpec) -> Part:
    return Part(spec.name, whole(spec.shape), 0, strides(spec.shape))


def unless_same(leaf: Leaf, place: Place | None) -> Place | None:
    """None if the local tensor is the whole stored one, with the same name and shape."""
    spec, part = place or (None, None)
    if spec is None or not isinstance(part, Part):
        return place
    same = spec.name == leaf.name and spec.shape == leaf.shape == part.box.shape and part.strides == strides(leaf.shape)
    return None if same else place


def stored_aliases(tied: Mapping[str, str], group: Group | None) -> dict[str, str]:
    """Ties between stored names that follow from ties of local ones."""
    if group is None:
        return dict(tied)
    aliases: dict[str, str] = {}
    for alias, canonical in tied.items():
        pairs = zip(group.stored_names(alias), group.stored_names(canonical), strict=True)
        aliases.update((other, name) for other, name in pairs if other != name)
    return aliases


def held_ties(group: Group) -> dict[str, str]:
    """Names that the model ties to others, whose tensor this rank holds under them."""
    pairs = ((name, group.ties.get(name)) for name in group.places)
    return {name: target for name, target in pairs if target is not None and group.stored_names(name) == [target]}
