"""Maps a rank's tensors to the stored ones, if a trainer saves through a program.

As on restore, a rank's local tensors are made of parts of stored tensors. The stored tensors are those of the checkpoint
that was restored through the program, else they follow from the live names and shapes. The statements run once for the
parameters of a model; each group's tensors, and optimizer state, follow these.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from math import prod
from typing import Any, NamedTuple, TypeVar

from holdfast_formats.disk.packing import natural_key
from holdfast_formats.errors import InvalidRequest, LimitExceeded, StateMismatch
from holdfast_formats.layout.declared import stored_shape
from holdfast_formats.layout.elements import split_key
from holdfast_formats.layout.language import Layout
from holdfast_formats.layout.parts import LocalTensor
from holdfast_formats.layout.rank_tensors import KEYED_GROUP, LayoutHoldings
from holdfast_formats.layout.rules import Rules
from holdfast_formats.layout.rules.expressions import sizes_for
from holdfast_formats.mapping.box_moves import BoxMove
from holdfast_formats.mapping.listing import TensorKey
from holdfast_formats.programs import placements
from holdfast_formats.programs.compilation import arranged
from holdfast_formats.programs.compiled import CompiledProgram
from holdfast_formats.programs.document import Program
from holdfast_formats.programs.environment import Environment
from holdfast_formats.programs.following import FollowingTensors, Plane
from holdfast_formats.programs.inverse_names import Counts, StoredName, lenient, shapes_back, stored_names, way_back
from holdfast_formats.programs.operations import Ranks
from holdfast_formats.programs.remade import RemadeTensors
from holdfast_formats.programs.statements import ProgramStatement
from holdfast_formats.region import Shape
from holdfast_formats.tensors import TensorSpec

_Made = TypeVar("_Made")

_REFUSED = "a state restored through it cannot be saved through it"


class WantedTensors(NamedTuple):
    group: str
    dtypes: Mapping[str, str]
    order: Mapping[str, int]


class HeldParts(NamedTuple):
    """A rank's local tensors by name, the specs of the stored ones, and stored tensors equal to others."""

    local: Mapping[str, LocalTensor]
    specs: Mapping[str, TensorSpec]
    copies: Mapping[str, tuple[str, ...]]


class WholeTensor(NamedTuple):
    """A tensor that states its own place: the sources of the whole tensor, and their shapes. `moves` include those of equal
    tensors.
    """

    spec: TensorSpec
    moves: tuple[BoxMove, ...]
    stored: Mapping[str, Shape]

    def tied(self, ties: Mapping[str, str]) -> WholeTensor:
        """Replace tied names by the stored ones."""
        if not any(name in ties for name in self.stored):
            return self
        names = {name: ties.get(name, name) for name in self.stored}
        moves = (move._replace(source=TensorKey(move.source.group, names[move.source.name])) for move in self.moves)
        return WholeTensor(self.spec, tuple(moves), {names[name]: shape for name, shape in self.stored.items()})


class SavedProgram:
    """A program through which a rank of a layout saves. Caches its results."""

    def __init__(self, program: Program, layout: Layout, rank: int, config: Mapping[str, Any] | None) -> None:
        self.program, self._layout, self._rank = program, layout, rank
        self._sizes_of = config or {}
        self._lenient = program._replace(statements=lenient(program.statements))
        self.stored: dict[str, Shape] = {}  # the stored parameters that are known, by name
        self._learned: dict[str, Shape] = {}
        self.restored = False  # whether they are all of a checkpoint's
        self.divisions: Mapping[str, str] = {}  # of each stored parameter: what a placement says of how it is divided
        self._around: Environment | None = None

    def learn(self, stored: Mapping[str, Shape], config: Mapping[str, Any] | None) -> bool:
        """Save the parameters of a checkpoint that is restored through the program. False if they were known already."""
        config = config or self._sizes_of
        if not stored or (self.restored and stored == self._learned and config == self._sizes_of):
            return False
        self.stored, self._learned, self.restored, self._around = dict(stored), dict(stored), True, None
        self._sizes_of = config
        return True

    def cover(self, live: Mapping[str, Shape], whole: bool, rules: Rules, cut: bool = True) -> None:
        """Find the stored tensors of live ones; `whole`: local shapes are not those of shards.

        Without `cut`, they are the shapes of whole tensors, whatever the layout. Raises `InvalidRequest` or `StateMismatch`,
        with program, statement and tensor, for those without an inverse.
        """
        around = self._around
        if around is not None and all(name in around.held for name in live):
            return
        self._naming(lambda: self._cover(live, whole, rules, cut))

    def sources(self, name: str) -> tuple[str, ...]:
        """The stored tensors of a covered live one, and those that are equal to them."""
        assert self._around is not None  # it is covered
        one = self._around.held[name]
        return tuple(dict.fromkeys((*one.sources, *(each for names in one.same for each in names))))

    def held(self, wanted: WantedTensors, rules: Rules) -> HeldParts:
        """This rank's local tensors of a group, including the covered `wanted` ones.

        Raises `StateMismatch` or `InvalidRequest` for tensors that are not parts of stored ones.
        """
        return self._naming(lambda: self._held(wanted, rules))

    def check_alone(self, leaves: Iterable[str]) -> None:
        """`InvalidRequest` for two live tensors made of the same elements of a stored one."""
        used, by = Counter[str](), dict[str, list[str]]()
        for name in leaves:
            assert self._around is not None  # it is covered
            for move in self._around.held[name].moves:
                used[move.source.name] += move.target.volume
                by.setdefault(move.source.name, []).append(name)
        for source, volume in used.items():
            if volume > prod(self.stored[source]):
                names = list(dict.fromkeys(by[source]))
                raise InvalidRequest(
                    f"program {self.program.name!r} makes {' and '.join(map(repr, names))} from the same elements "
                    f"of {source!r}: if they diverge, it is ambiguous which to save",
                    hint="tie them in the module, or leave one out of the state",
                    tensors=names,
                )

    def _cover(self, live: Mapping[str, Shape], whole: bool, rules: Rules, cut: bool) -> None:
        if self._around is None and self.stored:
            self._around = self._run()
        missing = {n: s for n, s in live.items() if self._around is None or n not in self._around.held}
        if missing:
            self.stored = {**self.stored, **self._back(missing, whole, rules, cut)}
            self._around = self._run()
        left = [name for name in missing if name not in self._around.held] if self._around is not None else []
        if left:
            raise StateMismatch(
                f"{left[0]!r} does not match what the inverse program produces",
                hint="write the inverse by hand under [inverse], or leave the tensor out of the state",
                tensor=left[0],
            )

    def _run(self) -> Environment:
        """The statements over the known parameters, which must be used completely."""
        sizes = sizes_for(self.program.sizes, self._sizes_of)
        around = arranged(self._lenient, self.stored, sizes, Ranks())
        used = Counter[str]()
        for one in around.held.values():
            for move in one.moves:
                used[move.source.name] += move.target.volume
            for names in one.same:
                used.update({name: prod(self.stored[name]) for name in names})
        for name, shape in self.stored.items():
            left = prod(shape) - used[name]
            if left > 0:
                why = around.dropped.get(name) or around.sliced.get(name) or "no statement uses them"
                raise InvalidRequest(
                    f"{left} elements of the checkpoint's {name!r} would be lost ({why}), so {_REFUSED}",
                    hint="save with another Checkpointer, in its own run, without program=",
                    tensor=name,
                )
        alike = self._lenient.for_one_rank()
        compared = around if alike is self._lenient else arranged(alike, self.stored, sizes, Ranks())
        uses = placements.uses_of(compared.held)
        self.divisions = {name: placements.division(self.stored[name], of).text for name, of in uses.items()}
        return around

    def _back(self, live: Mapping[str, Shape], whole: bool, rules: Rules, cut: bool) -> dict[str, Shape]:
        """The stored tensors of live ones: their names by the inverse, their shapes by the rules or by local shapes."""
        try:
            back = way_back(self.program)
        except InvalidRequest as problem:
            hint = f"{problem.hint}; or restore a checkpoint through the program first"
            raise InvalidRequest(f"{problem.detail}, so {_REFUSED}", hint=hint, **problem.members) from None
        mesh = self._layout.mesh
        counts = {"LAYER_ID": rules.layers, "EXPERT_ID": rules.experts}
        shared = {variable for variable, size in (("LAYER_ID", mesh.pp), ("EXPERT_ID", mesh.ep)) if size > 1 or not whole}
        shared = shared if cut else set()
        known = Counts({variable: n for variable, n in counts.items() if n is not None}, frozenset(shared))
        sizes = sizes_for(self.program.sizes, self._sizes_of)
        stored_sources = stored_names(back, live, sizes, known)
        shapes: dict[str, Shape] = {}
        unknown: dict[str, StoredName] = {}
        for name, one in stored_sources.items():
            shape = stored_shape(name, rules)
            uncut = not cut or (whole and (mesh.tp == mesh.etp == 1 or rules.rule(name) is None))
            if shape is None and uncut:
                shape = one.shape
            if shape is not None:
                shapes[name] = shape
            elif uncut:
                unknown[name] = one
            else:
                raise StateMismatch(
                    f"the global shape of tensor {name!r} is unknown",
                    hint="pass the model's config.json, or rules that state its shape",
                    tensor=name,
                )
        if unknown:
            shapes |= self._by_shapes(back, {n: live[n] for one in unknown.values() for n in one.of}, sizes, unknown)
        return shapes

    def _by_shapes(
        self,
        back: tuple[ProgramStatement, ...],
        live: Mapping[str, Shape],
        sizes: Mapping[str, int],
        wanted: Mapping[str, StoredName],
    ) -> dict[str, Shape]:
        shapes = shapes_back(back, live, sizes)
        lacking = sorted(name for name in wanted if name not in shapes)
        if lacking:
            raise StateMismatch(
                f"the global shape of tensor {lacking[0]!r} is unknown",
                hint="pass the model's config.json, or rules that state its shape",
                tensor=lacking[0],
            )
        return {name: shapes[name] for name in wanted}

    def wholes(self, wanted: WantedTensors, shapes: Mapping[str, Shape]) -> dict[str, WholeTensor]:
        """The sources of a group's whole tensors; `StateMismatch` or `InvalidRequest` if they are not whole."""
        return self._naming(lambda: self._wholes(wanted, shapes))

    def _wholes(self, wanted: WantedTensors, shapes: Mapping[str, Shape]) -> dict[str, WholeTensor]:
        compiled, specs = self._followed(wanted)
        stored = {name: (spec.dtype, spec.shape) for name, spec in specs.items()}
        RemadeTensors(compiled, wanted.group, stored)  # refuses casts
        copies = _copies(compiled)
        whole_tensors: dict[str, WholeTensor] = {}
        for name, shape in shapes.items():
            mapped = compiled.tensors[TensorKey(wanted.group, name)]
            if mapped.spec.shape != shape or sum(move.target.volume for move in mapped.moves) < prod(shape):
                raise StateMismatch(
                    f"{name!r} has shape {list(shape)}, but would have {list(mapped.spec.shape)}"
                    + (", with padding" if mapped.padded else ""),
                    hint="check that config.json belongs to this model; padded tensors must be plain tensors",
                    tensor=name,
                )
            moves = tuple(
                move._replace(source=TensorKey(move.source.group, of))
                for move in mapped.moves
                for of in (move.source.name, *copies.get(move.source.name, ()))
            )
            whole_tensors[name] = WholeTensor(mapped.spec, moves, {m.source.name: specs[m.source.name].shape for m in moves})
        return whole_tensors

    def _held(self, wanted: WantedTensors, rules: Rules) -> HeldParts:
        compiled, specs = self._followed(wanted)
        given = {name: (specs[name].dtype, specs[name].shape) for name in sorted(specs, key=natural_key)}
        makes = RemadeTensors(compiled, wanted.group, given, wanted.order)
        holdings = LayoutHoldings(self._layout, wanted.group, given, rules, None, makes)
        local = {tensor.name: tensor for tensor in holdings.of(self._rank).tensors}
        return HeldParts(local, specs, _copies(compiled))

    def _followed(self, wanted: WantedTensors) -> tuple[CompiledProgram, dict[str, TensorSpec]]:
        """The results of the wanted tensors' stored ones, and these."""
        assert self._around is not None  # they are covered
        keyed = wanted.group == KEYED_GROUP
        planes: dict[Plane, dict[str, TensorSpec]] = {}
        for name, dtype in wanted.dtypes.items():
            parameter, end = split_key(name, keyed)
            self._refuse_new(parameter)
            for source in self.sources(parameter):
                spec = TensorSpec(wanted.group, source + end, dtype, self.stored[source])
                before = planes.setdefault(Plane(wanted.group, end), {}).setdefault(source, spec)
                if before.dtype != dtype:
                    raise StateMismatch(
                        f"{name!r} is {dtype}, and others that are made of {source + end!r} are {before.dtype}",
                        hint="train all of them in one dtype, or save without a program",
                        tensor=name,
                    )
        compiled = FollowingTensors(self._around, self.stored).planes(planes)._replace(program=self.program.name)
        return compiled, {spec.name: spec for held in planes.values() for spec in held.values()}

    def _refuse_new(self, name: str) -> None:
        assert self._around is not None
        one = self._around.held[name]
        if not one.moves and 0 not in one.shape:
            why = self._around.added.get(name, "it is all padding")
            raise InvalidRequest(
                f"{name!r} is in no tensor of the checkpoint ({why}), so {_REFUSED}",
                hint="leave it out of the state, or save it with another Checkpointer without program=",
                tensor=name,
            )

    def _naming(self, work: Callable[[], _Made]) -> _Made:
        try:
            return work()
        except (InvalidRequest, LimitExceeded, StateMismatch) as problem:
            if problem.detail.startswith("program "):
                raise
            kind = type(problem)
            raise kind(f"program {self.program.name!r}: {problem.detail}", hint=problem.hint, **problem.members) from None


def _copies(program: CompiledProgram) -> dict[str, tuple[str, ...]]:
    """For each stored tensor, those with the same elements: they are saved as its copies."""
    return {first.name: tuple(other.name for other in others) for first, *others in program.equal}
