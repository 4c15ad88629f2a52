"""Packing: determines each tensor's file and start byte from names, dtypes and shapes alone.

Rank, mesh and node have no influence, so the same tensors give the same files, whichever ranks save them. Frozen tensors,
whose bytes are expected to stay, have files of their own, so that later saves need not write these files again.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Sequence
from functools import lru_cache
from typing import NamedTuple

from holdfast_formats.disk import safetensors
from holdfast_formats.disk.manifests import EXTENT_BYTES_MAX
from holdfast_formats.disk.safetensors import FileTensor
from holdfast_formats.errors import InvalidRequest, StateMismatch
from holdfast_formats.naming import shard_file_name
from holdfast_formats.tensors import TensorSpec

FILE_BYTES_MAX = 5_000_000_000  # Hugging Face's default, in decimal gigabytes
EXTENT_BYTES_MIN = 2**18  # digests of shorter ones cost more than they save a reader
EXTENTS_MAX = 2**16  # the approximate number per checkpoint, besides one at the end of each tensor: a manifest of 3 MB
TENSOR_EXTENTS = 8  # per tensor at least, unless they would be too short: some ranks need an eighth of it
FROZEN_BYTES_MIN = 2**22  # a group with fewer bytes of frozen tensors has no files for them: a file has a cost too
PARTS_KEPT = 2**12
_DIGITS = re.compile(r"(\d+)")
FORMAT_METADATA = {"format": "pt"}  # transformers refuses a file that lacks it


class FilePlan(NamedTuple):
    """One shard file before it is written: its encoded header, and its tensors in storage order."""

    name: str
    group: str
    header: bytes
    tensors: tuple[tuple[TensorSpec, int], ...]  # (spec, first byte in the file)
    bytes: int
    frozen: bool = False  # all its tensors are expected to keep their bytes


def natural_key(name: str) -> tuple[tuple[int, int | str], ...]:
    """Sort key that puts `layers.2` before `layers.10`; total, since equal keys mean equal names up to leading zeros."""
    return (*map(_part_key, _DIGITS.split(name)), (0, name))


@lru_cache(maxsize=PARTS_KEPT)  # names of 100 000 tensors are made of a few hundred parts
def _part_key(part: str) -> tuple[int, int | str]:
    return (1, int(part)) if part.isdigit() and part.isascii() else (0, part)


def extent_bytes(data_bytes: int) -> int:
    """The length of extents for tensors of so many bytes: a power of two.

    Short extents mean that a reader of a part of a tensor reads few other bytes. Each tensor's extents begin at
    multiples of this.
    """
    return _power_of_two(-(-data_bytes // EXTENTS_MAX), EXTENT_BYTES_MAX)


def tensor_extent_bytes(tensor_bytes: int, extent_bytes: int) -> int:
    """The extent length of one tensor: shorter for a small one, which would have few otherwise."""
    return _power_of_two(-(-tensor_bytes // TENSOR_EXTENTS), extent_bytes)


def _power_of_two(least: int, most: int) -> int:
    return min(max(1 << (least - 1).bit_length(), EXTENT_BYTES_MIN), most)


def pack(
    specs: Iterable[TensorSpec],
    file_bytes_max: int = FILE_BYTES_MAX,
    frozen: Collection[tuple[str, str]] = frozenset(),
) -> list[FilePlan]:
    """Pack tensors into shard files, group by group, in natural order of their names; the `frozen` ones, by group and name,
    into files of their own, after the others.

    A file is closed when the next tensor would take its data over `file_bytes_max`; a single larger tensor gets a file of
    its own. Inside a file the order is the safetensors library's. Raises `InvalidRequest` for a limit below one byte and
    `StateMismatch` when a group has a name twice.
    """
    if file_bytes_max < 1:
        raise InvalidRequest(f"file_bytes_max must be at least 1, not {file_bytes_max}")
    groups: dict[str, list[TensorSpec]] = {}
    for spec in specs:
        spec.check()
        groups.setdefault(spec.group, []).append(spec)
    plans: list[FilePlan] = []
    for group in sorted(groups):
        bins = _filled(sorted(groups[group], key=lambda s: natural_key(s.name)), file_bytes_max, frozen)
        plans += [_plan_file(group, (at, len(bins)), specs, frozen) for at, specs in enumerate(bins)]
    return plans


def _filled(specs: Sequence[TensorSpec], file_bytes_max: int, frozen: Collection[tuple[str, str]]) -> list[list[TensorSpec]]:
    """A group's tensors by file."""
    still = [spec for spec in specs if (spec.group, spec.name) in frozen] if frozen else []
    if sum(spec.nbytes for spec in still) < FROZEN_BYTES_MIN or len(still) == len(specs):
        return _fill(specs, file_bytes_max)
    moving = [spec for spec in specs if (spec.group, spec.name) not in frozen]
    return _fill(moving, file_bytes_max) + _fill(still, file_bytes_max)


def _fill(specs: Sequence[TensorSpec], file_bytes_max: int) -> list[list[TensorSpec]]:
    bins: list[list[TensorSpec]] = []
    room = 0
    previous = None
    for spec in specs:
        if spec.name == previous:
            raise StateMismatch(f"group {spec.group!r} has two tensors named {spec.name!r}")
        previous = spec.name
        if not bins or (spec.nbytes > room and bins[-1]):
            bins.append([])
            room = file_bytes_max
        bins[-1].append(spec)
        room -= spec.nbytes
    return bins


def _plan_file(
    group: str, numbered: tuple[int, int], specs: Sequence[TensorSpec], frozen: Collection[tuple[str, str]]
) -> FilePlan:
    """`numbered`: its number, from 0 on, of how many."""
    ordered = [specs[i] for i in safetensors.storage_order((s.name, s.dtype) for s in specs)]
    stored: list[FileTensor] = []
    end = 0
    for spec in ordered:
        stored.append(FileTensor(spec.name, spec.dtype, spec.shape, end, end + spec.nbytes))
        end += spec.nbytes
    header = safetensors.encode(stored, FORMAT_METADATA)
    placed = tuple((spec, len(header) + place.start) for spec, place in zip(ordered, stored, strict=True))
    name, still = shard_file_name(group, *numbered), all((group, spec.name) in frozen for spec in specs)
    return FilePlan(name, group, header, placed, len(header) + end, still)
