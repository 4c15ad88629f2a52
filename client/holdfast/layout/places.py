"""Maps a rank's live tensors to the stored tensors that they are parts of."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import product
from math import prod
from typing import NamedTuple

import torch

from holdfast.layout.rank_view import MASTER, MODEL, OPTIM
from holdfast.tensors.leaves import Key, Leaf
from holdfast.tensors.live_pieces import LivePiece
from holdfast.tensors.matching import MatchedLeaves
from holdfast.tensors.torch_dtypes import packing
from holdfast_formats.errors import InvalidRequest
from holdfast_formats.layout import padding
from holdfast_formats.layout.parts import LocalTensor, Part, strides
from holdfast_formats.mapping.box_moves import BoxMove, narrowed
from holdfast_formats.programs.saving import WholeTensor
from holdfast_formats.region import Box, Shape, whole
from holdfast_formats.tensors import TensorSpec


def land(
    restoration: MatchedLeaves,
    held: Mapping[Key, LocalTensor],
    notes: Sequence[str],
    moves_of: Callable[[Key], Sequence[BoxMove] | None],
) -> MatchedLeaves:
    """The restoration with boxes of stored tensors instead of local tensors, and of what a program makes whole. Zeroes
    padding at the end.
    """
    leaves: list[Leaf] = []
    zeroed = []
    for leaf in restoration.leaves:
        local = held.get(leaf.key) if leaf.plain else None
        if local is None:
            moves = moves_of(leaf.key)
            made = () if moves is None else whole_views(leaf, moves)
            leaves += [Leaf(leaf.group, name, leaf.dtype, p.box.stop, (p,), leaf.placement) for name, p in made]
            leaves += [leaf] if moves is None else []
            continue
        for part in local.parts if leaf.shape else local.parts[:1]:  # one number may be stored for several tensors
            piece = LivePiece(part.box, view(leaf, part))
            leaves.append(Leaf(leaf.group, part.tensor, leaf.dtype, part.box.stop, (piece,), leaf.placement))
        if local.padding:
            zeroed.append(partial(_zero, leaf, padding.gaps(local)))
    return restoration._replace(
        leaves=tuple(leaves), notes=[*restoration.notes, *notes], actions=(*zeroed, *restoration.actions)
    )


def view(leaf: Leaf, part: Part) -> torch.Tensor:
    """The part's place in its local tensor's memory; `InvalidRequest` if that is not contiguous."""
    tensor = _memory(leaf)
    if part.start == 0 and part.box.shape == leaf.shape and part.strides == strides(leaf.shape):
        return tensor
    shape, steps, start, factor = part.box.shape, part.strides, part.start, packing(tensor.dtype)
    if factor > 1:
        if not shape or steps[-1] != 1 or any(n % factor for n in (start, shape[-1], *steps[:-1])):
            raise InvalidRequest(
                f"{leaf.path}: its part of {part.tensor!r} begins or ends inside a byte",
                hint="save it without a program, or in a dtype of whole bytes",
            )
        shape, start = (*shape[:-1], shape[-1] // factor), start // factor
        steps = (*(step // factor for step in steps[:-1]), 1)
    if not tensor.is_contiguous():
        raise InvalidRequest(
            f"{leaf.path} is built of several stored tensors, so it must be contiguous", hint="make it contiguous()"
        )
    return tensor.as_strided(shape, steps, tensor.storage_offset() + start)


def whole_views(leaf: Leaf, moves: Sequence[BoxMove]) -> Iterator[tuple[str, LivePiece]]:
    """Boxes of stored tensors in the memory of a tensor that states its own place; `moves` make the whole one.

    Raises `InvalidRequest` for elements of less than a byte that would be rearranged.
    """
    for box, tensor in leaf.pieces:
        for move in moves:
            share = narrowed(move, box)
            if share is None:
                continue
            if packing(tensor.dtype) > 1 and (
                share.stepped or share.target != box or share.axes != tuple(range(len(box.shape)))
            ):
                raise InvalidRequest(
                    f"{leaf.path}: programs cannot rearrange elements smaller than a byte",
                    hint="save it without a program, or in a dtype of whole bytes",
                )
            for at, part in _apart(share, tensor if packing(tensor.dtype) > 1 else _turned(tensor, share, box)):
                yield move.source.name, LivePiece(at, part)


def _turned(tensor: torch.Tensor, share: BoxMove, box: Box) -> torch.Tensor:
    """The elements of a share as a view with the dimensions of its source; the tensor has those of `box`."""
    steps = share.target_step or (1,) * len(share.axes)
    index = tuple(
        o - c if axis is None else slice(o - c, o - c + (n - 1) * step + 1, step)
        for o, n, c, step, axis in zip(*share.target, box.offset, steps, share.axes, strict=True)
    )
    axes = [axis for axis in share.axes if axis is not None]
    view = tensor[index].permute(sorted(range(len(axes)), key=axes.__getitem__))
    for dimension in range(len(share.box.shape)):
        view = view if dimension in axes else view.unsqueeze(dimension)
    return view


def _apart(share: BoxMove, view: torch.Tensor) -> Iterator[tuple[Box, torch.Tensor]]:
    """A share as boxes of its source: elements that are apart there are a box each."""
    box, steps = share.box, share.step or (1,) * len(share.box.shape)
    apart = [n if step > 1 else 1 for n, step in zip(box.shape, steps, strict=True)]
    shape = tuple(1 if step > 1 else n for n, step in zip(box.shape, steps, strict=True))
    for index in product(*map(range, apart)):
        offset = tuple(o + i * step for o, i, step in zip(box.offset, index, steps, strict=True))
        part = view
        for dimension, (i, n) in enumerate(zip(index, apart, strict=True)):
            part = part.narrow(dimension, i, 1) if n > 1 else part
        yield Box(offset, shape), part


def _memory(leaf: Leaf) -> torch.Tensor:
    if len(leaf.pieces) != 1:
        raise InvalidRequest(
            f"{leaf.path} is empty, but the layout expects elements on this rank",
            hint="check the sizes of the layout, or pass this tensor as a Fragment",
        )
    return leaf.pieces[0].tensor


def _zero(leaf: Leaf, ranges: Sequence[tuple[int, int]]) -> None:
    tensor = _memory(leaf)
    width, factor = tensor.element_size(), packing(tensor.dtype)
    octets = tensor.view(-1).view(torch.uint8)
    with torch.no_grad():
        for start, stop in ranges:
            octets[start * width // factor : stop * width // factor].zero_()


Specs = dict[str, tuple[str, Shape]]
PlainPlace = tuple[TensorSpec, Part]  # a stored tensor, and which part of it is where in the local one
Place = PlainPlace | tuple[TensorSpec, LivePiece]  # the latter of tensors that state their own place
Places = dict[str, list[PlainPlace]]  # by local name
Source = tuple[Leaf, Place | None]  # None: the leaf is stored as it is


class Group(NamedTuple):
    """The local tensors of one group, the parts of each, and the names that the model ties to others.

    `ties` are names of this rank's tensors, `stored_ties` of stored ones. `wholes` describe how a program makes tensors
    that state their own place, or whose optimizer state does (`followed`), as whole tensors.
    """

    local: Specs
    places: Places
    ties: Mapping[str, str]
    stored_ties: Mapping[str, str] = {}
    wholes: Mapping[str, WholeTensor] = {}
    foreign: Mapping[str, tuple[str, Shape]] = {}  # the tensors that state their own place
    followed: Mapping[str, tuple[str, Shape]] = {}

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
            hint="put it into a Fragment or DTensor, save without a mapping program, or leave it out of the state",
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
