"""The tensors of a checkpoint by group and name, as stored or as a mapping program makes them."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Mapping
from typing import Any, NamedTuple

from holdfast_formats.mapping import equality, optimizer_state
from holdfast_formats.mapping.box_moves import MappedTensor, same
from holdfast_formats.mapping.committed_files import refuse_sub_byte
from holdfast_formats.mapping.listing import TensorKey
from holdfast_formats.programs import choice
from holdfast_formats.programs.compilation import compile_program
from holdfast_formats.programs.compiled import CompiledProgram
from holdfast_service.wings.convert.exports.source import ExportSource
from holdfast_service.wings.convert.exports.tied_tensors import said

CONFIG = "config.json"


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
    program.check_assumed(source.equal, lambda key: equality.zeros(source.files, source.listing.tensors[key]))
    used = {move.source for mapped in program.tensors.values() for move in mapped.moves}
    refuse_sub_byte({key.name: source.listing.tensors[key] for key in used})
    for key, mapped in program.tensors.items():
        groups[key.group][key.name] = mapped
    notes = [f"names and layouts come from program {program.program!r}", *program.notes]
    notes += [f"program {program.program!r} drops {loss.key.group}/{loss.key.name}: {loss.why}" for loss in program.lost]
    notes += said(source.ties("model"), "the program merges tied weights")
    return Arranged(groups, program.names, tuple(notes))


def compiled(source: ExportSource, given: str) -> CompiledProgram:
    """A program for this checkpoint: by its text, or by the name of a shipped one.

    Raises `InvalidRequest` for an invalid program, `StateMismatch` for one that does not fit the checkpoint.
    """
    program = choice.named_or_written(given)
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
        documents[optimizer_state.GROUP] = {
            key: optimizer_state.renamed(document, arranged.became) for key, document in held.items()
        }
    return documents
