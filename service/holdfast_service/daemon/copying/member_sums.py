"""CRC-32 of members of zip files, computed from bytes that are read anyway."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable
from typing import NamedTuple
from zlib import crc32

import numpy as np
from numpy.typing import NDArray

from holdfast_formats.errors import CorruptManifest
from holdfast_formats.mapping.listing import StoredMember

READ_BYTES = 2**24  # at once, of what has not passed

ReadInto = Callable[[str, int, NDArray[np.uint8]], int]


class MemberPlace(NamedTuple):
    """A member of a zip file, and the file."""

    file: str
    member: StoredMember


class MemberSums:
    """Computes sums of watched members, from bytes read in order. For one thread."""

    def __init__(self) -> None:
        self._sums: dict[str, dict[int, _Sum]] = {}  # by file, and by the member's first byte
        self._starts: dict[str, list[int]] = {}  # the same first bytes, in order

    def watch(self, stored: Iterable[MemberPlace]) -> None:
        touched = set()
        for file, member in stored:
            held = self._sums.setdefault(file, {})
            if member.start not in held:
                held[member.start] = _Sum(member)
                touched.add(file)
        self._order(touched)

    def passed(self, file: str, offset: int, data: memoryview) -> None:
        starts = self._starts.get(file)
        if not starts:
            return
        first = max(bisect_right(starts, offset) - 1, 0)
        for start in starts[first : bisect_left(starts, offset + data.nbytes)]:
            self._sums[file][start].passed(offset, data)

    def check(self, stored: Iterable[MemberPlace], read_into: ReadInto) -> None:
        """Compare these members, and stop watching them; `read_into` reads the missing bytes, and reports them here.

        Raises `CorruptExtent` by file and member.
        """
        touched = set()
        for file, member in stored:
            one = self._sums[file][member.start]
            while one.at < member.stop:
                buffer = np.empty(min(READ_BYTES, member.stop - one.at), np.uint8)
                if read_into(file, one.at, buffer) != buffer.nbytes:
                    raise CorruptManifest(f"{file} was truncated while being read", file=file)
            member.check(file, one.crc)
            del self._sums[file][member.start]
            touched.add(file)
        self._order(touched)

    def _order(self, files: Iterable[str]) -> None:
        for file in files:
            self._starts[file] = sorted(self._sums[file])


class _Sum:
    """The CRC-32 of a member's bytes up to `at`."""

    def __init__(self, member: StoredMember) -> None:
        self.member, self.at, self.crc = member, member.start, 0

    def passed(self, offset: int, data: memoryview) -> None:
        stop = min(offset + data.nbytes, self.member.stop)
        if offset <= self.at < stop:
            self.crc = crc32(data[self.at - offset : stop - offset], self.crc)
            self.at = stop
