"""What the ranks of a layout hold of the tensors that a program makes.

The layout cuts the stored tensors, whose rules are known; the program converts them. Of a result, a rank holds the elements
that come out of its parts of the stored ones, moved together. So a transposed weight is cut along its other dimension, a
fused one consists of the rank's part of each of its tensors, and of stacked layers a stage has its own. Nothing is read, and
a shard consists of parts of stored tensors, as without a program.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain, product
from math import prod
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from holdfast_formats import dtypes
from holdfast_formats.disk.coded import is_zeros
from holdfast_formats.disk.manifests import Manifest, TensorEntry
from holdfast_formats.disk.packing import natural_key
from holdfast_formats.errors import InvalidRequest, LimitExceeded, NoSuchResource, StateMismatch
from holdfast_formats.layout import rank_tensors
from holdfast_formats.layout.elements import Specs, split_key
from holdfast_formats.layout.language import Layout
from holdfast_formats.layout.parts import LocalTensor, Part, strides
from holdfast_formats.layout.rank_tensors import KEYED_GROUP, LayoutHoldings
from holdfast_formats.mapping.box_moves import BoxMove, MappedTensor, drawn
from holdfast_formats.mapping.committed_files import same_bytes
from holdfast_formats.mapping.listing import TensorKey
from holdfast_formats.near_names import one_of
from holdfast_formats.programs import placements
from holdfast_formats.programs.compilation import compile_program
from holdfast_formats.programs.compiled import CompiledProgram
from holdfast_formats.programs.document import Program
from holdfast_formats.region import Box, Shape, whole
from holdfast_formats.tensors import TensorSpec

PARTS_MAX = 200_000  # of one rank's tensors, of about 500 bytes each


def remade_holdings(
    manifest: Manifest,
    group: str,
    layout: Layout,
    config: Mapping[str, Any] | None,
    extra: Mapping[str, Any] | None,
    program: Program,
) -> LayoutHoldings:
    """What every rank of a layout holds of a group of a checkpoint, as `program` makes it; `config` is its config.json.

    Raises `InvalidRequest` for a layout with fused forms, which only the program may set; `StateMismatch`, with tensor and
    numbers, if program, layout and checkpoint do not fit, if tensors that the program requires to be equal, or zeros, are
    not, and if a program between the same two systems divided them in another way when they were saved.
    """
    if group not in manifest.tensors:
        raise NoSuchResource(
            f"there is no group {group!r}",
            hint=one_of(group, manifest.groups, "groups"),
        )
    refuse_forms(layout)
    specs = {
        of: {name: (entry.dtype, entry.shape) for name, entry in named.items()} for of, named in manifest.tensors.items()
    }
    compiled = compile_program(program, keyed(specs), config or {})
    check_assumed(manifest, group, compiled)
    check_divisions(
        manifest, ((group, name) for name in specs[group]), for_one_rank(program, specs, config, compiled), program
    )
    return rank_tensors.of_manifest(manifest, group, layout, config, extra, RemadeTensors(compiled, group, specs[group]))


def refuse_forms(layout: Layout) -> None:
    forms = [f"{kind}={form}" for kind, form in layout.forms._asdict().items() if form]
    if forms:
        raise InvalidRequest(
            f"{forms[0]} cannot be combined with a program, which itself defines fusion",
            hint="leave qkv, gate_up and experts out of the layout",
        )


def keyed(specs: Mapping[str, Specs]) -> dict[TensorKey, TensorSpec]:
    return {TensorKey(of, name): TensorSpec(of, name, *spec) for of, named in specs.items() for name, spec in named.items()}


def check_assumed(manifest: Manifest, group: str, program: CompiledProgram) -> None:
    """`StateMismatch`, by extent digests, for tensors that the program requires to be equal, or zeros, and that are not."""
    aliases = manifest.aliases.get(group, {})

    def entry(key: TensorKey) -> TensorEntry:
        return manifest.tensors[group][aliases.get(key.name, key.name)]

    program.check_assumed(
        lambda first, other: first.group != group or same_bytes(entry(first), entry(other)),
        lambda key: key.group != group or is_zeros(entry(key)),
    )


def for_one_rank(
    program: Program, specs: Mapping[str, Specs], config: Mapping[str, Any] | None, compiled: CompiledProgram
) -> CompiledProgram:
    """The program for these tensors with results as one rank has them, given it with those of a layout's ranks."""
    alike = program.for_one_rank()
    return compiled if alike is program else compile_program(alike, keyed(specs), config or {})


def check_divisions(
    manifest: Manifest, wanted: Iterable[tuple[str, str]], of_one: CompiledProgram, program: Program
) -> None:
    """`StateMismatch` for one of these tensors, by group and name, that was saved through a program between the same two
    systems, which divided it in another way; `of_one` is the program `for_one_rank`.
    """
    uses = placements.uses_of(of_one.arranged)
    divisions: dict[tuple[str, Shape], placements.Division] = {}  # a weight's masters and moments are divided as it is
    for group, name in wanted:
        entry = manifest.tensors.get(group, {}).get(name)
        owner = split_key(name, group == KEYED_GROUP)[0]
        if entry is None or owner not in uses:
            continue
        if (owner, entry.shape) not in divisions:
            divisions[owner, entry.shape] = placements.division(entry.shape, uses[owner])
        divisions[owner, entry.shape].check(entry, name, program)


class RemadeTensors:
    """Makes a rank's local tensors out of its local tensors of the stored ones."""

    def __init__(self, program: CompiledProgram, group: str, stored: Specs, first: Mapping[str, int] | None = None) -> None:
        """`stored` are the group's tensors by name. Tensors are made in the natural order of their names, first those that
        `first` gives a position.
        """
        self._program = program.program
        self._stored = {name: TensorSpec(group, name, *spec) for name, spec in stored.items()}
        self._equal = {names[0].name: [key.name for key in names] for names in program.equal if names[0].group == group}
        tensors = [mapped for key, mapped in program.tensors.items() if key.group == group]
        known: Mapping[str, int] = first or {}
        self._made = sorted(
            tensors,
            key=lambda mapped: (
                known.get(split_key(mapped.spec.name, group == KEYED_GROUP)[0], len(known)),
                natural_key(mapped.spec.name),
            ),
        )
        for mapped in self._made:
            self._check(mapped)

    def __call__(self, dense: list[LocalTensor], experts: list[LocalTensor]) -> tuple[list[LocalTensor], list[LocalTensor]]:
        """The results of these tensors, dense ones and experts'; each is sharded as its sources are."""
        rank = _RankTensors({}, {})
        for local in chain(dense, experts):
            if local.name in self._stored:  # a second name of a tied tensor has none where the program leads to
                rank.held[local.name] = local
                for part in local.parts:
                    rank.boxes.setdefault(part.tensor, {})[part.box] = None
        of_experts = {local.name for local in experts}
        by_kind: tuple[list[LocalTensor], list[LocalTensor]] = ([], [])
        parts = 0
        for mapped in self._made:
            local_tensor = self._remade(mapped, rank)
            if local_tensor is None:
                continue
            parts += len(local_tensor.parts)
            if parts > PARTS_MAX:
                raise LimitExceeded(
                    f"program {self._program!r} makes a rank's tensors from more than {PARTS_MAX} parts",
                    hint="export the checkpoint through the program first",
                )
            by_kind[bool(local_tensor.parts) and all(part.tensor in of_experts for part in local_tensor.parts)].append(
                local_tensor
            )
        return by_kind

    def _check(self, mapped: MappedTensor) -> None:
        """`StateMismatch` for results that do not consist of parts of stored tensors."""
        name, dtype = mapped.spec.name, mapped.spec.dtype
        for move in mapped.moves:
            spec = self._stored.get(move.source.name)
            if spec is None or spec.group != move.source.group:
                raise StateMismatch(
                    f"tensor {name!r} is made of another group's {move.source.name!r}",
                    hint="drop it with a statement NAME -> _, or export the checkpoint through the program first",
                    tensor=name,
                )
            if spec.dtype != dtype:
                raise StateMismatch(
                    f"program {self._program!r} casts {name!r} from {spec.dtype} to {dtype}, which shards do not support",
                    hint="remove the cast from the program, or export the checkpoint through it first",
                    tensor=name,
                )
            if dtypes.bits(dtype) % 8 and (move.stepped or move.axes != tuple(range(len(spec.shape)))):
                raise StateMismatch(
                    f"tensor {name!r} is {dtype}, whose elements are shorter than a byte and cannot be moved",
                    hint="export the checkpoint through the program first, in a dtype of whole bytes",
                    tensor=name,
                )

    def _remade(self, mapped: MappedTensor, rank: _RankTensors) -> LocalTensor | None:
        """The rank's share of a result; None if it holds none of its sources."""
        mapped = self._by_equal(mapped, rank)
        spec = mapped.spec
        if not mapped.moves or not prod(spec.shape):
            return LocalTensor(spec.name, spec.dtype, spec.shape, ())  # every rank holds what is made of nothing
        if not any(move.source.name in rank.held or move.source.name in rank.boxes for move in mapped.moves):
            return None
        shares = list(_shares(mapped.moves, rank.boxes))
        one = rank.held.get(mapped.moves[0].source.name) if self._is_whole(mapped) else None
        if one is not None:  # its local shape may have padding, and no elements
            shape = tuple(1 if axis is None else one.shape[axis] for axis in mapped.moves[0].axes)
            return self._placed(spec, shape, shares)
        if not shares:
            return None
        padded = [move.source.name for move in mapped.moves if _is_padded(rank.held.get(move.source.name))]
        if padded:
            raise StateMismatch(
                f"tensor {spec.name!r} is made of {padded[0]!r}, which the layout pads",
                hint="leave vocab= out of the layout",
            )
        if sum(share.target.volume for share in shares) == sum(move.target.volume for move in mapped.moves):
            return LocalTensor(spec.name, spec.dtype, spec.shape, _as_they_are(spec.shape, shares))
        if mapped.padded:
            raise StateMismatch(
                f"program {self._program!r} pads {spec.name!r}, which is sharded: no rank would own the padding",
                hint="let the layout pad the vocabulary, with vocab=",
                tensor=spec.name,
            )
        return self._placed(spec, None, shares)

    def _by_equal(self, mapped: MappedTensor, rank: _RankTensors) -> MappedTensor:
        """Use a source that the rank has: the program requires all to be equal."""
        if len(mapped.moves) != 1 or prod(mapped.spec.shape) != 1 or mapped.moves[0].source.name in rank.held:
            return mapped
        (move,) = mapped.moves
        other = next((name for name in self._equal.get(move.source.name, ()) if name in rank.held), None)
        return (
            mapped if other is None else mapped._replace(moves=(move._replace(source=TensorKey(move.source.group, other)),))
        )

    def _is_whole(self, mapped: MappedTensor) -> bool:
        move = mapped.moves[0]
        source = self._stored[move.source.name].shape
        return len(mapped.moves) == 1 and not move.stepped and not mapped.padded and move.box == whole(source)

    def _placed(self, spec: TensorSpec, shape: Shape | None, shares: Sequence[BoxMove]) -> LocalTensor:
        """The present elements, moved together, in a local tensor of `shape` or of their size."""
        sides = [_places(dimension, size, shares) for dimension, size in enumerate(spec.shape)]
        counts = tuple(side.held for side in sides)
        if shares and prod(counts) != sum(share.target.volume for share in shares):
            raise StateMismatch(
                f"program {self._program!r}: a rank's part of {spec.name!r} in this layout is not a contiguous box",
                hint="choose a layout that divides its source tensors evenly",
                tensor=spec.name,
            )
        shape = counts if shape is None else shape
        steps = strides(shape)
        parts: list[Part] = []
        for share in shares:
            start, along = 0, []
            for dimension, side in enumerate(sides):
                first, step = self._progress(spec.name, side, share, dimension)
                start += first * steps[dimension]
                along.append(step * steps[dimension])
            parts += _parts(share, start, along)
        return LocalTensor(spec.name, spec.dtype, shape, tuple(parts))

    def _progress(self, name: str, side: _Side, share: BoxMove, dimension: int) -> tuple[int, int]:
        """A share's elements along a dimension: the first, and the distance between two."""
        by = share.target_step[dimension] if share.target_step else 1
        begin, count = share.target.offset[dimension], share.target.shape[dimension]
        where = side.places[begin : begin + (count - 1) * by + 1 : by]
        if count == 1:
            return int(where[0]), 1
        step = int(where[1] - where[0])
        if (np.diff(where) != step).any():
            raise StateMismatch(
                f"program {self._program!r}: a rank's part of {name!r} in this layout is not evenly spaced",
                hint="choose a layout that divides its source tensors evenly",
                tensor=name,
            )
        return int(where[0]), step


class _RankTensors(NamedTuple):
    """A rank's local tensors of stored ones by name, and its boxes of each; a dict for its order."""

    held: dict[str, LocalTensor]
    boxes: dict[str, dict[Box, None]]


class _Side(NamedTuple):
    """Along one dimension of a tensor, the position of each index among the rank's, and their number."""

    places: NDArray[np.int64]
    held: int


def _places(dimension: int, size: int, shares: Sequence[BoxMove]) -> _Side:
    held = np.zeros(size, bool)
    for share in shares:
        by = share.target_step[dimension] if share.target_step else 1
        begin, count = share.target.offset[dimension], share.target.shape[dimension]
        held[begin : begin + (count - 1) * by + 1 : by] = True
    return _Side(np.cumsum(held) - 1, int(held.sum()))


def _is_padded(local: LocalTensor | None) -> bool:
    return local is not None and local.padding > 0


def _shares(moves: Sequence[BoxMove], boxes: Mapping[str, Mapping[Box, None]]) -> Iterator[BoxMove]:
    for move in moves:
        for box in boxes.get(move.source.name, ()):
            share = drawn(move, box)
            if share is not None:
                yield share


def _as_they_are(shape: Shape, shares: Sequence[BoxMove]) -> tuple[Part, ...]:
    steps = strides(shape)
    parts: list[Part] = []
    for share in shares:
        start = sum(offset * step for offset, step in zip(share.target.offset, steps, strict=True))
        by = share.target_step or (1,) * len(shape)
        parts += _parts(share, start, [step * distance for step, distance in zip(steps, by, strict=True)])
    return tuple(parts)


def _parts(share: BoxMove, start: int, along: Sequence[int]) -> Iterator[Part]:
    """A share as parts; `along` are the strides of its target. Non-contiguous elements of the source are a part each."""
    by_axis = {axis: distance for axis, distance in zip(share.axes, along, strict=True) if axis is not None}
    distances = tuple(by_axis.get(dimension, 1) for dimension in range(len(share.box.shape)))
    if not share.step:
        yield Part(share.source.name, share.box, start, distances)
        return
    apart = [step if n > 1 else 1 for n, step in zip(share.box.shape, share.step, strict=True)]
    shape = tuple(1 if step > 1 else n for n, step in zip(share.box.shape, apart, strict=True))
    for index in product(*(range(n) if step > 1 else (0,) for n, step in zip(share.box.shape, apart, strict=True))):
        offset = tuple(o + i * step for o, i, step in zip(share.box.offset, index, apart, strict=True))
        first = start + sum(i * distance for i, distance in zip(index, distances, strict=True))
        yield Part(share.source.name, Box(offset, shape), first, distances)
