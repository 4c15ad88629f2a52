"""Names the mapping program in the error of a restore, if it makes the live weights of a checkpoint with other names."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from holdfast.layout import rules_choice
from holdfast.layout.program_choice import fitting_program
from holdfast.read.reader import CheckpointReader
from holdfast.tensors.leaves import OfferedLeaves
from holdfast_formats.errors import CheckpointError, StateMismatch
from holdfast_formats.programs import AUTO

_WEIGHTS = "model/"


@contextmanager
def named(stored: OfferedLeaves, reader: CheckpointReader, layout: str) -> Iterator[None]:
    """Name the program in a `StateMismatch` for weights that the checkpoint lacks, if a built-in one makes all of them.

    `layout` is the state's, as text.
    """
    try:
        yield
    except StateMismatch as error:
        missing = [str(name).removeprefix(_WEIGHTS) for name in error.members.get("missing", ()) if _of_weights(name)]
        program = fitting_program(stored, missing, _config(reader)) if missing else None
        if program is not None:
            error.hint = (
                f"the mapping program {program.name!r} makes these weights of the checkpoint's: pass "
                f"layout=ParallelLayout({layout!r}, program={program.name!r}), or program={AUTO!r}; or {error.hint}"
            )
        raise


def _config(reader: CheckpointReader) -> Mapping[str, Any] | None:
    try:
        return rules_choice.config_of(reader)
    except CheckpointError:  # the restore fails all the same, for what it was told
        return None


def _of_weights(name: object) -> bool:
    return isinstance(name, str) and name.startswith(_WEIGHTS)
