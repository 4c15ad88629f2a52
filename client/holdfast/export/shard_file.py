"""Writes a rank's shard as a safetensors file, with a bounded buffer whatever its size.

The data is written first and the header last: an unfinished file begins with zeros, and no reader accepts it.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import numpy as np

from holdfast.export import copy
from holdfast.layout import shards
from holdfast.read.reader import CheckpointReader
from holdfast.read.requests import Want
from holdfast_formats.disk.manifests import Manifest
from holdfast_formats.errors import InvalidRequest
from holdfast_formats.layout import language, shard_file
from holdfast_formats.layout.language import Layout
from holdfast_formats.layout.parts import LocalTensor
from holdfast_formats.layout.shard_file import PlacedTensor, ShardFile
from holdfast_formats.root_files import check_output_place

BUFFER_BYTES = 64 * 2**20

OnBytes = Callable[[int], None]


class _Placed(NamedTuple):
    """A local tensor, or a piece of one, and its first byte in the file."""

    local: LocalTensor
    start: int


def of(
    manifest: Manifest, layout: Layout, rank: int, group: str, tensors: Sequence[LocalTensor], program: str = ""
) -> ShardFile:
    """The file of a rank's local tensors, as the service would send it; `StateMismatch` for a tensor it cannot hold.
    `program` is the name of the one that made the tensors, if any.
    """
    shapes = {name: entry.shape for name, entry in manifest.tensors[group].items()}
    metadata = shard_file.describe(manifest.run, manifest.step, language.text(layout), rank, group, program)
    return shard_file.lay_out(tensors, shapes, metadata)


def write(reader: CheckpointReader, group: str, file: ShardFile, path: Path, on_bytes: OnBytes = lambda _: None) -> None:
    """Read, verify and write a shard. The file must not exist; on any error it is removed again.

    Nothing is synced: a power cut may lose the file. `on_bytes` is called with the bytes written. Raises `InvalidRequest` if
    something exists at `path`, `CorruptExtent` for damage, `NoSpace`, `StorageFailed`.
    """
    with _created(path, file.bytes) as descriptor:
        memory = np.empty(min(BUFFER_BYTES, max(file.bytes - len(file.header), 1)), np.uint8)
        for batch in _batches(file.tensors, len(memory)):
            first, stop = batch[0].start, batch[-1].start + shards.nbytes(batch[-1].local)
            filled = memory[: stop - first]
            reader.load(_wants(group, batch, filled, first))
            copy.write(descriptor, first, filled.data)
            on_bytes(stop - first)
        copy.write(descriptor, 0, memoryview(file.header))
        on_bytes(len(file.header))


def _wants(group: str, batch: Sequence[_Placed], memory: shards.Octets, first: int) -> Iterator[Want]:
    for local, start in batch:
        octets = memory[start - first : start - first + shards.nbytes(local)]
        if local.padding:
            octets.fill(0)
        yield from shards.wants(group, local, octets)


def _batches(tensors: Sequence[PlacedTensor], bytes_max: int) -> Iterator[list[_Placed]]:
    """Neighbours that fit into the buffer together; a tensor that does not fit is cut into pieces."""
    batch: list[_Placed] = []
    taken = 0
    for placed in tensors:
        at = placed.start
        for piece in shards.pieces(placed.local, bytes_max):
            size = shards.nbytes(piece)
            if batch and taken + size > bytes_max:
                yield batch
                batch, taken = [], 0
            batch.append(_Placed(piece, at))
            taken += size
            at += size
    if batch:
        yield batch


@contextmanager
def _created(path: Path, size: int) -> Iterator[int]:
    """Create a file of zeros; remove it again if the block fails."""
    check_output_place(path)
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        descriptor = os.open(path, flags, 0o644)
    except FileExistsError:
        raise InvalidRequest(f"{path} already exists", hint="remove it, or choose another file name") from None
    except OSError as error:
        raise copy.translated(path, error) from error
    try:
        os.truncate(descriptor, size)
        yield descriptor
    except BaseException as error:
        path.unlink(missing_ok=True)
        if isinstance(error, OSError):
            raise copy.translated(path, error) from error
        raise
    finally:
        os.close(descriptor)
