"""The tensors of a checkpoint by group and name, as stored or as a mapping program makes them."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Mapping
from math import prod
from typing import Any, NamedTuple

from holdfast_formats import dtypes
from holdfast_formats.errors import StateMismatch
from holdfast_formats.mapping import optimizer_state
from holdfast_formats.mapping.box_moves import MappedTensor, same
from holdfast_formats.mapping.committed_files import refuse_sub_byte
from holdfast_formats.mapping.listing import TensorKey
from holdfast_formats.mapping.reading import elements
from holdfast_formats.programs import choice
from holdfast_formats.programs.compilation import compile_program
from holdfast_formats.programs.compiled import CompiledProgram
from holdfast_formats.programs.document import read_program
from holdfast_service.wings.convert.exports.source import ExportSource
from holdfast_service.wings.convert.exports.tied_tensors import said

CONFIG = "config.json"
_READ_BYTES = 2**24  # read at once, of tensors that a program expects to be zeros


class Arranged(NamedTuple):
    """Tensors by group and name. `names` maps the parameters that a program named to their results."""

    groups: Mapping[str, Mapping[str, MappedTensor]]
    names: Mapping[str, tuple[str, ...]] = {}
    notes: tuple[str, ...] = ()

    def group(self, group: str) -> Mapping[str, MappedTensor]:
        return self.groups.get(group, {})

    def became(self, name: str) -> tuple[str, ...]:
        return self.names.get(name, (name,))


def arrange(source: ExportSource, program: CompiledProgram | None) -> Arranged:
    """All tensors, without aliases, after checking the program's assumptions.

    Raises `StateMismatch` for tensors that a program requires to be equal, or zeros, and that are not.
    """
    groups: dict[str, dict[str, MappedTensor]] = defaultdict(dict)
    if program is None:
        for group in source.groups:
            held = source.group(group)
            refuse_sub_byte(held)
            groups[group] = {name: same(tensor) for name, tensor in held.items()}
        return Arranged(groups)
    _check(source, program)
    used = {move.source for mapped in program.tensors.values() for move in mapped.moves}
    refuse_sub_byte({key.name: source.listing.tensors[key] for key in used})
    for key, mapped in program.tensors.items():
        groups[key.group][key.name] = mapped
    notes = [f"names and layouts are those that program {program.program!r} makes", *program.notes]
    notes += [f"program {program.program!r} drops {loss.key.group}/{loss.key.name}: {loss.why}" for loss in program.lost]
    notes += said(source.ties("model"), "the program makes of tied weights one")
    return Arranged(groups, program.names, tuple(notes))


def compiled(source: ExportSource, given: str) -> CompiledProgram:
    """A program for this checkpoint: by its text, or by the name of a shipped one.

    Raises `InvalidRequest` for an invalid program, `StateMismatch` for one that does not fit the checkpoint.
    """
    program = read_program(given) if "\n" in given or "=" in given else choice.load(given)
    aliases = {TensorKey(group, alias) for group, held in source.aliases.items() for alias in held}
    specs = {key: tensor.spec for key, tensor in source.listing.tensors.items() if key not in aliases}
    return compile_program(program, specs, config_of(source))


def config_of(source: ExportSource) -> Mapping[str, Any]:
    """The checkpoint's config.json; empty if there is none, or it is no object."""
    try:
        document = json.loads(source.read_asset(CONFIG)) if CONFIG in source.assets else {}
    except (ValueError, RecursionError):
        return {}
    return document if isinstance(document, dict) else {}


def renamed_documents(source: ExportSource, arranged: Arranged) -> dict[str, dict[str, Any]]:
    """The checkpoint's documents with the parameters of optimizers under their new names.

    Raises `StateMismatch` if parameters of several groups became one tensor.
    """
    documents: dict[str, dict[str, Any]] = {group: dict(held) for group, held in source.listing.documents.items()}
    if arranged.names and optimizer_state.GROUP in documents:
        held = documents[optimizer_state.GROUP]
        documents[optimizer_state.GROUP] = {key: _renamed(document, arranged) for key, document in held.items()}
    return documents


def _renamed(document: Any, arranged: Arranged) -> Any:
    if not isinstance(document, dict) or not isinstance(document.get("groups"), dict):
        return document
    owners: dict[str, int] = {}
    groups: list[tuple[list[str], dict[str, Any]]] = []
    order = document["groups"].get("$keys", list(document["groups"]))
    for number, first in enumerate(order):
        group = document["groups"][first]
        params = _all_became(group["params"], arranged)
        for name in params:
            if owners.setdefault(name, number) != number:
                raise StateMismatch(f"{name!r} is made of parameters of two groups of the optimizer", tensor=name)
        groups.append((params, {key: value for key, value in group.items() if key not in ("params", "$keys")}))
    renamed = optimizer_state.document(groups)
    for key in ("masters", "state"):
        renamed[key] = _by_new_name(document.get(key, {}), arranged, listed=key == "masters")
    return {**renamed, "kinds": document.get("kinds", {})}


def _all_became(names: Iterable[str], arranged: Arranged) -> list[str]:
    return list(dict.fromkeys(new for name in names for new in arranged.became(name)))


def _by_new_name(held: Any, arranged: Arranged, listed: bool) -> Any:
    if not isinstance(held, dict):
        return held
    plain = {key: value for key, value in held.items() if key != "$keys"}
    if listed:  # names by kind
        return {kind: _all_became(names, arranged) for kind, names in plain.items()}
    return {new: value for name, value in plain.items() for new in arranged.became(name)}


def _check(source: ExportSource, program: CompiledProgram) -> None:
    for first, *others in program.equal:
        for other in others:
            if not source.equal(first, other):
                raise StateMismatch(
                    f"program {program.program!r} takes {first.name!r} and {other.name!r} of group {first.group} "
                    "for equal, and they differ",
                    tensor=other.name,
                )
    for key in program.zeros:
        _check_zeros(source, key, program.program)


def _check_zeros(source: ExportSource, key: TensorKey, program: str) -> None:
    tensor = source.listing.tensors[key]
    volume, step = prod(tensor.spec.shape), _READ_BYTES // dtypes.to_numpy(tensor.spec.dtype).itemsize
    for start in range(0, volume, step):
        if elements(source.files, {key: tensor}, same(tensor), start, min(start + step, volume)).any():
            raise StateMismatch(
                f"program {program!r} takes {key.name!r} of group {key.group} for zeros, and it holds something else",
                tensor=key.name,
            )
