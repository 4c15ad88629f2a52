"""Tied tensors of an export: a checkpoint stores them once, and says under which other names they are known."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from holdfast_formats.foreign.moves import MappedTensor


def renamed(mapped: MappedTensor, group: str, name: str) -> MappedTensor:
    """The tensor under another key."""
    return mapped._replace(spec=msgspec.structs.replace(mapped.spec, group=group, name=name))


def tied(held: Mapping[str, MappedTensor], ties: Mapping[str, str]) -> dict[str, MappedTensor]:
    """The tensors, and those that are tied to them under their own names."""
    more = {alias: renamed(held[name], held[name].spec.group, alias) for alias, name in ties.items() if name in held}
    return {**held, **more}


def said(ties: Mapping[str, str], what: str = "tied weights are stored under both names") -> list[str]:
    """A sentence about them; none where nothing is tied."""
    return [f"{what}: " + ", ".join(f"{alias} = {name}" for alias, name in sorted(ties.items()))] if ties else []
