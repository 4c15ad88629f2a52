"""Tensors arranged out of others: transposed, joined, cut, stacked, braided, padded. Nothing is read.

Invariant of every operation: the moves of an arrangement fill it exactly once, except for padding.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from holdfast_formats.errors import StateMismatch
from holdfast_formats.mapping.box_moves import BoxMove
from holdfast_formats.mapping.listing import TensorKey
from holdfast_formats.region import Box, Shape, whole

MOVES_MAX = 2**18  # of one tensor
LOOKS_MAX = 2**22  # at pieces of a tensor, while it is cut


class Arrangement(NamedTuple):
    """A tensor of `shape` and the sources of its elements; `dtype` is the one it is cast to, if any.

    The tensors in `same` are assumed to have the same elements.
    """

    shape: Shape
    moves: tuple[BoxMove, ...]
    dtype: str | None = None
    padded: bool = False
    same: tuple[tuple[str, ...], ...] = ()

    @property
    def sources(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(move.source.name for move in self.moves))


def of(key: TensorKey, shape: Shape) -> Arrangement:
    box = whole(shape)
    return Arrangement(shape, (BoxMove(key, box, box, tuple(range(len(shape)))),))


def transposed(arranged: Arrangement, order: Sequence[int]) -> Arrangement:
    """Its dimensions in another order, as `numpy.transpose` takes it."""
    moves = tuple(
        BoxMove(
            move.source,
            move.box,
            Box(_ordered(move.target.offset, order), _ordered(move.target.shape, order)),
            tuple(move.axes[d] for d in order),
            move.step,
            _ordered(move.target_step, order),
        )
        for move in arranged.moves
    )
    return arranged._replace(shape=_ordered(arranged.shape, order), moves=moves)


def _ordered(values: Shape, order: Sequence[int]) -> Shape:
    return tuple(values[d] for d in order) if values else ()


def joined(parts: Sequence[Arrangement], axis: int, name: str) -> Arrangement:
    """Parts concatenated along a dimension; `name` is for the error."""
    first = parts[0]
    moves: list[BoxMove] = []
    at = 0
    for part in parts:
        if part.shape[:axis] != first.shape[:axis] or part.shape[axis + 1 :] != first.shape[axis + 1 :]:
            raise StateMismatch(
                f"{name!r}: {list(part.shape)} and {list(first.shape)} cannot be joined along dimension {axis}",
                hint="join along the only dimension in which the shapes differ, by axis=; or transpose one with ^T",
                tensor=name,
            )
        if part.dtype != first.dtype:
            raise StateMismatch(
                f"{name!r}: {part.dtype} and {first.dtype} cannot be joined",
                hint="cast each before it is joined: a -> a, dtype=…",
                tensor=name,
            )
        for move in part.moves:
            placed = _moved(move, axis, at) if at else move
            follows = moves and _following(moves[-1], placed, axis)
            if follows:
                moves[-1] = follows
            else:
                moves.append(placed)
        at += part.shape[axis]
        check_pieces(len(moves), name)
    same = tuple(dict.fromkeys(names for part in parts for names in part.same))
    shape = (*first.shape[:axis], at, *first.shape[axis + 1 :])
    return Arrangement(shape, tuple(moves), first.dtype, any(part.padded for part in parts), same)


def check_pieces(count: int, name: str) -> None:
    """`StateMismatch` for a tensor of too many pieces, before they are made."""
    if count > MOVES_MAX:
        raise StateMismatch(
            f"{name!r} would be made of {count} pieces; at most {MOVES_MAX} are allowed",
            hint="leave this tensor out of the program, and convert it in a script of your own",
            tensor=name,
        )


def check_cuts(arranged: Arrangement, cuts: int, name: str) -> None:
    """`StateMismatch` for so many cuts of so many pieces that it would take minutes."""
    check_pieces(cuts, name)
    if cuts * len(arranged.moves) > LOOKS_MAX:
        raise StateMismatch(
            f"{name!r} would be split {cuts} times, from {len(arranged.moves)} pieces",
            hint="split it before it is joined or reordered",
            tensor=name,
        )


def _moved(move: BoxMove, axis: int, by: int) -> BoxMove:
    offset = move.target.offset
    target = Box((*offset[:axis], offset[axis] + by, *offset[axis + 1 :]), move.target.shape)
    return BoxMove(move.source, move.box, target, move.axes, move.step, move.target_step)


def _following(a: BoxMove, b: BoxMove, axis: int) -> BoxMove | None:
    """Two moves as one, if the second continues the first in source and target."""
    if a.source != b.source or a.axes != b.axes or a.stepped or b.stepped:
        return None
    from_axis = a.axes[axis]
    if from_axis is None:
        return None
    source = _extended(a.box, b.box, from_axis)
    target = _extended(a.target, b.target, axis)
    return a._replace(box=source, target=target) if source and target else None


def _extended(a: Box, b: Box, axis: int) -> Box | None:
    shape = (*a.shape[:axis], a.shape[axis] + b.shape[axis], *a.shape[axis + 1 :])
    offset = (*a.offset[:axis], a.offset[axis] + a.shape[axis], *a.offset[axis + 1 :])
    same_sides = a.shape[:axis] == b.shape[:axis] and a.shape[axis + 1 :] == b.shape[axis + 1 :]
    return Box(a.offset, shape) if offset == b.offset and same_sides else None


def picked(arranged: Arrangement, axis: int, start: int, count: int, step: int = 1) -> Arrangement:
    """Elements `start`, `start + step`, … of a dimension, `count` of them."""
    moves = tuple(
        box_move for move in arranged.moves for box_move in _picked(move, axis, range(start, start + count * step, step))
    )
    if not count and not moves:  # no element, and yet made of these tensors
        moves = tuple(_part(move, axis, range(0), 0, 1) for move in arranged.moves[:1])
    shape = (*arranged.shape[:axis], count, *arranged.shape[axis + 1 :])
    return arranged._replace(shape=shape, moves=moves)


def _picked(move: BoxMove, axis: int, wanted: range) -> Iterator[BoxMove]:
    held_step = move.target_step[axis] if move.target_step else 1
    begin, length = move.target.offset[axis], move.target.shape[axis]
    if wanted.step == 1:
        low = max(-((begin - wanted.start) // held_step), 0)
        high = min(-((begin - wanted.stop) // held_step), length)
        if low < high:
            yield _part(move, axis, range(low, high), begin + low * held_step - wanted.start, held_step)
        return
    if held_step == 1:
        low = max(-((wanted.start - begin) // wanted.step), 0)
        high = min(-((wanted.start - begin - length) // wanted.step), len(wanted))
        if low < high:
            first = wanted.start + low * wanted.step - begin
            indices = range(first, first + (high - low) * wanted.step, wanted.step)
            yield _part(move, axis, indices, low, 1)
        return
    if held_step == wanted.step and (begin - wanted.start) % held_step:
        return
    if held_step == wanted.step:
        low = max((wanted.start - begin) // held_step, 0)
        high = min((wanted.start - begin) // held_step + len(wanted), length)
        if low < high:
            yield _part(move, axis, range(low, high), (begin - wanted.start) // held_step + low, 1)
        return
    for i in range(length):
        if begin + i * held_step in wanted:
            yield _part(move, axis, range(i, i + 1), wanted.index(begin + i * held_step), 1)


def _part(move: BoxMove, axis: int, indices: range, at: int, target_step: int) -> BoxMove:
    """Some of a move's elements along a dimension of the target, placed from `at` on."""
    target = Box(_with(move.target.offset, axis, at), _with(move.target.shape, axis, len(indices)))
    target_steps = _with(move.target_step or (1,) * len(move.axes), axis, target_step if len(indices) > 1 else 1)
    target_steps = () if max(target_steps) == 1 else target_steps
    from_axis = move.axes[axis]
    if from_axis is None:
        return move._replace(target=target, target_step=target_steps)
    steps = move.step or (1,) * len(move.box.shape)
    offset = _with(move.box.offset, from_axis, move.box.offset[from_axis] + indices.start * steps[from_axis])
    steps = _with(steps, from_axis, steps[from_axis] * indices.step if len(indices) > 1 else 1)
    box = Box(offset, _with(move.box.shape, from_axis, len(indices)))
    return BoxMove(move.source, box, target, move.axes, () if max(steps) == 1 else steps, target_steps)


def _with(values: Shape, axis: int, value: int) -> Shape:
    return (*values[:axis], value, *values[axis + 1 :])


def interleaved(parts: Sequence[Arrangement], axis: int, name: str) -> Arrangement:
    """The first element of each part along a dimension, then the second of each, and so on; all of one shape."""
    if any(part.shape != parts[0].shape for part in parts):
        raise StateMismatch(
            f"{name!r}: parts of different shapes cannot be interleaved",
            hint="the length of a head must be even: num_heads= comes from config.json, which may be another model's",
            tensor=name,
        )
    many = len(parts)
    moves = []
    for number, part in enumerate(parts):
        for move in part.moves:
            steps = move.target_step or (1,) * len(move.axes)
            step = steps[axis] * many if move.target.shape[axis] > 1 else 1
            target = Box(_with(move.target.offset, axis, move.target.offset[axis] * many + number), move.target.shape)
            target_steps = _with(steps, axis, step)
            moves.append(move._replace(target=target, target_step=() if max(target_steps) == 1 else target_steps))
    shape = _with(parts[0].shape, axis, parts[0].shape[axis] * many)
    same = tuple(dict.fromkeys(names for part in parts for names in part.same))
    return Arrangement(shape, tuple(moves), parts[0].dtype, any(part.padded for part in parts), same)


def lifted(arranged: Arrangement, axis: int) -> Arrangement:
    moves = []
    for move in arranged.moves:
        target = Box(_inserted(move.target.offset, axis, 0), _inserted(move.target.shape, axis, 1))
        steps = _inserted(move.target_step, axis, 1) if move.target_step else ()
        moves.append(BoxMove(move.source, move.box, target, (*move.axes[:axis], None, *move.axes[axis:]), move.step, steps))
    return arranged._replace(shape=_inserted(arranged.shape, axis, 1), moves=tuple(moves))


def lowered(arranged: Arrangement, axis: int) -> Arrangement:
    moves = []
    for move in arranged.moves:
        target = Box(_without(move.target.offset, axis), _without(move.target.shape, axis))
        axes = (*move.axes[:axis], *move.axes[axis + 1 :])
        steps = _without(move.target_step, axis)
        moves.append(BoxMove(move.source, move.box, target, axes, move.step, steps))
    return arranged._replace(shape=_without(arranged.shape, axis), moves=tuple(moves))


def _inserted(values: Shape, axis: int, value: int) -> Shape:
    return (*values[:axis], value, *values[axis:])


def _without(values: Shape, axis: int) -> Shape:
    return (*values[:axis], *values[axis + 1 :])


def padded(arranged: Arrangement, axis: int, size: int) -> Arrangement:
    """Zero-padded after its last element along a dimension, to `size` elements."""
    return arranged._replace(shape=_with(arranged.shape, axis, size), padded=arranged.padded or size > arranged.shape[axis])


def zeros(shape: Shape, dtype: str | None) -> Arrangement:
    return Arrangement(shape, (), dtype, padded=True)


def braided(parts: Sequence[Arrangement], axis: int, times: int, name: str) -> Arrangement:
    """The first of `times` equal pieces of each part along a dimension, then the second of each, and so on."""
    for part in parts:
        if times < 1 or part.shape[axis] % times:
            raise StateMismatch(
                f"{name!r}: {part.shape[axis]} in dimension {axis} cannot be divided by {times}",
                hint="num_key_value_groups=, ranks= or dst_ranks= must divide it; config.json may be another model's",
                tensor=name,
            )
        check_cuts(part, times, name)
    lengths = [part.shape[axis] // times for part in parts]
    pieces = (
        picked(part, axis, i * length, length) for i in range(times) for part, length in zip(parts, lengths, strict=True)
    )
    return joined(list(pieces), axis, name)


def unbraided(arranged: Arrangement, axis: int, times: int, lengths: Sequence[int], name: str) -> list[Arrangement]:
    """The parts of which `braided` made it; `lengths` are those of the parts' pieces."""
    row = sum(lengths)
    if times < 1 or row * times != arranged.shape[axis]:
        raise StateMismatch(
            f"{name!r} has {arranged.shape[axis]} in dimension {axis}, not {times} times {'+'.join(map(str, lengths))}",
            hint="let sizes= add up to it, or change axis=, ranks= or num_heads=; config.json may be another model's",
            tensor=name,
        )
    check_cuts(arranged, times * len(lengths), name)
    pieces_of, at = [], 0
    for length in lengths:
        pieces = [picked(arranged, axis, i * row + at, length) for i in range(times)]
        pieces_of.append(joined(pieces, axis, name))
        at += length
    return pieces_of
