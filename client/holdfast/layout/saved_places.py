"""Maps a rank's live tensors to parts of stored tensors, if the state is saved through a mapping program."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from math import prod
from typing import Any, NamedTuple

import torch

from holdfast.layout import rules_choice
from holdfast.layout.places import Group, Places, PlainPlace, Specs
from holdfast.layout.rank_view import NAMED, OPTIM, Live, owner_of
from holdfast.tensors.leaves import Content, Key, Leaf, OfferedLeaves
from holdfast.tensors.live_pieces import LivePiece
from holdfast_formats.errors import InvalidRequest, StateMismatch
from holdfast_formats.layout.language import Layout
from holdfast_formats.layout.parts import LocalTensor
from holdfast_formats.layout.rules import Rules
from holdfast_formats.programs import Program
from holdfast_formats.programs.saving import HeldParts, SavedProgram, WantedTensors, WholeTensor
from holdfast_formats.region import Shape
from holdfast_formats.tensors import TensorSpec


class NamedSpecs(NamedTuple):
    """The tensors of a group: plain ones, those that state their own place, and plain ones whose optimizer state does."""

    local: Specs
    foreign: Specs
    aliases: Specs
    foreign_aliases: Specs
    followed: Specs

    @property
    def stated(self) -> tuple[Specs, Specs]:
        return self.foreign, self.followed


def named_specs(group: str, content: Content) -> NamedSpecs:
    local: Specs = {}
    foreign: Specs = {}
    followed: set[str] = set()
    for leaf in content.leaves.values():
        if leaf.group == group:
            (local if leaf.plain else foreign)[leaf.name] = leaf.dtype, leaf.shape
        elif leaf.group == OPTIM and not leaf.plain:
            followed.add(owner_of(OPTIM, leaf.name))
    tied = content.aliases.get(group, {})
    aliases, others = ({a: held[n] for a, n in tied.items() if n in held} for held in (local, foreign))
    return NamedSpecs(local, foreign, aliases, others, {name: local[name] for name in local.keys() & followed})


class SavedPlaces:
    """The places of a rank's tensors. The program's result for parameters is cached."""

    def __init__(
        self,
        program: Program,
        layout: Layout,
        rank: int,
        config: Mapping[str, Any] | None,
        extra: Mapping[str, Any] | None,
    ) -> None:
        self._saved, self._layout, self._rank = SavedProgram(program, layout, rank, config), layout, rank
        self._config, self._extra = config, extra
        self.notes: dict[str, str] = {}  # each with the group that it is about

    def learn(self, stored: OfferedLeaves) -> bool:
        """Use this restored checkpoint's names for saves from now on. False if nothing changes."""
        shapes: dict[str, Shape] = {}
        for group in NAMED:
            for name, (_, shape) in stored.specs.get(group, {}).items():
                shapes.setdefault(name, tuple(shape))
        self._config = stored.config or self._config
        return self._saved.learn(shapes, stored.config)

    def named(self, group: str, named_specs: NamedSpecs, live: Live, whole: bool) -> Group:
        """The places of the live tensors of a group; `whole`: a rank has more than a share of each plain one.

        Raises `InvalidRequest` or `StateMismatch` for what the program or the layout does not fit.
        """
        places, ties = self._plain(group, named_specs, live, whole)
        stated = {**named_specs.foreign, **named_specs.foreign_aliases, **named_specs.followed}
        wholes, more = self._wholes(group, stated)
        self._saved.check_alone((*named_specs.local, *named_specs.foreign))
        return Group(named_specs.local, places, {}, {**ties, **more}, wholes, named_specs.foreign, named_specs.followed)

    def _plain(self, group: str, given: NamedSpecs, live: Live, whole: bool) -> tuple[Places, dict[str, str]]:
        local, aliased = given.local, given.aliases
        others = {} if whole or not local else {n: ("", ()) for n in live.parameters if not live.is_foreign(group, n)}
        every: Specs = {**others, **local, **aliased}
        if not every:
            return {}, {}
        rules = self._rules()
        self._saved.cover({name: shape for name, (_, shape) in every.items()}, whole, rules)
        rules = self._rules()
        self._refuse_unruled(group, every, rules)
        usual = next((dtype for dtype, _ in local.values()), "F32")
        held = self._held(group, {name: dtype or usual for name, (dtype, _) in every.items()}, live, rules)
        placed = self._placed(group, {**local, **aliased}, held)
        ties = {alias: name for alias, name in rules.aliases().items() if alias in held.specs}
        return {name: [_tied(place, ties) for place in places] for name, places in placed.items()}, ties

    def _wholes(self, group: str, given: Specs) -> tuple[dict[str, WholeTensor], dict[str, str]]:
        if not given:
            return {}, {}
        shapes = {name: shape for name, (_, shape) in given.items()}
        self._saved.cover(shapes, True, self._rules(), cut=False)
        whole_tensors = self._saved.wholes(
            WantedTensors(group, {name: dtype for name, (dtype, _) in given.items()}, {}), shapes
        )
        known = self._rules().aliases()
        ties = {alias: name for alias, name in known.items() if any(alias in one.stored for one in whole_tensors.values())}
        return {name: one.tied(ties) for name, one in whole_tensors.items()}, ties

    def division(self, spec: TensorSpec) -> str:
        """What the placement of a stored tensor says of how it is divided; "" if it has another shape than the weight."""
        owner = owner_of(spec.group, spec.name)
        return self._saved.divisions.get(owner, "") if spec.shape == self._saved.stored.get(owner) else ""

    def kept(self, local: Specs, live: Live) -> Places:
        rules = self._rules()
        dtypes = {name: dtype for name, (dtype, _) in local.items()}
        for key, dtype in {name.rpartition("/")[2]: dtype for name, dtype in dtypes.items()}.items():
            dtypes = {**{f"{parameter}/{key}": dtype for parameter in live.parameters}, **dtypes}
        self._saved.cover({owner_of(OPTIM, name): () for name in dtypes}, False, rules)
        return self._placed(OPTIM, local, self._held(OPTIM, dtypes, live, self._rules()))

    def _rules(self) -> Rules:
        """The rules of the stored names. Ties come from the config, unless a checkpoint shows its names."""
        known = self._saved.stored if self._saved.restored or self._config is None else ()
        shapes = self._saved.stored
        return rules_choice.choose(self._config, known, self._layout, self._extra, shapes)

    def _held(self, group: str, dtypes: Mapping[str, str], live: Live, rules: Rules) -> HeldParts:
        order = {name: position for position, name in enumerate(live.parameters)}
        return self._saved.held(WantedTensors(group, dtypes, order), rules)

    def _placed(self, group: str, local: Specs, held_parts: HeldParts) -> Places:
        places: Places = {}
        for name, (dtype, shape) in local.items():
            tensor = held_parts.local.get(name)
            if tensor is None and 0 in shape:  # other ranks hold all of it
                places[name] = []
                continue
            if tensor is None or tensor.shape != shape:
                where = "has no part of it" if tensor is None else f"should have {list(tensor.shape)}"
                raise StateMismatch(
                    f"tensor {name!r} of group {group!r} has the local shape {list(shape)}, rank {self._rank} of this "
                    f"layout {where}",
                    hint="check the layout, the program, and that config.json belongs to this model",
                    tensor=name,
                )
            self._note(group, tensor)
            places[name] = [
                (TensorSpec(group, of, dtype, held_parts.specs[part.tensor].shape), part._replace(tensor=of))
                for part in tensor.parts
                for of in (part.tensor, *held_parts.copies.get(part.tensor, ()))
            ]
        return places

    def _note(self, group: str, tensor: LocalTensor) -> None:
        if tensor.padding:
            text = f"{tensor.padding} elements of {group}/{tensor.name} are padding: not saved, restored as zeros"
            self.notes[text] = group

    def _refuse_unruled(self, group: str, names: Iterable[str], rules: Rules) -> None:
        """`InvalidRequest` for stored matrices without a rule, if ranks hold parts: they may or may not be cut."""
        mesh = self._layout.mesh
        if mesh.tp == mesh.etp == mesh.ep == 1:
            return
        known = rules.aliases()
        for name in names:
            for source in self._saved.sources(name):
                ruled = source in known or rules.rule(source) is not None or rules.fusion(source) is not None
                if not ruled and len(self._saved.stored[source]) >= 2:
                    raise InvalidRequest(
                        f"the layout has no rule for {source!r}, of which {group}/{name} is made, so it is not known "
                        "whether it is sharded",
                        hint="pass layout=ParallelLayout(…, rules=…) with a table that describes how it is "
                        "sharded (without `cut` it is replicated)",
                        tensor=source,
                    )


def _tied(place: PlainPlace, ties: Mapping[str, str]) -> PlainPlace:
    spec, part = place
    name = ties.get(spec.name, spec.name)
    return place if name == spec.name else (TensorSpec(spec.group, name, spec.dtype, spec.shape), part._replace(tensor=name))


class SharedCounts:
    """Single numbers, such as steps, of which several live ones are stored as one: they must be equal at every save."""

    def __init__(self) -> None:
        self._found: dict[Key, dict[Key, Leaf]] = {}

    def add(self, stored: Key, first: Leaf, other: Leaf) -> None:
        self._found.setdefault(stored, {})[first.key] = first
        self._found[stored][other.key] = other

    def keep(self, leaves: Collection[Key]) -> None:
        """Forget numbers that are no longer stored; content without optimizer state changes nothing."""
        if any(group == OPTIM for group, _ in leaves):
            self._found = {key: counts for key, counts in self._found.items() if key in leaves}

    def check(self) -> None:
        """`StateMismatch` where they differ now."""
        for (_, stored), leaves in self._found.items():
            first, *others = leaves.values()
            value = first.pieces[0].tensor
            for leaf in others:
                other = leaf.pieces[0].tensor
                if not torch.equal(other.to(value.device), value):
                    raise StateMismatch(
                        f"{first.path} is {value.item()} and {leaf.path} is {other.item()}, and both would be saved as "
                        f"{stored!r}",
                        hint="update all parameters that form one tensor in the checkpoint at the same steps",
                        tensors=[first.path, leaf.path],
                    )


def refuse_two(one: LivePiece, other: LivePiece, paths: tuple[str, str], stored: str) -> None:
    """`InvalidRequest` for two live tensors with the same stored place, unless they share memory."""
    a, b = one.tensor, other.tensor
    if a.data_ptr() != b.data_ptr() or a.stride() != b.stride():
        raise InvalidRequest(
            f"{paths[0]} and {paths[1]} would both be saved as {stored!r}, but may diverge",
            hint="tie them in the module, or leave one out of the state",
            tensors=list(paths),
        )


def is_number(leaf: Leaf) -> bool:
    """Whether this is one number of an optimizer's state."""
    return leaf.group == OPTIM and prod(leaf.shape) == 1
