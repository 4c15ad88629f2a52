"""What each rank of a layout holds of a group: local tensors, and the parts of stored tensors that they are made of.

Pure arithmetic on names, shapes and a layout; no tensor is touched and no model's code is run. In order: stored tensors are
taken apart into elements, pipeline and experts choose whose they are, tensor parallelism cuts them, the layout's own fused
forms put them together again, and sharding deals out what is left.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from math import gcd, prod
from typing import NamedTuple

from . import sharding
from .elements import Element, Elements, Specs, one_for_all, take_apart
from .errors import InvalidRequest, StateMismatch
from .layouts import Layout
from .mesh import Coordinate
from .parts import LocalTensor, fuse, of_box, padded, resolve, stack
from .region import Box, whole
from .rules import Fusion, Rules

KEYED_GROUP = "optim"  # its names are <parameter>/<key>
_SHARDED_FROM_STAGE = {"model": 3, "ema": 3, "master": 1, KEYED_GROUP: 1}
_RANKS = "ranks/"  # tensors of one rank's process: random streams, data loaders
_WHOLE_FORMS = ("contiguous",)


class Held(NamedTuple):
    """What a rank holds: tensors whose parts are of stored ones, and what was decided on the way, for people."""

    tensors: tuple[LocalTensor, ...]
    notes: tuple[str, ...]


class _Cut(NamedTuple):
    """A rank's share of an element: its box, the rows of padding behind it, and what is to be said of that."""

    element: Element
    box: Box
    rows: int  # of the local tensor where the vocabulary is padded, else -1
    note: str


_Cell = tuple[int, int, int, int]  # pipeline stage, expert-, tensor- and expert-tensor-parallel rank


class Holding:
    """What the ranks of one layout hold of one group; ranks that differ in data parallelism alone are worked out once."""

    def __init__(
        self, layout: Layout, group: str, specs: Specs, rules: Rules, aliases: Mapping[str, str] | None = None
    ) -> None:
        """Raises `StateMismatch`, with tensor and numbers, where the layout does not fit the tensors.

        `specs` are the group's stored tensors, `aliases` the names that are tied to one of them.
        """
        self.layout = layout
        self.group = group
        self._specs = specs
        self._rules = rules
        self._elements = take_apart(specs, rules, group == KEYED_GROUP)
        self._layers = rules.layers if rules.layers is not None else _count(self._elements, "stage")
        self._tied = {a: t for a, t in {**rules.aliases(), **(aliases or {})}.items() if t in specs and a not in specs}
        self._placed = self._place()
        self._cells: dict[_Cell, tuple[list[LocalTensor], list[LocalTensor], tuple[str, ...]]] = {}

    def of(self, rank: int) -> Held:
        """What one rank holds; `InvalidRequest` for a rank outside the layout's world."""
        mesh = self.layout.mesh
        if not 0 <= rank < mesh.world:
            raise InvalidRequest(f"rank {rank} is none of the {mesh.world} ranks of this layout")
        at = mesh.coordinate(rank)
        dense, experts, notes = self._cell(at)
        if self.layout.stage >= _SHARDED_FROM_STAGE.get(self.group, 4):
            dense = self._shared(dense, at.sharding, mesh.sharding)
            experts = self._shared(experts, at.esharding, mesh.esharding)
        own = [name for name in self._specs if name.startswith(_RANKS) and name.startswith(f"{_RANKS}{rank:05d}/")]
        personal = [of_box(n, self._specs[n][0], n, whole(self._specs[n][1])) for n in own]
        return Held(tuple(resolve(t, self._elements.sources) for t in (*dense, *experts, *personal)), notes)

    def _place(self) -> dict[tuple[int, int], list[Element]]:
        """The elements by pipeline stage and expert-parallel rank; -1 for what all of them hold."""
        mesh = self.layout.mesh
        experts = self._rules.experts if self._rules.experts is not None else _count(self._elements, "expert")
        stages: dict[int, int] = {}
        found: dict[tuple[int, int], list[Element]] = {}
        for element in self._elements.by_name.values():
            if element.name.startswith(_RANKS):
                continue
            rule = element.rule
            stage, expert = -1, -1
            if rule is not None and mesh.pp > 1:
                stage = self._stage(rule.stage, stages)
            if rule is not None and rule.expert is not None and mesh.ep > 1:
                count = rule.experts or experts
                if count % mesh.ep or rule.expert >= count:
                    raise StateMismatch(
                        f"tensor {element.name!r}: {count} experts do not divide by ep={mesh.ep}",
                        hint="choose an ep that divides the number of experts",
                    )
                expert = rule.expert // (count // mesh.ep)
            found.setdefault((stage, expert), []).append(element)
        return found

    def _stage(self, stage: int | str, known: dict[int, int]) -> int:
        if stage == "every":
            return -1
        if not isinstance(stage, int):
            return 0 if stage == "first" else self.layout.mesh.pp - 1
        if stage not in known:
            known[stage] = self.layout.virtual_stage(stage, self._layers)[0]
        return known[stage]

    def _cell(self, at: Coordinate) -> tuple[list[LocalTensor], list[LocalTensor], tuple[str, ...]]:
        key = (at.pp, at.ep, at.tp, at.etp)
        if key not in self._cells:
            self._cells[key] = self._work_out(at)
        return self._cells[key]

    def _work_out(self, at: Coordinate) -> tuple[list[LocalTensor], list[LocalTensor], tuple[str, ...]]:
        chosen = {(stage, expert) for stage in (-1, at.pp) for expert in (-1, at.ep)}
        cuts = {e.name: self._cut(e, at) for cell in sorted(chosen) for e in self._placed.get(cell, ())}
        ordered = [cuts[name] for name in self._elements.by_name if name in cuts] if len(chosen) > 1 else list(cuts.values())
        dense: list[LocalTensor] = []
        experts: list[LocalTensor] = []
        for local, expert in self._formed(ordered, cuts, at):
            (experts if expert else dense).append(local)
        dense += self._ties(cuts, at)
        return dense, experts, tuple(_tell(cut for cut in ordered if cut.note))

    def _cut(self, element: Element, at: Coordinate) -> _Cut:
        """The rank's box of an element, by its rule; `StateMismatch` where the rule refuses."""
        rule, shape = element.rule, element.shape
        if rule is None:
            return _Cut(element, whole(shape), -1, "no rule knows these: every rank holds all of them")
        dimension = rule.dimension
        size, index = (
            (self.layout.mesh.etp, at.etp) if rule.axis == "etp" else (self.layout.mesh.tp, at.tp) if rule.axis else (1, 0)
        )
        if dimension is None or dimension >= len(shape):
            return _Cut(element, whole(shape), -1, "")
        if rule.vocabulary and self.layout.vocabulary:
            multiple = self.layout.vocabulary * self.layout.mesh.tp
            rows = -(-shape[dimension] // multiple) * multiple // size
            low, high = (min(end, shape[dimension]) for end in (rows * index, rows * (index + 1)))
            return _Cut(element, _slab(shape, dimension, low, high), rows, "")
        if size == 1:
            return _Cut(element, whole(shape), -1, "")
        units = rule.units or shape[dimension]
        if shape[dimension] % units:
            if not element.key:
                raise StateMismatch(f"tensor {element.name!r}: {shape[dimension]} rows are not {units} equal heads")
            return _Cut(element, whole(shape), -1, "optimizer state of another shape than its parameter: held whole")
        return _divided(element, units, size, index)

    def _formed(
        self, ordered: Sequence[_Cut], cuts: Mapping[str, _Cut], at: Coordinate
    ) -> Iterator[tuple[LocalTensor, bool]]:
        """Every local tensor of these elements in the layout's forms, and whether it belongs to experts."""
        done: set[str] = set()
        for cut in ordered:
            element = cut.element
            expert = element.rule is not None and element.rule.expert is not None
            if element.name in done:
                continue
            fusion = self._form(element)
            if fusion is None:
                local = of_box(element.name, element.dtype, element.name, cut.box)
                yield (local if cut.rows < 0 else padded(local, cut.rows)), expert
                continue
            held = [cuts[part + element.key] for part in fusion.of if part + element.key in cuts]
            done.update(each.element.name for each in held)
            yield self._fused(fusion, element.key, held, at), expert

    def _form(self, element: Element) -> Fusion | None:
        """The fused tensor of which this element is a part in this layout, if any."""
        candidates = self._rules.fusions(element.parameter)
        stored = [fusion for fusion in candidates if fusion.name + element.key in self._specs]
        for fusion in (*stored, *candidates):
            form = self.layout.form(fusion.kind)
            if form != "split" and (form or fusion in stored):
                return fusion
        return None

    def _fused(self, fusion: Fusion, key: str, held: Sequence[_Cut], at: Coordinate) -> LocalTensor:
        name, dtype = fusion.name + key, held[0].element.dtype
        if any(cut.element.dtype != dtype for cut in held):
            raise StateMismatch(
                f"tensor {name!r} cannot be fused: its parts have dtypes {sorted({c.element.dtype for c in held})}"
            )
        if not held[0].element.shape:
            return one_for_all(name, dtype, [cut.element.name for cut in held])
        if not fusion.stacked:
            if len(held) != len(fusion.of):
                missing = [part for part in fusion.of if part + key not in {cut.element.name for cut in held}]
                raise StateMismatch(f"tensor {name!r} cannot be fused: there is no {', '.join(map(repr, missing))}")
            return self._joined(fusion, name, dtype, held, at)
        experts: dict[int, list[_Cut]] = {}
        for cut in held:
            assert cut.element.rule is not None and cut.element.rule.expert is not None  # a stack is one of experts
            experts.setdefault(cut.element.rule.expert, []).append(cut)
        if len({len(parts) for parts in experts.values()}) != 1:
            raise StateMismatch(f"tensor {name!r} cannot be stacked: some experts lack a tensor")
        return stack(name, [self._joined(fusion, name, dtype, parts, at) for _, parts in sorted(experts.items())])

    def _joined(self, fusion: Fusion, name: str, dtype: str, held: Sequence[_Cut], at: Coordinate) -> LocalTensor:
        """Boxes of the fused elements as one local tensor, in the layout's pattern or, where it has none, the stored one."""
        form = self.layout.form("gate_up" if fusion.kind == "experts" else fusion.kind)
        groups = 1 if form else fusion.groups
        if groups != 1 or form in ("heads", "groups"):
            groups = _local_groups(fusion, held, name)
        if form in _WHOLE_FORMS and self.layout.mesh.tp > 1:
            return self._slice_of_whole(fusion, name, dtype, held, at)
        return fuse(name, dtype, [(cut.element.name, cut.box) for cut in held], fusion.dimension, groups)

    def _slice_of_whole(self, fusion: Fusion, name: str, dtype: str, held: Sequence[_Cut], at: Coordinate) -> LocalTensor:
        """The rank's slice of the whole fused tensor: it may hold nothing of some of the parts."""
        rule = held[0].element.rule
        size, index = (self.layout.mesh.etp, at.etp) if rule and rule.axis == "etp" else (self.layout.mesh.tp, at.tp)
        lengths = [cut.element.shape[fusion.dimension] for cut in held]
        if sum(lengths) % size:
            raise StateMismatch(
                f"tensor {name!r}: {sum(lengths)} rows do not divide by {size} ranks", hint="use another form"
            )
        low, high = sum(lengths) // size * index, sum(lengths) // size * (index + 1)
        boxes = []
        for cut, length in zip(held, lengths, strict=True):
            first, last = max(low, 0), min(high, length)
            if first < last:
                boxes.append((cut.element.name, _slab(cut.element.shape, fusion.dimension, first, last)))
            low, high = low - length, high - length
        return fuse(name, dtype, boxes, fusion.dimension, 1)

    def _ties(self, cuts: Mapping[str, _Cut], at: Coordinate) -> Iterator[LocalTensor]:
        """Tied names on stages that do not hold the tensor itself: stored once, given to both."""
        if self.layout.mesh.pp == 1:
            return
        for alias, target in self._tied.items():
            rule = self._rules.rule(alias)
            if rule is None or target in cuts or self._stage(rule.stage, {}) not in (-1, at.pp):
                continue
            element = self._elements.by_name.get(target)
            if element is not None:
                cut = self._cut(element._replace(rule=rule), at)
                local = of_box(alias, element.dtype, element.name, cut.box)
                yield local if cut.rows < 0 else padded(local, cut.rows)

    def _shared(self, tensors: list[LocalTensor], index: int, count: int) -> list[LocalTensor]:
        """What one of `count` sharding ranks keeps. Of an optimizer every key is dealt out like its parameter."""
        if count == 1 or not tensors:
            return tensors
        by_key: dict[str, list[LocalTensor]] = {}
        for tensor in tensors:
            key = tensor.name.rpartition("/")[2] if self.group == KEYED_GROUP and tensor.shape else ""
            by_key.setdefault(key if tensor.shape else "", []).append(tensor)
        scalars = [t for t in by_key.pop("", [])] if self.group == KEYED_GROUP else []
        kept = [t for listed in by_key.values() for t in sharding.share(listed, self.layout, index, count)]
        held = {tensor.name.rpartition("/")[0] for tensor in kept}
        return kept + [t for t in scalars if t.name.rpartition("/")[0] in held or not by_key]


def hold(
    layout: Layout, rank: int, group: str, specs: Specs, rules: Rules, aliases: Mapping[str, str] | None = None
) -> Held:
    """What one rank holds of a group; for many ranks of one layout use `Holding`."""
    return Holding(layout, group, specs, rules, aliases).of(rank)


def _divided(element: Element, units: int, size: int, index: int) -> _Cut:
    """`units` indivisible units along the rule's dimension over `size` ranks; where they do not divide, the rule decides."""
    rule, shape = element.rule, element.shape
    assert rule is not None and rule.dimension is not None
    dimension = rule.dimension
    width, note = shape[dimension] // units, ""
    if units % size == 0:
        low, high = units // size * index, units // size * (index + 1)
    elif rule.otherwise == "uneven":
        step = -(-units // size)
        low, high = min(step * index, units), min(step * (index + 1), units)
        note = f"{units} do not divide by {rule.axis}={size}: cut unevenly, at most {step} a rank"
    elif rule.otherwise == "replicate":
        low, high, note = 0, units, f"{units} do not divide by {rule.axis}={size}: every rank holds all of them"
    elif rule.otherwise == "largest":
        share = gcd(units, size)
        low, high = units // share * (index * share // size), units // share * (index * share // size + 1)
        note = f"{units} do not divide by {rule.axis}={size}: cut in {share}, each held by {size // share} ranks"
    else:
        what = f"{units} heads" if rule.units else f"{units} rows"
        raise StateMismatch(
            f"tensor {element.name!r}: {what} in dimension {dimension} do not divide by {rule.axis}={size}",
            hint=f"choose a {rule.axis} that divides {units}",
        )
    return _Cut(element, _slab(shape, dimension, low * width, high * width), -1, note)


def _slab(shape: Sequence[int], dimension: int, low: int, high: int) -> Box:
    offset, size = [0] * len(shape), list(shape)
    offset[dimension], size[dimension] = low, high - low
    return Box(tuple(offset), tuple(size))


def _local_groups(fusion: Fusion, held: Sequence[_Cut], name: str) -> int:
    """How many groups the local heads fall into: one a key/value head that this rank holds."""
    dimension = fusion.dimension
    whole_length, length = held[-1].element.shape[dimension], held[-1].box.shape[dimension]
    heads = fusion.units[1] if fusion.units is not None else fusion.groups
    if heads <= 1 and fusion.units is None:
        raise StateMismatch(
            f"tensor {name!r}: how many heads it has is not known", hint="give the checkpoint its config.json"
        )
    return max(length * heads // whole_length, 1)


def _count(elements: Elements, what: str) -> int:
    """One more than the highest layer or expert in the names, where no config says how many there are."""
    numbers = (getattr(e.rule, what) for e in elements.by_name.values() if e.rule is not None)
    return max((n + 1 for n in numbers if isinstance(n, int)), default=0)


def _tell(cuts: Iterable[_Cut]) -> Iterator[str]:
    counted: dict[str, Counter[str]] = {}
    for cut in cuts:
        counted.setdefault(cut.note, Counter())[cut.element.name] += 1
    for note, names in counted.items():
        first = next(iter(names))
        more = f" and {len(names) - 1} more" if len(names) > 1 else ""
        yield f"{first}{more}: {note}"


def volume(held: Held) -> int:
    """Elements that a rank holds, padding included."""
    return sum(prod(tensor.shape) for tensor in held.tensors)
