"""What a kind of foreign checkpoint is, and which kind a directory is. `known_kinds` has them all."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from holdfast_formats.errors import InvalidRequest, StateMismatch
from holdfast_formats.foreign import file_signs
from holdfast_formats.foreign.listing import ForeignFiles, ForeignListing


class ReadOptions(NamedTuple):
    """What a user may ask of an import: names and layouts as they are (`as_is`), Paddle's broken flat directories put
    together (`assemble_flat`), 16-bit integers taken for what they are (`int16`, one of `sixteen_bits.WAYS`), the
    number of ranks whose shards are there (`shards`).
    """

    as_is: bool = False
    assemble_flat: bool = False
    int16: str | None = None
    shards: int | None = None


class ForeignKind(NamedTuple):
    """A kind of checkpoint: its name as `--from` takes it, what people call it, how it is recognised (by names of files and
    headers, never by loading), and how it is read. A kind that others extend is the `last` choice: it is not asked for a
    directory that another one recognises.
    """

    name: str
    title: str
    recognises: Callable[[ForeignFiles], bool]
    read: Callable[[ForeignFiles, ReadOptions], ForeignListing]
    last: bool = False


def choose(files: ForeignFiles, wanted: str | None, kinds: tuple[ForeignKind, ...]) -> ForeignKind:
    """The kind of a directory, or the `wanted` one.

    Raises `InvalidRequest` for a kind that does not exist, `StateMismatch` where none fits, or more than one.
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
