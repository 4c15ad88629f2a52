"""What the placement of a stored tensor says of the mapping program through which it was saved.

A weight as long as wide fits both ways. If a program between the same two systems transposes other weights than when they
were saved, a restore finds that out here.
"""

from __future__ import annotations

from holdfast_formats.disk.manifests import TensorEntry
from holdfast_formats.errors import StateMismatch
from holdfast_formats.programs.document import Program
from holdfast_formats.region import Shape

_TURNED = ", transposed"
_HOW = {True: "transposed", False: "not transposed"}


def through(layout: str, program: Program) -> str:
    """The placement of tensors that are saved in a layout through a program."""
    return f"{layout} through program {program.name}{_systems(program)}".strip()


def of_shape(placement: str, shape: Shape, turned: bool) -> str:
    """The placement of a tensor; `turned`: the live one has its dimensions in another order."""
    return placement + _TURNED if turned and fits_both_ways(shape) else placement


def fits_both_ways(shape: Shape) -> bool:
    return len(set(shape)) < len(shape)


def check(entry: TensorEntry, name: str, program: Program, turned: bool) -> None:
    """`StateMismatch` for a tensor that was saved through a program between the same two systems, and turned there and not
    here, or the other way round.
    """
    known = entry.placement.removesuffix(_TURNED)
    was = known != entry.placement
    if known.endswith(_systems(program)) and fits_both_ways(entry.shape) and was is not turned:
        raise StateMismatch(
            f"{name!r} was saved {_HOW[was]}, {known.strip()}, and program {program.name!r} would restore it "
            f"{_HOW[turned]}: the program is another one, or the model has other layers",
            hint="construct the model as the one that was saved, and pass the same program as layout=, or none as then",
            tensor=name,
        )


def _systems(program: Program) -> str:
    return f", {program.source} to {program.target}"
