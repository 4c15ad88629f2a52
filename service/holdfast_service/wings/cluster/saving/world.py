"""What all ranks of a world hold, in columns: a row for each box of each rank. Pure, and in numpy: there are millions.

Tensors that are distributed alike (the same form, cut into the same boxes, held by the same ranks) are one *family*. A model
has few of them, however many tensors and ranks: what follows from a family is worked out once for all of its tensors.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from holdfast_formats import rounding
from holdfast_formats.errors import LimitExceeded, StateMismatch
from holdfast_formats.region import Box, byte_box, byte_span, byte_view
from holdfast_formats.staging.declaration import Declaration, HeldTensor, rows
from holdfast_formats.staging.plan import BoxOrigin
from holdfast_formats.tensors import TensorSpec, box_bytes
from holdfast_service.control.checkpoints.planner import check_tiling, disagreed
from holdfast_service.control.checkpoints.replica_claims import Apart, ReplicatedBox, SharedBoxes, own_spec

Column = NDArray[np.int32]
Places = NDArray[np.int64]
Key = tuple[str, str]  # group, name
BOXES_MAX = 2**26  # of all ranks; each takes some 110 bytes while a plan is made


class World(NamedTuple):
    """The boxes of all ranks, in the order of ranks, and of a rank in that of its table. `tensor` and `box` are numbers of
    `specs` and `boxes`; boxes are in their own order. `place` is where the box begins in the rank's slot.

    `rounded_from` is the group of the master of each tensor that is in no slot, by number. Such tensors have their masters'
    rows once these are `rounded`, behind the first `staged` ones.
    """

    specs: list[TensorSpec]
    placements: list[str]  # of the lowest rank that has the tensor
    boxes: list[Box]
    tensor: Column
    box: Column
    rank: Column
    place: Places
    rounded_from: Mapping[int, str]
    staged: int


class _Tensors:
    """Numbers for tensors and for their distinct placements."""

    def __init__(self) -> None:
        self.specs: list[TensorSpec] = []
        self.placements: list[tuple[int, str]] = []  # the tensor's number, its placement
        self.rounded_from: dict[int, str] = {}
        self._by_name: dict[Key, tuple[int, int]] = {}  # its number, the rank that brought it
        self._said: dict[tuple[int, str], int] = {}
        self._known: dict[int, tuple[tuple[HeldTensor, ...], Column]] = {}

    def numbers(self, part: Declaration) -> Column:
        """The placement number of each tensor of a declaration; many nodes have the same one."""
        known = self._known.get(id(part.tensors))
        if known is None:
            found = [self._number(part, position) for position in range(len(part.tensors))]
            known = self._known[id(part.tensors)] = part.tensors, np.array(found, np.int32)
        return known[1]

    def _number(self, part: Declaration, position: int) -> int:
        spec, placement = part.tensors[position].spec, part.tensors[position].placement
        rank = part.ranks[0] if part.ranks else 0
        number, by = self._by_name.setdefault((spec.group, spec.name), (len(self.specs), rank))
        if number == len(self.specs):
            self.specs.append(spec)
        elif self.specs[number] != spec:
            raise disagreed(spec, _first_rank(part, position), self.specs[number], by)
        if part.tensors[position].rounded_from:
            self.rounded_from[number] = part.tensors[position].rounded_from
        number_of = self._said.setdefault((number, placement), len(self.placements))
        if number_of == len(self.placements):
            self.placements.append((number, placement))
        return number_of


def _first_rank(part: Declaration, tensor: int) -> int:
    at = int(np.flatnonzero(part.tensor == tensor)[:1].sum())
    return part.ranks[int(np.searchsorted(part.first_fragment, at, side="right")) - 1]


def gather(parts: Sequence[Declaration]) -> World:
    """The world of all its nodes' declarations, in any order. `StateMismatch` where they disagree on a tensor,
    `LimitExceeded` if it is too large.
    """
    many = sum(len(part.box) for part in parts)
    if many > BOXES_MAX:
        raise LimitExceeded(
            f"the ranks of this save hold {many} tensor parts in total, over the limit of {BOXES_MAX} for one node's plan",
            hint="shard each tensor over fewer ranks, for example with HSDP, or hold less state per rank",
        )
    tensors, known = _Tensors(), dict[Box, int]()
    segments: list[_Segment] = []
    for part in parts:
        numbers = tensors.numbers(part)
        box = np.array([known.setdefault(one, len(known)) for one in part.different], np.int32)
        of, row = numbers[part.tensor], rows(part)
        tensor, held = numbers[row.tensor], box[row.box]
        for position, rank in enumerate(part.ranks):
            fragments = slice(part.first_fragment[position], part.first_fragment[position + 1])
            mine = slice(part.first_box[position], part.first_box[position + 1])
            segments.append(_Segment(rank, of[fragments], tensor[mine], held[mine], row.place[mine]))
    segments.sort(key=lambda one: one.rank)
    ordered = sorted(known)
    places = np.empty(len(known), np.int32)
    places[[known[box] for box in ordered]] = np.arange(len(known))
    number = np.array([number for number, _ in tensors.placements], np.int32)
    tensor = number[_numbers([one.tensor for one in segments])]
    return World(
        tensors.specs,
        _placements(tensors, _numbers([one.said for one in segments])),
        ordered,
        tensor,
        places[_numbers([one.box for one in segments])],
        np.repeat(np.array([one.rank for one in segments], np.int32), [len(one.box) for one in segments]),
        np.concatenate([*(one.place for one in segments), np.empty(0, np.int64)]),
        tensors.rounded_from,
        len(tensor),
    )


class _Segment(NamedTuple):
    """One rank's rows: the placement number of each fragment's tensor; the same for each box, with the box and its place."""

    rank: int
    said: Column
    tensor: Column
    box: Column
    place: Places


def _numbers(columns: Sequence[Column]) -> Column:
    return np.concatenate([*columns, np.empty(0, np.int32)])


def _placements(tensors: _Tensors, column: Column) -> list[str]:
    """The placement that the lowest rank with the tensor declares."""
    placements = [""] * len(tensors.specs)
    firsts, at = np.unique(column, return_index=True)
    for one in firsts[np.argsort(at)[::-1]].tolist():  # so the first one wins
        number, placement = tensors.placements[one]
        placements[number] = placement
    return placements


def set_apart(world: World, apart: Apart, kept: bool) -> World:
    """The world without differing ranks' boxes; `kept`: each such rank has the tensor as one of its own."""
    if not apart:
        return world
    specs, placements, tensor = list(world.specs), list(world.placements), world.tensor.copy()
    numbers = {(spec.group, spec.name): number for number, spec in enumerate(specs)}
    stays = np.ones(len(tensor), np.bool_)
    for key, ranks in apart.items():
        rows_of = np.flatnonzero((world.tensor == numbers[key]) & np.isin(world.rank, ranks))
        for row in rows_of.tolist():
            if kept:
                tensor[row] = len(specs)
                specs.append(own_spec(specs[numbers[key]], int(world.rank[row])))
                placements.append(placements[numbers[key]])
            else:
                stays[row] = False
    box, rank, place = world.box[stays], world.rank[stays], world.place[stays]
    return World(specs, placements, world.boxes, tensor[stays], box, rank, place, world.rounded_from, len(place))


def rounded(world: World) -> World:
    """The world in which a tensor without a slot is held where its master is. `StateMismatch` with its name if there is
    none.
    """
    if not world.rounded_from:
        return world
    known = numbers(world)
    rounded_to = np.full(len(world.specs), -1, np.int32)  # of each master, the tensor that is made of it
    copied = np.bincount(world.tensor, minlength=len(world.specs))
    for number, group in world.rounded_from.items():
        spec = world.specs[number]
        master = known.get((group, spec.name), -1)
        master_spec = None if master < 0 or master in world.rounded_from else world.specs[master]
        rounding.check(spec, group, master_spec, copied=bool(copied[number]))
        if rounded_to[master] >= 0:
            raise StateMismatch(f"two tensors would be rounded from {group}/{spec.name}", hint=rounding.HINT)
        rounded_to[master] = number
    of = rounded_to[world.tensor]
    more = np.flatnonzero(of >= 0)
    return world._replace(
        tensor=np.concatenate((world.tensor, of[more])),
        box=np.concatenate((world.box, world.box[more])),
        rank=np.concatenate((world.rank, world.rank[more])),
        place=np.concatenate((world.place, world.place[more])),
    )


class Stretch(NamedTuple):
    """The bytes [begin, end) of a tensor."""

    begin: int
    end: int


class Spans(NamedTuple):
    """The nodes' holdings of a tensor that begins at 0: a row for each piece of a node; as of `blocks.HeldSpans`."""

    begin: Places
    end: Places
    bytes: Places
    node: Places


class Holdings:
    """The ranks that hold each box of a tensor: rows of the world, sorted by tensor, box and rank; without empty boxes.

    Raises `StateMismatch` where the boxes of a tensor are not the whole of it, each byte once.
    """

    def __init__(self, world: World) -> None:
        self._world = world
        solid = np.array([box.volume > 0 for box in world.boxes], np.bool_)
        row = np.flatnonzero(solid[world.box]) if len(world.box) else np.empty(0, np.int64)
        key = world.tensor[row].astype(np.int64) * max(len(world.boxes), 1) + world.box[row]
        order = np.argsort(key, kind="stable")
        self._rows, key = row[order], key[order]
        first = np.flatnonzero(np.concatenate((np.ones(min(len(key), 1), np.bool_), key[1:] != key[:-1])))
        self._first_row = np.append(first, len(key))  # of each different box of a tensor
        tensor, box = np.divmod(key[first], max(len(world.boxes), 1))
        self._box = box.astype(np.int32)
        self._first_box = np.searchsorted(tensor, np.arange(len(world.specs) + 1))  # of each tensor
        self._ranks = world.rank[self._rows]
        self._spans: dict[int, tuple[Places, Places, Places]] = {}
        self.family = self._families()

    @property
    def boxes(self) -> int:
        """The number of different boxes of all tensors."""
        return len(self._box)

    def shared(self) -> SharedBoxes:
        """The boxes that several ranks hold."""
        counts = np.diff(self._first_row)
        shared = (counts > 1) & (self._rows[self._first_row[:-1]] < self._world.staged)
        several = np.flatnonzero(shared)
        numbers = self._rows[np.repeat(shared, counts)]
        begins = np.cumsum(counts[several]) - counts[several]

        def named(index: int) -> ReplicatedBox:
            at = int(several[index])
            of = int(np.searchsorted(self._first_box, at, side="right")) - 1
            ranks = self._ranks[self._first_row[at] : self._first_row[at + 1]]
            return ReplicatedBox(self._world.specs[of], self._world.boxes[self._box[at]], tuple(ranks.tolist()))

        return SharedBoxes(numbers, begins, named)

    def _families(self) -> list[int]:
        """For each tensor, the first of its family."""
        first: dict[tuple[object, ...], int] = {}
        tilings: set[tuple[object, ...]] = set()
        families = []
        for number, spec in enumerate(self._world.specs):
            low, high = self._first_box[number], self._first_box[number + 1]
            form = (spec.dtype, spec.shape, self._box[low:high].tobytes())
            if form not in tilings and number not in self._world.rounded_from:  # of that, the master is
                check_tiling(spec, [self._world.boxes[box] for box in self._box[low:high].tolist()])
                tilings.add(form)
            rows_of = self._first_row[low : high + 1]
            held = self._ranks[rows_of[0] : rows_of[-1]].tobytes() if high > low else b""
            families.append(first.setdefault((*form, (rows_of - rows_of[0]).tobytes() if high > low else b"", held), number))
        return families

    def spans(self, number: int, node_of: Places, nodes: int) -> Spans:
        """Each node's holdings of a tensor; neighbours in one piece."""
        low, high = int(self._first_box[number]), int(self._first_box[number + 1])
        if low == high:
            return Spans(*np.empty((4, 0), np.int64))
        begin, end, size = self._placed(number)
        first = self._first_row[low : high + 1]
        box = np.repeat(np.arange(high - low), np.diff(first))
        node = node_of[self._ranks[first[0] : first[-1]]]
        node, box = np.divmod(np.unique(node * (high - low) + box), high - low)
        order = np.lexsort((begin[box], node))
        node, box = node[order], box[order]
        begin, end, size = begin[box], end[box], size[box]
        whole = end - begin == size
        joins = np.zeros(len(node), np.bool_)
        joins[1:] = (node[1:] == node[:-1]) & (begin[1:] == end[:-1]) & whole[1:] & whole[:-1]
        starts = np.flatnonzero(~joins)
        lasts = np.append(starts[1:], len(node)) - 1
        found = Spans(begin[starts], end[lasts], np.add.reduceat(size, starts), node[starts])
        order = np.lexsort((found.node, found.begin))
        return Spans(*(column[order] for column in found))

    def _placed(self, number: int) -> tuple[Places, Places, Places]:
        """Begin and end of each of a tensor's boxes in it, and its bytes; computed once per family."""
        family = self.family[number]
        found = self._spans.get(family)
        if found is None:
            spec = self._world.specs[family]
            boxes = [self._world.boxes[box] for box in self._box[self._first_box[family] : self._first_box[family + 1]]]
            view = byte_view(spec.dtype, spec.shape, spec.name)
            spans = [(0, spec.nbytes)] if len(boxes) == 1 else []  # it tiles the tensor alone
            for one in boxes[len(spans) :]:
                spans.append(byte_span(byte_box(spec.dtype, one, spec.shape, spec.name), view.shape, view.itemsize))
            begin, end = np.array(spans, np.int64).reshape(-1, 2).T
            sizes = np.array([box_bytes(spec, one) for one in boxes], np.int64)
            found = self._spans[family] = begin, end, sizes
        return found

    def origins(self, number: int, parts: Sequence[Stretch], near: NDArray[np.bool_], turn: int) -> tuple[BoxOrigin, ...]:
        """The boxes of a tensor with bytes in these parts of it, each from one rank that holds it: the lowest that is `near`
        (by rank), else each `turn` another one.
        """
        begin, end, _ = self._placed(number)
        touched = np.zeros(len(begin), np.bool_)
        for part in parts:
            touched |= (begin < part.end) & (end > part.begin)
        low, high = int(self._first_box[number]), int(self._first_box[number + 1])
        if low == high:
            return ()
        first = self._first_row[low:high]
        counts = self._first_row[low + 1 : high + 1] - first
        rows_of = np.arange(first[0], first[-1] + counts[-1])
        here = np.where(near[self._ranks[rows_of]], rows_of, len(self._ranks))
        row = np.minimum.reduceat(here, first - first[0])
        row = np.where(row < len(self._ranks), row, first + (turn + np.arange(low, high)) % counts)[touched]
        columns = (self._ranks[row], self._box[low:high][touched], self._world.place[self._rows[row]])
        boxes = self._world.boxes
        held_as = rounding.HELD_AS if number in self._world.rounded_from else ""
        return tuple(
            BoxOrigin(rank, boxes[box], place, held_as)
            for rank, box, place in zip(*(c.tolist() for c in columns), strict=True)
        )


def numbers(world: World) -> Mapping[Key, int]:
    return {(spec.group, spec.name): number for number, spec in enumerate(world.specs)}
