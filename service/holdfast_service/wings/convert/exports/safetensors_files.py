"""Puts tensors into safetensors files with an index, as Hugging Face and Paddle name them."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from holdfast_formats.disk import safetensors
from holdfast_formats.disk.packing import FILE_BYTES_MAX, FilePlan, pack
from holdfast_formats.disk.safetensors import FileTensor
from holdfast_formats.mapping.box_moves import MappedTensor
from holdfast_formats.mapping.target_files import GrowingFile, TargetFile
from holdfast_formats.tensors import TensorSpec
from holdfast_service.wings.convert.exports.plan import small_file


class KnownTensor(NamedTuple):
    """A small tensor whose bytes need no reading."""

    spec: TensorSpec
    data: bytes


class ShardSet(NamedTuple):
    """The files of a set of tensors, and each tensor's file."""

    files: tuple[TargetFile, ...]
    weight_map: Mapping[str, str]
    total_bytes: int

    def index_file(self, name: str, more: Mapping[str, Any] | None = None) -> TargetFile:
        document = {"metadata": {"total_size": self.total_bytes}, "weight_map": self.weight_map, **(more or {})}
        return small_file(name, json.dumps(document, indent=2).encode() + b"\n")


def shard_set(
    stem: str,
    tensors: Iterable[MappedTensor | KnownTensor],
    form: str,
    numbered: bool = False,
    file_bytes_max: int = FILE_BYTES_MAX,
) -> ShardSet:
    """The tensors in files `STEM.safetensors` or `STEM-00001-of-0000N.safetensors`, the latter always if `numbered`.

    `form` is the metadata's `format`, by which libraries recognise the layout. `StateMismatch` for a duplicate name.
    """
    listed = list(tensors)
    held = {one.spec.name: one for one in listed}
    specs = [TensorSpec(stem, one.spec.name, one.spec.dtype, one.spec.shape) for one in listed]
    plans = pack(specs, file_bytes_max)
    files, weight_map = list[TargetFile](), dict[str, str]()
    for plan in plans:
        name = f"{stem}-00001-of-00001.safetensors" if numbered and len(plans) == 1 else plan.name
        files.append(_file(name, plan, held, form))
        weight_map |= {spec.name: name for spec, _ in plan.tensors}
    return ShardSet(tuple(files), dict(sorted(weight_map.items())), sum(spec.nbytes for spec in specs))


def _file(name: str, plan: FilePlan, held: Mapping[str, MappedTensor | KnownTensor], form: str) -> TargetFile:
    first = len(plan.header)  # places are counted from here; the header with other metadata may be longer
    listed = [
        FileTensor(spec.name, spec.dtype, spec.shape, start - first, start - first + spec.nbytes)
        for spec, start in plan.tensors
    ]
    header = safetensors.encode(listed, {"format": form})
    file = GrowingFile()
    file.put(header)
    for placed in listed:  # one after the other
        one = held[placed.name]
        if isinstance(one, KnownTensor):
            file.put(one.data)
        else:
            file.stream(one)
    return file.made(name)
