"""What a foreign checkpoint contains: its tensors, where their elements stand in which file, and the use of every file.

An adapter (one module for each kind of checkpoint) turns a directory into a `ForeignListing` and reads no tensor for it.
Whatever it does not understand it refuses by file and key: nothing is skipped without a reason in `files`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Literal, NamedTuple, Protocol

from numpy.typing import NDArray

from holdfast_formats.region import Box, Shape
from holdfast_formats.tensors import TensorSpec

_OF_RANK = re.compile(r"ranks/[0-9]+/")


class ForeignFiles(Protocol):
    """The directory of a foreign checkpoint. Paths are relative, with `/`; a link out of it counts as missing."""

    def read(self, path: str, offset: int = 0, length: int | None = None) -> bytes:
        """Bytes of a file; fewer than `length` only at its end."""

    def read_into(self, path: str, offset: int, buffer: Any) -> int:
        """Fill a contiguous `buffer`; the number of bytes read, fewer than it holds only at the file's end."""

    def size(self, path: str) -> int | None:
        """Bytes of a file, None if there is no file at `path`."""

    def list(self, path: str) -> list[str]:
        """The names in a directory, sorted; empty for anything but a directory."""


class TensorKey(NamedTuple):
    """A tensor's group and its name."""

    group: str
    name: str


def is_of_rank(name: str) -> bool:
    """Whether a tensor is no weight: it belongs to one rank's process, or to a value that a module keeps beside them."""
    return _OF_RANK.match(name) is not None


class StoredMember(NamedTuple):
    """A member of a zip file: its name there, its bytes in the file, and the CRC-32 that the zip file states of them."""

    name: str
    start: int
    bytes: int
    crc: int

    @property
    def stop(self) -> int:
        return self.start + self.bytes


class ForeignPiece(NamedTuple):
    """A box of a tensor, and where it stands: the byte of its first element, and the step of each dimension in elements.

    Steps are not negative. `strides` of a row-major piece are `layout.parts.strides(box.shape)`. `member` is the one of a
    zip file that holds it, if its CRC-32 is known.
    """

    file: str
    start: int
    box: Box
    strides: Shape
    member: StoredMember | None = None


class FetchBox(Protocol):
    """Reads a box of a stored tensor."""

    def __call__(self, tensor: ForeignTensor, box: Box, into: NDArray[Any] | None = None, /) -> NDArray[Any]:
        """The box, in the tensor's dtype: `into`, if an array of the box's shape and that dtype is given, or a new array."""


class Decoder(Protocol):
    """Computes a tensor's values from other stored tensors: those of a quantised optimizer, say.

    One whose values do not follow from its type and its inputs alone has an attribute `terms`, whose `repr` says from what;
    one that computes stretches in order, and none of them better for being long, has `band_bytes`, how many to ask for.
    """

    @property
    def inputs(self) -> tuple[ForeignTensor, ...]:
        """The stored tensors that it needs."""

    def decode(self, box: Box, fetch: FetchBox) -> NDArray[Any]:
        """The values of a box, of its shape, in the decoded tensor's dtype; `fetch` reads a box of a stored tensor."""


class ForeignTensor(NamedTuple):
    """A tensor of a foreign checkpoint as a whole, in the layout that it has there.

    The dtype of `spec` is that of its values: bfloat16 that numpy stored as U16 is BF16. `pieces` tile it exactly, or are
    empty where `decoder` computes it. `copies` are pieces that must hold the same bytes as these.
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
    """What became of a source file. `unused` needs a reason, which people read: why no state of the training is lost."""

    file: str
    use: Use
    reason: str = ""


class ForeignListing(NamedTuple):
    """All of a foreign checkpoint. `documents` are JSON values by group and key, for state.json; `assets` are copied.

    `notes` say what was decoded, or taken for granted, in sentences for the report.
    """

    kind: str
    tensors: Mapping[TensorKey, ForeignTensor]
    files: tuple[FileUse, ...]
    documents: Mapping[str, Mapping[str, Any]] = {}
    assets: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    step: int | None = None  # of the training, where the checkpoint says it
    made_assets: Mapping[str, bytes] = {}  # files to write that are translated from the source's own, by name
