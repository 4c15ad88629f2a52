"""Random numbers that belong to an element: its draw depends on seed, model, tensor and flat index, and on nothing else.

Philox counts instead of remembering, so any stretch of a tensor has its draws without those before it: chunks, kills and the
order of the work change nothing.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from xxhash import xxh3_128_intdigest

_PER_COUNT = 4  # numbers of 64 bits that one count of Philox 4×64 gives


class Draws:
    """The uniform draws of one tensor of one model; `stream` tells several of them apart."""

    def __init__(self, seed: int, model: int, tensor: str) -> None:
        self._key = xxh3_128_intdigest(f"{seed}/{model}/{tensor}".encode())

    def uniform(self, start: int, count: int) -> NDArray[np.float64]:
        """The draws of elements [start, start + count): multiples of 2⁻⁵³ in [0, 1)."""
        skipped = start % _PER_COUNT
        raw = np.random.Philox(key=self._key, counter=start // _PER_COUNT).random_raw(skipped + count)
        bits: NDArray[np.uint64] = raw[skipped:] >> np.uint64(11)
        return bits.astype(np.float64) * 2.0**-53
