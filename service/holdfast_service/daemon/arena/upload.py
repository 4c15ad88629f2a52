"""Chunked upload of one slot over HTTP."""

from __future__ import annotations

from typing import Literal, NamedTuple

from holdfast_formats.staging import wire
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

    def span(self, part: Part) -> memoryview:
        geometry = self.segment.geometry
        if part == "data":
            start, length = geometry.data_offset(self.slot), geometry.data_bytes
        else:
            start, length = geometry.table_offset(self.slot), geometry.table_bytes_max
        return self.segment.memory[start : start + length]
