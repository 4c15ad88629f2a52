"""Chunked upload of one slot over HTTP."""

from __future__ import annotations

from typing import Literal, NamedTuple

from holdfast_formats.digest import digest
from holdfast_formats.errors import InvalidRequest
from holdfast_formats.staging import arena, wire
from holdfast_formats.staging.arena import SlotHeader, SlotState
from holdfast_service.daemon.arena.segment import ArenaSegment

Part = Literal["data", "table"]


class Chunk(NamedTuple):
    """Bytes of one part of an upload, and their digest according to the sender."""

    offset: int
    data: bytes | bytearray | memoryview
    digest: str


class SlotUpload:
    """Upload of one slot: its progress and outcome."""

    def __init__(self, number: int, step: int, segment: ArenaSegment, turn: int) -> None:
        self.number, self.step, self.segment, self.turn = number, step, segment, turn
        self.slot = -1
        self.received: dict[str, int] = {"data": 0, "table": 0}
        self.sealed = False
        self.outcome: wire.Outcome | None = None

    def lease(self, slot: int) -> None:
        """The saver has given it this slot."""
        self.slot = slot

    def seal(self, attempt: int, table_digest: str) -> None:
        """All bytes have come. `InvalidRequest` if those of the table do not match the digest."""
        data_bytes, table_bytes = self.received["data"], self.received["table"]
        if digest(self.span("table")[:table_bytes]) != table_digest:
            raise InvalidRequest("the table does not match its digest")
        header = SlotHeader(SlotState.LEASED, self.step, attempt, data_bytes, table_bytes, 0)
        arena.seal(self.segment.memory, self.segment.geometry, self.slot, header, table_digest)
        self.sealed = True

    def end(self, outcome: wire.Outcome) -> None:
        self.outcome = outcome

    def span(self, part: Part) -> memoryview:
        geometry = self.segment.geometry
        if part == "data":
            start, length = geometry.data_offset(self.slot), geometry.data_bytes
        else:
            start, length = geometry.table_offset(self.slot), geometry.table_bytes_max
        return self.segment.memory[start : start + length]
