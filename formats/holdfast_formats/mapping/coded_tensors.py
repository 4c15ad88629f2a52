"""Tensors of compact checkpoints as entries of a listing: parts encoded from a tensor, and tensors decoded from parts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from holdfast_formats import dtypes
from holdfast_formats.disk import coded, codings
from holdfast_formats.disk.codings import BLOCK, MODEL, PARTS
from holdfast_formats.disk.compacted import CodedTensor
from holdfast_formats.disk.manifests import Manifest, TensorEntry
from holdfast_formats.errors import StateMismatch
from holdfast_formats.layout.parts import strides
from holdfast_formats.mapping.listing import FetchBox, ForeignPiece, ForeignTensor, TensorKey
from holdfast_formats.region import Box, whole
from holdfast_formats.tensors import TensorSpec

SLAB_ELEMENTS = 2**20  # at a time: the arithmetic takes some 50 bytes for each
BAND_BYTES = 2**24  # requested at once by an executor


class PartEncoder(NamedTuple):
    """Computes a part of a coded tensor from the tensor, and for `low16` its weight."""

    tensor: ForeignTensor
    coding: str
    role: str
    weight: ForeignTensor | None = None
    band_bytes: int = BAND_BYTES

    @property
    def inputs(self) -> tuple[ForeignTensor, ...]:
        return (self.tensor,) if self.weight is None else (self.tensor, self.weight)

    @property
    def terms(self) -> object:
        return self.coding, self.role

    def decode(self, box: Box, fetch: FetchBox) -> NDArray[Any]:
        part = PARTS[self.coding][self.role]
        array: NDArray[Any] = np.empty(box.shape, dtypes.to_numpy(part.dtype))
        for slab in codings.slabs(box, max(SLAB_ELEMENTS // (BLOCK if part.a_block else 1), 1)):
            inside = slab.within(box)
            place = tuple(slice(o, o + n) for o, n in zip(inside.offset, inside.shape, strict=True))
            array[place] = self._scales(slab, fetch) if part.a_block else self._codes(slab, fetch)
        return array

    def _codes(self, box: Box, fetch: FetchBox) -> NDArray[Any]:
        if self.weight is not None:
            parted = codings.split(fetch(self.tensor, box).view(np.uint32), fetch(self.weight, box).view(np.uint16))
            if parted is None:
                name = self.tensor.spec.name
                raise StateMismatch(
                    f"the weight of {name!r} is not its master, rounded",
                    hint="the checkpoint has changed while it was read: check it with `holdfast verify`",
                    tensor=name,
                )
            return parted[0]
        begins, ends = box.offset[-1], box.offset[-1] + box.shape[-1]
        first = begins - begins % BLOCK
        stop = min(ends + -ends % BLOCK, self.tensor.spec.shape[-1])
        wide = Box((*box.offset[:-1], first), (*box.shape[:-1], stop - first))
        codes = codings.encode(self.coding, fetch(self.tensor, wide))["codes"]
        return codes[..., begins - first : ends - first]

    def _scales(self, box: Box, fetch: FetchBox) -> NDArray[Any]:
        axis = len(self.tensor.spec.shape) - 1  # after it there may be one for the values of a block
        first, count = box.offset[axis] * BLOCK, box.shape[axis] * BLOCK
        count = min(count, self.tensor.spec.shape[-1] - first)
        wide = Box((*box.offset[:axis], first), (*box.shape[:axis], count))
        scale = codings.encode(self.coding, fetch(self.tensor, wide))["scale"]
        if scale.ndim == axis + 1:
            return scale
        return scale[..., box.offset[-1] : box.offset[-1] + box.shape[-1]]


class KnownIntegers(NamedTuple):
    """Integers that were computed before."""

    values: NDArray[np.uint64]

    @property
    def inputs(self) -> tuple[ForeignTensor, ...]:
        return ()

    @property
    def terms(self) -> object:
        return self.values.tobytes()

    def decode(self, box: Box, fetch: FetchBox) -> NDArray[Any]:
        return self.values[box.offset[0] : box.offset[0] + box.shape[0]]


class CodedValues(NamedTuple):
    """Computes the values of a coded tensor from its stored parts."""

    one: CodedTensor
    parts: Mapping[str, ForeignTensor]
    boxes: Any  # of a box of the tensor, the boxes of the parts
    band_bytes: int = BAND_BYTES

    @property
    def inputs(self) -> tuple[ForeignTensor, ...]:
        return tuple(self.parts.values())

    @property
    def terms(self) -> object:
        return self.one.coding

    def decode(self, box: Box, fetch: FetchBox) -> NDArray[Any]:
        values = np.empty(box.shape, np.float32)
        for slab in codings.slabs(box, SLAB_ELEMENTS):
            inside = slab.within(box)
            place = tuple(slice(o, o + n) for o, n in zip(inside.offset, inside.shape, strict=True))
            fetched = {role: fetch(self.parts[role], wanted) for role, wanted in self.boxes(slab).items()}
            arrays = {role: array.view(np.uint16) if role == MODEL else array for role, array in fetched.items()}
            values[place] = codings.decode(self.one.coding, slab, self.one.shape, arrays)
        return values


def tensors_of(manifest: Manifest) -> dict[TensorKey, ForeignTensor]:
    """The tensors of a committed checkpoint as they were saved, with aliases, by their places in its files.

    Raises `StateMismatch` for a coding of a later version.
    """
    keys = [TensorKey(group, name) for group, named in manifest.tensors.items() for name in named]
    stored = {key: _stored(key, manifest.tensors[key.group][key.name]) for key in keys}
    for group, aliases in manifest.aliases.items():
        for alias, target in aliases.items():
            key = TensorKey(group, alias)
            stored[key] = _stored(key, manifest.tensors[group][target])
    shown = coded.contents(manifest)
    keys = [TensorKey(group, name) for group, named in shown.tensors.items() for name in named]
    keys += [TensorKey(group, alias) for group, aliases in shown.aliases.items() for alias in aliases]
    return {key: stored[key] if coded.find(manifest, *key) is None else _decoded(manifest, key, stored) for key in keys}


def _stored(key: TensorKey, entry: TensorEntry) -> ForeignTensor:
    piece = ForeignPiece(entry.file, entry.start, whole(entry.shape), strides(entry.shape))
    return ForeignTensor(TensorSpec(*key, entry.dtype, entry.shape), (piece,))


def _decoded(manifest: Manifest, key: TensorKey, stored: Mapping[TensorKey, ForeignTensor]) -> ForeignTensor:
    located = coded.find(manifest, key.group, key.name)
    assert located is not None
    name, one = located
    wanted = coded.needs(manifest, key.group, name, Box((0,) * len(one.shape), (0,) * len(one.shape)))
    parts = {role: stored[TensorKey(box.group, box.name)] for role, box in wanted.items()}

    def boxes(box: Box) -> dict[str, Box]:
        return {role: need.box for role, need in coded.needs(manifest, key.group, name, box).items()}

    spec = TensorSpec(key.group, key.name, one.dtype, one.shape)
    return ForeignTensor(spec, (), decoder=CodedValues(one, parts, boxes))
