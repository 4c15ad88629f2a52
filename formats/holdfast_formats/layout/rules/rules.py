"""The rules of a table for the tensors of one checkpoint, with the sizes from its config.json."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, NamedTuple, TypeVar

from holdfast_formats.errors import InvalidRequest, StateMismatch
from holdfast_formats.layout.rules.document import Kind, Otherwise
from holdfast_formats.layout.rules.expressions import Expression, evaluate
from holdfast_formats.layout.rules.patterns import NamePattern, split
from holdfast_formats.layout.rules.table import FusionRow, RuleTable, TensorRow
from holdfast_formats.region import Shape

Row = TypeVar("Row")
_Index = dict[str, list[tuple[NamePattern, Row]]]


class Rule(NamedTuple):
    """The rule for one tensor that is not fused."""

    shape: Shape | None  # None if the config does not give all of its sizes
    dimension: int | None  # the dimension that is cut; None: every rank of the axis holds the whole tensor
    axis: Literal["tp", "etp", ""]
    units: int | None  # indivisible units along the dimension; None: single rows, or unknown (then `unit` has a name)
    otherwise: Otherwise  # what happens when the axis does not divide the units
    vocabulary: bool  # dimension 0 is the vocabulary and may be padded
    stage: int | Literal["first", "last", "every"]  # a number is the layer's
    expert: int | None
    experts: int | None  # the number of experts, for an expert's tensor
    unit: str = ""  # what the units are: "kv_heads"


class Fusion(NamedTuple):
    """A fused tensor that corresponds to certain others, whether or not a checkpoint has it."""

    kind: Kind
    name: str
    of: tuple[str, ...]  # for a stack expert by expert
    dimension: int  # along which they are joined, in each of them; a stack's experts are along a new dimension 0
    units: tuple[int, int] | None  # query heads and key-value heads, if they are known
    stacked: bool
    groups: int  # the checkpoint's pattern: 1 is one after the other; 0: by an unknown number of heads


class Rules:
    """The rules for the names of one checkpoint; `name` is the table's, "none" for one that knows no tensor."""

    def __init__(self, table: RuleTable, sizes: Mapping[str, int], ties: Mapping[str, str]) -> None:
        self.name = table.name
        self.layers = sizes.get("layers")
        self.experts = sizes.get("experts")
        self._sizes = sizes
        self._ties = dict(ties)
        self._synonyms = table.synonyms
        worked_out: dict[TensorRow, Rule] = {}
        for pattern, row in table.tensors.items():
            if row not in worked_out:
                worked_out[row] = self._work_out(pattern, row)
        self._tensors = _index({pattern: worked_out[row] for pattern, row in table.tensors.items()})
        self._fusions = _index(table.fusions)
        self._parts: dict[NamePattern, list[FusionRow]] = {}
        for fusion in table.fusions.values():
            for part in fusion.of:
                self._parts.setdefault(part, []).append(fusion)
        self._made: dict[str, Fusion] = {}

    def rule(self, name: str) -> Rule | None:
        """The rule for a tensor that is not fused, or None if the table does not know its name.

        Raises `StateMismatch` for an expert beyond the number that the config gives.
        """
        located = _find(self._tensors, name)
        if located is None:
            return None
        _, rule, place = located
        stage, layer, expert = rule.stage, place.get("layer"), place.get("expert")
        if isinstance(stage, int) and layer is not None:
            beyond = self.layers is not None and layer >= self.layers
            stage = "last" if beyond else layer  # modules that predict further tokens follow the layers
        if expert is None:
            return Rule(*rule[:6], stage, None, None, rule.unit)
        if self.experts is not None and expert >= self.experts:
            raise StateMismatch(
                f"tensor {name!r} belongs to expert {expert}, but the config has only {self.experts} experts",
                hint="num_experts in config.json must count all of them, or choose another table with rules=",
            )
        return Rule(*rule[:6], stage, expert, self.experts, rule.unit)

    def fusion(self, name: str) -> Fusion | None:
        """The fused tensor of this name; None if there is none, and for a stack of an unknown number of experts."""
        made = self._made.get(name)
        if made is None:
            located = _find(self._fusions, name)
            if located is not None:
                made = self._fuse(located[1], located[2])
        return made

    def fusions(self, name: str) -> tuple[Fusion, ...]:
        """Every fused tensor that the tensor `name` may be a part of, in the table's order: the first is the usual one."""
        made = (self._fuse(row, place) for row, place in self._holders(name))
        return tuple(fusion for fusion in made if fusion is not None)

    def stored(self, name: str) -> Fusion | None:
        return next((self._fuse(row, place) for row, place in self._holders(name) if row.stored), None)

    def aliases(self) -> dict[str, str]:
        """Names that the config ties to another tensor, and that tensor's name, which is the stored one."""
        return dict(self._ties)

    def synonyms(self, name: str) -> tuple[str, ...]:
        """Other names that checkpoints may have for the tensor `name`."""
        located = _find(self._tensors, name)
        return () if located is None else tuple(other.name(located[2]) for other in self._synonyms.get(located[0], ()))

    def _holders(self, name: str) -> list[tuple[FusionRow, Mapping[str, int]]]:
        located = _find(self._tensors, name)
        return [] if located is None else [(row, located[2]) for row in self._parts.get(located[0], ())]

    def _fuse(self, row: FusionRow, place: Mapping[str, int]) -> Fusion | None:
        stacked = row.kind == "experts"
        if stacked and self.experts is None:
            return None
        name = row.name.name(place)
        fusion = self._made.get(name)
        if fusion is None:
            places = [{**place, "expert": expert} for expert in range(self.experts or 0)] if stacked else [place]
            of = tuple(part.name(each) for each in places for part in row.of)
            units = self._heads(row)
            fusion = self._made[name] = Fusion(row.kind, name, of, row.dimension, units, stacked, _groups(row, units))
        return fusion

    def _heads(self, row: FusionRow) -> tuple[int, int] | None:
        if row.heads is None:
            return None
        query, key_value = (evaluate(size, self._sizes) for size in row.heads)
        return None if query is None or key_value is None else (query, key_value)

    def _work_out(self, pattern: NamePattern, row: TensorRow) -> Rule:
        stage: int | Literal["first", "last", "every"] = 0 if row.stage == "layer" else row.stage
        shape = self._shape(pattern, row)
        units = None if row.units is None else self._size(pattern, row.units)
        rule = Rule(shape, row.cut, row.by, units, row.otherwise, row.vocabulary, stage, None, None, row.unit)
        return rule if row.block == 1 else _by_block(rule, row.block)

    def _shape(self, pattern: NamePattern, row: TensorRow) -> Shape | None:
        if row.shape is None:
            return None
        lengths = [self._size(pattern, size) for size in row.shape]
        known = tuple(length for length in lengths if length is not None)
        return known if len(known) == len(lengths) else None

    def _size(self, pattern: NamePattern, size: Expression) -> int | None:
        try:
            return evaluate(size, self._sizes)
        except InvalidRequest as problem:
            raise InvalidRequest(
                f"rules table {self.name!r}, {pattern.text!r}: {problem.detail}", hint=problem.hint
            ) from None


def _groups(row: FusionRow, units: tuple[int, int] | None) -> int:
    if row.found == "contiguous":
        return 1
    query, key_value = units or (0, 0)
    return query if row.found == "heads" else key_value


def _index(rows: Mapping[NamePattern, Row]) -> _Index[Row]:
    """Rows by their patterns' keys, those with the fewest open numbers first: `layers.0.` before `layers.{layer}.`."""
    index: _Index[Row] = {}
    for pattern, row in sorted(rows.items(), key=lambda item: len(item[0].variables)):
        index.setdefault(pattern.key, []).append((pattern, row))
    return index


def _find(index: _Index[Row], name: str) -> tuple[NamePattern, Row, Mapping[str, int]] | None:
    key, numbers = split(name)
    for pattern, row in index.get(key, ()):
        place = pattern.match(numbers)
        if place is not None:
            return pattern, row, place
    return None


def _by_block(rule: Rule, block: int) -> Rule:
    """The rule for the per-block numbers beside a weight, which are cut as the weight if no block crosses the cut."""
    shape = None if rule.shape is None else tuple(-(-length // block) for length in rule.shape)
    if rule.dimension is None or rule.shape is None:
        return rule._replace(shape=shape, units=None, unit="", otherwise="replicate")
    rows = rule.shape[rule.dimension]
    if rows % block:  # then every rank's part ends within a block
        return rule._replace(shape=shape, dimension=None, axis="", units=None, unit="", otherwise="replicate")
    if rule.units and rows % rule.units == 0 and (rows // rule.units) % block == 0:
        return rule._replace(shape=shape)
    return rule._replace(shape=shape, units=None, unit="", otherwise="replicate")
