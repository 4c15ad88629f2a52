"""Directories of `HuggingFaceStorageWriter(save_distributed=True)`: safetensors files with the shards of one rank, whose
header has the place of each shard in its tensor.
"""

from __future__ import annotations

from holdfast_formats.errors import StateMismatch
from holdfast_formats.files import Files
from holdfast_formats.mapping.listing import FileUse, ForeignListing, ForeignPiece
from holdfast_formats.region import Box, Shape, whole
from holdfast_formats.tensors import TensorSpec
from holdfast_service.wings.convert.foreign.dcp import directories
from holdfast_service.wings.convert.foreign.dcp.gathering import GatheredListing
from holdfast_service.wings.convert.foreign.dcp.metadata import SavedState, check_tiled
from holdfast_service.wings.convert.foreign.dcp.payloads import safetensors_part

_NOTE = "tensor shapes are derived from the extent of their shards"


def read(files: Files, shards: int | None) -> ForeignListing:
    """All shards together, as group model; `shards` is the number of ranks that wrote some.

    `StateMismatch` if they overlap, leave gaps, or differ in dtype, and for another number of shards: the directory does not
    state it, and a tensor whose last shard is missing would be a smaller one.
    """
    _check_count(files, shards)
    pieces: dict[str, list[ForeignPiece]] = {}  # with those of no element, which count for a tensor's shape
    dtypes: dict[str, str] = {}
    known: dict[str, FileUse] = {}
    for file in files.list(""):
        if not directories.SHARD.fullmatch(file):
            continue
        known[file] = FileUse(file, "tensors")
        part = safetensors_part(files, file)
        for name, stored in part.arrays.items():
            offset = (part.offsets or {}).get(name)
            if offset is None or len(offset) != len(stored.shape):
                raise StateMismatch(f"{file} does not give the position of the shard of {name!r}", file=file, tensor=name)
            if dtypes.setdefault(name, stored.dtype) != stored.dtype:
                raise StateMismatch(
                    f"{name!r} is {stored.dtype} in {file}, but {dtypes[name]} in an earlier shard", file=file, tensor=name
                )
            pieces.setdefault(name, []).append(stored.piece(whole(stored.shape), offset))
    gathered = GatheredListing(files)
    for name, held in pieces.items():
        shape = _extent([piece.box for piece in held])
        check_tiled(name, shape, [piece.box for piece in held], held[0].file)
        gathered.add(TensorSpec("model", name, dtypes[name], shape), tuple(one for one in held if one.box.volume))
    listed = directories.uses(files, SavedState({}, {}, {}, {}), "", known)
    return ForeignListing("dcp", gathered.tensors, listed, assets=directories.assets(listed), notes=(_NOTE,))


def _check_count(files: Files, shards: int | None) -> None:
    ranks = sorted({int(match[1]) for file in files.list("") if (match := directories.SHARD.fullmatch(file))})
    if shards == len(ranks):
        return
    shards_text = f"there are shards of {len(ranks)} ranks, the last of rank {ranks[-1]}"
    if shards is None:
        raise StateMismatch(
            f"{shards_text}, but the directory does not record how many there were; without the last, tensors are cut",
            hint=f"compare with the number of ranks that saved; if none is missing, pass --shards {len(ranks)}",
        )
    raise StateMismatch(
        f"{shards_text}, but --shards is {shards}", hint="copy the whole directory; ranks without tensors write no file"
    )


def _extent(boxes: list[Box]) -> Shape:
    return tuple(max(stops) for stops in zip(*(box.stop for box in boxes), strict=True))
