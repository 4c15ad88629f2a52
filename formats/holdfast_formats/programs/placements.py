"""What the placement of a stored tensor says of the mapping program through which it was saved.

A program may divide a stored tensor among live ones in more than one way that fits: a weight as long as wide, transposed or
not; query, key and value of one shape, in any order. If a program between the same two systems divides it in another way
than when it was saved, a restore finds that out here.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping, Sequence
from math import prod
from typing import NamedTuple

from holdfast_formats.disk.manifests import TensorEntry
from holdfast_formats.disk.packing import natural_key
from holdfast_formats.errors import StateMismatch
from holdfast_formats.mapping.box_moves import BoxMove
from holdfast_formats.programs.arrangement import Arrangement
from holdfast_formats.programs.document import Program
from holdfast_formats.region import Shape, whole

LISTED_MAX = 8  # names of live tensors; of more, their numbers are left out
_TURNED = ", transposed"
_HOW = {True: "transposed", False: "not transposed"}
_AND = " + "
_SAID = re.compile(rf"(?P<turned>{_TURNED})?(, whole|, as (?P<names>.+?)(?P<where> (\[[\d, ]+\]|#[0-9a-f]{{8}}))?)?")
_DIVIDED = re.compile(rf"(through program \S+, \S+ to [^, ]+({_TURNED})?), (whole|as .+)")


class Use(NamedTuple):
    """A live tensor, its number of elements, and what of a stored one goes where in it."""

    live: str
    volume: int
    move: BoxMove


class Division(NamedTuple):
    """The live tensors of which a stored one is a part, or which are parts of it, in this order; where in them its elements
    are, unless they begin where the live tensor does and have its order.

    `turned`: the live ones have its dimensions in another order, which would fit otherwise too. `alone`: it is all of one
    live tensor.
    """

    names: tuple[str, ...]
    where: str
    alone: bool
    turned: bool

    @property
    def text(self) -> str:
        """What a placement says of them."""
        return (_TURNED if self.turned else "") + self._how

    @property
    def _how(self) -> str:
        return ", whole" if self.alone and not self.where else f", as {_AND.join(self.names)}{self.where}"

    def check(self, entry: TensorEntry, name: str, program: Program) -> None:
        """`StateMismatch` for a tensor that was saved through a program between the same two systems, which divided it in
        another way than this program. Older checkpoints say less of that, and imported ones nothing.
        """
        before, systems, text = entry.placement.rpartition(_systems(program))
        said = _SAID.fullmatch(text)
        if not systems or said is None:
            return
        saved, was = before + systems, said["turned"] is not None
        if fits_both_ways(entry.shape) and was is not self.turned:
            raise StateMismatch(
                f"{name!r} was saved {_HOW[was]}, {saved}, and program {program.name!r} would restore it "
                f"{_HOW[self.turned]}: the program is another one, or the model has other layers",
                hint="construct the model as the one that was saved, and pass the same program as layout=, or none as then",
                tensor=name,
            )
        then, now = (each.removeprefix(_TURNED).removeprefix(", ") for each in (text, self._how))
        if then and self._contradicts(said["names"], said["where"] or ""):
            raise StateMismatch(
                f"{name!r} was saved {then}, {saved}, and program {program.name!r} would restore it {now}: its parts have "
                "another order, axis, size or number of heads",
                hint="pass the program through which it was saved as layout=; if the live tensors themselves are in another "
                "order now, write another `to` into the new program",
                tensor=name,
            )

    def _contradicts(self, names: str | None, where: str) -> bool:
        """Whether these are the live tensors of a text, with other elements. Those of other names may be other tensors; the
        text of a whole tensor has none.
        """
        same = self.alone if names is None else set(names.split(_AND)) == set(self.names)
        return same and where != self.where


def through(layout: str, program: Program) -> str:
    """The placement of tensors that are saved in a layout through a program; the text of their parts follows."""
    return f"{layout} through program {program.name}{_systems(program)}".strip()


def on_ranks(placement: str) -> str:
    """A placement without how a program divides the tensor: what it says of the ranks."""
    return _DIVIDED.sub(r"\1", placement)


def uses_of(arranged: Mapping[str, Arrangement]) -> dict[str, list[Use]]:
    """The uses of each stored tensor, given the live ones as a program for one rank makes them."""
    uses: dict[str, list[Use]] = {}
    for live, one in arranged.items():
        for move in one.moves:
            uses.setdefault(move.source.name, []).append(Use(live, prod(one.shape), move))
    return uses


def division(shape: Shape, uses: Sequence[Use]) -> Division:
    """The parts of a stored tensor of this shape."""
    ordered = sorted(uses, key=lambda use: (use.move.box.offset, natural_key(use.live)))
    names = tuple(dict.fromkeys(use.live for use in ordered))
    alone = len(names) == 1 and uses[0].volume == prod(shape)
    turned = fits_both_ways(shape) and any(use.move.turns for use in uses)
    listed = names if len(names) <= LISTED_MAX else tuple(dict.fromkeys(map(_unnumbered, names)))
    return Division(listed, _where(shape, ordered), alone, turned)


def fits_both_ways(shape: Shape) -> bool:
    return len(set(shape)) < len(shape)


def _systems(program: Program) -> str:
    return f", {program.source} to {program.target}"


def _where(shape: Shape, uses: Sequence[Use]) -> str:
    first = uses[0].move
    plain = not first.stepped and (not first.turns or len(shape) == 2)
    if len(uses) == 1 and plain and first.box == whole(shape):
        return f" {list(first.target.offset)}" if any(first.target.offset) else ""
    numbers = {live: number for number, live in enumerate(sorted({use.live for use in uses}, key=natural_key))}
    moves = [(numbers[use.live], *_plainly(use.move)) for use in uses]
    return f" #{hashlib.sha256(repr(moves).encode()).hexdigest()[:8]}"


def _plainly(move: BoxMove) -> tuple[object, ...]:
    """The move, with the distances between its elements where there are two or more."""
    steps = move.step or (1,) * len(move.box.shape), move.target_step or (1,) * len(move.target.shape)
    sides = (
        [(int(start), int(n), int(by) if n > 1 else 1) for start, n, by in zip(box.offset, box.shape, along, strict=True)]
        for box, along in zip((move.box, move.target), steps, strict=True)
    )
    return (*sides, move.axes)


def _unnumbered(name: str) -> str:
    return ".".join("*" if part.isdigit() else part for part in name.split("."))
