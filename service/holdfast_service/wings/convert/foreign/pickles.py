"""Reads pickles and torch files without running anything in them: the only entry point for pickled data.

Containers, numbers and texts become Python's own values. Arrays, tensors and bytes objects become their places in the file:
their bytes are never read here. Objects of classes that the caller allows become inert records. Any other class or function
is refused by file and byte, or becomes a `PickledOpaque`, if the caller refuses it by its key. Any opcode, depth or size
over a limit is refused. Memory use is below 256 MiB for any file. Results
contain no cycles, and are quick to walk through.

Errors are `StateMismatch` for unsupported content, `LimitExceeded`, and `CorruptManifest` for truncated files.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from holdfast_formats.errors import StateMismatch
from holdfast_formats.files import Files
from holdfast_service.wings.convert.foreign import file_signs
from holdfast_service.wings.convert.foreign.pickled import torch_files, zip_members
from holdfast_service.wings.convert.foreign.pickled.described import kind_of
from holdfast_service.wings.convert.foreign.pickled.dtypes import TORCH as TORCH_DTYPES
from holdfast_service.wings.convert.foreign.pickled.latin_arrays import LatinDecoder, out_of
from holdfast_service.wings.convert.foreign.pickled.machine import PickleMachine
from holdfast_service.wings.convert.foreign.pickled.stream import PickleStream
from holdfast_service.wings.convert.foreign.pickled.values import (
    AnyArray,
    LatinArray,
    PickledArray,
    PickledBytes,
    PickledGlobal,
    PickledOpaque,
    PickledRecord,
)
from holdfast_service.wings.convert.foreign.pickled.zip_members import ZipWindow

__all__ = [
    "TORCH_DTYPES",
    "AnyArray",
    "LatinArray",
    "LatinDecoder",
    "PickledArray",
    "PickledBytes",
    "PickledGlobal",
    "PickledOpaque",
    "PickledRecord",
    "kind_of",
    "out_of",
    "read_pickle",
    "read_torch",
]


def read_pickle(files: Files, path: str, allowed: Collection[str] = ()) -> Any:
    """The value of a file that is one pickle. `allowed` are classes (`module.Class`) whose objects become records."""
    stream = PickleStream(files, path, 0, _size(files, path))
    file_signs.check_head(path, files.read(path, 0, file_signs.HEAD_BYTES))
    value = PickleMachine(stream, allowed).run()
    if stream.where != stream.stop:
        raise stream.refused(f"ends at byte {stream.where}, before the last {stream.stop - stream.where} bytes")
    return value


def read_torch(
    files: Files, path: str, allowed: Collection[str] = (), at: tuple[int, int] | None = None, opaque: bool = False
) -> Any:
    """The value of a file of `torch.save`, a zip file or in the older form; `allowed` as of `read_pickle`. With `opaque`,
    objects of other classes are a `PickledOpaque`.

    `at` is the first byte and the length of a zip file inside the file.
    """
    size = _size(files, path)
    start, length = (0, size) if at is None else at
    if start < 0 or length < 0 or start + length > size:
        raise StateMismatch(f"{path} has {size} bytes, but the metadata places a value at {start}+{length}", file=path)
    head = files.read(path, start, file_signs.HEAD_BYTES)
    file_signs.check_head(path, head)
    if head.startswith(zip_members.MAGIC):
        return torch_files.read_zip(ZipWindow(files, path, start, start + length), allowed, opaque)
    if head.startswith(torch_files.PICKLE_START) and at is None:
        return torch_files.read_legacy(files, path, size, allowed, opaque)
    raise StateMismatch(
        f"{path} is not a file of torch.save: it begins with {head[:8]!r}",
        hint="download or copy it again; or write it again by torch.save(model.state_dict(), FILE)",
        file=path,
    )


def _size(files: Files, path: str) -> int:
    size = files.size(path)
    if size is None:
        raise file_signs.absent(files, path)
    return size
