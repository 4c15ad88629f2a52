"""A placement says whether a program transposed the tensor, and with another program of the same systems that counts."""

from __future__ import annotations

import pytest

from holdfast_formats.disk.manifests import TensorEntry
from holdfast_formats.errors import StateMismatch
from holdfast_formats.programs import placements, read_program


def program(name: str, target: str = "ours"):
    return read_program(f"name = '{name}'\nfrom = 'hf'\nto = '{target}'\nstatements = '* -> *'")


def entry(shape: tuple[int, ...], turned: bool, target: str = "ours") -> TensorEntry:
    text = placements.of_shape(placements.through("dp=2", program("old", target)), shape, turned)
    return TensorEntry("F32", shape, "model.safetensors", 0, (), text)


@pytest.mark.parametrize("turned", [True, False])
@pytest.mark.parametrize("shape", [(4, 4), (2, 4, 4), (4, 6), (4,)])
def test_only_what_fits_both_ways_is_compared(shape: tuple[int, ...], turned: bool) -> None:
    placements.check(entry(shape, turned), "w", program("new"), turned)
    if len(set(shape)) == len(shape):
        placements.check(entry(shape, turned), "w", program("new"), not turned)
    else:
        with pytest.raises(StateMismatch, match=r"'w' was saved (not )?transposed, dp=2 through program old, hf to ours"):
            placements.check(entry(shape, turned), "w", program("new"), not turned)


@pytest.mark.parametrize("placement", ["", "replicate", "dp=2", "Fragment, transposed"])
def test_what_no_such_program_saved_is_not_compared(placement: str) -> None:
    """As what torch saved, or an import made; and what a program for another system has saved is the same for this one."""
    for turned in (True, False):
        placements.check(TensorEntry("F32", (4, 4), "f", 0, (), placement), "w", program("new"), turned)
        placements.check(entry((4, 4), True, "theirs"), "w", program("new"), turned)
