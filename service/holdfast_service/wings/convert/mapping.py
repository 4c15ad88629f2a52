"""Maps a foreign checkpoint's tensors: unchanged, or by a program."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from holdfast_formats.errors import CorruptManifest, StateMismatch
from holdfast_formats.files import Files
from holdfast_formats.mapping import optimizer_state
from holdfast_formats.mapping.box_moves import MappedTensor, same
from holdfast_formats.mapping.listing import ForeignListing, TensorKey
from holdfast_formats.programs import CompiledProgram, Program, compile_program, load, read_program

CONFIG = "config.json"
CONFIG_BYTES_MAX = 2**24
NAMED = 3  # tensors in a note

Documents = Mapping[str, Mapping[str, Any]]


class MappedListing(NamedTuple):
    """The tensors that an import writes, and the values beside them. Source tensors of one of `equal` must hold the same
    bytes, and those in `zeros` only zeros, or the program would lose something.
    """

    tensors: tuple[MappedTensor, ...]
    documents: Documents
    notes: tuple[str, ...] = ()
    equal: tuple[tuple[TensorKey, ...], ...] = ()
    zeros: tuple[TensorKey, ...] = ()


def mapped(files: Files, listing: ForeignListing, program: str | None) -> MappedListing:
    """What an import writes; with a `program`, its name or its text, the program's results.

    Raises `InvalidRequest` and `StateMismatch` for an invalid program, or one that does not fit the tensors.
    """
    if program is None:
        return MappedListing(tuple(same(tensor) for tensor in listing.tensors.values()), listing.documents)
    specs = {key: tensor.spec for key, tensor in listing.tensors.items()}
    compiled_program = compile_program(_program(program), specs, _config(files))
    documents = _renamed(listing.documents, compiled_program.names)
    return MappedListing(
        tuple(compiled_program.tensors.values()),
        documents,
        tuple(_notes(compiled_program)),
        compiled_program.equal,
        compiled_program.zeros,
    )


def _program(given: str) -> Program:
    """A program by its text, which has a key in it, or by its name."""
    return read_program(given) if "=" in given else load(given.strip())


def _config(files: Files) -> Mapping[str, Any]:
    size = files.size(CONFIG)
    if size is None:
        return {}
    try:
        document = json.loads(files.read(CONFIG, 0, CONFIG_BYTES_MAX + 1)) if size <= CONFIG_BYTES_MAX else None
    except (ValueError, RecursionError) as error:
        raise CorruptManifest(f"cannot read {CONFIG}: {error}", file=CONFIG) from error
    if not isinstance(document, dict):
        raise CorruptManifest(f"{CONFIG} is not a JSON object of at most {CONFIG_BYTES_MAX} bytes", file=CONFIG)
    return document


def _renamed(documents: Documents, names: Mapping[str, Sequence[str]]) -> Documents:
    """The documents with the parameters of every optimizer under their new names."""
    optim = documents.get(optimizer_state.GROUP, {})
    renamed = {key: _renamed_optimizer(held, names) if _is_optimizer(held) else held for key, held in optim.items()}
    return {**documents, optimizer_state.GROUP: renamed} if renamed else documents


def _is_optimizer(held: Any) -> bool:
    return isinstance(held, dict) and isinstance(held.get("groups"), dict)


def _renamed_optimizer(held: Mapping[str, Any], names: Mapping[str, Sequence[str]]) -> Mapping[str, Any]:
    if any(held.get(key) for key in ("state", "masters", "kinds")):
        raise StateMismatch(
            "the optimizer has values of parameters, which no program maps", hint="import it without a program"
        )
    groups: list[tuple[list[str], Mapping[str, Any]]] = []
    group_of: dict[str, int] = {}
    for number, group in enumerate(value for key, value in held.get("groups", {}).items() if key != "$keys"):
        renamed_names = list(dict.fromkeys(new for name in group.get("params", ()) for new in names.get(name, ())))
        for name in renamed_names:
            if group_of.setdefault(name, number) != number:
                raise StateMismatch(
                    f"{name!r} is made of parameters of two groups of the optimizer", hint="import it without the optimizer"
                )
        groups.append((renamed_names, {key: value for key, value in group.items() if key not in ("params", "$keys")}))
    return {**held, **optimizer_state.document(groups)}


def _notes(compiled_program: CompiledProgram) -> list[str]:
    notes = [f"the tensors were mapped by the program {compiled_program.program!r}", *compiled_program.notes]
    notes += [f"{lost.elements} elements of {lost.key.name!r} are left out: {lost.why}" for lost in compiled_program.lost]
    if compiled_program.added:
        notes.append(f"made of nothing, as zeros: {_some(key.name for key in compiled_program.added)}")
    rounded = [cast.key.name for cast in compiled_program.casts if not cast.lossless]
    if rounded:
        notes.append(f"rounded to another type, which loses digits: {_some(rounded)}")
    return notes


def _some(names: Iterable[str]) -> str:
    listed = list(names)
    more = f" and {len(listed) - NAMED} more" if len(listed) > NAMED else ""
    return ", ".join(map(repr, listed[:NAMED])) + more
