"""Wanted parts of coded tensors of a compact checkpoint: which stored parts to read, and the decoded values."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from holdfast.read.requests import Want
from holdfast_formats import dtypes, transfer
from holdfast_formats.disk import coded, codings
from holdfast_formats.disk.manifests import Manifest
from holdfast_formats.disk.read_planner import resolve
from holdfast_formats.errors import StateMismatch
from holdfast_formats.region import Box, check_box

BATCH_ELEMENTS = 2**22  # decoded at once: the arithmetic takes some 50 bytes for each


class CodedWant(NamedTuple):
    """A wanted box of a coded tensor, with its stored name."""

    want: Want
    name: str


class _Slab(NamedTuple):
    """A part of a wanted box, and the stored parts for decoding it."""

    of: CodedWant
    box: Box
    parts: dict[str, NDArray[Any]]
    wants: list[Want]


def parted(manifest: Manifest, wants: Iterable[Want]) -> tuple[list[Want], list[CodedWant]]:
    """Wants of tensors that are stored as they were saved, and of coded ones.

    Raises `StateMismatch` for a box or a receiver that does not fit a coded tensor.
    """
    if manifest.compacted is None:
        return list(wants), []
    plain: list[Want] = []
    small: list[CodedWant] = []
    for want in wants:
        stored_form = coded.find(manifest, want.group, want.name)
        if stored_form is None:
            plain.append(want)
            continue
        check_box(want.box, stored_form[1].shape, want.name)
        if want.target.shape != want.box.shape or want.target.dtype != transfer.element_dtype(4):
            raise StateMismatch(
                f"tensor {want.name!r}: {want.target.dtype}{list(want.target.shape)} cannot receive 4-byte elements of "
                f"shape "
                f"{list(want.box.shape)}"
            )
        small.append(CodedWant(want, stored_form[0]))
    return plain, small


def stored(manifest: Manifest, small: Iterable[CodedWant]) -> set[str]:
    needed = (need for one in small for need in coded.needs(manifest, one.want.group, one.name, one.want.box).values())
    return {resolve(manifest, need.group, need.name)[1].file for need in needed}


def batches(manifest: Manifest, small: Iterable[CodedWant]) -> Iterator[list[_Slab]]:
    batch: list[_Slab] = []
    held = 0
    for one in small:
        for box in codings.slabs(one.want.box, BATCH_ELEMENTS):
            if batch and held + box.volume > BATCH_ELEMENTS:
                yield batch
                batch, held = [], 0
            batch.append(_slab(manifest, one, box))
            held += box.volume
    if batch:
        yield batch


def wants_of(batch: Iterable[_Slab]) -> list[Want]:
    return [want for slab in batch for want in slab.wants]


def decode(manifest: Manifest, batch: Iterable[_Slab]) -> None:
    """Write the values of a batch whose parts have been read."""
    for slab in batch:
        want = slab.of.want
        values = coded.decoded(manifest, want.group, slab.of.name, slab.box, slab.parts)
        inside = slab.box.within(want.box)
        place = tuple(slice(o, o + n) for o, n in zip(inside.offset, inside.shape, strict=True))
        want.target[place] = values.view(want.target.dtype)


def _slab(manifest: Manifest, one: CodedWant, box: Box) -> _Slab:
    parts: dict[str, NDArray[Any]] = {}
    wants: list[Want] = []
    for role, need in coded.needs(manifest, one.want.group, one.name, box).items():
        _, entry = resolve(manifest, need.group, need.name)
        parts[role] = np.empty(need.box.shape, dtypes.to_numpy(entry.dtype))
        receiver = parts[role].view(transfer.element_dtype(parts[role].itemsize))
        wants.append(Want(need.group, need.name, need.box, receiver))
    return _Slab(one, box, parts, wants)
