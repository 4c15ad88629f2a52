"""Converts between plain local tensors of a declared layout and the tensors that are stored.

A rank of a Megatron-, Paddle- or vLLM-like program holds fused, cut and padded tensors that do not say so themselves. Here
the layout says it. On save, every local tensor becomes pieces of stored tensors. On restore, the checkpoint is presented as
if this rank alone had saved it. So all code in between sees one set of names and shapes, those of this rank.

With a mapping program, the stored tensors are those of which the program makes the live ones (`saved_places`).

Optimizer state follows its parameter. State of the parameter's shape is the same part of it. A single number is stored once
for every tensor that the parameter is made of, and a restore takes the first.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from math import prod
from typing import Any, Literal

from holdfast.launch import Launch
from holdfast.layout import rules_choice
from holdfast.layout.places import (
    Group,
    Place,
    Places,
    Source,
    Specs,
    held_ties,
    kept_places,
    own_places,
    stored_aliases,
    unless_same,
    view,
)
from holdfast.layout.program_choice import fitting_program
from holdfast.layout.rank_view import (
    EMA,
    MASTER,
    MODEL,
    NAMED,
    OPTIM,
    LayoutPart,
    Live,
    RankCheckpoint,
    inward_texts,
    owner_of,
    through_program,
    with_tied,
)
from holdfast.layout.rules_choice import ParallelLayout, RulesSource, program_of
from holdfast.layout.saved_places import SavedPlaces, SharedCounts, is_number, named_specs, refuse_two
from holdfast.memory import gc_pause
from holdfast.tensors import optimizer_documents
from holdfast.tensors.leaves import Content, Key, Leaf, OfferedLeaves
from holdfast.tensors.live_pieces import LivePiece
from holdfast_formats.errors import InvalidRequest, StateMismatch
from holdfast_formats.layout import declared, language, rank_tensors
from holdfast_formats.layout.language import Layout
from holdfast_formats.layout.parts import LocalTensor
from holdfast_formats.layout.rules import Rules
from holdfast_formats.programs import AUTO, CompiledProgram, Program, compile_program, placements, remade
from holdfast_formats.region import Shape

_SHARED_FROM_STAGE = {MODEL: 3, MASTER: 1, EMA: 3}  # from this stage on no tensor of the group is whole, known or not


class DeclaredLayout:
    """The layout of one rank's plain tensors. Caches its results for tensors that stay the same."""

    def __init__(
        self,
        layout: Layout,
        rank: int,
        config: Mapping[str, Any] | None,
        rules: RulesSource,
        program: Program | Literal["auto"] | None = None,
    ) -> None:
        """`program`: "auto" chooses one for each restored checkpoint; until then there is none."""
        self.layout, self.rank, self.config = layout, rank, config
        self.program: Program | None = None
        self.compiled: CompiledProgram | None = None  # for the checkpoint of the last call of `inward`
        self.for_one_rank: CompiledProgram | None = None  # the same, with results as one rank has them
        self._auto = program == AUTO
        self._extra = rules_choice.read_rules(rules)
        self._go_through(None if isinstance(program, str) else program)

    def _go_through(self, program: Program | None) -> None:
        """Save and restore through another program, or none; forget what was worked out for the last one."""
        self.program, self._placement = program, language.text(self.layout)
        self._saved: SavedPlaces | None = None
        if program is not None:
            self._saved = SavedPlaces(program, self.layout, self.rank, self.config, self._extra)
            self._placement = placements.through(self._placement, program)
        self._counts = SharedCounts()
        self._groups: dict[str, Group] = {}
        self._made: dict[Key, tuple[tuple[Leaf, ...], Leaf]] = {}
        self._texts: dict[str, tuple[str, str]] = {}

    @property
    def divides(self) -> bool:
        """Whether ranks hold parts of plain tensors. With replicas alone (`dp=8`) each holds whole ones."""
        mesh = self.layout.mesh
        return mesh.world > mesh.dp or mesh.ep * mesh.etp > 1

    def outward(self, content: Content, live: Live) -> Content:
        """Replace local tensors in the content by the stored ones. Raises `StateMismatch` or `InvalidRequest` for
        misfits.
        """
        with gc_pause.paused():
            return self._outward(content, live)

    def _outward(self, content: Content, live: Live) -> Content:
        groups = {group: self._declare(group, content, live) for group in NAMED}
        groups[OPTIM] = self._declare_kept(content, groups, live)
        known = {
            group: declared_group
            for group, declared_group in self._groups.items()
            if declared_group.local or declared_group.foreign
        }
        if any(declared_group is not groups[group] for group, declared_group in known.items()):
            self._made = {}  # the parts of a tensor may depend on which others there are
        self._groups = groups
        gathered: dict[Key, list[Source]] = {}
        for leaf in content.leaves.values():
            for place in self._places(leaf):
                key = leaf.key if place is None else (place[0].group, place[0].name)
                gathered.setdefault(key, []).append((leaf, place))
        leaves = {key: self._leaf(key, sources) for key, sources in gathered.items()}
        self._made = {key: value for key, value in self._made.items() if key in leaves}
        self._counts.keep(leaves)
        aliases = {group: stored_aliases(tied, groups.get(group)) for group, tied in content.aliases.items()}
        for group, declared_group in groups.items():
            aliases[group] = {**declared_group.stored_ties, **held_ties(declared_group), **aliases.get(group, {})}
        return Content(leaves, content.values, {group: tied for group, tied in aliases.items() if tied}, content.mesh)

    def outward_text(self, key: str, text: str) -> str:
        """An optimizer's document with the names of stored tensors, from the last call of `outward`."""
        known = self._texts.get(key)
        if known is None or known[0] != text:
            held = [self._groups[group] for group in (MASTER, MODEL)]
            names = {name: group.stored_names(name) for group in held for name in (*group.places, *group.wholes)}
            two = None if self._saved is None else optimizer_documents.conflict(text, names)
            if two is not None:
                raise StateMismatch(
                    f"{key}: parameters that are parts of {two!r} in the checkpoint have different "
                    "hyper-parameters or values",
                    hint="put them into one param_group",
                    tensor=two,
                )
            known = self._texts[key] = text, optimizer_documents.renamed(text, names)
        return known[1]

    def check_now(self, groups: Collection[str]) -> tuple[str, ...]:
        """Notes on what a save of these groups leaves out; `StateMismatch` for numbers stored as one that differ now."""
        if OPTIM in groups:
            self._counts.check()
        return () if self._saved is None else tuple(text for text, of in self._saved.notes.items() if of in groups)

    def inward(self, stored: OfferedLeaves, groups: Iterable[str], live: Live) -> RankCheckpoint:
        """These groups of the checkpoint as this rank alone would have saved them.

        Raises `StateMismatch` or `InvalidRequest` naming a tensor that cannot be cut as the layout says.
        """
        wanted = {*groups} | ({MODEL, MASTER} if OPTIM in groups else set())
        known = stored.specs.get(MODEL) or stored.specs.get(MASTER) or {}
        shapes = {name: shape for name, (_, shape) in known.items()}
        rules = rules_choice.choose(stored.config or self.config, known, self.layout, self._extra, shapes)
        if self._auto:
            second = rules.aliases()
            names = [name for name in live.parameters if name not in second]
            chosen = fitting_program(stored, names, self.config)
            if (chosen and chosen.name) != (self.program and self.program.name):
                self._go_through(chosen)
        if self.program is not None:
            assert self._saved is not None  # there is one for each program
            if self._saved.learn(stored):
                self._groups, self._made, self._texts = {}, {}, {}
            sizes = stored.config or self.config or {}
            stored, ties = with_tied(stored, rules, self.program)
            self.compiled = compile_program(self.program, remade.keyed(stored.specs), sizes)
            self.for_one_rank = remade.for_one_rank(self.program, stored.specs, sizes, self.compiled)
            return through_program(self.compiled, stored, LayoutPart(self.layout, self.rank, wanted, rules), live, ties)
        layout = declared.with_forms(self.layout, live.parameters, rules)
        order = _order(live.parameters, rules)
        specs: dict[str, Mapping[str, tuple[str, Shape]]] = dict(stored.specs)
        aliases = dict(stored.aliases)
        held: dict[Key, LocalTensor] = {}
        notes: list[str] = []
        for group in (group for group in (*NAMED, OPTIM) if group in wanted and stored.specs.get(group)):
            tied = stored.aliases.get(group, {})
            given = dict(sorted(stored.specs[group].items(), key=lambda item: order.get(owner_of(group, item[0]), _LAST)))
            holdings = rank_tensors.hold(layout, self.rank, group, given, rules, tied)
            own = {local.name: local for local in holdings.tensors if not live.is_foreign(group, local.name)}
            others = {name: spec for name, spec in given.items() if live.is_foreign(group, name)}
            specs[group] = {**others, **{name: (local.dtype, local.shape) for name, local in own.items()}}
            offered = {a for a in tied if layout.mesh.pp == 1 or a in live.parameters}  # or it may belong to another stage
            aliases[group] = {a: tied[a] for a in sorted(offered - specs[group].keys()) if tied[a] in specs[group]}
            held.update({(group, name): local for name, local in own.items()})
            notes += [note for note in holdings.notes if note not in notes]
        sources_of = {key: [part.tensor for part in local.parts] for key, local in held.items()}
        values = {**stored.values, OPTIM: inward_texts(stored, sources_of)} if OPTIM in stored.values else stored.values
        return RankCheckpoint(stored._replace(specs=specs, aliases=aliases, values=values), held, tuple(notes))

    def _declare(self, group: str, content: Content, live: Live) -> Group:
        given = named_specs(group, content)
        local, known = given.local, self._groups.get(group)
        same = known is not None and known.local == local
        if known is not None and same and (self._saved is None or (known.foreign, known.followed) == given.stated):
            return known
        if self._saved is not None:
            return self._saved.named(group, given, live, self.layout.stage < _SHARED_FROM_STAGE[group])
        rules = self._rules(local)
        ties = rules.aliases()
        self._refuse_unnamed(group, [name for name in local if name in live.parameters], local, rules)
        aliased = {a: local[name] for a, name in content.aliases.get(group, {}).items() if name in local and a not in ties}
        whole_unknown = self.layout.stage < _SHARED_FROM_STAGE[group]
        named = {
            name: spec
            for name, spec in {**local, **aliased}.items()
            if not whole_unknown or rules.rule(name) is not None or rules.fusion(name) is not None
        }
        return Group(local, self._worked_out(group, rules, named, live), ties)

    def _refuse_unnamed(self, group: str, parameters: Iterable[str], local: Specs, rules: Rules) -> None:
        """Raise `InvalidRequest` for matrices without a rule, if ranks hold parts: they may or may not be cut."""
        mesh = self.layout.mesh
        if mesh.tp == mesh.etp == mesh.ep == 1:
            return
        known = rules.aliases()
        unnamed = [
            name
            for name in parameters
            if len(local[name][1]) >= 2 and name not in known and rules.rule(name) is None and rules.fusion(name) is None
        ]
        if unnamed:
            more = f" and {len(unnamed) - 1} more" if len(unnamed) > 1 else ""
            raise InvalidRequest(
                f"the layout {self._placement!r} has no rule for {group}/{unnamed[0]}{more}, so it is not "
                "known whether it is sharded",
                hint="pass layout=ParallelLayout(…, rules=…) with a table that describes how it is sharded "
                "(without `cut` it is replicated), or use Fragments or DTensors in the state",
                tensors=[f"{group}/{name}" for name in unnamed],
            )

    def _declare_kept(self, content: Content, groups: Mapping[str, Group], live: Live) -> Group:
        """Optimizer state of another shape than its parameter: shards of it, if the layout shards state."""
        local: Specs = {}
        for leaf in content.leaves.values():
            if leaf.group == OPTIM and leaf.plain and prod(leaf.shape) != 1:
                name = owner_of(OPTIM, leaf.name)
                owners = [groups[of] for of in (MASTER, MODEL) if name in groups[of].places and name in groups[of].local]
                if owners and all(owner.local[name][1] != leaf.shape for owner in owners):
                    local[leaf.name] = (leaf.dtype, leaf.shape)
        known = self._groups.get(OPTIM)
        if known is not None and known.local == local:
            return known
        shared = local if self.layout.stage else {}
        if self._saved is not None:
            return Group(local, self._saved.kept(shared, live) if shared else {}, {})
        return Group(local, self._worked_out(OPTIM, self._rules(live.parameters), shared, live), {})

    def _rules(self, names: Iterable[str]) -> Rules:
        """The rules for a save. Ties come from the config only: the names of one pipeline stage would not show them."""
        return rules_choice.choose(self.config, names if self.config is None else (), self.layout, self._extra)

    def _worked_out(self, group: str, rules: Rules, local: Specs, live: Live) -> Places:
        if not local:
            return {}
        parameters = live.parameters if self.layout.stage else ()
        declared_tensors = declared.declare(self.layout, self.rank, rules, group, local, parameters)
        return {
            name: [(tensor.specs[part.tensor], part) for part in tensor.local.parts]
            for name, tensor in declared_tensors.items()
        }

    def _places(self, leaf: Leaf) -> Iterator[Place | None]:
        """The stored tensors of which a leaf has parts; None if it is stored as it is."""
        group = self._groups.get(leaf.group)
        places = own_places(leaf, group) if group is not None else None
        if places is None and group is not None and leaf.group == OPTIM and (leaf.plain or self._saved is not None):
            yield from self._shown(leaf, kept_places(leaf, self._groups))
        else:
            yield from self._shown(leaf, (None,) if places is None else places)

    def _shown(self, leaf: Leaf, places: Iterable[Place | None]) -> Iterator[Place | None]:
        yield from places if self._saved is not None else (unless_same(leaf, place) for place in places)

    def _leaf(self, key: Key, sources: Sequence[Source]) -> Leaf:
        """The stored tensor's leaf; the identical one of the last save if its parts are the same."""
        leaves = tuple(leaf for leaf, _ in sources)
        known = self._made.get(key)
        if known is not None and len(known[0]) == len(leaves) and all(a is b for a, b in zip(known[0], leaves, strict=True)):
            return known[1]
        joined = self._joined(sources)
        self._made[key] = leaves, joined
        return joined

    def _joined(self, sources: Sequence[Source]) -> Leaf:
        first, place = sources[0]
        if place is None and (self._saved is None or len(sources) == 1):
            return first
        if place is None:
            raise InvalidRequest(
                f"{first.path} and {sources[1][0].path} would have the same name in the checkpoint",
                hint="give one of them another name, or another key in the state",
            )
        spec = place[0]
        pieces: dict[object, LivePiece] = {}
        for leaf, at in sources:
            if at is None or at[0] != spec:
                raise InvalidRequest(
                    f"{leaf.path} and {first.path} imply different shapes or dtypes for the stored tensor {spec.name!r}",
                    hint="compare the layout and its rules with the model's sizes",
                )
            if not at[1].box.volume:
                continue
            piece = at[1] if isinstance(at[1], LivePiece) else LivePiece(at[1].box, view(leaf, at[1]))
            before = pieces.setdefault(at[1].box, piece)  # the same box twice: tied tensors
            if self._saved is not None and before is not piece:
                if is_number(leaf):
                    self._counts.add((spec.group, spec.name), first, leaf)
                else:
                    refuse_two(before, piece, (first.path, leaf.path), spec.name)
        alone = all(leaf.alone for leaf, _ in sources)
        frozen = all(leaf.frozen for leaf, _ in sources)
        held = tuple(pieces.values())
        placement = self._placement + ("" if self._saved is None else self._saved.division(spec))
        return Leaf(spec.group, spec.name, spec.dtype, spec.shape, held, placement, alone=alone, frozen=frozen)


def declare(given: ParallelLayout, launch: Launch, assets: Mapping[str, bytes]) -> DeclaredLayout:
    """The layout of a launch's rank. `config` is the given one, else the assets', else unknown.

    Raises `InvalidRequest` for an invalid layout, or one of another number of ranks.
    """
    wanted, config = rules_choice.layout_of(given.layout), given.config
    if wanted.mesh.world != launch.world:
        raise InvalidRequest(
            f"the layout {language.text(wanted)!r} needs {wanted.mesh.world} ranks, but this launch has {launch.world}",
            hint="tp * cp * sharding * dp * pp must equal the number of ranks",
        )
    if config is None and rules_choice.CONFIG in assets:
        config = rules_choice.parse_config(assets[rules_choice.CONFIG], "the assets")
    program: Program | Literal["auto"] | None = "auto" if given.program == AUTO else program_of(given.program)
    if program is not None:
        remade.refuse_forms(wanted)
    return DeclaredLayout(wanted, launch.rank, config, given.rules, program)


_LAST = (2**63, 0)


def _order(parameters: Iterable[str], rules: Rules) -> dict[str, tuple[int, int]]:
    """Sort stored tensors by the live parameters, because sharding distributes them in that order."""
    order: dict[str, tuple[int, int]] = {}
    for position, name in enumerate(parameters):
        fusion = rules.fusion(name)
        for inner, part in enumerate(fusion.of if fusion is not None else (name,)):
            for stored in (part, *(other.name for other in rules.fusions(part))):
                order.setdefault(stored, (position, inner))
    return order
