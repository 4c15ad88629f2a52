"""Chooses the mapping program for a live state and a checkpoint that has other names."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from holdfast.tensors.leaves import OfferedLeaves
from holdfast_formats.programs import Program, fitting
from holdfast_formats.programs.remade import keyed


def fitting_program(stored: OfferedLeaves, names: Collection[str], config: Mapping[str, Any] | None) -> Program | None:
    """The built-in program that makes live weights of these names of a checkpoint's, which has others; None if it has them
    all, or there is none.
    """
    if stored.specs.get("model", {}).keys() | stored.aliases.get("model", {}).keys() >= set(names):
        return None
    return fitting(keyed(stored.specs), names, stored.config or config)
