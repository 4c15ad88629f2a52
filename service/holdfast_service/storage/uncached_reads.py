"""One-time reads: large reads bypass the page cache, which others need."""

from __future__ import annotations

import mmap
import threading

from holdfast_files.direct import ALIGNMENT
from holdfast_formats.files import Files

from .hub_snapshot import HubSnapshot
from .posix import DIRECT_BYTES_MIN, PosixTier
from .tier import Buffer, octets

SCRATCH_BYTES = 2**23  # of each thread that reads


def read_once(place: Files) -> Files:
    """The same place, for a caller that reads all of it once."""
    return _ReadOnce(place) if isinstance(place, (PosixTier, HubSnapshot)) else place


class _Scratch(threading.local):
    """Aligned memory of a thread: wanted bytes and their target may begin anywhere."""

    def __init__(self) -> None:
        self.view = memoryview(mmap.mmap(-1, SCRATCH_BYTES))


_scratch = _Scratch()


class _ReadOnce:
    """A directory on POSIX. Cached ranges are read from the page cache."""

    def __init__(self, place: PosixTier | HubSnapshot) -> None:
        self._place, self.label = place, place.label

    def read(self, path: str, offset: int = 0, length: int | None = None) -> bytes:
        return self._place.read(path, offset, length)

    def read_into(self, path: str, offset: int, buffer: Buffer) -> int:
        view = octets(buffer)
        if view.nbytes < DIRECT_BYTES_MIN or self._place.is_cached(path, offset, view.nbytes):
            return self._place.read_into(path, offset, view)
        done = 0
        while done < view.nbytes:
            skipped = (offset + done) % ALIGNMENT
            wanted = min(skipped + view.nbytes - done, SCRATCH_BYTES)
            room = _scratch.view[: wanted + -wanted % ALIGNMENT]
            found = room[skipped : min(self._place.read_stored(path, offset + done - skipped, room), wanted)]
            if not found.nbytes:
                break
            view[done : done + found.nbytes] = found
            done += found.nbytes
        return done

    def read_stored(self, path: str, offset: int, buffer: Buffer) -> int:
        return self._place.read_stored(path, offset, buffer)

    def size(self, path: str) -> int | None:
        return self._place.size(path)

    def list(self, path: str) -> list[str]:
        return self._place.list(path)

    def stamp(self, path: str) -> str:
        return self._place.stamp(path)
