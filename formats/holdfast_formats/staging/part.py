"""A node's part of a save whose ranks are on several nodes: the tables of its ranks, in two encodings.

Holdings are the same from save to save, and large: they are stored once, by their digest (`declaration`). The rest of
the tables is short.
"""

from __future__ import annotations

import hashlib
import threading
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import msgspec
import numpy as np

from holdfast_formats import decoding
from holdfast_formats.errors import InvalidRequest
from holdfast_formats.staging import declaration, replica_claims
from holdfast_formats.staging.declaration import Declaration
from holdfast_formats.staging.slot_table import SlotTable


class EncodedPart(NamedTuple):
    """`declaration`: the ranks' holdings. `said`: the rest of their tables."""

    declaration: bytes
    said: bytes


class DecodedPart(NamedTuple):
    """`said` are the ranks' tables without their holdings, in the order of the declaration."""

    declaration: Declaration
    said: Sequence[SlotTable]

    @property
    def tables(self) -> list[SlotTable]:
        """The tables as in the ranks' slots."""
        return [
            msgspec.structs.replace(table, fragments=self.declaration.fragments(position))
            for position, table in enumerate(self.said)
        ]


_decode_said = decoding.decoder(tuple[SlotTable, ...])


REMEMBERED_MAX = 4  # runs and groups that are saved in turn
_remembered: OrderedDict[bytes, bytes] = OrderedDict()
_lock = threading.Lock()


def encode(tables: Iterable[SlotTable]) -> EncodedPart:
    """A part from the tables of its ranks; the same ranks with the same fragments give the same declaration."""
    ordered = sorted(tables, key=lambda table: table.rank)
    tables_apart = [msgspec.structs.replace(table, fragments=()) for table in ordered]
    return EncodedPart(_declared(ordered), msgspec.json.encode(tables_apart))


def _declared(ordered: Sequence[SlotTable]) -> bytes:
    """The declaration of these tables. It mostly equals the previous save's, which is checked in a fifth of the time."""
    state = hashlib.sha256()
    for table in ordered:
        state.update(hashlib.sha256(msgspec.json.encode([table.rank, table.fragments])).digest())
    key = state.digest()
    with _lock:
        known = _remembered.pop(key, None)
    encoded = known or declaration.encode({table.rank: table.fragments for table in ordered})
    with _lock:
        _remembered[key] = encoded
        while len(_remembered) > REMEMBERED_MAX:
            _remembered.popitem(last=False)
    return encoded


def decode(declared: Declaration, data: bytes) -> DecodedPart:
    """A part; `InvalidRequest` if the two do not belong together."""
    try:
        tables = _decode_said(data)
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        raise InvalidRequest(f"a part of a save cannot be read: {error}") from error
    if tuple(table.rank for table in tables) != declared.ranks:
        raise InvalidRequest("a part of a save and its declaration are not of the same ranks")
    for table, boxes in zip(tables, np.diff(declared.first_box).tolist(), strict=True):
        if len(table.digests) not in (0, boxes * replica_claims.ROW_BYTES):
            raise InvalidRequest(f"{len(table.digests)} bytes of digests are not those of {boxes} boxes")
    return DecodedPart(declared, tables)
