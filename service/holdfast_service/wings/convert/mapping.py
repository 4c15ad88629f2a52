"""Maps a foreign checkpoint's tensors: unchanged, or by a program."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from holdfast_formats.errors import StateMismatch
from holdfast_formats.files import Files
from holdfast_formats.mapping import optimizer_state
from holdfast_formats.mapping.box_moves import MappedTensor, same
from holdfast_formats.mapping.listing import ForeignListing
from holdfast_formats.programs import CompiledProgram, compile_program, named_or_written
from holdfast_service.wings.convert.foreign.file_signs import read_object

CONFIG = "config.json"
NAMED = 3  # tensors in a note
_OF_PARAMETERS = ("state", "masters", "kinds")  # of an optimizer's document

Documents = Mapping[str, Mapping[str, Any]]


class MappedListing(NamedTuple):
    """The tensors that an import writes, and the values beside them; `program` is the one that maps them, if any."""

    tensors: tuple[MappedTensor, ...]
    documents: Documents
    notes: tuple[str, ...] = ()
    program: CompiledProgram | None = None


def mapped(files: Files, listing: ForeignListing, program: str | None) -> MappedListing:
    """What an import writes; with a `program`, its name or its text, the program's results.

    Raises `InvalidRequest` and `StateMismatch` for an invalid program, or one that does not fit the tensors.
    """
    if program is None:
        return MappedListing(tuple(same(tensor) for tensor in listing.tensors.values()), listing.documents)
    if any(map(optimizer_state.is_numbered, listing.documents.get(optimizer_state.GROUP, {}).values())):
        raise StateMismatch(
            "the optimizer has numbers in place of parameter names, which programs cannot map",
            hint="import it without --program, and restore it with the model as it is; or import the weights alone, with "
            "--weights-only",
        )
    specs = {key: tensor.spec for key, tensor in listing.tensors.items()}
    compiled = compile_program(
        named_or_written(program), specs, {} if files.size(CONFIG) is None else read_object(files, CONFIG)
    )
    documents = _renamed(listing.documents, compiled.names)
    return MappedListing(tuple(compiled.tensors.values()), documents, tuple(_notes(compiled)), compiled)


def _renamed(documents: Documents, names: Mapping[str, Sequence[str]]) -> Documents:
    """The documents with the parameters of every optimizer under their new names."""
    optim = documents.get(optimizer_state.GROUP, {})
    kept = [held.get(key) for held in optim.values() if optimizer_state.is_document(held) for key in _OF_PARAMETERS]
    if any(kept):
        raise StateMismatch(
            "the optimizer has per-parameter values, which programs cannot map", hint="import it without a program"
        )
    renamed = {key: optimizer_state.renamed(held, lambda name: names.get(name, ())) for key, held in optim.items()}
    return {**documents, optimizer_state.GROUP: renamed} if renamed else documents


def _notes(compiled_program: CompiledProgram) -> list[str]:
    notes = [f"the tensors were mapped by the program {compiled_program.program!r}", *compiled_program.notes]
    notes += [f"{lost.elements} elements of {lost.key.name!r} are left out: {lost.why}" for lost in compiled_program.lost]
    if compiled_program.added:
        notes.append(f"created as zeros: {_some(key.name for key in compiled_program.added)}")
    rounded = [cast.key.name for cast in compiled_program.casts if not cast.lossless]
    if rounded:
        notes.append(f"rounded to another dtype, which loses precision: {_some(rounded)}")
    return notes


def _some(names: Iterable[str]) -> str:
    listed = list(names)
    more = f" and {len(listed) - NAMED} more" if len(listed) > NAMED else ""
    return ", ".join(map(repr, listed[:NAMED])) + more
