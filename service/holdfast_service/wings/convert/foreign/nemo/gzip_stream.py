"""The bytes of a gzip file at any place, without unpacking it to the disk.

The whole file is decompressed once. States of the decompressor are kept at some distance from each other, from which reads
go on. Memory is bounded: a state takes about 100 KiB.
"""

from __future__ import annotations

import zlib
from bisect import bisect_right
from threading import Lock
from typing import Any, NamedTuple

from holdfast_formats.errors import CheckpointError, CorruptManifest, LimitExceeded
from holdfast_formats.files import Files

MAGIC = b"\x1f\x8b"
READ_BYTES = 2**16  # of compressed bytes at once
MADE_BYTES = 2**20  # of decompressed bytes at once
DISTANCE_BYTES = 2**24  # between two states, doubled whenever there are too many
STATES_MAX = 256
BOMB_RATIO, BOMB_BYTES = 64, 2**26  # weights are hardly compressed: more than both is refused
_GZIP = 16 + zlib.MAX_WBITS


class _State(NamedTuple):
    """A decompressor before byte `at` of its output, which reads on from byte `next` of the file."""

    at: int
    next: int
    inflate: Any

    def copy(self) -> _State:
        return self._replace(inflate=self.inflate.copy())


class GzipStream:
    """One file's content; `size` is its length. Safe for threads, which wait for each other.

    Construction reads the whole file. `CorruptManifest` for one that is damaged or cut, `LimitExceeded` for a bomb.
    """

    def __init__(self, files: Files, path: str) -> None:
        self._files, self._path, self._lock = files, path, Lock()
        self._distance = DISTANCE_BYTES
        self._last = _State(0, 0, zlib.decompressobj(_GZIP))
        self._states = [self._last.copy()]
        most = max(BOMB_BYTES, BOMB_RATIO * (files.size(path) or 0))
        while self._more():
            self._note()
            if self._last.at > most:
                what = f"{path} unpacks to over {most} bytes, {BOMB_RATIO} times its size"
                raise LimitExceeded(what, hint="unpack it yourself, and import the directory", file=path)
        self.size = self._last.at

    def read_into(self, offset: int, buffer: memoryview) -> int:
        """Fill `buffer` from byte `offset` on; fewer bytes only at the end."""
        with self._lock:
            if not self._last.at <= offset < self._last.at + self._distance:
                self._last = self._states[bisect_right([state.at for state in self._states], offset) - 1].copy()
            done = 0
            while done < buffer.nbytes:
                data = self._more(max(1, min(MADE_BYTES, offset + buffer.nbytes - self._last.at)))
                if not data:
                    break
                wanted = data[max(0, offset - (self._last.at - len(data))) :]
                buffer[done : done + len(wanted)] = wanted
                done += len(wanted)
            return done

    def _more(self, length: int = MADE_BYTES) -> bytes:
        """At most so many of the next bytes; empty only at the end."""
        at, start, inflate = self._last
        while True:
            if inflate.eof:
                self._check_end(start - len(inflate.unused_data))
                return b""
            packed = inflate.unconsumed_tail
            if not packed:
                packed = self._files.read(self._path, start, READ_BYTES)
                start += len(packed)
            try:
                data: bytes = inflate.decompress(packed, length)
            except zlib.error as error:
                raise self._damaged(f"cannot be decompressed at byte {start - len(packed)}: {error}") from error
            self._last = _State(at + len(data), start, inflate)
            if data:
                return data
            if not packed and not inflate.eof:
                raise self._damaged(f"ends at byte {start}, in the middle of its content")

    def _check_end(self, end: int) -> None:
        if end != self._files.size(self._path):
            raise self._damaged(f"goes on at byte {end}, after the end of its content")

    def _note(self) -> None:
        """Keep the state, if the last one is far enough away."""
        if self._last.at - self._states[-1].at < self._distance:
            return
        self._states.append(self._last.copy())
        if len(self._states) > STATES_MAX:
            self._states = self._states[::2]
            self._distance *= 2

    def _damaged(self, what: str) -> CheckpointError:
        return CorruptManifest(f"{self._path} {what}", hint="copy the file again: it is damaged", file=self._path)
