"""Random numbers per element: a draw depends only on seed, model, tensor and flat index.

The generator can be moved ahead, so any stretch of a tensor has its draws without those before it: chunks, kills and the
order of the work change nothing. numpy guarantees the streams of bit generators and of `RandomState`.
"""

from __future__ import annotations

from math import ceil

import numpy as np
from numpy.typing import NDArray
from xxhash import xxh3_128_intdigest

from holdfast_service.wings.merge.scanning import Mask

_PER_NUMBER = 2  # draws that one number of 64 bits gives
_BITS, _UNUSED = 24, 8  # of each draw's 32 bits; F32 has no more precision


class Draws:
    """The uniform draws of one tensor of one model: multiples of 2⁻²⁴ in [0, 1)."""

    def __init__(self, seed: int, model: int, tensor: str) -> None:
        self._key = xxh3_128_intdigest(f"{seed}/{model}/{tensor}".encode())

    def uniform(self, start: int, count: int) -> NDArray[np.float32]:
        """The draws of elements [start, start + count)."""
        values = (self._raw(start, count) >> np.uint32(_UNUSED)).astype(np.float32)
        values *= np.float32(2.0**-_BITS)
        return values

    def below(self, chance: float, start: int, count: int) -> Mask:
        """Where the draws of elements [start, start + count) are below a chance less than 1."""
        mask: Mask = self._raw(start, count) < (ceil(chance * 2**_BITS) << _UNUSED)
        return mask

    def _raw(self, start: int, count: int) -> NDArray[np.uint32]:
        skipped = start % _PER_NUMBER
        generator = np.random.PCG64DXSM(self._key).advance(start // _PER_NUMBER)
        numbers = -(-(skipped + count) // _PER_NUMBER)
        raw = np.random.RandomState(generator).randint(0, 2**64, numbers, np.uint64)
        return raw.astype("<u8", copy=False).view("<u4")[skipped : skipped + count]
