"""Detects changes of a foreign checkpoint's files while it is read, and digests files that are read in order."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from threading import Lock

import numpy as np

from holdfast_formats.digest import digest, running
from holdfast_formats.errors import NoSuchResource, StateMismatch
from holdfast_formats.files import Files
from holdfast_service.daemon.copying.member_sums import MemberPlace, MemberSums
from holdfast_service.storage import Buffer
from holdfast_service.storage.tier import octets

GAP_BYTES_MAX = 2**24  # between what is read of a file: headers and padding, read besides to digest the whole file
AGAIN_BYTES_MAX = 2**26  # a file up to this size is read once more where its digest is not known


class WatchedSource:
    """Files that remember each file's stamp at the first read: size, modification time, inode.

    With `digested`, or for its paths, it also computes the XXH3 digest of whole files from the bytes that pass. Thread-safe;
    bytes of a file that pass out of order are read again for its digest.
    """

    def __init__(
        self, source: Files, digested: bool | Callable[[str], bool] = False, shown: Callable[[str], str] = str
    ) -> None:
        """`shown`: a path as errors name it."""
        self._source, self._shown = source, shown
        self._digested = digested if callable(digested) else lambda path: digested
        self._stamps: dict[str, str] = {}
        self._names: dict[str, list[str]] = {}
        self._streams: dict[str, _FileDigest] = {}
        self._members = MemberSums()
        self._passing = Lock()

    @property
    def label(self) -> str:
        return self._source.label

    def read(self, path: str, offset: int = 0, length: int | None = None) -> bytes:
        self.stamp(path)
        return self._source.read(path, offset, length)

    def read_into(self, path: str, offset: int, buffer: Buffer) -> int:
        stamp = self.stamp(path)
        try:
            read = self._source.read_into(path, offset, buffer)
        except NoSuchResource as error:
            if not stamp:
                raise
            raise self._changed(path, "is gone") from error
        with self._passing:
            if self._digested(path):
                self._stream(path).passed(offset, octets(buffer)[:read])
            self._members.passed(path, offset, octets(buffer)[:read])
        return read

    def watch(self, stored: Iterable[MemberPlace]) -> None:
        """Compute the CRC-32 of these members from the bytes that pass from now on."""
        self._members.watch(stored)

    def check_members(self, stored: Iterable[MemberPlace]) -> None:
        """`CorruptExtent` unless a watched member has its stated CRC-32.

        Bytes that did not pass in order are read. These members are not watched any more afterwards.
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
        """The file's stamp at the first read."""
        if path not in self._stamps:
            self._stamps.setdefault(path, self._source.stamp(path))
        return self._stamps[path]

    def check_unchanged(self, paths: Iterable[str]) -> None:
        """`StateMismatch` if a file has changed since it was first read."""
        for path in paths:
            now = self._source.stamp(path)
            if now != self.stamp(path):
                raise self._changed(path, "changed" if now else "is gone")

    def check_names(self) -> None:
        """`StateMismatch` if a listed directory has gained or lost a file: another process still writes there."""
        for path, names in self._names.items():
            other = sorted(set(names) ^ set(self._source.list(path)))
            if other:
                file = f"{path}/{other[0]}" if path else other[0]
                how = "is gone" if other[0] in names else "has come"
                raise self._changed(file, how)

    def _changed(self, path: str, how: str) -> StateMismatch:
        file = self._shown(path)
        return StateMismatch(
            f"{file} {how} while the source was being read",
            hint="try again when no process is writing to the source",
            file=file,
        )

    def digest_of(self, path: str) -> str | None:
        """The XXH3 digest of a whole file; None if that would cost another pass over a large file."""
        size = self._source.size(path)
        stated = self._stream(path).finished(size)
        if stated is None and size is not None and size <= AGAIN_BYTES_MAX:
            try:
                return digest(self._source.read(path))
            except NoSuchResource:
                return None
        return stated

    def _stream(self, path: str) -> _FileDigest:
        if path not in self._streams:
            self._streams[path] = _FileDigest(self._source, path)
        return self._streams[path]


class _FileDigest:
    """The digest of one file's bytes [0, `at`). A short gap before later bytes is read, too."""

    def __init__(self, source: Files, path: str) -> None:
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
        """Read the gap before `stop`; False if it is too long."""
        if stop - self._at > GAP_BYTES_MAX:
            return False
        gap = np.empty(stop - self._at, np.uint8)
        if self._source.read_into(self._path, self._at, gap) != gap.nbytes:
            return False
        self._running.update(gap.data)
        self._at = stop
        return True
