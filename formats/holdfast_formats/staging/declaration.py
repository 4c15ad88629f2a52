"""A declaration: what the ranks of a node hold, in columns. It is the same from save to save, and identified by its
digest.

Ranks of one program hold the same tensors, and few different boxes. So each tensor and each box is stored once, and a
rank's holdings are numbers, which hardly differ from rank to rank. Compressed, that is a few bytes a tensor, not a
rank.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from typing import NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from holdfast_formats import decoding
from holdfast_formats.errors import InvalidRequest
from holdfast_formats.region import Box, Shape, byte_box, check_box
from holdfast_formats.tensors import StagedFragment, TensorSpec, box_bytes

Numbers = NDArray[np.int64]
_NUMBER = np.dtype("<i4")  # of a tensor or a box, and how many there are
_PLACE = np.dtype("<i8")  # in a slot


class HeldTensor(msgspec.Struct, frozen=True, gc=False, array_like=True):
    """A tensor of which a rank holds something, with its framework's description."""

    spec: TensorSpec
    placement: str
    rounded_from: str = ""  # as of `StagedFragment`, and so is `frozen`
    frozen: bool = False


class _Encoded(msgspec.Struct, frozen=True, array_like=True):
    """`fragments` counts each rank's; `tensor`, `boxes` and `place` have for each fragment its tensor, its number of
    boxes, and its begin in the slot. `box` has one number for each box. `tensors` are encoded separately: they are the
    same on many nodes.
    """

    ranks: tuple[int, ...]
    fragments: tuple[int, ...]
    tensors: bytes
    different: tuple[Box, ...]
    tensor: bytes
    boxes: bytes
    place: bytes
    box: bytes


class Declaration(NamedTuple):
    """What some ranks hold. `tensors` and `different` (boxes) are stored once; the columns are as in `_Encoded`.
    `first_fragment` and `first_box` are the begins of each rank's, with one more for the end.
    """

    ranks: tuple[int, ...]
    tensors: tuple[HeldTensor, ...]
    different: tuple[Box, ...]
    tensor: Numbers
    boxes: Numbers
    place: Numbers
    box: Numbers
    first_fragment: Numbers
    first_box: Numbers

    def fragments(self, position: int) -> tuple[StagedFragment, ...]:
        """The fragments of the rank at this position, as in its slot's table."""
        first, last = self.first_fragment[position], self.first_fragment[position + 1]
        at = int(self.first_box[position])
        found = []
        for number in range(int(first), int(last)):
            count = int(self.boxes[number])
            held = tuple(self.different[box] for box in self.box[at : at + count].tolist())
            of = self.tensors[int(self.tensor[number])]
            found.append(StagedFragment(of.spec, held, int(self.place[number]), of.placement, of.rounded_from, of.frozen))
            at += count
        return tuple(found)


class RowColumns(NamedTuple):
    """A row for each box that a rank holds: tensor and box by number, and its place in the slot."""

    tensor: Numbers
    box: Numbers
    place: Numbers


TENSORS_KEPT = 1024

decoding.decoder(_Encoded)  # builds now what the decoders need
decoding.decoder(HeldTensor)
_decode = msgspec.msgpack.Decoder(_Encoded)
_decode_tensors = msgspec.msgpack.Decoder(tuple[HeldTensor, ...])


def encode(held: Mapping[int, Sequence[StagedFragment]]) -> bytes:
    """Encode holdings by rank; the same for the same fragments, in whatever order the ranks come."""
    tensors: dict[HeldTensor, int] = {}
    different: dict[Box, int] = {}
    tensor: list[int] = []
    boxes: list[int] = []
    place: list[int] = []
    box: list[int] = []
    ranks = sorted(held)
    for rank in ranks:
        for fragment in held[rank]:
            of = HeldTensor(fragment.spec, fragment.placement, fragment.rounded_from, fragment.frozen)
            tensor.append(tensors.setdefault(of, len(tensors)))
            boxes.append(len(fragment.boxes))
            place.append(fragment.slot_offset)
            box.extend(different.setdefault(one, len(different)) for one in fragment.boxes)
    columns = (np.array(column, np.int64) for column in (tensor, boxes, place, box))
    counts = np.array([len(held[rank]) for rank in ranks], np.int64)
    return encode_columns(declared(tuple(ranks), tuple(tensors), tuple(different), FragmentColumns(*columns), counts))


class FragmentColumns(NamedTuple):
    """Columns as in `Declaration`."""

    tensor: Numbers
    boxes: Numbers
    place: Numbers
    box: Numbers


def declared(
    ranks: tuple[int, ...],
    tensors: tuple[HeldTensor, ...],
    different: tuple[Box, ...],
    columns: FragmentColumns,
    counts: Numbers,
) -> Declaration:
    first_fragment = _ends(counts)
    return Declaration(ranks, tensors, different, *columns, first_fragment, _ends(columns.boxes)[first_fragment])


def encode_columns(declaration: Declaration) -> bytes:
    """The bytes of a declaration, which its digest identifies."""
    return msgspec.msgpack.encode(
        _Encoded(
            declaration.ranks,
            tuple(np.diff(declaration.first_fragment).tolist()),
            msgspec.msgpack.encode(declaration.tensors),
            declaration.different,
            declaration.tensor.astype(_NUMBER).tobytes(),
            declaration.boxes.astype(_NUMBER).tobytes(),
            declaration.place.astype(_PLACE).tobytes(),
            declaration.box.astype(_NUMBER).tobytes(),
        )
    )


def decode(encoded: bytes) -> Declaration:
    """The holdings of a node's ranks; `InvalidRequest` for an invalid declaration."""
    try:
        read = _decode.decode(encoded)
        tensors, forms = _tensors(read.tensors)
        numbers = [np.frombuffer(data, _NUMBER).astype(np.int64) for data in (read.tensor, read.boxes, read.box)]
        columns = FragmentColumns(
            tensor=numbers[0],
            boxes=numbers[1],
            place=np.frombuffer(read.place, _PLACE).astype(np.int64),
            box=numbers[2],
        )
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        raise InvalidRequest(f"cannot read the declaration of another node's ranks: {error}") from error
    counts = np.array(read.fragments, np.int64)
    if not _fit(read, columns, counts) or not _within(columns.tensor, len(tensors)):
        raise InvalidRequest("cannot read the declaration of another node's ranks: its columns do not match")
    declared_part = declared(read.ranks, tensors, read.different, columns, counts)
    for of, which in _pairs(forms[np.repeat(columns.tensor, columns.boxes)], columns.box, len(read.different)):
        spec, held = tensors[of].spec, read.different[which]
        check_box(held, spec.shape, spec.name)
        byte_box(spec.dtype, held, spec.shape, spec.name)
    return declared_part


@lru_cache(maxsize=TENSORS_KEPT)
def _tensors(encoded: bytes) -> tuple[tuple[HeldTensor, ...], Numbers]:
    """With the first tensor of each form, which alone decides what boxes are possible."""
    tensors = _decode_tensors.decode(encoded)
    first: dict[tuple[str, Shape], int] = {}
    for held in tensors:
        held.spec.check()
    forms = [first.setdefault((held.spec.dtype, held.spec.shape), number) for number, held in enumerate(tensors)]
    return tensors, np.array(forms, np.int64)


def _ends(counts: Numbers) -> Numbers:
    return np.concatenate((np.zeros(1, np.int64), np.cumsum(counts, dtype=np.int64)))


def _fit(read: _Encoded, columns: FragmentColumns, counts: Numbers) -> bool:
    tensor, boxes, place, box = columns
    alike = len(read.ranks) == len(counts) == len(set(read.ranks)) and len(tensor) == len(boxes) == len(place)
    if not alike or any(column.size and column.min() < 0 for column in (*columns, counts)):
        return False
    if int(counts.sum()) != len(tensor) or int(boxes.sum()) != len(box):
        return False
    return _within(box, len(read.different))


def _within(column: Numbers, stop: int) -> bool:
    return not column.size or int(column.max()) < stop


def _pairs(of: Numbers, box: Numbers, boxes: int) -> Iterable[tuple[int, int]]:
    """All distinct pairs."""
    for pair in np.unique(of * max(boxes, 1) + box).tolist():
        yield divmod(pair, max(boxes, 1))


def without(declaration: Declaration, group: str) -> Declaration:
    """The declaration without this group."""
    stays = np.array([held.spec.group != group for held in declaration.tensors], np.bool_)
    kept = stays[declaration.tensor] if len(declaration.tensors) else np.zeros(0, np.bool_)
    number = np.cumsum(stays, dtype=np.int64) - 1
    columns = FragmentColumns(
        tensor=number[declaration.tensor[kept]],
        boxes=declaration.boxes[kept],
        place=declaration.place[kept],
        box=declaration.box[np.repeat(kept, declaration.boxes)],
    )
    tensors = tuple(held for held in declaration.tensors if held.spec.group != group)
    ends = _ends(kept.astype(np.int64))[declaration.first_fragment]
    counts = ends[1:] - ends[:-1]
    return declared(declaration.ranks, tensors, declaration.different, columns, counts)


def rows(declaration: Declaration) -> RowColumns:
    tensor = np.repeat(declaration.tensor, declaration.boxes)
    place = np.repeat(declaration.place, declaration.boxes)
    if (declaration.boxes > 1).any():  # some fragment has several boxes: they follow each other in the slot
        sizes = _sizes(declaration, tensor)
        before = np.cumsum(sizes) - sizes
        first = (_ends(declaration.boxes)[:-1])[declaration.boxes > 0]
        place = place + before - np.repeat(before[first], declaration.boxes[declaration.boxes > 0])
    return RowColumns(tensor, declaration.box, place)


def _sizes(declaration: Declaration, tensor: Numbers) -> Numbers:
    pairs, which = np.unique(tensor * max(len(declaration.different), 1) + declaration.box, return_inverse=True)
    pairs_of = [divmod(pair, max(len(declaration.different), 1)) for pair in pairs.tolist()]
    sizes = [box_bytes(declaration.tensors[of].spec, declaration.different[box]) for of, box in pairs_of]
    return np.array(sizes, np.int64)[which]
