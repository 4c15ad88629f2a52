"""The kinds of foreign checkpoints, and detection of a directory's kind. `known_kinds` lists them all."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from holdfast_formats.errors import InvalidRequest, StateMismatch
from holdfast_formats.files import Files
from holdfast_formats.foreign import file_signs
from holdfast_formats.foreign.listing import ForeignListing


class ReadOptions(NamedTuple):
    """Options of an import: original names and layouts (`as_is`), joining of Paddle's broken flat directories
    (`assemble_flat`), the meaning of 16-bit integers (`int16`, one of `sixteen_bits.WAYS`), the number of ranks with shards
    (`shards`).
    """

    as_is: bool = False
    assemble_flat: bool = False
    int16: str | None = None
    shards: int | None = None


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


def choose(files: Files, wanted: str | None, kinds: tuple[ForeignKind, ...]) -> ForeignKind:
    """The kind of a directory, or the `wanted` one.

    Raises `InvalidRequest` for an unknown kind, `StateMismatch` if none fits, or more than one.
    """
    if wanted is not None:
        found = [kind for kind in kinds if kind.name == wanted]
        if not found:
            raise InvalidRequest(f"there is no kind {wanted!r}", hint=f"one of {', '.join(kind.name for kind in kinds)}")
        return found[0]
    fitting = [kind for kind in kinds if not kind.last and kind.recognises(files)]
    fitting = fitting or [kind for kind in kinds if kind.last and kind.recognises(files)]
    if len(fitting) == 1:
        return fitting[0]
    if fitting:
        raise StateMismatch(
            f"the directory may be {' or '.join(kind.title for kind in fitting)}",
            hint=f"say which: --from {fitting[0].name}, or --from {fitting[1].name}",
        )
    names = files.list("")
    packed = next((said for name in names if (said := file_signs.archive(name))), None)
    raise StateMismatch(
        f"no known checkpoint has these files: {', '.join(names[:8]) or 'none'}{' …' if len(names) > 8 else ''}",
        hint=packed or f"known are {', '.join(kind.title for kind in kinds)}",
    )
