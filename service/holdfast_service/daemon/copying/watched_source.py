"""A foreign checkpoint while it is read: notices files that change meanwhile, and digests those that are read in order."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from threading import Lock

import numpy as np

from holdfast_formats.digest import digest, running
from holdfast_formats.errors import NoSuchResource, StateMismatch
from holdfast_service.daemon.copying.member_sums import MemberPlace, MemberSums
from holdfast_service.storage import Buffer, Readable
from holdfast_service.storage.tier import octets

GAP_BYTES_MAX = 2**24  # between what is read of a file: headers and padding, read besides to digest the whole file
AGAIN_BYTES_MAX = 2**26  # a file up to this size is read once more where its digest is not known


class WatchedSource:
    """A `Readable` that remembers of every file, when it is first touched, its stamp: size, time of the last write, inode.

    With `digested`, or for the paths that it is true of, it also computes the XXH3 digest of whole files from the bytes that
    pass. Several threads may read; what of a file passes out of order is read again for its digest.
    """

    def __init__(self, source: Readable, digested: bool | Callable[[str], bool] = False) -> None:
        self._source = source
        self._digested = digested if callable(digested) else lambda path: digested
        self._stamps: dict[str, str] = {}
        self._names: dict[str, list[str]] = {}
        self._streams: dict[str, _FileDigest] = {}
        self._members = MemberSums()
        self._passing = Lock()

    def read(self, path: str, offset: int = 0, length: int | None = None) -> bytes:
        self.stamp(path)
        return self._source.read(path, offset, length)

    def read_into(self, path: str, offset: int, buffer: Buffer) -> int:
        self.stamp(path)
        read = self._source.read_into(path, offset, buffer)
        with self._passing:
            if self._digested(path):
                self._stream(path).passed(offset, octets(buffer)[:read])
            self._members.passed(path, offset, octets(buffer)[:read])
        return read

    def watch(self, stored: Iterable[MemberPlace]) -> None:
        """Sum up the CRC-32 of these members from the bytes that pass from now on."""
        self._members.watch(stored)

    def check_members(self, stored: Iterable[MemberPlace]) -> None:
        """`CorruptExtent`, by file and member, where the bytes of a watched member have not the CRC-32 that is stated.

        What has not passed in order is read for it. Afterwards these members are watched no more.
        """
        self._members.check(stored, self.read_into)

    def read_stored(self, path: str, offset: int, buffer: Buffer) -> int:
        self.stamp(path)
        return self._source.read_stored(path, offset, buffer)

    def size(self, path: str) -> int | None:
        self.stamp(path)
        return self._source.size(path)

    def list(self, path: str) -> list[str]:
        names = self._source.list(path)
        self._names.setdefault(path, names)
        return names

    def stamp(self, path: str) -> str:
        """The file's stamp at the first touch."""
        if path not in self._stamps:
            self._stamps.setdefault(path, self._source.stamp(path))
        return self._stamps[path]

    def check_unchanged(self, paths: Iterable[str]) -> None:
        """`StateMismatch` by name where a file is not what it was when it was first touched."""
        for path in paths:
            if self._source.stamp(path) != self.stamp(path):
                raise StateMismatch(
                    f"{path} changed while it was read", hint="start again when nobody writes to the source", file=path
                )

    def check_names(self) -> None:
        """`StateMismatch` by name where a directory that was listed has got or lost a file: somebody still writes there."""
        for path, names in self._names.items():
            other = sorted(set(names) ^ set(self._source.list(path)))
            if other:
                file = f"{path}/{other[0]}" if path else other[0]
                how = "is gone" if other[0] in names else "has come"
                raise StateMismatch(
                    f"{file} {how} while the source was read", hint="start again when nobody writes to the source", file=file
                )

    def digest_of(self, path: str) -> str | None:
        """The XXH3 digest of a whole file; None where that would cost another pass over a large file."""
        size = self._source.size(path)
        found = self._stream(path).finished(size)
        if found is None and size is not None and size <= AGAIN_BYTES_MAX:
            try:
                return digest(self._source.read(path))
            except NoSuchResource:
                return None
        return found

    def _stream(self, path: str) -> _FileDigest:
        if path not in self._streams:
            self._streams[path] = _FileDigest(self._source, path)
        return self._streams[path]


class _FileDigest:
    """The digest of one file's bytes [0, `at`). What is read behind a short gap brings the gap along."""

    def __init__(self, source: Readable, path: str) -> None:
        self._source, self._path = source, path
        self._running, self._at, self._lost = running(), 0, False

    def passed(self, offset: int, data: memoryview) -> None:
        if self._lost or offset + data.nbytes <= self._at:
            return
        if offset < self._at:
            data, offset = data[self._at - offset :], self._at
        if offset > self._at and not self._bring(offset):
            self._lost = True
            return
        self._running.update(data)
        self._at += data.nbytes

    def finished(self, size: int | None) -> str | None:
        if self._lost or size is None or not self._at or not self._bring(size):
            return None
        return str(self._running.hexdigest())

    def _bring(self, stop: int) -> bool:
        """Read the gap before `stop`; False where it is too long."""
        if stop - self._at > GAP_BYTES_MAX:
            return False
        gap = np.empty(stop - self._at, np.uint8)
        if self._source.read_into(self._path, self._at, gap) != gap.nbytes:
            return False
        self._running.update(gap.data)
        self._at = stop
        return True
