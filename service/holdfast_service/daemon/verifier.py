"""Reads a checkpoint back and proves every byte against its manifest (I7), with bounded memory."""

from __future__ import annotations

import numpy as np

from holdfast_formats import manifest, naming, safetensors
from holdfast_formats.digest import digest
from holdfast_formats.errors import CorruptExtent, CorruptManifest, NotCommitted
from holdfast_formats.manifest import EXTENT_BYTES_MAX, FileEntry, Manifest
from holdfast_service.storage import Tier

_HINT = "restore another step; `holdfast verify` lists every damaged range"


def verify(tier: Tier, directory: str) -> Manifest:
    """Check COMMIT, manifest, every header, every extent and every small file under `directory`; return the manifest.

    Raises `NotCommitted`, `CorruptManifest` or `CorruptExtent`, naming file, tensor and byte range of the first damage.
    """
    if tier.size(f"{directory}/{naming.COMMIT}") is None:
        raise NotCommitted(f"{directory} has no {naming.COMMIT}")
    made = manifest.decode(tier.read(f"{directory}/{naming.MANIFEST}"), tier.read(f"{directory}/{naming.COMMIT}"))
    for file in made.files:
        _verify_file(tier, directory, file)
    buffer = np.empty(EXTENT_BYTES_MAX, np.uint8)
    for tensors in made.tensors.values():
        for name, tensor in tensors.items():
            for extent in tensor.extents:
                target = buffer[: extent.length]
                begin = tensor.start + extent.offset
                read = tier.read_into(f"{directory}/{tensor.file}", begin, target.data)
                if read != extent.length or digest(target) != extent.digest:
                    raise CorruptExtent(
                        f"{directory}/{tensor.file}: tensor {name!r}, bytes {begin} to {begin + extent.length} are damaged",
                        hint=_HINT,
                        file=tensor.file,
                        tensor=name,
                        offset=begin,
                        length=extent.length,
                    )
    return made


def _verify_file(tier: Tier, directory: str, file: FileEntry) -> None:
    path = f"{directory}/{file.name}"
    if tier.size(path) != file.bytes:
        raise CorruptManifest(f"{path} has {tier.size(path)} bytes, not {file.bytes}", hint=_HINT, file=file.name)
    head = tier.read(path, 0, file.header_bytes or file.bytes)
    if digest(head) != file.digest:
        raise CorruptManifest(f"{path} is damaged in its first {len(head)} bytes", hint=_HINT, file=file.name)
    if file.header_bytes:
        safetensors.decode(head, file.bytes, path)
