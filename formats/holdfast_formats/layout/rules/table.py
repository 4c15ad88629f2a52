"""A compiled table: patterns of tensors and of fused tensors with their rules, checked against each other."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Literal, NamedTuple

from holdfast_formats.errors import InvalidRequest
from holdfast_formats.layout.rules import document
from holdfast_formats.layout.rules.document import Document, Found, Kind, Otherwise
from holdfast_formats.layout.rules.expressions import Expression, names_in, parse
from holdfast_formats.layout.rules.patterns import NamePattern, compile_pattern, count, expand, places

PATTERNS_MAX = 20_000

Stage = Literal["layer", "first", "last", "every"]


class TensorRow(NamedTuple):
    """The rule for a pattern's tensors; `block` > 1: one element stands for so many rows and columns."""

    shape: tuple[Expression, ...] | None
    cut: int | None
    by: Literal["tp", "etp", ""]
    units: Expression | None
    unit: str
    otherwise: Otherwise
    vocabulary: bool
    stage: Stage
    block: int = 1


class FusionRow(NamedTuple):
    """The rule for a fused tensor; its patterns' words are expanded together."""

    kind: Kind
    name: NamePattern
    of: tuple[NamePattern, ...]
    dimension: int
    heads: tuple[Expression, Expression] | None
    found: Found
    stored: bool


class TieRow(NamedTuple):
    """A name that is one tensor with one of `targets` if config.json's `when`, or else `default`, is true."""

    alias: str
    targets: tuple[str, ...]
    when: str
    default: bool


class RuleTable(NamedTuple):
    """All rules for a family of architectures, before a config is read."""

    name: str
    architectures: frozenset[str]
    model_types: frozenset[str]
    marks: tuple[tuple[NamePattern, ...], ...]  # each is matched by any of its patterns
    sizes: Mapping[str, Expression]
    tensors: Mapping[NamePattern, TensorRow]
    fusions: Mapping[NamePattern, FusionRow]
    ties: tuple[TieRow, ...]
    synonyms: Mapping[NamePattern, tuple[NamePattern, ...]]  # each with the other names of the same tensor
    has_experts: bool


def compile_table(lineage: Sequence[Document]) -> RuleTable:
    """Compile a document and those that it extends, nearest first: for a name, the nearer one has precedence.

    Raises `InvalidRequest` with the table and the entry for anything invalid.
    """
    own = lineage[0]
    try:
        return _compiled(own, lineage)
    except InvalidRequest as problem:
        raise InvalidRequest(f"rules table {own.name!r}: {problem.detail}", hint=problem.hint) from None


def _compiled(own: Document, lineage: Sequence[Document]) -> RuleTable:
    roots = next((doc.root for doc in lineage if doc.root is not None), [""])
    sizes = {name: _expression(size) for doc in reversed(lineage) for name, size in doc.sizes.items()}
    _check_size(lineage, roots)
    scales = next((doc.scales for doc in lineage if doc.scales is not None), None)
    tensors = _tensors(lineage, roots, sizes.keys())
    if scales is not None:
        tensors |= _scaled(tensors, scales)
    fusions = _fusions(lineage, roots, sizes.keys(), tensors)
    if scales is not None:
        fusions |= _scaled_fusions(fusions, tensors, scales.suffix)
    return RuleTable(
        name=own.name,
        architectures=frozenset(own.architectures),
        model_types=frozenset(own.model_types),
        marks=tuple(_mark(_texts(mark), roots) for mark in own.marks),
        sizes=sizes,
        tensors=tensors,
        fusions=fusions,
        ties=tuple(_ties(lineage, roots)),
        synonyms=_synonyms(lineage, roots, tensors),
        has_experts=any("expert" in pattern.variables for pattern in tensors),
    )


def _check_size(lineage: Sequence[Document], roots: Sequence[str]) -> None:
    patterns = 0
    for doc in lineage:
        texts = [_texts(mark) for mark in doc.marks]
        listed: list[tuple[list[str], list[str]]] = [(found, []) for found in (*texts, *([tie.target] for tie in doc.ties))]
        listed += [(_texts(entry.name), entry.part) for entry in doc.tensors]
        listed += [([entry.name, *entry.of], entry.part) for entry in doc.fusions]
        listed += [(entry.names, entry.part) for entry in doc.synonyms]
        patterns += sum(count(found, {"root": roots, "part": part}) for found, part in listed)
    if patterns > PATTERNS_MAX:
        raise InvalidRequest(
            f"{patterns} names with {{root}} and {{part}} written out, {PATTERNS_MAX} are allowed",
            hint="list fewer words in root and part, or write more entries with {layer} and {expert}",
        )


def _texts(text: str | list[str]) -> list[str]:
    return [text] if isinstance(text, str) else text


def _mark(texts: Sequence[str], roots: Sequence[str]) -> tuple[NamePattern, ...]:
    return tuple(pattern for text in texts for (pattern,) in expand([text], {"root": roots}))


def _expression(size: str | int) -> Expression:
    return parse(str(size))


def _sized(size: str | int, known: Iterable[str]) -> Expression:
    expression = _expression(size)
    unknown = sorted(names_in(expression) - set(known))
    if unknown:
        raise InvalidRequest(
            f"{size!r} uses {unknown[0]!r}, which is not in [sizes]",
            hint=f'add {unknown[0]} = "a key of config.json" to [sizes]',
        )
    return expression


def _tensors(lineage: Sequence[Document], roots: Sequence[str], known: Iterable[str]) -> dict[NamePattern, TensorRow]:
    tensor_rows: dict[NamePattern, TensorRow] = {}
    for doc in lineage:
        said: dict[NamePattern, TensorRow] = {}
        for entry in doc.tensors:
            for text in _texts(entry.name):
                row = _row(entry, text, known)
                for (pattern,) in expand([text], {"root": roots, "part": entry.part}):
                    if pattern in said:
                        raise InvalidRequest(
                            f"{pattern.text!r} is defined twice", hint="remove one of the two entries in [[tensors]]"
                        )
                    said[pattern] = row
        tensor_rows |= {pattern: row for pattern, row in said.items() if pattern not in tensor_rows}
    return tensor_rows


def _row(entry: document.TensorRule, name: str, known: Iterable[str]) -> TensorRow:
    inside = places(name)
    shape = None if entry.shape is None else tuple(_sized(size, known) for size in entry.shape)
    stage = entry.stage or ("layer" if "layer" in inside else None)
    if stage is None:
        raise InvalidRequest(
            f"{name!r} has no {{layer}}, so its stage must be given", hint='stage = "first", "last" or "every"'
        )
    if stage == "layer" and "layer" not in inside:
        raise InvalidRequest(
            f'{name!r} has stage = "layer", but no {{layer}}',
            hint='write {layer} in the name, or stage = "first", "last" or "every"',
        )
    if entry.cut is None:
        spare = next((key for key in ("by", "units", "otherwise") if getattr(entry, key) is not None), "")
        if spare or entry.vocabulary:
            raise InvalidRequest(
                f"{name!r} has {spare or 'vocabulary'}, but no `cut` dimension", hint="add cut = 0, or remove the key"
            )
        return TensorRow(shape, None, "", None, "", "replicate", False, stage)
    if shape is not None and entry.cut >= len(shape):
        raise InvalidRequest(
            f"{name!r} has {len(shape)} dimensions, so dimension {entry.cut} cannot be cut",
            hint=f"a dimension from 0 to {len(shape) - 1}",
        )
    if entry.vocabulary and entry.cut:
        raise InvalidRequest(
            f"{name!r}: a vocabulary is cut along dimension 0, not {entry.cut}", hint="write cut = 0, or remove vocabulary"
        )
    return TensorRow(
        shape=shape,
        cut=entry.cut,
        by=entry.by or ("etp" if "expert" in inside else "tp"),
        units=None if entry.units is None else _sized(entry.units, known),
        unit="" if entry.units is None else str(entry.units),
        otherwise=entry.otherwise or "refuse",
        vocabulary=entry.vocabulary,
        stage=stage,
    )


def _fusions(
    lineage: Sequence[Document], roots: Sequence[str], known: Iterable[str], tensors: Mapping[NamePattern, TensorRow]
) -> dict[NamePattern, FusionRow]:
    fusion_rows: dict[NamePattern, FusionRow] = {}
    for doc in lineage:
        said: dict[NamePattern, FusionRow] = {}
        for entry in doc.fusions:
            _check_fusion(entry)
            heads = None if entry.heads is None else (_sized(entry.heads[0], known), _sized(entry.heads[1], known))
            for name, *of in expand([entry.name, *entry.of], {"root": roots, "part": entry.part}):
                if name in said or name in tensors:
                    raise InvalidRequest(f"{name.text!r} is defined twice", hint="remove one of the two entries")
                _check_atoms(entry, of, tensors)
                said[name] = FusionRow(entry.kind, name, tuple(of), entry.dimension, heads, entry.found, entry.stored)
        fusion_rows |= {pattern: row for pattern, row in said.items() if pattern not in fusion_rows}
    return fusion_rows


def _check_fusion(entry: document.FusionRule) -> None:
    inside = places(entry.name)
    wanted = (inside | {"expert"}) if entry.kind == "experts" else inside
    if entry.kind == "experts" and "expert" in inside:
        raise InvalidRequest(
            f"{entry.name!r} holds all experts, so its name has no {{expert}}",
            hint="take {expert} out of the name; the names in `of` keep it",
        )
    for text in entry.of:
        if places(text) != wanted:
            placeholders, should = (
                ", ".join(f"{{{word}}}" for word in sorted(words)) or "none" for words in (places(text), wanted)
            )
            raise InvalidRequest(
                f"{entry.name!r} is made of {text!r}, which has the placeholders {placeholders} instead of {should}",
                hint="write the same placeholders in `name` and `of`; of experts, {expert} is in `of` only",
            )
    if len(set(entry.of)) < len(entry.of):
        raise InvalidRequest(f"{entry.name!r} lists a tensor twice", hint="remove the second")
    if entry.kind == "qkv" and (len(entry.of) != 3 or entry.heads is None):
        raise InvalidRequest(
            f"{entry.name!r} must list query, key and value, and give its heads and key-value heads",
            hint='as in of = ["q", "k", "v"] and heads = ["heads", "kv_heads"]',
        )
    if entry.found != "contiguous" and entry.heads is None:
        raise InvalidRequest(
            f'{entry.name!r} has found = "{entry.found}", but no `heads`',
            hint='add heads = ["heads", "kv_heads"], or write found = "contiguous"',
        )


def _check_atoms(entry: document.FusionRule, of: Sequence[NamePattern], tensors: Mapping[NamePattern, TensorRow]) -> None:
    for pattern in of:
        row = tensors.get(pattern)
        if row is None:
            raise InvalidRequest(
                f"{entry.name!r} is made of {pattern.text!r}, which has no [[tensors]] entry",
                hint="add [[tensors]] with this name",
            )
        if row.shape is not None and entry.dimension >= len(row.shape):
            raise InvalidRequest(
                f"{entry.name!r} joins dimension {entry.dimension} of {pattern.text!r}, which has fewer dimensions",
                hint="change `dimension` of the entry, or the tensor's shape",
            )


def _scaled(tensors: Mapping[NamePattern, TensorRow], scales: document.Scales) -> dict[NamePattern, TensorRow]:
    """The rows of per-block numbers beside weights, cut as the weights are."""
    scaled_rows = {}
    for pattern, row in tensors.items():
        if row.shape is not None and len(row.shape) == 2 and not row.vocabulary and pattern.text.endswith(".weight"):
            scaled_rows[compile_pattern(pattern.text + scales.suffix)] = row._replace(block=scales.block)
    return {pattern: row for pattern, row in scaled_rows.items() if pattern not in tensors}


def _scaled_fusions(
    fusions: Mapping[NamePattern, FusionRow], tensors: Mapping[NamePattern, TensorRow], suffix: str
) -> dict[NamePattern, FusionRow]:
    scaled_rows = {}
    for fusion in fusions.values():
        of = tuple(compile_pattern(pattern.text + suffix) for pattern in fusion.of)
        name = compile_pattern(fusion.name.text + suffix)
        if all(pattern in tensors for pattern in of) and name not in fusions:
            scaled_rows[name] = fusion._replace(name=name, of=of)
    return scaled_rows


def _ties(lineage: Sequence[Document], roots: Sequence[str]) -> Iterator[TieRow]:
    aliases: set[str] = set()
    for doc in lineage:
        for tie in doc.ties:
            if places(tie.alias) or places(tie.target) - {"root"}:
                raise InvalidRequest(
                    f"{tie.alias!r} is tied to {tie.target!r}: only the target may have a placeholder, and only {{root}}",
                    hint="write one [[ties]] for each name, without other placeholders",
                )
            if tie.alias not in aliases:
                targets = tuple(target.text for (target,) in expand([tie.target], {"root": roots}))
                yield TieRow(tie.alias, targets, tie.when, tie.default)
        aliases |= {tie.alias for tie in doc.ties}


def _synonyms(
    lineage: Sequence[Document], roots: Sequence[str], tensors: Mapping[NamePattern, TensorRow]
) -> dict[NamePattern, tuple[NamePattern, ...]]:
    synonyms: dict[NamePattern, tuple[NamePattern, ...]] = {}
    for entry in (entry for doc in lineage for entry in doc.synonyms):
        if len({places(text) for text in entry.names}) > 1:
            named = " and ".join(map(repr, entry.names))
            raise InvalidRequest(
                f"{named} cannot be synonyms: their placeholders differ", hint="write the same placeholders in all names"
            )
        for patterns in expand(entry.names, {"root": roots, "part": entry.part}):
            for pattern in patterns:
                if pattern not in tensors:
                    raise InvalidRequest(
                        f"{pattern.text!r} is a synonym, but has no [[tensors]] entry", hint="add [[tensors]] with this name"
                    )
                synonyms.setdefault(pattern, tuple(other for other in patterns if other != pattern))
    return synonyms
