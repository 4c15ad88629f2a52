"""Computes how far two checkpoints are apart, tensor by tensor; every extent is verified before it is compared (I7)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from threading import Lock
from typing import NamedTuple

import numpy as np

from holdfast_files.opened import join
from holdfast_formats.disk import verification
from holdfast_formats.disk.coded import IN_NO_FILE
from holdfast_formats.disk.manifests import TensorEntry
from holdfast_formats.files import Files
from holdfast_formats.rest import comparing, histograms
from holdfast_formats.rest.comparing import Distance, Octets, Pair
from holdfast_formats.rest.measurements import Difference, TensorHistogram

READ = ("changed", "unknown")  # must be read to compute the distance


class ComparedFiles(NamedTuple):
    """A checkpoint's files in a directory. `decoded` returns the values of a tensor that is stored in fewer bytes."""

    files: Files
    directory: str
    decoded: Callable[[Pair], Iterator[Octets]]


def bytes_to_read(pairs: Iterable[Pair]) -> int:
    """Bytes of both checkpoints that `compare` reads for these."""
    return sum(2 * pair.entry.nbytes for pair in pairs if pair.state in READ)


def compare(
    a: ComparedFiles,
    b: ComparedFiles,
    pairs: Iterable[Pair],
    on_bytes: Callable[[int], None] = lambda size: None,
    threads: int = 1,
) -> Iterator[Difference]:
    """Compute the distances of the tensors, in the order of `pairs`; tensors with equal digests are not read.

    Each thread reads one tensor, with two extents of it in memory. `on_bytes` is called after each block, by one thread at a
    time, and may stop the comparison by raising. Raises `CorruptExtent` and `StorageFailed`.
    """
    lock = Lock()

    def one(pair: Pair) -> Difference:
        if pair.state not in READ or pair.a is None or pair.b is None:
            return comparing.difference(pair)
        distance = Distance(pair.a.dtype)
        for left, right in comparing.blocks(_octets(a, pair, pair.a), _octets(b, pair, pair.b)):
            distance.add(left, right)
            with lock:
                on_bytes(left.nbytes + right.nbytes)
        return comparing.difference(pair, distance)

    if threads == 1:
        yield from map(one, pairs)
        return
    with ThreadPoolExecutor(threads, "holdfast-diff") as pool:
        yield from pool.map(one, pairs)


def histogram(b: ComparedFiles, pair: Pair, a: ComparedFiles | None = None) -> TensorHistogram:
    """Of the values of b's tensor; with `a`, of the changes from a's to b's, which have one shape and dtype. Every byte is
    verified, and read twice. Raises `CorruptExtent` and `StorageFailed`.
    """

    def read() -> Iterator[histograms.Values]:
        assert pair.b is not None
        after = _octets(b, pair, pair.b)
        if a is None or pair.a is None:
            return histograms.values(after, pair.b.dtype)
        return histograms.changes(_octets(a, pair, pair.a), after, pair.b.dtype)

    return histograms.histogram(read)


def _octets(side: ComparedFiles, pair: Pair, entry: TensorEntry) -> Iterator[Octets]:
    if entry.file == IN_NO_FILE:
        yield from side.decoded(pair)
        return
    for extent in entry.extents:
        piece = verification.tensor_piece(pair.group, pair.name, entry, extent)
        data = np.empty(piece.length, np.uint8)
        size = side.files.read_into(join(side.directory, piece.file), piece.start, data.data)
        verification.check(piece, data[:size])
        yield data
