"""The kinds of foreign checkpoints, and detection of a directory's kind. `known_kinds` lists them all."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from holdfast_formats.errors import CheckpointError, InvalidRequest, StateMismatch
from holdfast_formats.files import Files
from holdfast_formats.mapping.listing import ForeignListing
from holdfast_formats.rest.jobs import ReadOptions
from holdfast_service.wings.convert.foreign import leaving_out, unread_kinds
from holdfast_service.wings.convert.foreign.leaving_out import HidingFiles


class ForeignKind(NamedTuple):
    """A kind of checkpoint: its name for `--from`, its description, how it is recognised (by names of files and headers,
    never by loading), and how all of it is listed. A kind that others extend is the `last` choice, if no other recognises
    the directory.
    """

    name: str
    title: str
    recognises: Callable[[Files], bool]
    lists: Callable[[Files, ReadOptions], ForeignListing]
    last: bool = False

    def read(self, files: Files, options: ReadOptions) -> ForeignListing:
        """What a directory holds, without what the options leave out. Raises what `lists` does, the error of a part that
        is refused and not left out, and `InvalidRequest` for a pattern that matches nothing.
        """
        try:
            return self._read(files, options)
        except CheckpointError as error:
            error.hint = error.hint or leaving_out.way_out(error, options, lambda less: self._goes_on(files, less))
            raise

    def _read(self, files: Files, options: ReadOptions) -> ForeignListing:
        hiding = HidingFiles(files, options.leave_out)
        return leaving_out.chosen(self.lists(hiding, options), hiding, options)

    def _goes_on(self, files: Files, options: ReadOptions) -> bool:
        """Whether an import with these options has tensors."""
        try:
            return self.recognises(HidingFiles(files, options.leave_out)) and bool(self._read(files, options).tensors)
        except CheckpointError:
            return False


def kind_named(name: str, kinds: tuple[ForeignKind, ...]) -> ForeignKind:
    """The kind of this name; `InvalidRequest` if it does not exist."""
    for kind in kinds:
        if kind.name == name:
            return kind
    raise InvalidRequest(f"unknown kind {name!r}", hint=f"one of {', '.join(kind.name for kind in kinds)}")


def choose(source: Files, wanted: str | None, kinds: tuple[ForeignKind, ...], leave_out: Sequence[str] = ()) -> ForeignKind:
    """The kind of a directory without the files that are left out, or the `wanted` one.

    Raises `InvalidRequest` for an unknown kind, `StateMismatch` if none fits, or more than one.
    """
    if wanted is not None:
        return kind_named(wanted, kinds)
    files = HidingFiles(source, leave_out)
    fitting = [kind for kind in kinds if not kind.last and kind.recognises(files)]
    fitting = fitting or [kind for kind in kinds if kind.last and kind.recognises(files)]
    if len(fitting) == 1:
        return fitting[0]
    if fitting:
        raise StateMismatch(
            f"the directory may be {' or '.join(kind.title for kind in fitting)}",
            hint=f"choose one: --from {fitting[0].name}, or --from {fitting[1].name}",
        )
    if files.hidden and not files.list(""):
        raise InvalidRequest(
            f"everything in the source was left out, by {' '.join(map(leaving_out.option, leave_out))}",
            hint=f"leave out less: the source has {', '.join(sorted(files.hidden)[: leaving_out.NAMED])}",
        )
    raise unread_kinds.refuse(files, (kind.title for kind in kinds))
