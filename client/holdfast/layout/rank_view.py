"""A rank's live state under a declared layout, and a checkpoint as this rank alone would have saved it.

With a mapping program, the checkpoint's tensors are those that it makes of the stored ones.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from math import prod
from typing import NamedTuple

from holdfast.tensors import optimizer_documents
from holdfast.tensors.leaves import Key, Leaf, OfferedLeaves
from holdfast_formats.disk.packing import natural_key
from holdfast_formats.errors import InvalidRequest
from holdfast_formats.layout.language import Layout
from holdfast_formats.layout.parts import LocalTensor, Part
from holdfast_formats.layout.rank_tensors import LayoutHoldings
from holdfast_formats.layout.rules import Rules
from holdfast_formats.mapping.box_moves import BoxMove
from holdfast_formats.mapping.listing import TensorKey
from holdfast_formats.programs import CompiledProgram, Program
from holdfast_formats.programs.remade import RemadeTensors
from holdfast_formats.region import Shape

MODEL, MASTER, EMA, OPTIM = "model", "master", "ema", "optim"
NAMED = (MODEL, MASTER, EMA)  # optimizer state follows these


class Live(NamedTuple):
    """Facts about the live state: its parameters in order, the names of DTensors and Fragments, and of empty plain
    tensors.

    An empty tensor may be all that a rank has of a shared tensor.
    """

    parameters: tuple[str, ...]
    foreign: frozenset[Key]
    empty: frozenset[Key]

    def is_foreign(self, group: str, name: str) -> bool:
        """Whether this is not a local tensor of the layout; optimizer state follows its parameter."""
        if group != OPTIM:
            return (group, name) in self.foreign
        owner = name.rpartition("/")[0]
        return any((of, owner) in self.foreign for of in (MASTER, MODEL))

    def is_empty(self, leaf: Leaf) -> bool:
        """Whether nothing need be stored for this tensor or its optimizer state."""
        owner = owner_of(leaf.group, leaf.name)
        owners = [(leaf.group, owner)] if leaf.group != OPTIM else [(MASTER, owner), (MODEL, owner)]
        return leaf.plain and (0 in leaf.shape or any(key in self.empty for key in owners))


class RankCheckpoint(NamedTuple):
    """A checkpoint as this rank would have saved it, and the local tensors behind its names."""

    stored: OfferedLeaves
    held: Mapping[Key, LocalTensor]
    notes: tuple[str, ...]
    moves_of: Callable[[Key], Sequence[BoxMove] | None] = lambda _: None  # what a program makes a whole tensor of


class LayoutPart(NamedTuple):
    """Which part of a checkpoint: a layout's rank, the groups, and the rules for the stored tensors."""

    layout: Layout
    rank: int
    groups: Collection[str]
    rules: Rules


def with_tied(stored: OfferedLeaves, rules: Rules, program: Program) -> tuple[OfferedLeaves, dict[str, str]]:
    """The checkpoint with the tied names that a program takes as tensors of their own; and these names.

    State of the tensor that they are tied to appears under them too.
    """
    ties: dict[str, str] = {}
    for group in NAMED:
        held = stored.specs.get(group, {})
        known = {**(rules.aliases() if held else {}), **stored.aliases.get(group, {})}
        ties.update((a, name) for a, name in known.items() if name in held and a not in held and program.takes(a))
    specs = dict(stored.specs)
    for group in (*NAMED, OPTIM) if ties else ():
        more = {
            name.replace(of, alias, 1): spec
            for alias, of in ties.items()
            for name, spec in stored.specs.get(group, {}).items()
            if owner_of(group, name) == of
        }
        specs[group] = {**more, **stored.specs.get(group, {})}
    return stored._replace(specs=specs), ties


class _Tied:
    """What a program makes of tied names: only live ones, made of the stored tensor."""

    def __init__(self, makes: RemadeTensors, group: str, ties: Mapping[str, str], live: Live) -> None:
        self._makes, self._group, self._live = makes, group, frozenset(live.parameters)
        self._stored = {alias: name for alias, name in ties.items()}
        self.aliases: dict[str, str] = {}  # made names whose tensor is made under another name too

    def __call__(self, dense: list[LocalTensor], experts: list[LocalTensor]) -> tuple[list[LocalTensor], list[LocalTensor]]:
        stacks = self._makes(dense, experts)
        if not self._stored:
            return stacks
        own = {(local.shape, local.parts): local.name for each in stacks for local in each if not self._is_tied(local)}
        return self._kept(stacks[0], own), self._kept(stacks[1], own)

    def _kept(
        self, local_tensors: list[LocalTensor], own: Mapping[tuple[Shape, tuple[Part, ...]], str]
    ) -> list[LocalTensor]:
        kept = []
        for local in local_tensors:
            if not self._is_tied(local):
                kept.append(local)
            elif owner_of(self._group, local.name) in self._live:
                named = local._replace(parts=tuple(part._replace(tensor=self.name(part.tensor)) for part in local.parts))
                same = own.get((named.shape, named.parts))
                if same is None:
                    kept.append(named)
                else:
                    self.aliases[local.name] = same
        return kept

    def _is_tied(self, local: LocalTensor) -> bool:
        return any(self.name(part.tensor) != part.tensor for part in local.parts)

    def name(self, tensor: str) -> str:
        owner = owner_of(self._group, tensor)
        return self._stored.get(owner, owner) + tensor[len(owner) :]


def through_program(
    compiled: CompiledProgram, stored: OfferedLeaves, wanted: LayoutPart, live: Live, ties: Mapping[str, str]
) -> RankCheckpoint:
    """The view of what a program makes of the checkpoint, including tied names (`with_tied`).

    Raises `InvalidRequest` for live DTensors and Fragments that the program pads.
    """
    positions = {name: position for position, name in enumerate(live.parameters)}
    specs: dict[str, Mapping[str, tuple[str, Shape]]] = dict(stored.specs)
    held: dict[Key, LocalTensor] = {}
    moves_of = _Moves(compiled)
    foreign_sources: dict[Key, list[str]] = {}
    notes: list[str] = []
    aliases = {group: tied for group, tied in stored.aliases.items() if group not in specs or group not in wanted.groups}
    for group in (group for group in (*NAMED, OPTIM) if group in wanted.groups and stored.specs.get(group)):
        makes = _Tied(RemadeTensors(compiled, group, stored.specs[group], positions), group, ties, live)
        given = {name: stored.specs[group][name] for name in sorted(stored.specs[group], key=natural_key)}
        holdings = LayoutHoldings(wanted.layout, group, given, wanted.rules, None, makes)
        found = holdings.of(wanted.rank)
        own = [local for local in found.tensors if not live.is_foreign(group, local.name)]
        held.update({(group, local.name): local for local in own})
        specs[group] = {local.name: (local.dtype, local.shape) for local in own}
        aliases[group] = {alias: name for alias, name in makes.aliases.items() if group != OPTIM and name in specs[group]}
        moves_of.names[group] = makes.name
        foreign = [mapped.spec for key, mapped in compiled.tensors.items() if key.group == group and live.is_foreign(*key)]
        foreign_sources |= {
            (group, one.name): [move.source.name for move in moves_of((group, one.name)) or ()] for one in foreign
        }
        specs[group] = {**specs[group], **{one.name: (one.dtype, one.shape) for one in foreign}}
        notes += [note for note in found.notes if note not in notes]
    sources_of = {key: [part.tensor for part in local.parts] for key, local in held.items()} | foreign_sources
    values = {**stored.values, OPTIM: inward_texts(stored, sources_of)} if OPTIM in stored.values else stored.values
    return RankCheckpoint(stored._replace(specs=specs, aliases=aliases, values=values), held, tuple(notes), moves_of)


class _Moves:
    """What a program makes whole tensors of, for live ones that state their own place. `names` returns the stored name of a
    tied tensor of a group.
    """

    def __init__(self, compiled: CompiledProgram) -> None:
        self.compiled = compiled
        self.names: dict[str, Callable[[str], str]] = {}

    def __call__(self, key: Key) -> tuple[BoxMove, ...] | None:
        """None for a tensor that the program does not make; `InvalidRequest` for one that it pads."""
        group, name = key
        mapped = self.compiled.tensors.get(TensorKey(*key)) if group in self.names else None
        if mapped is None:
            return None
        if sum(move.target.volume for move in mapped.moves) < prod(mapped.spec.shape):
            raise InvalidRequest(
                f"{group}/{name} is a DTensor or Fragment, and program {self.compiled.program!r} pads it",
                hint="padded tensors must be plain tensors",
                tensor=name,
            )
        return tuple(move._replace(source=TensorKey(group, self.names[group](move.source.name))) for move in mapped.moves)


def owner_of(group: str, name: str) -> str:
    return name.rpartition("/")[0] if group == OPTIM else name


def inward_texts(stored: OfferedLeaves, sources_of: Mapping[Key, Iterable[str]]) -> dict[str, str]:
    """The optimizers' documents with the names of local tensors; `sources_of` maps each to its stored ones."""
    names: dict[str, list[str]] = {}
    for group in (MASTER, MODEL):
        for (of, name), sources in sources_of.items():
            for tensor in dict.fromkeys(sources) if of == group else ():
                if name not in names.setdefault(tensor, []):
                    names[tensor].append(name)
    return {key: optimizer_documents.renamed(text, names) for key, text in stored.values[OPTIM].items()}
