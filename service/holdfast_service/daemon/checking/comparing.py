"""Compares the bytes of two checkpoints of the daemon's tier."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cached_property
from typing import NamedTuple

import numpy as np

from holdfast_files import comparing
from holdfast_files.comparing import ComparedFiles
from holdfast_files.opened import open_checkpoint
from holdfast_formats import naming
from holdfast_formats.disk import codings
from holdfast_formats.files import Files
from holdfast_formats.mapping.coded_tensors import SLAB_ELEMENTS, tensors_of
from holdfast_formats.mapping.committed_files import CommittedFiles
from holdfast_formats.mapping.listing import ForeignTensor, TensorKey
from holdfast_formats.mapping.reading import fetched
from holdfast_formats.region import whole
from holdfast_formats.rest.comparing import Octets, Pair
from holdfast_formats.rest.measurements import Difference, TensorHistogram


class ComparedCheckpoint(NamedTuple):
    run: str
    step: int

    @property
    def directory(self) -> str:
        return naming.checkpoint_path(self.run, self.step)


def compare(
    tier: Files,
    sides: tuple[ComparedCheckpoint, ComparedCheckpoint],
    pairs: Iterable[Pair],
    on_bytes: Callable[[int], None] = lambda size: None,
) -> Iterator[Difference]:
    """Compute how much the tensors differ, one at a time."""
    left, right = (_files(tier, side) for side in sides)
    return comparing.compare(left, right, pairs, on_bytes)


def histogram(tier: Files, b: ComparedCheckpoint, pair: Pair, a: ComparedCheckpoint | None = None) -> TensorHistogram:
    """See `comparing.histogram`."""
    return comparing.histogram(_files(tier, b), pair, None if a is None else _files(tier, a))


def _files(tier: Files, side: ComparedCheckpoint) -> ComparedFiles:
    return ComparedFiles(tier, side.directory, _Decoded(tier, side).octets)


class _Decoded:
    """The values of a compact checkpoint's tensors. Its manifest is read with the first of them."""

    def __init__(self, tier: Files, side: ComparedCheckpoint) -> None:
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
