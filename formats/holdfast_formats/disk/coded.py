"""A compact checkpoint as its tensors were saved: the stored parts that a box of a coded tensor needs, and its values."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from math import prod
from typing import Any, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from holdfast_formats.digest import digest
from holdfast_formats.disk import codings
from holdfast_formats.disk.codings import MODEL, TIES
from holdfast_formats.disk.compacted import CodedTensor, Compacted
from holdfast_formats.disk.manifests import EXTENT_BYTES_MAX, Extent, Manifest, TensorEntry
from holdfast_formats.disk.read_planner import WantedBox, resolve
from holdfast_formats.errors import StateMismatch
from holdfast_formats.region import Box, whole

Fetch = Callable[[WantedBox], NDArray[Any]]

OPTIM = "optim"
IN_NO_FILE = ""  # where a coded tensor is, of the contents


class StoredForm(NamedTuple):
    """How a tensor is stored in fewer bytes: the coding, the names of its parts (without a master's weight), their
    bytes, and the error after decoding, as in `CodedTensor`.
    """

    coding: str
    parts: tuple[str, ...]
    bytes: int
    error: float

    def __str__(self) -> str:
        return f"{self.coding}, off by {self.error:.2g}" if self.error else self.coding


def contents(manifest: Manifest) -> Manifest:
    """The manifest with every tensor as it was saved: for planning, not for reading. A coded tensor is in no file; its
    extents' digests are derived from those of its parts, so that equal ones are found.

    A checkpoint that is not compact is returned as it is.
    """
    if manifest.compacted is None:
        return manifest
    tensors, aliases = dict(manifest.tensors), dict(manifest.aliases)
    for group, coded in manifest.compacted.tensors.items():
        owners = {part: name for name in coded for part in stored_names(manifest, group, name)}
        shown = dict.fromkeys([*(owners.get(name, name) for name in manifest.tensors[group]), *coded])
        tensors[group] = {
            name: _as_saved(manifest, group, name, coded[name]) if name in coded else manifest.tensors[group][name]
            for name in shown
        }
        if known := {**manifest.aliases.get(group, {}), **manifest.compacted.aliases.get(group, {})}:
            aliases[group] = known
    return msgspec.structs.replace(manifest, tensors=tensors, aliases=aliases, compacted=None)


def _as_saved(manifest: Manifest, group: str, name: str, one: CodedTensor) -> TensorEntry:
    parts: dict[str, TensorEntry] = {}
    if one.coding in codings.PARTS:  # else its reader refuses it
        wanted = needs(manifest, group, name, whole(one.shape))
        parts = {role: resolve(manifest, need.group, need.name)[1] for role, need in wanted.items()}
    size = prod(one.shape) * 4
    if parts and all(is_zeros(parts[role]) for role in parts.keys() & {"codes", MODEL}) and TIES not in parts:
        cuts = [(at, min(EXTENT_BYTES_MAX, size - at)) for at in range(0, size, EXTENT_BYTES_MAX)]
        extents = tuple(Extent(at, length, digest_of_zeros(length)) for at, length in cuts)
    else:
        # Unlike any stored tensor's extents: only the values can show whether it equals one of those.
        sum_of = digest(" ".join([one.coding, *(e.digest for part in parts.values() for e in part.extents)]).encode())
        extents = (Extent(0, 4, sum_of), Extent(4, size - 4, sum_of))
    return TensorEntry(one.dtype, one.shape, IN_NO_FILE, 0, extents, one.placement)


def is_zeros(entry: TensorEntry) -> bool:
    """Whether all extents of a tensor have the digest of zeros."""
    return all(extent.digest == digest_of_zeros(extent.length) for extent in entry.extents)


@cache
def digest_of_zeros(length: int) -> str:
    return digest(bytes(length))


def count(manifest: Manifest) -> int:
    total = sum(map(len, manifest.tensors.values()))
    for group, held in manifest.compacted.tensors.items() if manifest.compacted is not None else ():
        total += len(held) - sum(len(stored_names(manifest, group, name)) for name in held)
    return total


def find(manifest: Manifest, group: str, name: str) -> tuple[str, CodedTensor] | None:
    """The stored name and the coding of a tensor, aliases resolved; None for one stored as saved."""
    if manifest.compacted is None:
        return None
    coded = manifest.compacted.tensors.get(group, {})
    name = manifest.compacted.aliases.get(group, {}).get(name, name)
    return (name, coded[name]) if name in coded else None


def stored_names(manifest: Manifest, group: str, name: str) -> list[str]:
    """The stored tensors of the group that are parts of a coded one."""
    coding = _of(manifest)[group][name].coding
    names = [name + part.suffix for part in codings.PARTS.get(coding, {}).values()]
    ties = name + codings.TIES_PART.suffix
    return [*names, ties] if coding == "low16" and ties in manifest.tensors[group] else names


def stored_form(manifest: Manifest, group: str, name: str) -> StoredForm | None:
    """How a tensor is stored, aliases resolved; None for one stored as saved."""
    located = find(manifest, group, name)
    if located is None:
        return None
    stored, one = located
    parts = tuple(stored_names(manifest, group, stored))
    return StoredForm(one.coding, parts, sum(manifest.tensors[group][part].nbytes for part in parts), one.error)


def needs(manifest: Manifest, group: str, name: str, box: Box) -> dict[str, WantedBox]:
    """The boxes of stored tensors from which a box of a coded one is decoded, by part.

    Raises `StateMismatch` for a coding of a later version, and for a master without its weight.
    """
    one = _of(manifest)[group][name]
    parts = codings.PARTS.get(one.coding)
    if parts is None:
        raise StateMismatch(
            f"tensor {name!r} is stored as {one.coding!r}, which this version cannot read",
            hint="update Holdfast, or read the tensor from another step",
            tensor=name,
        )
    boxes = {role: WantedBox(group, name + part.suffix, codings.part_box(part, box)) for role, part in parts.items()}
    if one.coding == "low16":
        _, weight = resolve(manifest, MODEL, name)
        if (weight.dtype, weight.shape) != ("BF16", one.shape):
            raise StateMismatch(f"the weight of master {name!r} is {weight.dtype}{list(weight.shape)}", tensor=name)
        boxes[MODEL] = WantedBox(MODEL, name, box)
        ties = manifest.tensors[group].get(name + codings.TIES_PART.suffix)
        if ties is not None:
            boxes[TIES] = WantedBox(group, name + codings.TIES_PART.suffix, whole(ties.shape))
    return boxes


def decoded(manifest: Manifest, group: str, name: str, box: Box, parts: Mapping[str, NDArray[Any]]) -> NDArray[np.float32]:
    """The values of a box of a coded tensor, from the boxes of `needs`; integers and BF16 as numpy has them."""
    one = _of(manifest)[group][name]
    arrays = {role: array.view(np.uint16) if role == MODEL else array for role, array in parts.items()}
    return codings.decode(one.coding, box, one.shape, arrays)


def stored_boxes(manifest: Manifest, wanted: WantedBox) -> list[WantedBox]:
    """The stored boxes to read for a box of a tensor as saved."""
    located = find(manifest, wanted.group, wanted.name)
    return [wanted] if located is None else list(needs(manifest, wanted.group, located[0], wanted.box).values())


def told(compacted: Compacted) -> str:
    """A note about a compact checkpoint."""
    coded = sum(map(len, compacted.tensors.values()))
    left = sum(map(len, compacted.exact.values()))
    rest = f"; {left} others were left as saved" if left else ""
    if not compacted.lossy:
        return f"{coded} masters are stored as low bits, and restored bit for bit{rest}"
    return (
        f"optimizer states were stored as {compacted.optim} at {compacted.at}: values differ from the saved ones by up to "
        f"{compacted.error:.2g} of a tensor's norm; weights and masters are exact{rest}"
    )


def _of(manifest: Manifest) -> Mapping[str, Mapping[str, CodedTensor]]:
    assert manifest.compacted is not None
    return manifest.compacted.tensors
