"""Compare the bytes of two checkpoints; every extent is verified first (I7), two extents in memory at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

import numpy as np

from holdfast_formats import naming
from holdfast_formats.disk import verification
from holdfast_formats.disk.manifest import TensorEntry
from holdfast_formats.rest import comparing
from holdfast_formats.rest.comparing import Distance, Octets, Pair
from holdfast_formats.rest.observed import Difference
from holdfast_service.storage import Tier

READ = ("changed", "unknown")  # what has to be read to say how far it is apart


class ComparedCheckpoint(NamedTuple):
    """A checkpoint of the tier, as one of two."""

    run: str
    step: int

    @property
    def directory(self) -> str:
        return naming.checkpoint_path(self.run, self.step)


def bytes_to_read(pairs: Iterable[Pair]) -> int:
    """Bytes of both checkpoints that `compare` reads for these."""
    return sum(2 * pair.entry.nbytes for pair in pairs if pair.state in READ)


def compare(
    tier: Tier,
    sides: tuple[ComparedCheckpoint, ComparedCheckpoint],
    pairs: Iterable[Pair],
    on_bytes: Callable[[int], None] | None = None,
) -> Iterator[Difference]:
    """Compute how much the tensors differ; tensors with equal digests are not read.

    `on_bytes` is called with the number of bytes read, after each block, and may stop it by raising. Raises
    `CorruptExtent` and `StorageFailed`.
    """
    for pair in pairs:
        if pair.state not in READ or pair.a is None or pair.b is None:
            yield comparing.difference(pair)
            continue
        distance = Distance(pair.a.dtype)
        left = _octets(tier, sides[0], pair, pair.a)
        for a, b in comparing.blocks(left, _octets(tier, sides[1], pair, pair.b)):
            distance.add(a, b)
            if on_bytes is not None:
                on_bytes(a.nbytes + b.nbytes)
        yield comparing.difference(pair, distance)


def _octets(tier: Tier, side: ComparedCheckpoint, pair: Pair, entry: TensorEntry) -> Iterator[Octets]:
    for extent in entry.extents:
        piece = verification.tensor_piece(pair.group, pair.name, entry, extent)
        data = tier.read(f"{side.directory}/{piece.file}", piece.start, piece.length)
        verification.check(piece, data)
        yield np.frombuffer(data, np.uint8)
