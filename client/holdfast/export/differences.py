"""Computes how far two checkpoints are apart, tensor by tensor; the digest of every extent is checked before use (I7)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from holdfast.read.reader import CheckpointReader
from holdfast_formats.disk import coded, codings, verification
from holdfast_formats.disk.manifests import TensorEntry
from holdfast_formats.region import whole
from holdfast_formats.rest import comparing
from holdfast_formats.rest.comparing import Distance, Octets, Pair
from holdfast_formats.rest.measurements import Difference

DECODED_ELEMENTS = 2**20  # at once, of a tensor that is stored in fewer bytes
READ = ("changed", "unknown")  # must be read to compute the distance


def bytes_to_read(pairs: Sequence[Pair]) -> int:
    """Bytes of both checkpoints that `compare` reads for these."""
    return sum(2 * pair.entry.nbytes for pair in pairs if pair.state in READ)


def compare(
    a: CheckpointReader, b: CheckpointReader, pairs: Sequence[Pair], on_bytes: Callable[[int], None] | None = None
) -> Iterator[Difference]:
    """Compute the distances of the tensors, in the order of `pairs`; tensors with equal digests are not read.

    As many tensors are read at once as there are cores, with two extents of each in memory. `on_bytes` is called with the
    bytes read. Raises `CorruptExtent`.
    """

    def one(pair: Pair) -> Difference:
        if pair.state not in READ or pair.a is None or pair.b is None:
            return comparing.difference(pair)
        distance = Distance(pair.a.dtype)
        for left, right in comparing.blocks(_octets(a, pair, pair.a), _octets(b, pair, pair.b)):
            distance.add(left, right)
        return comparing.difference(pair, distance)

    with ThreadPoolExecutor(a.cores, "holdfast-diff") as threads:
        for pair, difference in zip(pairs, threads.map(one, pairs), strict=True):
            if on_bytes is not None and pair.state in READ:
                on_bytes(2 * pair.entry.nbytes)
            yield difference


def _octets(reader: CheckpointReader, pair: Pair, entry: TensorEntry) -> Iterator[Octets]:
    if coded.find(reader.manifest, pair.group, pair.name) is not None:
        for box in codings.slabs(whole(entry.shape), DECODED_ELEMENTS):
            yield reader.read(pair.group, pair.name, box).reshape(-1).view(np.uint8)
        return
    for extent in entry.extents:
        piece = verification.tensor_piece(pair.group, pair.name, entry, extent)
        data = np.empty(piece.length, np.uint8)
        got = reader.source.read_into(piece.file, piece.start, data.data)
        verification.check(piece, data[:got])
        yield data
