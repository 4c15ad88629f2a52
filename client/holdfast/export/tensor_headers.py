"""The tensors of a directory with safetensors files, by the files' headers alone."""

from __future__ import annotations

from pathlib import Path

from holdfast_formats.disk import safetensors
from holdfast_formats.errors import NoSuchCheckpoint, StateMismatch
from holdfast_formats.mapping.listing import TensorKey
from holdfast_formats.tensors import TensorSpec


def headers(directory: Path) -> dict[TensorKey, TensorSpec]:
    """All tensors of the directory's files, as group `model`; `StateMismatch` for a name in two files."""
    files = sorted(directory.glob("*.safetensors"))
    if not files:
        raise NoSuchCheckpoint(f"{directory} has no safetensors files", hint="give a Hugging Face directory or a checkpoint")
    specs: dict[TensorKey, TensorSpec] = {}
    for path in files:
        for spec in _read(path):
            key = TensorKey(spec.group, spec.name)
            if key in specs:
                raise StateMismatch(f"{path.name} and another file both have {spec.name!r}", tensor=spec.name)
            specs[key] = spec
    return specs


def _read(path: Path) -> list[TensorSpec]:
    size = path.stat().st_size
    with path.open("rb") as file:
        head = file.read(safetensors.LENGTH_BYTES)
        length = safetensors.header_length(head, size, path.name)
        held = safetensors.decode(head + file.read(length), size, path.name)
    return [TensorSpec("model", tensor.name, tensor.dtype, tensor.shape) for tensor in held.tensors]
