"""Tied tensors of an export: a checkpoint stores them once, with their other names."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from holdfast_formats.mapping.box_moves import MappedTensor


def renamed(mapped: MappedTensor, group: str, name: str) -> MappedTensor:
    return mapped._replace(spec=msgspec.structs.replace(mapped.spec, group=group, name=name))


def tied(held: Mapping[str, MappedTensor], ties: Mapping[str, str]) -> dict[str, MappedTensor]:
    """The tensors, and those tied to them under their own names."""
    more = {alias: renamed(held[name], held[name].spec.group, alias) for alias, name in ties.items() if name in held}
    return {**held, **more}


def said(ties: Mapping[str, str], what: str = "tied weights are stored under both names") -> list[str]:
    return [f"{what}: " + ", ".join(f"{alias} = {name}" for alias, name in sorted(ties.items()))] if ties else []
