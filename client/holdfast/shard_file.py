"""A rank's shard written as a safetensors file, with a bounded buffer whatever its size.

The data comes first and the header last: a file that nobody finished begins with zeros, and no reader takes it.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import numpy as np

from holdfast_formats import layouts, safetensors
from holdfast_formats.errors import InvalidRequest
from holdfast_formats.layout import FORMAT_METADATA
from holdfast_formats.layouts import Layout
from holdfast_formats.manifest import Manifest
from holdfast_formats.parts import LocalTensor
from holdfast_formats.safetensors import Stored

from . import copying, shards
from .reader import CheckpointReader
from .wants import Want

BUFFER_BYTES = 64 * 2**20

OnBytes = Callable[[int], None]


class Placed(NamedTuple):
    """A local tensor and its first byte behind the header."""

    local: LocalTensor
    start: int


class ShardFile(NamedTuple):
    """What a shard's file will hold: its header, and the tensors in the order of the data."""

    header: bytes
    tensors: tuple[Placed, ...]
    bytes: int


def describe(manifest: Manifest, layout: Layout, rank: int, group: str) -> dict[str, str]:
    """What a shard's file says of itself: the service's say the same."""
    where = {"run": manifest.run, "step": str(manifest.step), "layout": layouts.text(layout)}
    return {**where, "rank": str(rank), "group": group}


def lay_out(tensors: Sequence[LocalTensor], metadata: Mapping[str, str]) -> ShardFile:
    """The file of these local tensors; `StateMismatch` by name for what safetensors cannot hold."""
    order = safetensors.storage_order((local.name, local.dtype) for local in tensors)
    placed: list[Placed] = []
    stored: list[Stored] = []
    end = 0
    for local in (tensors[position] for position in order):
        size = shards.nbytes(local)
        placed.append(Placed(local, end))
        stored.append(Stored(local.name, local.dtype, local.shape, end, end + size))
        end += size
    header = safetensors.encode(stored, {**FORMAT_METADATA, **metadata})
    return ShardFile(header, tuple(placed), len(header) + end)


def write(reader: CheckpointReader, group: str, file: ShardFile, path: Path, on_bytes: OnBytes = lambda _: None) -> None:
    """Read, prove and write a shard. The file must not be there yet; on any error it is removed again.

    Nothing is synced: a power cut may lose the file. `on_bytes` hears how many bytes of the file were written. Raises
    `InvalidRequest` where something stands at `path`, `CorruptExtent` for damage, `NoSpace`, `StorageFailed`.
    """
    with _created(path, file.bytes) as descriptor:
        memory = np.empty(min(BUFFER_BYTES, max(file.bytes - len(file.header), 1)), np.uint8)
        for batch in _batches(file.tensors, len(memory)):
            first, stop = batch[0].start, batch[-1].start + shards.nbytes(batch[-1].local)
            filled = memory[: stop - first]
            reader.load(_wants(group, batch, filled, first))
            copying.write(descriptor, len(file.header) + first, filled.data)
            on_bytes(stop - first)
        copying.write(descriptor, 0, memoryview(file.header))
        on_bytes(len(file.header))


def _wants(group: str, batch: Sequence[Placed], memory: shards.Octets, first: int) -> Iterator[Want]:
    for local, start in batch:
        octets = memory[start - first : start - first + shards.nbytes(local)]
        if local.padding:
            octets.fill(0)
        yield from shards.wants(group, local, octets)


def _batches(tensors: Sequence[Placed], bytes_max: int) -> Iterator[list[Placed]]:
    """Neighbours that fit the buffer together; a tensor that does not fit alone comes in pieces."""
    batch: list[Placed] = []
    taken = 0
    for local, start in tensors:
        at = start
        for piece in shards.pieces(local, bytes_max):
            size = shards.nbytes(piece)
            if batch and taken + size > bytes_max:
                yield batch
                batch, taken = [], 0
            batch.append(Placed(piece, at))
            taken += size
            at += size
    if batch:
        yield batch


@contextmanager
def _created(path: Path, size: int) -> Iterator[int]:
    """A new file of zeros; gone again when the block fails."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        descriptor = os.open(path, flags, 0o644)
    except FileExistsError:
        raise InvalidRequest(f"{path} is there already", hint="remove it, or name another file") from None
    except OSError as error:
        raise copying.translated(path, error) from error
    try:
        os.truncate(descriptor, size)
        yield descriptor
    except BaseException as error:
        path.unlink(missing_ok=True)
        if isinstance(error, OSError):
            raise copying.translated(path, error) from error
        raise
    finally:
        os.close(descriptor)
