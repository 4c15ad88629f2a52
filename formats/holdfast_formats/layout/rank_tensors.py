"""What each rank of a layout holds of a group: local tensors, and the parts of stored tensors in them.

Pure arithmetic on names, shapes and a layout; no tensor is touched and no model's code is run. In order: stored tensors
are split into elements, pipeline and expert parallelism choose their ranks, tensor parallelism cuts them, the layout's
own fused forms combine them again, and sharding distributes the result.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from holdfast_formats import dtypes
from holdfast_formats.disk.manifests import Manifest
from holdfast_formats.disk.packing import natural_key
from holdfast_formats.errors import InvalidRequest, NoSuchResource, StateMismatch
from holdfast_formats.layout import sharding
from holdfast_formats.layout.axis_cuts import Cut, Cutter, slab
from holdfast_formats.layout.elements import Element, Elements, Specs, heads_unknown, one_for_all, split_key, take_apart
from holdfast_formats.layout.language import Layout
from holdfast_formats.layout.mesh import Coordinate
from holdfast_formats.layout.parts import LocalTensor, full, fuse, resolve, stack
from holdfast_formats.layout.rules import Fusion, Rules, choose
from holdfast_formats.near_names import one_of
from holdfast_formats.region import Box, Shape

KEYED_GROUP = "optim"  # its names are <parameter>/<key>
_MODEL = "model"  # the group whose names all others use
_SHARDED_FROM_STAGE = {_MODEL: 3, "ema": 3, "master": 1, KEYED_GROUP: 1}
_NEVER = 4
_RANKS = "ranks/"  # tensors of one rank's process: random streams, data loaders


# Makes other local tensors of these, the dense ones and the experts', before any are sharded.
Remake = Callable[[list[LocalTensor], list[LocalTensor]], tuple[list[LocalTensor], list[LocalTensor]]]


class HeldTensors(NamedTuple):
    """A rank's holdings: tensors with parts of stored ones, and notes."""

    tensors: tuple[LocalTensor, ...]
    notes: tuple[str, ...]


class HeldSize(NamedTuple):
    tensors: int
    bytes: int


class _Dealt(NamedTuple):
    """Tensors distributed over sharding ranks, and each rank's part.

    A scalar is kept by the ranks that keep a part of the tensor at its position in `beside`.
    """

    tensors: list[LocalTensor]
    cuts: sharding.Cuts
    bits: NDArray[np.int64]  # of an element of each tensor
    scalars: list[LocalTensor]
    beside: NDArray[np.int64]


class _Cell(NamedTuple):
    """Holdings of the ranks at one place in pipeline, expert and tensor parallelism.

    Each of them holds `common`; dense tensors and experts' are distributed. Parts are of stored tensors.
    """

    common: tuple[LocalTensor, ...]
    common_bytes: int
    dense: list[_Dealt]
    experts: list[_Dealt]
    notes: tuple[str, ...]


_Cuts = dict[str, tuple[Element, Cut]]


class LayoutHoldings:
    """The holdings of a layout's ranks of one group. Ranks that differ only in data parallelism are computed once."""

    def __init__(
        self,
        layout: Layout,
        group: str,
        specs: Specs,
        rules: Rules,
        aliases: Mapping[str, str] | None = None,
        remake: Remake | None = None,
    ) -> None:
        """Raises `StateMismatch`, with tensor and numbers, if the layout does not fit the tensors.

        `specs` are the group's stored tensors, `aliases` the names that are tied to one of them. If sharding
        distributes tensors one after the other, their order is that of `specs`, or of their results of `remake`.
        """
        self.layout = layout
        self._remake = remake
        self.group = group
        self._keyed = group == KEYED_GROUP
        self._specs = specs
        self._rules = rules
        self._elements = take_apart(specs, rules, self._keyed)
        self._layers = rules.layers if rules.layers is not None else _count(self._elements, "stage")
        self._tied = {a: t for a, t in {**rules.aliases(), **(aliases or {})}.items() if t in specs and a not in specs}
        self._as_stored = not self._elements.sources and not any(layout.forms)
        self._cutter = Cutter(layout, self._elements.by_name.values())
        self._personal = {name: spec for name, spec in specs.items() if name.startswith(_RANKS)}
        self._placed = self._place()
        self._cells: dict[tuple[int, ...], _Cell] = {}
        self._alike: dict[tuple[int, int, tuple[Shape, ...]], _Cell] = {}

    def of(self, rank: int) -> HeldTensors:
        at = self._coordinate(rank)
        cell = self._cell(at)
        tensors: list[LocalTensor] = []
        for index, listed in ((at.sharding, cell.dense), (at.esharding, cell.experts)):
            for dealt in listed:
                tensors += sharding.take(dealt.tensors, dealt.cuts, index)
                tensors += [dealt.scalars[i] for i in _kept_scalars(dealt, index).tolist()]
        own = f"{_RANKS}{rank:05d}/"
        tensors += [full(name, *spec) for name, spec in self._personal.items() if name.startswith(own)]
        return HeldTensors((*cell.common, *tensors) if tensors else cell.common, cell.notes)

    def share(self, rank: int) -> HeldSize:
        """How much one rank holds, without making its tensors; for whole worlds."""
        at = self._coordinate(rank)
        key = (at.pp, at.ep, self._cutter.shapes(at))
        cell = self._alike.get(key)
        if cell is None:  # whatever their boxes are, ranks with equal shapes hold the same amount
            cell = self._alike[key] = self._cell(at)
        count, octets = len(cell.common), cell.common_bytes
        for index, listed in ((at.sharding, cell.dense), (at.esharding, cell.experts)):
            for dealt in listed:
                kept, start, stop = dealt.cuts.ranges(index)
                scalars = _kept_scalars(dealt, index)
                count += len(kept) + len(scalars)
                octets += int(((stop - start) * dealt.bits[kept]).sum()) // 8
                octets += sum(dtypes.nbytes(dealt.scalars[i].dtype, 1) for i in scalars.tolist())
        return HeldSize(count, octets)

    def _place(self) -> dict[tuple[int, int], list[tuple[int, Element]]]:
        """The elements by pipeline stage and expert-parallel rank, each with its number; -1 for all ranks."""
        mesh = self.layout.mesh
        experts = self._rules.experts if self._rules.experts is not None else _count(self._elements, "expert")
        stages: dict[int | str, int] = {}
        by_place: dict[tuple[int, int], list[tuple[int, Element]]] = {}
        for number, element in enumerate(self._elements.by_name.values()):
            if element.name in self._personal:
                continue
            rule = element.rule
            stage, expert = -1, -1
            if rule is not None and mesh.pp > 1:
                stage = stages[rule.stage] if rule.stage in stages else self._stage(rule.stage, stages)
            if rule is not None and rule.expert is not None and mesh.ep > 1:
                if experts % mesh.ep or rule.expert >= experts:
                    raise StateMismatch(
                        f"tensor {element.name!r}: {experts} experts are not divisible by ep={mesh.ep}",
                        hint="choose an ep that divides the number of experts",
                    )
                expert = rule.expert // (experts // mesh.ep)
            by_place.setdefault((stage, expert), []).append((number, element))
        return by_place

    def _stage(self, stage: int | str, known: dict[int | str, int]) -> int:
        if stage == "every":
            known[stage] = -1
        elif isinstance(stage, int):
            known[stage] = self.layout.virtual_stage(stage, self._layers)[0]
        else:
            known[stage] = 0 if stage == "first" else self.layout.mesh.pp - 1
        return known[stage]

    def _coordinate(self, rank: int) -> Coordinate:
        if not 0 <= rank < self.layout.mesh.world:
            raise InvalidRequest(
                f"rank {rank} is not one of the {self.layout.mesh.world} ranks of this layout",
                hint="the number of ranks is tp * cp * sharding * dp * pp of the layout",
            )
        return self.layout.mesh.coordinate(rank)

    def _cell(self, at: Coordinate) -> _Cell:
        key = (at.pp, at.ep, at.tp, at.etp)
        if key not in self._cells:
            self._cells[key] = self._work_out(at)
        return self._cells[key]

    def _work_out(self, at: Coordinate) -> _Cell:
        cells = [self._placed.get((stage, expert), []) for stage in (-1, at.pp) for expert in (-1, at.ep)]
        elements = [element for _, element in sorted(chain(*cells))]
        cuts: _Cuts = {element.name: (element, self._cutter.cut(element, at)) for element in elements}
        dense: list[LocalTensor] = []
        experts: list[LocalTensor] = []
        for local, expert in self._formed(cuts, at):
            (experts if expert else dense).append(local)
        dense += self._ties(cuts, at)
        if self._elements.sources:
            dense, experts = ([resolve(local, self._elements.sources) for local in each] for each in (dense, experts))
        if self._remake is not None:
            dense, experts = self._remake(dense, experts)
        notes = (*self.layout.notes(self._layers), *_tell(cuts))
        if self.layout.stage < _SHARDED_FROM_STAGE.get(self.group, _NEVER):
            return _Cell((*dense, *experts), sum(map(_bytes, (*dense, *experts))), [], [], notes)
        mesh = self.layout.mesh
        return _Cell((), 0, self._deal(dense, mesh.sharding), self._deal(experts, mesh.esharding), notes)

    def _formed(self, cuts: _Cuts, at: Coordinate) -> Iterator[tuple[LocalTensor, bool]]:
        done: set[str] = set()
        for element, cut in cuts.values():
            if element.name in done:
                continue
            expert = element.rule is not None and element.rule.expert is not None
            fusion = None if self._as_stored else self._form(element)
            if fusion is None:
                yield cut.of(element), expert
            else:
                names = [part + element.key for part in fusion.of]
                done.update(names)
                yield self._fused(fusion, element, [cuts[name] for name in names if name in cuts], at), expert

    def _form(self, element: Element) -> Fusion | None:
        candidates = self._rules.fusions(element.parameter)
        stored = [fusion for fusion in candidates if fusion.name + element.key in self._specs]
        for fusion in (*stored, *candidates):
            form = self.layout.form(fusion.kind)
            mixed = fusion.stacked and len(fusion.of) > (self._rules.experts or 0)  # of gate and up
            if form != "split" and (form or fusion in stored) and not (mixed and self.layout.form("gate_up") == "split"):
                return fusion
        return None

    def _fused(self, fusion: Fusion, first: Element, held: Sequence[tuple[Element, Cut]], at: Coordinate) -> LocalTensor:
        """One local tensor from the parts that this rank holds; `StateMismatch` if one is missing or has another dtype."""
        name, dtype = fusion.name + first.key, first.dtype
        if any(element.dtype != dtype for element, _ in held):
            kinds = sorted({element.dtype for element, _ in held})
            raise StateMismatch(
                f"tensor {name!r} cannot be fused: its parts have dtypes {kinds}",
                hint="leave it unfused in the layout: qkv=split, gate_up=split or experts=split",
            )
        if not first.shape:
            return one_for_all(name, dtype, [element.name for element, _ in held])
        if not fusion.stacked:
            if len(held) != len(fusion.of):
                present = {element.parameter for element, _ in held}
                missing = ", ".join(repr(part) for part in fusion.of if part not in present)
                raise StateMismatch(
                    f"tensor {name!r} cannot be fused: there is no {missing}",
                    hint="leave it unfused in the layout: qkv=split, gate_up=split or experts=split",
                )
            return self._joined(fusion, name, held, at)
        experts: dict[int, list[tuple[Element, Cut]]] = {}
        for element, cut in held:
            assert element.rule is not None and element.rule.expert is not None  # a stack is one of experts
            experts.setdefault(element.rule.expert, []).append((element, cut))
        if len({len(parts) for parts in experts.values()}) != 1:
            raise StateMismatch(
                f"tensor {name!r} cannot be stacked: some experts lack a tensor",
                hint="leave the experts unstacked in the layout: experts=split",
            )
        return stack(name, [self._joined(fusion, name, parts, at) for _, parts in sorted(experts.items())])

    def _joined(self, fusion: Fusion, name: str, held: Sequence[tuple[Element, Cut]], at: Coordinate) -> LocalTensor:
        """Boxes of the fused elements as one local tensor, in the layout's or the stored pattern."""
        form = self.layout.form("gate_up" if fusion.kind == "experts" else fusion.kind)
        dtype = held[0][0].dtype
        if form == "contiguous":
            return fuse(name, dtype, self._slice(fusion, name, held, at), fusion.dimension, 1)
        groups = 1 if form else fusion.groups
        if groups != 1 or form in ("heads", "groups"):
            groups = _local_groups(fusion, *held[-1], name)
        return fuse(name, dtype, [(element.name, cut.box) for element, cut in held], fusion.dimension, groups)

    def _slice(
        self, fusion: Fusion, name: str, held: Sequence[tuple[Element, Cut]], at: Coordinate
    ) -> list[tuple[str, Box]]:
        """The rank's slice of the whole fused tensor; some parts may be empty."""
        rule, mesh = held[0][0].rule, self.layout.mesh
        axis = "" if rule is None else rule.axis  # each rank holds the whole of a tensor that no axis cuts
        size, index = {"tp": (mesh.tp, at.tp), "etp": (mesh.etp, at.etp), "": (1, 0)}[axis]
        rows = sum(element.shape[fusion.dimension] for element, _ in held)
        if rows % size:
            raise StateMismatch(f"tensor {name!r}: {rows} rows are not divisible by {size} ranks", hint="use another form")
        low, high = rows // size * index, rows // size * (index + 1)
        boxes = []
        for element, _ in held:
            length = element.shape[fusion.dimension]
            first, last = max(low, 0), max(min(high, length), 0)
            boxes.append((element.name, slab(element.shape, fusion.dimension, min(first, last), last)))
            low, high = low - length, high - length
        return boxes

    def _ties(self, cuts: _Cuts, at: Coordinate) -> Iterator[LocalTensor]:
        """Tied names on stages without the tensor itself: stored once, given to both."""
        if self.layout.mesh.pp == 1:
            return
        for alias, target in self._tied.items():
            rule = self._rules.rule(alias)
            if rule is None or target in cuts or self._stage(rule.stage, {}) not in (-1, at.pp):
                continue
            tied = self._elements.by_name[target]._replace(rule=rule)
            yield self._cutter.cut(tied._replace(name=alias), at).of(tied)._replace(name=alias)

    def _deal(self, tensors: list[LocalTensor], count: int) -> list[_Dealt]:
        """Distribute tensors over `count` sharding ranks. An optimizer's keys are distributed like their parameter."""
        by_key: dict[str, list[LocalTensor]] = {}
        scalars: list[LocalTensor] = []
        for tensor in tensors:
            if self._keyed and not tensor.shape:
                scalars.append(tensor)
            else:
                by_key.setdefault(split_key(tensor.name, self._keyed)[1], []).append(tensor)
        deals = []
        for listed in by_key.values() or [[]]:
            places = {split_key(tensor.name, self._keyed)[0]: i for i, tensor in enumerate(listed)}
            beside = [places.get(split_key(tensor.name, self._keyed)[0], -1) for tensor in scalars]
            bits = np.array([dtypes.bits(tensor.dtype) for tensor in listed], np.int64)
            cuts = sharding.cuts(listed, self.layout, count)
            deals.append(_Dealt(listed, cuts, bits, scalars, np.array(beside, np.int64)))
            scalars = []
        return deals


def of_manifest(
    manifest: Manifest,
    group: str,
    layout: Layout,
    config: Mapping[str, Any] | None,
    extra: Mapping[str, Any] | None = None,
    remake: Remake | None = None,
) -> LayoutHoldings:
    """The holdings of a checkpoint's group; every reader gets the same result.

    `config` is the model's config.json, `extra` a team's own rules. If sharding distributes tensors one after the
    other, their order is the natural order of their names. Raises `NoSuchResource` for a group that does not exist.
    """
    entries = manifest.tensors.get(group)
    if entries is None:
        raise NoSuchResource(
            f"there is no group {group!r}",
            hint=one_of(group, manifest.groups, "groups"),
        )
    model = manifest.tensors.get(_MODEL) or entries
    shapes = {name: entry.shape for name, entry in model.items()}
    chosen = choose(config, model, table=layout.rules, extra=extra, shapes=shapes)
    specs = {name: (entries[name].dtype, entries[name].shape) for name in sorted(entries, key=natural_key)}
    return LayoutHoldings(layout, group, specs, chosen, manifest.aliases.get(group), remake)


def hold(
    layout: Layout, rank: int, group: str, specs: Specs, rules: Rules, aliases: Mapping[str, str] | None = None
) -> HeldTensors:
    """What one rank holds of a group; for many ranks of one layout use `LayoutHoldings`."""
    return LayoutHoldings(layout, group, specs, rules, aliases).of(rank)


def _bytes(tensor: LocalTensor) -> int:
    return dtypes.nbytes(tensor.dtype, tensor.volume, tensor.name)


def _kept_scalars(dealt: _Dealt, index: int) -> NDArray[np.int64]:
    kept, _, _ = dealt.cuts.ranges(index)
    return np.flatnonzero((dealt.beside < 0) | np.isin(dealt.beside, kept))


def _local_groups(fusion: Fusion, element: Element, cut: Cut, name: str) -> int:
    """The number of groups of the local heads: one per key/value head that this rank holds."""
    if fusion.units is None:
        raise heads_unknown(name)
    return max(cut.box.shape[fusion.dimension] * fusion.units[1] // element.shape[fusion.dimension], 1)


def _count(elements: Elements, what: str) -> int:
    """One more than the highest layer or expert in the names, for configs without a count."""
    numbers = (getattr(e.rule, what) for e in elements.by_name.values() if e.rule is not None)
    return max((n + 1 for n in numbers if isinstance(n, int)), default=0)


def _tell(cuts: _Cuts) -> Iterable[str]:
    """A note for several tensors: the first name, and how many more."""
    names: dict[str, str] = {}
    counted: Counter[str] = Counter()
    for element, cut in cuts.values():
        if cut.note:
            names.setdefault(cut.note, element.name)
            counted[cut.note] += 1
    for note, name in names.items():
        more = f" and {counted[note] - 1} more" if counted[note] > 1 else ""
        yield f"{name}{more}: {note}"
