"""A program compiled for one checkpoint: every tensor that is made, and the use of every source."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Literal, NamedTuple

from holdfast_formats.errors import StateMismatch
from holdfast_formats.mapping.box_moves import MappedTensor
from holdfast_formats.mapping.listing import TensorKey
from holdfast_formats.programs.arrangement import Arrangement
from holdfast_formats.tensors import TensorSpec

_OTHER_PROGRAM = "choose another program: this one does not fit the checkpoint"


class DtypeChange(NamedTuple):
    """A tensor whose dtype changes; `lossless` if every value can be recovered."""

    key: TensorKey
    before: str
    after: str
    lossless: bool


class LostElements(NamedTuple):
    """Source elements without a use, and the statement that drops them."""

    key: TensorKey
    elements: int
    why: str


How = Literal["kept", "renamed", "transposed", "rearranged", "joined", "added"]


class Becoming(NamedTuple):
    """A row of `--dry-run`: a result, how it is made, and of which tensors."""

    made: TensorSpec
    how: How
    sources: tuple[TensorKey, ...]


class CompiledProgram(NamedTuple):
    """Checked results: every element is written once, and every source element is used or listed in `lost`.

    The tensors of each of `equal` must hold the same bytes, and those of `zeros` only zeros, which is checked before the
    work. `names` maps each parameter to its results, for documents that name parameters, and `arranged` has the results of
    parameters alone.
    """

    program: str
    tensors: Mapping[TensorKey, MappedTensor]
    lost: tuple[LostElements, ...]
    added: tuple[TensorKey, ...]
    casts: tuple[DtypeChange, ...]
    equal: tuple[tuple[TensorKey, ...], ...]
    zeros: tuple[TensorKey, ...]
    names: Mapping[str, tuple[str, ...]]
    arranged: Mapping[str, Arrangement]
    notes: tuple[str, ...] = ()

    def check_assumed(self, equal: Callable[[TensorKey, TensorKey], bool], zeros: Callable[[TensorKey], bool]) -> None:
        """`StateMismatch` for tensors that the program takes for equal, or for zeros, and that are not."""
        for first, *others in self.equal:
            for other in others:
                if not equal(first, other):
                    raise StateMismatch(
                        f"program {self.program!r} assumes that {first.name!r} and {other.name!r} of group "
                        f"{first.group} are equal, but they differ",
                        hint=_OTHER_PROGRAM,
                        tensor=other.name,
                    )
        for key in self.zeros:
            if not zeros(key):
                raise StateMismatch(
                    f"program {self.program!r} assumes that {key.name!r} of group {key.group} is all zeros, but it is not",
                    hint=_OTHER_PROGRAM,
                    tensor=key.name,
                )

    def rows(self, sources: Mapping[TensorKey, TensorSpec]) -> list[Becoming]:
        """The conversions, by the names of results; `sources` are the tensors that the program was compiled for."""
        return [_row(self.tensors[key], sources) for key in sorted(self.tensors)]


def _row(mapped: MappedTensor, specs: Mapping[TensorKey, TensorSpec]) -> Becoming:
    sources = tuple(dict.fromkeys(move.source for move in mapped.moves))
    if not sources:
        return Becoming(mapped.spec, "added", sources)
    if len(sources) > 1:
        return Becoming(mapped.spec, "joined", sources)
    move, dimensions = mapped.moves[0], len(mapped.spec.shape)
    one = len(mapped.moves) == 1 and not move.stepped and move.target.shape == mapped.spec.shape
    if not one or sorted(axis for axis in move.axes if axis is not None) != list(range(dimensions)):
        return Becoming(mapped.spec, "rearranged", sources)
    if move.axes != tuple(range(dimensions)):
        return Becoming(mapped.spec, "transposed", sources)
    part = specs[sources[0]].shape != move.box.shape
    how: How = "rearranged" if part else "kept" if sources[0] == mapped.key else "renamed"
    return Becoming(mapped.spec, how, sources)
