"""Bands of computed tensors: another thread computes the next one while the last one is written."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Executor, Future
from itertools import zip_longest
from typing import NamedTuple

import numpy as np

from holdfast_formats.staging.holdings import Bytes


class ComputedChunk(NamedTuple):
    """Bytes of a target's tensor from `start` on; `ahead`: it may be computed while the band before it is in use."""

    tensor: int
    start: int
    ahead: bool


class ComputedChunks:
    """The bands of one file, in order. For one thread; `make` is only called in one thread of `executor` at a time."""

    def __init__(
        self, bands: Sequence[ComputedChunk], make: Callable[[ComputedChunk], Bytes], executor: Executor | None
    ) -> None:
        """Without an executor each band is computed on request."""
        self._make, self._executor = make, executor
        self._next = dict(zip_longest(bands, bands[1:]))
        self._held: ComputedChunk | None = None
        self._data: Bytes = np.empty(0, np.uint8)
        self._coming: tuple[ComputedChunk, Future[Bytes]] | None = None

    def get(self, band: ComputedChunk) -> Bytes:
        """A band's bytes, valid until the next call; raises what `make` raises."""
        if band != self._held:
            self._held, self._data = None, np.empty(0, np.uint8)  # free the last one first
            coming, self._coming = self._coming, None
            if coming is None or coming[0] != band:
                _wait(coming)
                self._data = self._make(band)
            else:
                self._data = coming[1].result()
            self._held = band
            following = self._next[band]
            if self._executor is not None and following is not None and following.ahead:
                self._coming = following, self._executor.submit(self._make, following)
        return self._data

    def close(self) -> None:
        """Wait until nothing is being computed."""
        _wait(self._coming)


def _wait(coming: tuple[ComputedChunk, Future[Bytes]] | None) -> None:
    """Wait for an unneeded band, or its error."""
    if coming is not None and not coming[1].cancel():
        coming[1].exception()
