"""One rank's average: its shared memory, with the rank's update and the daemon's accumulator."""

from __future__ import annotations

import mmap
import os
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from holdfast_formats.errors import InvalidRequest, NoSpace
from holdfast_formats.staging import average
from holdfast_formats.staging.arena import PAGE_BYTES, SegmentOwner, SlotState
from holdfast_formats.staging.average import AverageGeometry, AverageRecord, AverageUpdate, UpdateHeader
from holdfast_service.daemon.arena.segment import is_spilled
from holdfast_service.daemon.arena.shares import ShareHolder

PREFIX = "average-"  # of the names under which a keeper holds such segments


class AverageSegment:
    """Owns the mapping and the descriptor. Only the folding thread writes into it."""

    spilled = False

    def __init__(self, fd: int, geometry: AverageGeometry, owner: SegmentOwner, name: str) -> None:
        self.fd, self.geometry, self.owner, self.name = fd, geometry, owner, name
        self.holder = ShareHolder(owner.run)  # whose share it counts for
        try:
            self._map = mmap.mmap(fd, geometry.segment_bytes)
        except OSError as error:
            raise NoSpace(f"cannot map {geometry.segment_bytes} bytes: {error.strerror}", hint="free memory") from error
        self.memory = memoryview(self._map)
        octets = np.frombuffer(self.memory, np.uint8)
        self._update = octets[geometry.update_offset : geometry.accumulator_offset]
        self._accumulator = octets[geometry.accumulator_offset : geometry.journal_offset]
        self._journal = octets[geometry.journal_offset : geometry.segment_bytes]
        self._table: tuple[int, AverageUpdate] | None = None

    @classmethod
    def make(cls, fd: int, geometry: AverageGeometry, owner: SegmentOwner, name: str) -> AverageSegment:
        """An empty average in the memory of `fd`, which belongs to it, also if this raises."""
        try:
            segment = cls(fd, geometry, owner, name)
        except NoSpace:
            os.close(fd)
            raise
        average.write_superblock(segment.memory, geometry, owner)
        return segment

    @classmethod
    def adopt(cls, fd: int, name: str) -> AverageSegment:
        """An average of an earlier daemon. `InvalidRequest` if it is none; then the descriptor stays the caller's."""
        if is_spilled(fd):
            raise InvalidRequest("an average in a file")
        with mmap.mmap(fd, PAGE_BYTES, prot=mmap.PROT_READ) as page, memoryview(page) as seen:
            geometry, owner = average.read_superblock(seen), average.read_owner(seen)
        if geometry.segment_bytes > os.fstat(fd).st_size:
            raise InvalidRequest("a truncated average")
        return cls(fd, geometry, owner, name)

    def count_for(self, holder: ShareHolder) -> None:
        """Its memory counts for this holder's share."""
        self.holder = holder

    @property
    def bytes(self) -> int:
        return self.geometry.segment_bytes

    @property
    def touched_bytes(self) -> int:
        return min(os.fstat(self.fd).st_blocks * 512, self.bytes)

    @property
    def record(self) -> AverageRecord:
        return average.read_record(self.memory)

    @property
    def header(self) -> UpdateHeader:
        """The rank's words; an invalid header counts as a free one."""
        try:
            return average.read_rank(self.memory)
        except InvalidRequest:
            average.free(self.memory)
            return average.read_rank(self.memory)

    def brings(self, number: int) -> bool:
        header = self.header
        return header.state is SlotState.SEALED and header.number == number

    def update(self) -> AverageUpdate:
        """The sealed update; `InvalidRequest` if it is another rank's, or incomplete."""
        header = self.header
        if self._table is None or self._table[0] != header.seal:
            average_update = average.decode_update(average.read_table(self.memory, self.geometry), self.geometry.data_bytes)
            if average_update.owner != self.owner or average_update.number != header.number:
                raise InvalidRequest(f"an update of {average_update.owner} in the average of {self.owner}")
            self._table = header.seal, average_update
        return self._table[1]

    def brought(self, offset: int, size: int) -> NDArray[np.uint8]:
        """Bytes of the update."""
        return self._update[offset : offset + size]

    def kept(self, offset: int, size: int) -> NDArray[np.uint8]:
        """Bytes of the accumulator."""
        return self._accumulator[offset : offset + size]

    def journal(self, size: int) -> NDArray[np.uint8]:
        """The first bytes of the journal."""
        return self._journal[:size]

    def write(self, record: AverageRecord) -> None:
        """Replace the record."""
        average.write_record(self.memory, record)

    def free(self) -> None:
        """The update is processed: its rank may bring another one."""
        average.free(self.memory)

    def is_at(self, fd: int) -> bool:
        """Whether a descriptor is of this memory."""
        return os.path.sameopenfile(self.fd, fd)

    def close(self) -> None:
        """Free the memory, once the last view of it is gone."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


def consistent(segments: Sequence[AverageSegment]) -> bool:
    """Whether the averages of all ranks of a world are at the same update, or at two consecutive ones."""
    numbers = {segment.record.number for segment in segments}
    return max(numbers) - min(numbers) <= 1
