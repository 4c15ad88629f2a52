"""What becomes of a foreign checkpoint's tensors: each stays what it is, under its name."""

from __future__ import annotations

from holdfast_formats.errors import InvalidRequest
from holdfast_formats.foreign.listing import ForeignListing
from holdfast_formats.foreign.moves import MappedTensor, same


def mapped(listing: ForeignListing, program: str | None) -> tuple[MappedTensor, ...]:
    """The tensors that an import writes; with a `program`, its name or its text, those that it makes of the listing's."""
    if program is not None:
        raise InvalidRequest("this version maps no tensors by a program", hint="leave the program out")
    return tuple(same(tensor) for tensor in listing.tensors.values())
