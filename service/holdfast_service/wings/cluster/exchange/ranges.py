"""Requests for ranges of the slots of a round, and the encoding of their bytes.

The response is the ranges one after the other. After each `CHUNK_BYTES` of a range, and at its end, comes the digest of the
bytes since the last one, so that changes in transit are detected.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import msgspec

from holdfast_formats import decoding
from holdfast_formats.digest import DIGITS
from holdfast_formats.staging.slot_ranges import SlotRange

CHUNK_BYTES = 2**22
REQUEST_BYTES_MAX = 2**22
PATH = "/rounds/{}/bytes"


class RangesRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Rank, begin and end of each range."""

    ranges: tuple[tuple[int, int, int], ...]


decode_asked = decoding.decoder(RangesRequest)


def encode_asked(ranges: Sequence[SlotRange]) -> bytes:
    return msgspec.json.encode(RangesRequest(tuple((one.rank, one.begin, one.end) for one in ranges)))


def chunks(begin: int, end: int) -> Iterator[tuple[int, int]]:
    for low in range(begin, end, CHUNK_BYTES):
        yield low, min(low + CHUNK_BYTES, end)


def answer_bytes(ranges: Sequence[SlotRange]) -> int:
    return sum(one.length + DIGITS * -(-one.length // CHUNK_BYTES) for one in ranges)
