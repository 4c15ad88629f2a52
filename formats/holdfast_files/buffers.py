"""Page-aligned, reusable buffers (windows) between slots and disk, in bounded memory."""

from __future__ import annotations

import mmap
import queue
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import numpy as np

from holdfast_formats.disk.manifests import EXTENT_BYTES_MAX
from holdfast_formats.staging.holdings import Bytes

ALIGNMENT_MAX = 2**16  # of any tier that is written through windows
WINDOW_BYTES = EXTENT_BYTES_MAX + 2 * ALIGNMENT_MAX  # whole extents, and what aligning both ends adds


class BufferPool:
    """A ring of `count` windows, each made when it is first needed. A thread that needs one waits until one is free."""

    def __init__(self, count: int) -> None:
        self._free: queue.LifoQueue[Bytes | None] = queue.LifoQueue()
        for _ in range(count):
            self._free.put(None)

    @contextmanager
    def taken(self) -> Iterator[Bytes]:
        """A window; its contents are left from its last use."""
        held = self._free.get()
        window = page_aligned(WINDOW_BYTES) if held is None else held
        try:
            yield window
        finally:
            self._free.put(window)


def page_aligned(size: int) -> Bytes:
    """New memory of its own pages, huge ones where the system has them."""
    # Private: kernels rarely make shared memory of huge pages, and from small ones direct writes are a third slower.
    memory: Any = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):  # fewer pages to make and to pin
            memory.madvise(mmap.MADV_HUGEPAGE)
    return np.frombuffer(memory, np.uint8)
