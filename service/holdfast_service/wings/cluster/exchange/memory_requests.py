"""Requests for another node's in-memory checkpoint: which slots it holds, and ranges of them.

Bytes come as those of a round do (`ranges`). Places in a slot count from its first byte of data; its table is at `table_at`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import msgspec

from holdfast_formats import decoding
from holdfast_formats.staging.arena import SEGMENT_BYTES_MAX, page_aligned
from holdfast_formats.staging.slot_ranges import SlotRange
from holdfast_formats.staging.slot_table import TABLE_BYTES_MAX
from holdfast_service.daemon.arena.memory_checkpoints import MemoryStep

SLOTS_PATH = "/held"
BYTES_PATH = "/held/bytes"
SLOTS_BYTES_MAX = 2**20  # of an answer


class SlotReport(NamedTuple):
    rank: int
    table_digest: str
    table_at: int
    data_bytes: int
    table_bytes: int

    def is_possible(self, of: MemoryStep) -> bool:
        """Whether this description is possible for a slot of this save."""
        sizes = (self.data_bytes <= self.table_at <= SEGMENT_BYTES_MAX, 0 < self.table_bytes <= TABLE_BYTES_MAX)
        aligned = self.table_at == page_aligned(self.table_at)
        return 0 <= self.rank < of.world and self.data_bytes >= 0 and aligned and all(sizes)


class SlotReports(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    slots: tuple[SlotReport, ...]


class SlotsRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    of: MemoryStep


class MemoryRangesRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Rank, begin and end of each range; `tables` are the digests of the intended slots' tables."""

    of: MemoryStep
    tables: dict[int, str]
    ranges: tuple[tuple[int, int, int], ...]


decode_slots_asked = decoding.decoder(SlotsRequest)
decode_slots = decoding.decoder(SlotReports)
decode_ranges_asked = decoding.decoder(MemoryRangesRequest)


def encode_slots_asked(of: MemoryStep) -> bytes:
    return msgspec.json.encode(SlotsRequest(of))


def encode_slots(slots: Sequence[SlotReport]) -> bytes:
    return msgspec.json.encode(SlotReports(tuple(slots)))


def encode_ranges_asked(of: MemoryStep, tables: Mapping[int, str], ranges: Sequence[SlotRange]) -> bytes:
    return msgspec.json.encode(
        MemoryRangesRequest(of, dict(tables), tuple((one.rank, one.begin, one.end) for one in ranges))
    )
