"""Selects the table for a checkpoint: by its own name, by config.json, or by the names of its tensors."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from importlib.resources import files
from typing import Any

from holdfast_formats.errors import InvalidRequest
from holdfast_formats.layout.rules.document import Document, check, decode
from holdfast_formats.layout.rules.expressions import sizes_for
from holdfast_formats.layout.rules.patterns import NamePattern, split
from holdfast_formats.layout.rules.rules import Rules
from holdfast_formats.layout.rules.table import RuleTable, TieRow, compile_table
from holdfast_formats.region import Shape

EXTENDS_MAX = 8  # documents that one table may combine

_NONE = compile_table([Document(name="none")])


@cache
def packaged() -> tuple[str, ...]:
    """The packaged tables' names; the most specific ones first."""
    documents = [check(decode(entry.read_bytes())) for entry in _tables() if entry.name.endswith(".toml")]
    return tuple(doc.name for doc in sorted(documents, key=lambda doc: (-len(doc.marks), doc.name)))


def _tables() -> Any:
    return (files(__package__) / "tables").iterdir()


@cache
def _document(name: str) -> Document:
    return check(decode((files(__package__) / "tables" / f"{name}.toml").read_bytes()))


@cache
def _table(name: str) -> RuleTable:
    return compile_table(_lineage(_document(name)))


def _lineage(document: Document) -> list[Document]:
    documents = [document]
    waiting = _bases(document)
    while waiting:
        name = waiting.pop()
        if name not in packaged():
            raise InvalidRequest(
                f"rules table {document.name!r} extends {name!r}, which does not exist",
                hint=f"one of {', '.join(packaged())}",
            )
        base = _document(name)
        if base not in documents:
            documents.append(base)
        if len(documents) > EXTENDS_MAX:
            raise InvalidRequest(
                f"rules table {document.name!r} extends more than {EXTENDS_MAX} tables",
                hint="extend the most specific table only",
            )
        waiting += _bases(base)
    return documents


def _bases(document: Document) -> list[str]:
    return [document.extends] if isinstance(document.extends, str) else list(document.extends)


def choose(
    config: Mapping[str, Any] | None,
    names: Iterable[str],
    *,
    table: str = "auto",
    extra: Mapping[str, Any] | None = None,
    shapes: Mapping[str, Shape] | None = None,
) -> Rules:
    """The rules for a checkpoint with this config.json and these tensors.

    `extra` is a decoded rules file: its table is used, unless `table` names another. Without either, the table is the
    one with the config's architecture, else with its model type, else the one whose marks are all among the names, else
    "none". Layers and experts missing in the config are counted by the names and by the `shapes` of experts' stacks.
    Raises `InvalidRequest` for a table that does not exist or is invalid, and for sizes in the config that are not
    numbers.
    """
    held = frozenset(names)
    chosen = _chosen(config, held, table, extra)
    sizes = sizes_for(chosen.sizes, config or {}, f"rules table {chosen.name!r}, size")
    if "layers" not in sizes or ("experts" not in sizes and chosen.has_experts):
        sizes = {**_counted(chosen, held, shapes or {}), **sizes}
    return Rules(chosen, sizes, {} if config is None else _aliases(chosen.ties, config, held))


def _chosen(
    config: Mapping[str, Any] | None, held: frozenset[str], table: str, extra: Mapping[str, Any] | None
) -> RuleTable:
    own = None if extra is None else check(extra)
    if own is not None and own.name in (*packaged(), "none", "auto"):
        raise InvalidRequest(
            f"rules table {own.name!r}: the name is taken", hint=f'choose another name, and add extends = "{own.name}"'
        )
    if own is not None and table in ("auto", own.name):
        return compile_table(_lineage(own))
    if table == "none":
        return _NONE
    if table != "auto":
        if table not in packaged():
            raise InvalidRequest(f"there is no rules table {table!r}", hint=f"auto, none, {', '.join(packaged())}")
        return _table(table)
    rule_table = None if config is None else _by_config(config, held)
    return rule_table or _marked([_table(name) for name in packaged()], held) or _NONE


def _by_config(config: Mapping[str, Any], held: frozenset[str]) -> RuleTable | None:
    """The table of the config's architecture, else of its model type; if there are several, the one whose marks match."""
    documents = _documents_of(config)
    architectures = {name for doc in documents for name in _texts(doc.get("architectures"))}
    model_types = [name for doc in documents for name in _texts([doc.get("model_type")])]
    tables = [_table(name) for name in packaged()]
    matching = [table for table in tables if table.architectures & architectures]
    for model_type in model_types:
        matching = matching or [table for table in tables if model_type in table.model_types]
    return (_marked(matching, held) if len(matching) > 1 else None) or next(iter(matching), None)


def _texts(value: Any) -> list[str]:
    return [text for text in value if isinstance(text, str)] if isinstance(value, (list, tuple)) else []


def _documents_of(config: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    nested = config.get("text_config")
    return [config, nested] if isinstance(nested, Mapping) else [config]


def _marked(tables: Sequence[RuleTable], held: frozenset[str]) -> RuleTable | None:
    wanted: dict[str, list[tuple[str, int, NamePattern]]] = {}
    for table in tables:
        for i, mark in enumerate(table.marks):
            for pattern in mark:
                wanted.setdefault(pattern.key, []).append((table.name, i, pattern))
    met = set()
    for name in held:
        key, numbers = split(name)
        met |= {(table, i) for table, i, pattern in wanted.get(key, ()) if pattern.match(numbers) is not None}
    return next((t for t in tables if t.marks and all((t.name, i) in met for i in range(len(t.marks)))), None)


def _counted(table: RuleTable, held: frozenset[str], shapes: Mapping[str, Shape]) -> dict[str, int]:
    known: dict[str, list[tuple[NamePattern, bool]]] = {}
    for pattern in table.tensors:
        known.setdefault(pattern.key, []).append((pattern, False))
    for pattern, row in table.fusions.items():
        known.setdefault(pattern.key, []).append((pattern, row.kind == "experts"))
    layers, experts = 0, 0
    for name in held:
        key, numbers = split(name)
        for pattern, stacked in known.get(key, ()):
            place = pattern.match(numbers)
            if place is None:
                continue
            shape = shapes.get(name, ())
            layers = max(layers, place.get("layer", -2) + 1)
            experts = max(experts, place.get("expert", -2) + 1, shape[0] if stacked and shape else 0)
    return {name: count for name, count in (("layers", layers), ("experts", experts)) if count}


def _aliases(ties: Sequence[TieRow], config: Mapping[str, Any], held: frozenset[str]) -> dict[str, str]:
    """Tied names and the stored name of each. Without a checkpoint, the target counts as stored. Two stored names are
    no tie.
    """
    aliases: dict[str, str] = {}
    for tie in ties:
        values = (doc.get(tie.when) for doc in _documents_of(config))
        if not next((value for value in values if isinstance(value, bool)), tie.default):
            continue
        stored = next((target for target in tie.targets if target in held), None)
        if tie.alias not in held and (stored or not held):
            aliases[tie.alias] = stored or tie.targets[0]
        elif tie.alias in held and not stored:
            aliases[tie.targets[0]] = tie.alias
    return aliases
