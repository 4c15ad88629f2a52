"""Hugging Face's `*.safetensors.index.json`: `weight_map` and `metadata`, nothing else at the top."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from holdfast_formats.disk.packing import FilePlan


def encode(files: Iterable[FilePlan]) -> bytes:
    """The index of one group's files: each tensor's file, and the tensors' total bytes.

    Our own fields may only be inside `metadata`. transformers itself writes `weight_map` and `all_checkpoint_keys` there, so
    those two names are never used.
    """
    listed = list(files)
    weight_map = {spec.name: file.name for file in listed for spec, _ in file.tensors}
    total = sum(spec.nbytes for file in listed for spec, _ in file.tensors)
    document = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
    return msgspec.json.format(msgspec.json.encode(document), indent=2) + b"\n"
