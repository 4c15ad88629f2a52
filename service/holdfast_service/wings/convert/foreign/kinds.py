"""The kinds of foreign checkpoints, and detection of a directory's kind. `known_kinds` lists them all."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from holdfast_formats.errors import InvalidRequest, StateMismatch
from holdfast_formats.files import Files
from holdfast_formats.mapping.listing import ForeignListing
from holdfast_formats.rest.jobs import ReadOptions
from holdfast_service.wings.convert.foreign import file_signs


class ForeignKind(NamedTuple):
    """A kind of checkpoint: its name for `--from`, its description, how it is recognised (by names of files and headers,
    never by loading), and how it is read. A kind that others extend is the `last` choice, if no other recognises the
    directory.
    """

    name: str
    title: str
    recognises: Callable[[Files], bool]
    read: Callable[[Files, ReadOptions], ForeignListing]
    last: bool = False


def kind_named(name: str, kinds: tuple[ForeignKind, ...]) -> ForeignKind:
    """The kind of this name; `InvalidRequest` if it does not exist."""
    for kind in kinds:
        if kind.name == name:
            return kind
    raise InvalidRequest(f"unknown kind {name!r}", hint=f"one of {', '.join(kind.name for kind in kinds)}")


def choose(files: Files, wanted: str | None, kinds: tuple[ForeignKind, ...]) -> ForeignKind:
    """The kind of a directory, or the `wanted` one.

    Raises `InvalidRequest` for an unknown kind, `StateMismatch` if none fits, or more than one.
    """
    if wanted is not None:
        return kind_named(wanted, kinds)
    fitting = [kind for kind in kinds if not kind.last and kind.recognises(files)]
    fitting = fitting or [kind for kind in kinds if kind.last and kind.recognises(files)]
    if len(fitting) == 1:
        return fitting[0]
    if fitting:
        raise StateMismatch(
            f"the directory may be {' or '.join(kind.title for kind in fitting)}",
            hint=f"choose one: --from {fitting[0].name}, or --from {fitting[1].name}",
        )
    names = files.list("")
    packed = next((archive for name in names if (archive := file_signs.archive(name))), None)
    raise StateMismatch(
        f"no known kind of checkpoint has these files: {', '.join(names[:8]) or 'none'}{' …' if len(names) > 8 else ''}",
        hint=packed or f"known kinds: {', '.join(kind.title for kind in kinds)}",
    )
