"""Leaves parts of a source out by name: keys of a file, tensors, values and files. What is left out is listed, with the
option that asked for it.

A pattern is a name, or has `*`, `?` and `[…]`. It matches a whole name, or the beginning of one up to a dot or a slash:
`optimizer` leaves out `optimizer.state`. A tensor or value has two names, its own and `GROUP/NAME`.
"""

from __future__ import annotations

import difflib
import re
import shlex
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any, Protocol, runtime_checkable

from holdfast_files.opened import join
from holdfast_formats.errors import CheckpointError, InvalidRequest
from holdfast_formats.files import Files
from holdfast_formats.mapping.listing import FileUse, ForeignListing, ForeignTensor, PartLeftOut, RefusedPart, TensorKey
from holdfast_formats.rest.jobs import ReadOptions

WEIGHTS_ONLY = "--weights-only"
NOT_WEIGHTS = frozenset({"optim", "master", "ema", "extra", ""})
NAMED = 8  # options in one hint
_AGAIN = "copy it again from its source, or save it again with the program that wrote it"
_KEY_ENDS = re.compile(r"[./\[]")  # after a part of a name
_FILE_ENDS = re.compile(r"/")


class HidingFiles:
    """The files of a source without those that are left out, which are noted in `hidden` once they are listed."""

    def __init__(self, files: Files, patterns: Sequence[str]) -> None:
        self._files, self._patterns = files, patterns
        self.hidden: dict[str, tuple[str, ...]] = {}

    @property
    def label(self) -> str:
        return self._files.label

    def size(self, path: str) -> int | None:
        size = self._files.size(path)
        return None if size is None or self.hides(path) else size

    def stamp(self, path: str) -> str:
        return self._files.stamp(path)

    def list(self, path: str) -> list[str]:
        return [name for name in self._files.list(path) if not self.hides(join(path, name))]

    def read(self, path: str, offset: int = 0, length: int | None = None) -> bytes:
        return self._files.read(path, offset, length)

    def read_into(self, path: str, offset: int, buffer: Any) -> int:
        return self._files.read_into(path, offset, buffer)

    def read_stored(self, path: str, offset: int, buffer: Any) -> int:
        return self._files.read_stored(path, offset, buffer)

    def hides(self, path: str) -> bool:
        """Whether a path is left out, itself or with a directory above it."""
        found = matching(self._patterns, (path,), _FILE_ENDS)
        self.hidden |= found
        return bool(found)

    def bytes_of(self, path: str) -> int:
        return self._files.size(path) or 0


@runtime_checkable
class _Hiding(Protocol):
    def hides(self, path: str) -> bool: ...


def hides(files: Files, path: str) -> bool:
    """Whether a file that a source names is left out of it."""
    return isinstance(files, _Hiding) and files.hides(path)


def matching(patterns: Sequence[str], names: Iterable[str], ends: re.Pattern[str] = _KEY_ENDS) -> dict[str, tuple[str, ...]]:
    """The shortest part of a name that is left out, with the patterns that match; empty if none does."""
    for name in names if patterns else ():
        for part in (*(name[: end.start()] for end in ends.finditer(name) if end.start()), name):
            found = tuple(pattern for pattern in patterns if part == pattern or fnmatchcase(part, pattern))
            if found:
                return {part: found}
    return {}


class LeftOutParts:
    """Decides what is left out, and counts it by the part of its name that a pattern matches."""

    def __init__(self, options: ReadOptions) -> None:
        self._options = options
        self._parts: dict[str, PartLeftOut] = {}

    @property
    def parts(self) -> tuple[PartLeftOut, ...]:
        return tuple(self._parts.values())

    def takes_key(self, key: str, sizes: Iterable[int] = ()) -> bool:
        """Whether a key of the source is left out, with tensors of these `sizes` in bytes below it."""
        found = matching(self._options.leave_out, (key,))
        for part, patterns in found.items():
            self._count(part, tuple(map(option, patterns)), tuple(sizes))
        return bool(found)

    def takes(self, name: str, group: str, tensor: ForeignTensor | None = None) -> bool:
        """Whether a tensor, value or refused part of a group is left out."""
        full, sizes = join(group, name), () if tensor is None else (tensor.spec.nbytes,)
        for part, patterns in matching(self._options.leave_out, (full, name)).items():
            self._count(part if full.startswith(part) else join(group, part), tuple(map(option, patterns)), sizes)
            return True
        if not self._options.weights_only or group not in NOT_WEIGHTS:
            return False
        self._count(full if tensor is None else group, (WEIGHTS_ONLY,), sizes)
        return True

    def _count(self, what: str, options: tuple[str, ...], sizes: tuple[int, ...]) -> None:
        known = self._parts.get(what, PartLeftOut(what, options))
        self._parts[what] = known._replace(tensors=known.tensors + len(sizes), bytes=known.bytes + sum(sizes))


def chosen(listing: ForeignListing, hiding: HidingFiles, options: ReadOptions) -> ForeignListing:
    """The listing without what is left out. Raises the error of a part that is still refused, and `InvalidRequest` for a
    pattern that matches nothing.
    """
    hiding.list("")
    left = LeftOutParts(options)
    refused = [part for part in listing.refused if not left.takes(part.name, part.group)]
    dropped = [part.name for part in listing.refused if not part.group and part not in refused]
    tensors = {key: one for key, one in listing.tensors.items() if not left.takes(key.name, key.group, one)}
    documents = _kept(listing.documents, left)
    of_ranks = {rank: _kept(held, left) for rank, held in listing.rank_documents.items()}
    files = [PartLeftOut(path, tuple(map(option, found)), 0, hiding.bytes_of(path)) for path, found in hiding.hidden.items()]
    left_out = (*listing.left_out, *left.parts, *files)
    _check_used(options.leave_out, left_out, (*_names(listing), *hiding.list("")))
    if refused:
        raise _error(refused)
    hidden = (FileUse(path, "unused", "left out by choice") for path in (*hiding.hidden, *dropped))
    others = (_use(use, tensors) for use in listing.files if use.file not in dropped)
    uses = [*others, *hidden] if left_out else listing.files
    return listing._replace(
        tensors=tensors,
        documents=documents,
        rank_documents={rank: held for rank, held in of_ranks.items() if held},
        files=tuple(uses),
        refused=(),
        left_out=left_out,
    )


def _kept(documents: Mapping[str, Mapping[str, Any]], left: LeftOutParts) -> dict[str, dict[str, Any]]:
    kept = {
        group: {key: one for key, one in held.items() if not left.takes(key, group)} for group, held in documents.items()
    }
    return {group: held for group, held in kept.items() if held or not documents[group]}


def option(pattern: str) -> str:
    """The option that leaves out a name, as a shell reads it."""
    return f"--leave-out{'=' if pattern.startswith('-') else ' '}{shlex.quote(pattern)}"


def way_on(names: Iterable[str], weights: bool = False) -> str:
    """The end of a hint: the options with which an import goes on without these parts; `weights` if they are weights."""
    listed = list(dict.fromkeys(names))
    more = " and more" if len(listed) > NAMED else ""
    return f"go on without: {' '.join(map(option, listed[:NAMED]))}{more}" + ("" if weights else f", or {WEIGHTS_ONLY}")


def way_out(error: CheckpointError, options: ReadOptions, goes_on: Callable[[ReadOptions], bool]) -> str:
    """The hint of an error that has none: the option with which the import `goes_on`, if there is one."""
    for name in (str(error.members[key]) for key in ("tensor", "file") if error.members.get(key)):
        if goes_on(options.model_copy(update={"leave_out": (*options.leave_out, name)})):
            return f"{_AGAIN}; or, if it is not needed, {way_on([name], weights=True)}"
    if goes_on(options.model_copy(update={"weights_only": True})):
        return f"{_AGAIN}; or import the weights alone: {WEIGHTS_ONLY}"
    return _AGAIN


def _error(refused: Sequence[RefusedPart]) -> CheckpointError:
    error = refused[0].error
    weights = any(part.group not in NOT_WEIGHTS for part in refused)
    way = way_on((part.name for part in refused), weights)
    error.hint = f"{error.hint}; or {way}" if error.hint else way
    return error


def _check_used(patterns: Sequence[str], left_out: Iterable[PartLeftOut], names: Sequence[str]) -> None:
    used = {text for part in left_out for text in part.options}
    for pattern in patterns:
        if option(pattern) not in used:
            near = difflib.get_close_matches(pattern, names, 3, 0.5) or sorted(names)[:3]
            raise InvalidRequest(
                f"{option(pattern)} matches nothing in the source",
                hint=f"check the name, such as {', '.join(near)}; --dry-run shows the names",
            )


def _names(listing: ForeignListing) -> list[str]:
    held = {part.name for part in listing.refused} | {key for one in listing.documents.values() for key in one}
    return sorted(held | {key.name for key in listing.tensors})


def _use(use: FileUse, tensors: Mapping[TensorKey, ForeignTensor]) -> FileUse:
    """The use of a file, whose tensors may all be left out."""
    if use.use != "tensors" or use.file in files_of(tensors.values()):
        return use
    return FileUse(use.file, "unused", "all tensors of it are left out")


def files_of(tensors: Collection[ForeignTensor]) -> set[str]:
    """The files that hold the values of these tensors."""
    found = {piece.file for one in tensors for piece in (*one.pieces, *one.copies)}
    inputs = [one for tensor in tensors if tensor.decoder is not None for one in tensor.decoder.inputs]
    return found | files_of(inputs) if inputs else found
