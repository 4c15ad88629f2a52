"""The contents of a foreign checkpoint: its tensors, the places of their elements in files, and the use of every file.

An adapter (one module for each kind of checkpoint) turns a directory into a `ForeignListing` without reading tensors. It
refuses unknown content by file and key: nothing is skipped without a reason in `files`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Literal, NamedTuple, Protocol

from numpy.typing import NDArray

from holdfast_formats.errors import CheckpointError, CorruptExtent
from holdfast_formats.region import Box, Shape
from holdfast_formats.tensors import TensorSpec

_OF_RANK = re.compile(r"ranks/[0-9]+/")


class TensorKey(NamedTuple):
    group: str
    name: str


def is_of_rank(name: str) -> bool:
    """Whether a tensor is no weight: it belongs to one rank's process, or is a module's value beside the weights."""
    return _OF_RANK.match(name) is not None


class StoredMember(NamedTuple):
    """A member of a zip file: its name, its bytes in the file, and its stated CRC-32."""

    name: str
    start: int
    bytes: int
    crc: int

    @property
    def stop(self) -> int:
        return self.start + self.bytes

    def check(self, path: str, crc: int) -> None:
        """`CorruptExtent` unless the computed CRC-32 is the stated one, or none is stated."""
        if self.crc in (0, crc):
            return
        raise CorruptExtent(
            f"{path}: the CRC-32 of its member {self.name!r} is {crc:08x}, but the zip file records {self.crc:08x}",
            hint="copy the file again: it is damaged",
            file=path,
            member=self.name,
            offset=self.start,
            length=self.bytes,
        )


class ForeignPiece(NamedTuple):
    """A box of a tensor, and its place: the byte of its first element, and the step of each dimension in elements.

    Steps are not negative. `strides` of a row-major piece are `layout.parts.strides(box.shape)`. `member` is its zip member,
    if the CRC-32 is known.
    """

    file: str
    start: int
    box: Box
    strides: Shape
    member: StoredMember | None = None


class FetchBox(Protocol):
    """Reads a box of a stored tensor."""

    def __call__(self, tensor: ForeignTensor, box: Box, into: NDArray[Any] | None = None, /) -> NDArray[Any]:
        """The box, in the tensor's dtype: in `into`, if an array of that shape and dtype is given, or a new array."""


class Decoder(Protocol):
    """Computes a tensor's values from other stored tensors: those of a quantised optimizer, say.

    One whose values depend on more than its type and inputs has an attribute `terms`, whose `repr` identifies the rest. One
    that must compute in order, in short ranges, has `band_bytes`, the bytes to request at once.
    """

    @property
    def inputs(self) -> tuple[ForeignTensor, ...]:
        """The stored tensors that it needs."""

    def decode(self, box: Box, fetch: FetchBox) -> NDArray[Any]:
        """The values of a box, of its shape, in the decoded tensor's dtype; `fetch` reads a box of a stored tensor."""


class ForeignTensor(NamedTuple):
    """A whole tensor of a foreign checkpoint, in its original layout.

    The dtype of `spec` is that of its values: bfloat16 that numpy stored as U16 is BF16. `pieces` tile it exactly, or are
    empty if `decoder` computes it. `copies` are pieces that must hold the same bytes.
    """

    spec: TensorSpec
    pieces: tuple[ForeignPiece, ...]
    copies: tuple[ForeignPiece, ...] = ()
    decoder: Decoder | None = None

    @property
    def key(self) -> TensorKey:
        return TensorKey(self.spec.group, self.spec.name)


Use = Literal["tensors", "asset", "state", "signal", "unused"]


class FileUse(NamedTuple):
    """The use of a source file. `unused` needs a reason for the report: why no training state is lost."""

    file: str
    use: Use
    reason: str = ""


class RefusedPart(NamedTuple):
    """A part of the source that cannot be imported, by the name that a user may leave out: a key, a tensor or a file.

    `group` is the one in which it would be, empty for a file.
    """

    name: str
    error: CheckpointError
    group: str = "extra"


class PartLeftOut(NamedTuple):
    """What is not imported although it could be, or was refused: its name, and the options that asked for it."""

    what: str
    options: tuple[str, ...]
    tensors: int = 0
    bytes: int = 0

    @property
    def reason(self) -> str:
        return " and ".join(self.options)


class ForeignListing(NamedTuple):
    """All of a foreign checkpoint. `documents` are JSON values by group and key, for state.json; `assets` are copied.

    `notes` are sentences for the report on decoding and assumptions. A listing with parts that are `refused` is an error,
    unless all of them are left out; `ForeignKind.read` sees to that.
    """

    kind: str
    tensors: Mapping[TensorKey, ForeignTensor]
    files: tuple[FileUse, ...]
    documents: Mapping[str, Mapping[str, Any]] = {}
    assets: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    step: int | None = None  # of the training, if the checkpoint has it
    made_assets: Mapping[str, bytes] = {}  # files to write that are translated from the source's own, by name
    rank_documents: Mapping[int, Mapping[str, Mapping[str, Any]]] = {}  # values of single ranks, as `documents`
    refused: tuple[RefusedPart, ...] = ()
    left_out: tuple[PartLeftOut, ...] = ()

    def documents_of(self, documents: Mapping[str, Mapping[str, Any]]) -> dict[int, dict[str, dict[str, Any]]]:
        """These values of all ranks for each one that has its own, with its own."""
        return {
            rank: {group: {**documents.get(group, {}), **own.get(group, {})} for group in (*documents, *own)}
            for rank, own in (self.rank_documents or {0: {}}).items()
        }
