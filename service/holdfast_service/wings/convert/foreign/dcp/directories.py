"""What every file of a DCP directory is used for."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

from holdfast_files.opened import join
from holdfast_formats import naming
from holdfast_formats.errors import LimitExceeded
from holdfast_formats.files import Files
from holdfast_formats.mapping.listing import FileUse
from holdfast_service.wings.convert.foreign.dcp.metadata import METADATA, SavedState

FILES_MAX = 2**20
DEPTH_MAX = 8
OF_A_RANK = re.compile(r"__\d+_\d+\.distcp")
METADATA_OF_A_RANK = re.compile(r"__\d+\.metadata")
SHARD = re.compile(r"shard-(\d{5})-model-\d{5}-of-\d{5}\.safetensors")
_EARLIER = "the metadata does not list it: it is left from an earlier save into this directory"
_UNFINISHED = "it is left from an unfinished save"


def walk(files: Files, directory: str = "", depth: int = 0) -> Iterator[str]:
    """The paths of all files. Raises `LimitExceeded` for too many or too deep directories."""
    for position, name in enumerate(files.list(directory)):
        path = join(directory, name)
        if position > FILES_MAX or depth > DEPTH_MAX:
            raise LimitExceeded(f"{path}: more than {FILES_MAX} files, or directories deeper than {DEPTH_MAX}", file=path)
        if files.size(path) is not None:
            yield path
        else:
            yield from walk(files, path, depth + 1)


def uses(files: Files, saved: SavedState, directory: str, known: Mapping[str, FileUse]) -> tuple[FileUse, ...]:
    """The use of every file. `known` are those read besides the metadata and its files."""
    of_tensors = {chunk.at.file for tensor in saved.tensors.values() for chunk in tensor.chunks}
    of_values = {at.file for at in saved.values.values()}
    listed: list[FileUse] = []
    for path in walk(files):
        if path in of_tensors:
            listed.append(FileUse(path, "tensors"))
        elif path in of_values or path == join(directory, METADATA):
            listed.append(FileUse(path, "state"))
        else:
            listed.append(known[path] if path in known else _other(path))
    return tuple(listed)


def assets(uses: tuple[FileUse, ...]) -> tuple[str, ...]:
    return tuple(use.file for use in uses if use.use == "asset")


def _other(path: str) -> FileUse:
    name = path.rpartition("/")[2]
    if name.endswith(".distcp") or METADATA_OF_A_RANK.fullmatch(name):
        return FileUse(path, "unused", _EARLIER)
    if name.endswith(".tmp"):
        return FileUse(path, "unused", _UNFINISHED)
    if "/" not in path and naming.is_asset_name(name):
        return FileUse(path, "asset")
    return FileUse(path, "unused", "the metadata does not list it, and a checkpoint cannot hold such a file")
