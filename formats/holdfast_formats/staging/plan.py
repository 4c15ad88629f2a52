"""A plan (packing, and the slot from which each byte is read) and a receipt (what a node made durable). Both are values."""

from __future__ import annotations

from typing import NamedTuple

import msgspec

from holdfast_formats import decoding, dtypes, naming
from holdfast_formats.disk.manifests import Extent, FileEntry
from holdfast_formats.disk.packing import FilePlan, extent_bytes
from holdfast_formats.errors import CorruptManifest
from holdfast_formats.lineage import Intent
from holdfast_formats.region import Box
from holdfast_formats.staging.slot_table import Blob
from holdfast_formats.tensors import TensorSpec


class BoxOrigin(NamedTuple):
    """The place of one box's bytes: in the slot of `rank`, from `slot_offset` on, row-major. `held_as`: another dtype
    in the slot, to be rounded.
    """

    rank: int
    box: Box
    slot_offset: int
    held_as: str = ""

    def nbytes(self, spec: TensorSpec) -> int:
        return dtypes.nbytes(self.held_as or spec.dtype, self.box.volume, spec.name)

    def of_tensor(self, spec: TensorSpec, length: int) -> int:
        """The bytes of the tensor made of so many bytes of the slot, which are whole elements."""
        return length * dtypes.bits(spec.dtype) // dtypes.bits(self.held_as) if self.held_as else length


class PlannedTensor(NamedTuple):
    """A tensor, its first byte in the file, and the boxes that tile it exactly, each with one holder. The plan of a
    node's share has only boxes with bytes in the share.
    """

    spec: TensorSpec
    start: int
    origins: tuple[BoxOrigin, ...]
    placement: str


class PlannedFile(NamedTuple):
    layout: FilePlan
    tensors: tuple[PlannedTensor, ...]


class PlannedAsset(NamedTuple):
    rank: int
    blob: Blob


class WritePlan(NamedTuple):
    """Everything a node needs to write one step. It does not depend on time, on nodes, or on the order of ranks."""

    run: str
    step: int
    attempt: int
    world: int
    groups: tuple[str, ...]
    files: tuple[PlannedFile, ...]
    aliases: dict[str, dict[str, str]]
    assets: tuple[PlannedAsset, ...]
    metrics: dict[str, float]
    mesh: dict[str, int]
    state: bytes  # state.json
    intent: Intent = Intent()
    lacks_average: bool = False  # although its ranks keep one with the daemon

    @property
    def bytes(self) -> int:
        return sum(file.layout.bytes for file in self.files)

    @property
    def extent_bytes(self) -> int:
        """The length of extents. It depends only on the tensors' bytes, not on the ranks that save them."""
        return extent_bytes(sum(file.layout.bytes - len(file.layout.header) for file in self.files))


class Receipt(msgspec.Struct, frozen=True):
    """What one node wrote and fsynced for one save: the files, and the extents of every tensor by group and name."""

    node: str
    run: str
    step: int
    attempt: int
    files: tuple[FileEntry, ...]
    extents: dict[str, dict[str, tuple[Extent, ...]]]


_decode = decoding.decoder(Receipt)


def encode_receipt(receipt: Receipt) -> bytes:
    return msgspec.json.encode(receipt)


def decode_receipt(encoded: bytes) -> Receipt:
    try:
        return _decode(encoded)
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        raise CorruptManifest(f"a receipt under {naming.RECEIPTS} cannot be read: {error}") from error
