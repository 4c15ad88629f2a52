"""A node's part of a save whose ranks are on several nodes: the tables of its ranks, in two encodings.

What the ranks hold is the same from save to save, and large: it is stored once, by its digest (a *declaration*). What they
say in this save is short.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import msgspec

from holdfast_formats import decoding
from holdfast_formats.errors import InvalidRequest
from holdfast_formats.staging.slot_table import SlotTable
from holdfast_formats.tensors import StagedFragment

Fragments = Mapping[int, tuple[StagedFragment, ...]]  # by rank


class _Held(msgspec.Struct, frozen=True, array_like=True):
    rank: int
    fragments: tuple[StagedFragment, ...]


class EncodedPart(NamedTuple):
    """`declaration`: what the ranks hold. `said`: the rest of their tables."""

    declaration: bytes
    said: bytes


_decode_held = decoding.decoder(tuple[_Held, ...])
_decode_said = decoding.decoder(tuple[SlotTable, ...])


def encode(tables: Iterable[SlotTable]) -> EncodedPart:
    """A part from the tables of its ranks; the same ranks with the same fragments give the same declaration."""
    ordered = sorted(tables, key=lambda table: table.rank)
    held = [_Held(table.rank, table.fragments) for table in ordered]
    said = [msgspec.structs.replace(table, fragments=()) for table in ordered]
    return EncodedPart(msgspec.json.encode(held), msgspec.json.encode(said))


def decode_declaration(encoded: bytes) -> Fragments:
    """What each rank holds; `InvalidRequest` for what no part has."""
    try:
        held = _decode_held(encoded)
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        raise InvalidRequest(f"what ranks of another node hold cannot be read: {error}") from error
    for one in held:
        for fragment in one.fragments:
            fragment.check()
    return {one.rank: one.fragments for one in held}


def decode(fragments: Fragments, said: bytes) -> Sequence[SlotTable]:
    """The tables of the ranks; `InvalidRequest` where the two do not belong together."""
    try:
        tables = _decode_said(said)
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        raise InvalidRequest(f"a part of a save cannot be read: {error}") from error
    if {table.rank for table in tables} != fragments.keys():
        raise InvalidRequest("a part of a save and its declaration are not of the same ranks")
    return [msgspec.structs.replace(table, fragments=fragments[table.rank]) for table in tables]
