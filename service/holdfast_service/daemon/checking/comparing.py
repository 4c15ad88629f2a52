"""Compares the bytes of two checkpoints; every extent is verified first (I7), two extents in memory at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cached_property
from typing import NamedTuple

import numpy as np

from holdfast_files.opened import open_checkpoint
from holdfast_formats import naming
from holdfast_formats.disk import codings, verification
from holdfast_formats.disk.coded import IN_NO_FILE
from holdfast_formats.disk.manifests import TensorEntry
from holdfast_formats.mapping.coded_tensors import SLAB_ELEMENTS, tensors_of
from holdfast_formats.mapping.committed_files import CommittedFiles
from holdfast_formats.mapping.listing import ForeignTensor, TensorKey
from holdfast_formats.mapping.reading import fetched
from holdfast_formats.region import whole
from holdfast_formats.rest import comparing
from holdfast_formats.rest.comparing import Distance, Octets, Pair
from holdfast_formats.rest.measurements import Difference
from holdfast_service.storage import Tier

READ = ("changed", "unknown")  # what has to be read to say how far it is apart


class ComparedCheckpoint(NamedTuple):
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
    decoded = [_Decoded(tier, side) for side in sides]
    for pair in pairs:
        if pair.state not in READ or pair.a is None or pair.b is None:
            yield comparing.difference(pair)
            continue
        distance = Distance(pair.a.dtype)
        left, right = (
            opened.octets(pair) if entry.file == IN_NO_FILE else _octets(tier, side, pair, entry)
            for opened, side, entry in zip(decoded, sides, (pair.a, pair.b), strict=True)
        )
        for a, b in comparing.blocks(left, right):
            distance.add(a, b)
            if on_bytes is not None:
                on_bytes(a.nbytes + b.nbytes)
        yield comparing.difference(pair, distance)


class _Decoded:
    """The values of a compact checkpoint's tensors. Its manifest is read with the first of them."""

    def __init__(self, tier: Tier, side: ComparedCheckpoint) -> None:
        self._tier, self._side = tier, side

    @cached_property
    def _opened(self) -> tuple[CommittedFiles, Mapping[TensorKey, ForeignTensor]]:
        manifest = open_checkpoint(self._tier, self._side.directory).manifest
        files = CommittedFiles(self._tier, manifest, self._side.directory)
        return files, tensors_of(manifest)

    def octets(self, pair: Pair) -> Iterator[Octets]:
        files, tensors = self._opened
        tensor = tensors[TensorKey(pair.group, pair.name)]
        for box in codings.slabs(whole(tensor.spec.shape), SLAB_ELEMENTS):
            yield fetched(files, tensor, box).reshape(-1).view(np.uint8)


def _octets(tier: Tier, side: ComparedCheckpoint, pair: Pair, entry: TensorEntry) -> Iterator[Octets]:
    for extent in entry.extents:
        piece = verification.tensor_piece(pair.group, pair.name, entry, extent)
        data = tier.read(f"{side.directory}/{piece.file}", piece.start, piece.length)
        verification.check(piece, data)
        yield np.frombuffer(data, np.uint8)
