"""Copies of other nodes' slots, as far as they were fetched, in memory of this node that its ranks read."""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterator

from holdfast_formats.digest import digest
from holdfast_formats.errors import NoSpace
from holdfast_formats.staging import arena
from holdfast_formats.staging.arena import Geometry, SlotHeader, SlotState, page_aligned
from holdfast_formats.staging.slot_ranges import SlotRange
from holdfast_formats.staging.wire import HeldPart
from holdfast_service.daemon.arena.memory_checkpoints import MemoryStep
from holdfast_service.daemon.arena.segment import memfd
from holdfast_service.wings.cluster.exchange.holders import HolderLost, HoldingNode
from holdfast_service.wings.cluster.exchange.memory_requests import SlotReport

UNIT_BYTES = 2**18  # fetched as a whole
_ABSENT, _ON_ITS_WAY, _THERE, _LOST = range(4)


class Mirror:
    """One slot of another node: a segment with one slot, with only the fetched data.

    Not thread-safe. Memory without fetched data is not used.
    """

    def __init__(self, of: MemoryStep, slot_report: SlotReport, holder: HoldingNode) -> None:
        """`NoSpace` without room for it."""
        self.of, self.report, self.holder = of, slot_report, holder
        self._geometry = Geometry(1, slot_report.table_at, page_aligned(slot_report.table_bytes))
        self.fd = memfd(f"mirror-{of.run}-rank{slot_report.rank}", self._geometry.segment_bytes)
        try:
            memory = memoryview(mmap.mmap(self.fd, self._geometry.segment_bytes))
        except OSError as error:
            self.close()
            raise NoSpace(f"cannot map {self._geometry.segment_bytes} bytes: {error.strerror}") from error
        arena.write_superblock(memory, self._geometry)
        self._memory = memory
        self.slot = memory[self._geometry.data_offset(0) :]
        self._units = bytearray(-(-slot_report.data_bytes // UNIT_BYTES))

    @property
    def part(self) -> HeldPart:
        """Its description for ranks."""
        return HeldPart(rank=self.report.rank, slot=0, table_digest=self.report.table_digest)

    @property
    def table(self) -> SlotRange:
        return SlotRange(self.report.rank, self.report.table_at, self.report.table_at + self.report.table_bytes)

    def open(self) -> None:
        """The table is there: from now on ranks can read the slot. `HolderLost` if it is another table."""
        report = self.report
        if digest(self.slot[self.table.begin : self.table.end]) != report.table_digest:
            raise HolderLost(f"node {self.holder.node} sent a different table for rank {report.rank} than it had announced")
        seal = int(report.table_digest, 16)
        header = SlotHeader(SlotState.FREE, self.of.step, self.of.attempt, report.data_bytes, report.table_bytes, seal)
        arena.write_header(self._memory, self._geometry, 0, header)

    def has(self, begin: int, end: int) -> bool:
        """Whether the rank has data in this range."""
        return 0 <= begin < end <= self.report.data_bytes

    def claim(self, begin: int, end: int) -> Iterator[SlotRange]:
        """Claim the missing parts of this range; the caller fetches them."""
        units, first = self._units, begin // UNIT_BYTES
        last = -(-end // UNIT_BYTES)
        while (start := units.find(_ABSENT, first, last)) >= 0:
            first = start
            while first < last and units[first] == _ABSENT:
                units[first] = _ON_ITS_WAY
                first += 1
            yield SlotRange(self.report.rank, start * UNIT_BYTES, min(first * UNIT_BYTES, self.report.data_bytes))

    def settle(self, one: SlotRange, is_whole: bool) -> None:
        """Mark a claimed range as fetched, or as missing again."""
        for unit in range(one.begin // UNIT_BYTES, -(-one.end // UNIT_BYTES)):
            self._units[unit] = _THERE if is_whole else _LOST

    def is_settled(self, begin: int, end: int) -> bool:
        return all(unit > _ON_ITS_WAY for unit in self._between(begin, end))

    def is_there(self, begin: int, end: int) -> bool:
        return all(unit == _THERE for unit in self._between(begin, end))

    def _between(self, begin: int, end: int) -> bytearray:
        return self._units[begin // UNIT_BYTES : -(-end // UNIT_BYTES)]

    def close(self) -> None:
        """Free the memory once no rank has it open."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1
