"""What a rank's live state is to a declared layout, and a checkpoint as this rank alone would have saved it.

Where a mapping program stands between, the checkpoint's tensors are those that it makes of the stored ones.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import NamedTuple

from holdfast.tensors import optimizer_documents
from holdfast.tensors.leaves import Key, Leaf, OfferedLeaves
from holdfast_formats.disk.packing import natural_key
from holdfast_formats.errors import InvalidRequest
from holdfast_formats.layout.language import Layout
from holdfast_formats.layout.parts import LocalTensor
from holdfast_formats.layout.rank_tensors import LayoutHoldings
from holdfast_formats.layout.rules import Rules
from holdfast_formats.programs import CompiledProgram
from holdfast_formats.programs.remade import RemadeTensors
from holdfast_formats.region import Shape

MODEL, MASTER, EMA, OPTIM = "model", "master", "ema", "optim"
NAMED = (MODEL, MASTER, EMA)  # optimizer state follows these


class Live(NamedTuple):
    """Facts about the live state: its parameters in order, the names of DTensors and Fragments, and those of empty plain
    tensors.

    An empty tensor may be all that a rank has of a tensor that the ranks share.
    """

    parameters: tuple[str, ...]
    foreign: frozenset[Key]
    empty: frozenset[Key]

    def is_foreign(self, group: str, name: str) -> bool:
        """Whether this is not a local tensor of the layout; optimizer state is what its parameter is."""
        if group != OPTIM:
            return (group, name) in self.foreign
        owner = name.rpartition("/")[0]
        return any((of, owner) in self.foreign for of in (MASTER, MODEL))

    def is_empty(self, leaf: Leaf) -> bool:
        """Whether nothing need be stored for this tensor or its optimizer state."""
        owner = owner_of(leaf.group, leaf.name)
        owners = [(leaf.group, owner)] if leaf.group != OPTIM else [(MASTER, owner), (MODEL, owner)]
        return leaf.plain and (0 in leaf.shape or any(key in self.empty for key in owners))


class View(NamedTuple):
    """A checkpoint as this rank would have saved it, and the local tensors behind its names."""

    stored: OfferedLeaves
    held: Mapping[Key, LocalTensor]
    notes: tuple[str, ...]


class LayoutPart(NamedTuple):
    """Which part of a checkpoint: a layout's rank, the groups, and the rules for the stored tensors."""

    layout: Layout
    rank: int
    groups: Collection[str]
    rules: Rules


def through_program(compiled: CompiledProgram, stored: OfferedLeaves, wanted: LayoutPart, live: Live) -> View:
    """The view of what a program makes of the checkpoint; `InvalidRequest` for live DTensors and Fragments, by name."""
    positions = {name: position for position, name in enumerate(live.parameters)}
    specs: dict[str, Mapping[str, tuple[str, Shape]]] = dict(stored.specs)
    held: dict[Key, LocalTensor] = {}
    notes: list[str] = []
    for group in (group for group in (*NAMED, OPTIM) if group in wanted.groups and stored.specs.get(group)):
        makes = RemadeTensors(compiled, group, stored.specs[group], positions)
        given = {name: stored.specs[group][name] for name in sorted(stored.specs[group], key=natural_key)}
        holdings = LayoutHoldings(wanted.layout, group, given, wanted.rules, stored.aliases.get(group), makes)
        found = holdings.of(wanted.rank)
        for local in found.tensors:
            if live.is_foreign(group, local.name):
                raise InvalidRequest(
                    f"{group}/{local.name} is a DTensor or Fragment, which is not restored through a program",
                    hint="import or export the checkpoint through the program first, then restore it without one",
                )
            held[group, local.name] = local
        specs[group] = {local.name: (local.dtype, local.shape) for local in found.tensors}
        notes += [note for note in found.notes if note not in notes]
    values = {**stored.values, OPTIM: inward_texts(stored, held)} if OPTIM in stored.values else stored.values
    aliases = {group: tied for group, tied in stored.aliases.items() if group not in specs or group not in wanted.groups}
    return View(stored._replace(specs=specs, aliases=aliases, values=values), held, tuple(notes))


def owner_of(group: str, name: str) -> str:
    """The parameter to which a tensor belongs."""
    return name.rpartition("/")[0] if group == OPTIM else name


def inward_texts(stored: OfferedLeaves, held: Mapping[Key, LocalTensor]) -> dict[str, str]:
    """The optimizers' documents with the names of local tensors."""
    names: dict[str, list[str]] = {}
    for group in (MASTER, MODEL):
        for (of, name), local in held.items():
            for tensor in dict.fromkeys(part.tensor for part in local.parts if of == group):
                if name not in names.setdefault(tensor, []):
                    names[tensor].append(name)
    return {key: optimizer_documents.renamed(text, names) for key, text in stored.values[OPTIM].items()}
