"""The `.metadata` of a DCP directory: tensors with their chunks, values, and the places of all in files."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from math import prod
from typing import Any, NamedTuple, TypeGuard

from holdfast_files.opened import join
from holdfast_formats import dtypes
from holdfast_formats.errors import NotCommitted, Refused, StateMismatch
from holdfast_formats.files import Files
from holdfast_formats.mapping.listing import RefusedPart
from holdfast_formats.region import Box, Shape, check_box, first_overlap
from holdfast_service.wings.convert.foreign import pickles
from holdfast_service.wings.convert.foreign.pickles import PickledGlobal, PickledRecord

METADATA = ".metadata"
Path = tuple[str | int, ...]

_DCP = "torch.distributed.checkpoint"
_MEGATRON = "megatron.core.dist_checkpointing.strategies.torch"
_ROOTS = (f"{_DCP}.metadata.Metadata", f"{_MEGATRON}.MCoreMetadata")
_TENSOR, _VALUE = f"{_DCP}.metadata.TensorStorageMetadata", f"{_DCP}.metadata.BytesStorageMetadata"
_OPTIMIZER = ("optim", "state.", "param_groups.")  # how keys of optimizers begin
_PATHS = ("PosixPath", "PurePosixPath", "WindowsPath", "PureWindowsPath")
ALLOWED = frozenset(
    (
        *_ROOTS,
        *(
            f"{_DCP}.metadata.{name}"
            for name in ("TensorStorageMetadata", "BytesStorageMetadata", "ChunkStorageMetadata", "MetadataIndex")
        ),
        *(f"{_DCP}.metadata.{name}" for name in ("TensorProperties", "_MEM_FORMAT_ENCODING", "StorageMeta")),
        f"{_DCP}.filesystem._StorageInfo",
        *(f"torch.{name}" for name in ("complex32", "complex128", "quint8", "qint8", "qint32", "float4_e2m1fn_x2")),
        # Megatron-core keeps the plans of its ranks, to save the next step faster.
        *(f"{_DCP}.planner.{name}" for name in ("SavePlan", "WriteItem", "WriteItemType", "TensorWriteData")),
        *(f"{_DCP}.filesystem.{name}" for name in ("_StoragePrefix",)),
        f"{_MEGATRON}.MCoreSavePlan",
        *(f"{module}.{name}" for module in ("pathlib", "pathlib._local") for name in _PATHS),
    )
)


class StoredAt(NamedTuple):
    """Bytes [start, start + length) of a file; its name is relative to the directory."""

    file: str
    start: int
    length: int


class SavedChunk(NamedTuple):
    box: Box
    at: StoredAt


class SavedTensor(NamedTuple):
    """A tensor by its key in the state dict. The chunks tile it exactly."""

    fqn: str
    dtype: str
    shape: Shape
    chunks: tuple[SavedChunk, ...]

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * dtypes.bits(self.dtype) // 8


class SavedState(NamedTuple):
    """A saved state dict: tensors and values by key, and the keys' paths if a planner has recorded them.

    `flattened` are tensors of Megatron-core whose chunks are flat ranges of a grid's cells, with their true shapes.
    `refused` are keys that cannot be read.
    """

    tensors: Mapping[str, SavedTensor]
    values: Mapping[str, StoredAt]
    paths: Mapping[str, Path]
    flattened: Mapping[str, Shape]
    refused: tuple[RefusedPart, ...] = ()

    @property
    def files(self) -> frozenset[str]:
        of_tensors = {chunk.at.file for tensor in self.tensors.values() for chunk in tensor.chunks}
        return frozenset(of_tensors | {at.file for at in self.values.values()})


def read(files: Files, directory: str = "") -> SavedState:
    """Read `.metadata`. Refused are tensors that it contradicts itself about, and those of a type that no checkpoint holds.

    Raises `NotCommitted` without one, `StateMismatch` by file and key for anything else that does not fit.
    """
    path = join(directory, METADATA)
    if files.size(path) is None:
        raise NotCommitted(
            f"{path} is missing, which a save writes last: the save did not complete, or each rank wrote its own metadata",
            hint="import a step whose save completed",
            file=path,
        )
    root = pickles.read_pickle(files, path, ALLOWED)
    if not isinstance(root, PickledRecord) or root.name not in _ROOTS:
        raise StateMismatch(f"{path} does not hold the metadata of a DCP checkpoint", file=path)
    places = _places(files, directory, root.get("storage_data"), path)
    tensors: dict[str, SavedTensor] = {}
    values: dict[str, StoredAt] = {}
    refused: dict[str, Refused] = {}
    for fqn, about in _dict(root.get("state_dict_metadata"), "state_dict_metadata", path).items():
        if not isinstance(fqn, str) or not isinstance(about, PickledRecord):
            raise StateMismatch(f"{path}: the entry of key {fqn!r:.80} is malformed", file=path)
        if about.name == _TENSOR:
            try:
                tensors[fqn] = _tensor(fqn, about, places, path)
            except Refused as error:
                refused[fqn] = error
        elif about.name == _VALUE:
            values[fqn] = _place(places, EntryKey(fqn), path)
        else:
            raise StateMismatch(f"{path} describes {fqn!r} as {about.name}", file=path, tensor=fqn)
    for fqn, offset in places:
        if fqn not in refused and fqn not in (
            values if offset is None else tensors
        ):  # chunks without elements may have any offset
            raise StateMismatch(f"{path} gives a location for {fqn!r}, but does not describe it", file=path, tensor=fqn)
    paths, flattened = _paths(root.get("planner_data"), path), _flattened(root.get("mcore_data"), path)
    parts = (RefusedPart(fqn, error, "optim" if fqn.startswith(_OPTIMIZER) else "model") for fqn, error in refused.items())
    return SavedState(tensors, values, paths, flattened, tuple(parts))


def check_tiled(fqn: str, shape: Shape, boxes: Iterable[Box], file: str) -> None:
    """`StateMismatch` unless the boxes tile the shape exactly."""
    solid = [box for box in boxes if box.volume]
    for box in solid:
        check_box(box, shape, fqn)
    twice = first_overlap(solid)
    if twice is not None:
        text = f"{fqn!r}: the chunks at {list(twice[0].offset)} and {list(twice[1].offset)} overlap"
        raise StateMismatch(text, file=file, tensor=fqn)
    missing = prod(shape) - sum(box.volume for box in solid)
    if missing:
        raise StateMismatch(f"{fqn!r}: {missing} elements of {list(shape)} are in no chunk", file=file, tensor=fqn)


class EntryKey(NamedTuple):
    """A key of the state dict; for a tensor with the offset of one of its chunks."""

    fqn: str
    offset: Shape | None = None


Places = dict[EntryKey, StoredAt]


def _places(files: Files, directory: str, value: Any, path: str) -> Places:
    places: Places = {}
    sizes: dict[str, int | None] = {}
    for index, info in _dict(value, "storage_data", path).items():
        fqn = index.get("fqn") if isinstance(index, PickledRecord) else None
        offset = None if fqn is None else index.get("offset")
        if not isinstance(fqn, str) or not isinstance(info, PickledRecord) or not (offset is None or _is_shape(offset)):
            raise StateMismatch(f"{path} has a malformed location entry", file=path)
        key = EntryKey(fqn, offset)
        at = _stored_at(info, fqn, path)._replace(file=join(directory, _file_name(info, fqn, path)))
        if places.setdefault(key, at) != at:
            raise StateMismatch(f"{path} gives two locations for {fqn!r} at {offset}", file=path, tensor=fqn)
        if at.file not in sizes:
            sizes[at.file] = files.size(at.file)
        _check_inside(at, sizes[at.file], fqn)
    return places


def _stored_at(info: PickledRecord, fqn: str, path: str) -> StoredAt:
    transforms = info.get("transform_descriptors")
    if transforms:
        shown = ", ".join(map(str, transforms)) if isinstance(transforms, list | tuple) else str(transforms)
        raise StateMismatch(
            f"{fqn!r} was transformed when it was written: {shown}",
            hint="save without storage writer extensions",
            file=path,
            tensor=fqn,
        )
    start, length = info.get("offset"), info.get("length")
    if type(start) is not int or type(length) is not int or start < 0 or length < 0:
        raise StateMismatch(
            f"{path} has no valid location for {fqn!r}: {start!r:.40}, {length!r:.40}", file=path, tensor=fqn
        )
    return StoredAt("", start, length)


def _file_name(info: PickledRecord, fqn: str, path: str) -> str:
    name = info.get("relative_path")
    if not isinstance(name, str) or any(part in ("", ".", "..") for part in name.split("/")) or "\\" in name or "\0" in name:
        raise StateMismatch(f"{path} places {fqn!r} in {name!r:.80}, outside the directory", file=path, tensor=fqn)
    return name


def _check_inside(at: StoredAt, size: int | None, fqn: str) -> None:
    if size is None:
        raise StateMismatch(
            f"{fqn!r} is in {at.file}, which is missing",
            hint="copy the directory again, with the files of all ranks",
            file=at.file,
            tensor=fqn,
        )
    if at.start + at.length > size:
        text = f"{fqn!r} is in {at.file} at {at.start}+{at.length}, but that file has only {size} bytes"
        raise StateMismatch(text, hint="copy the file again: it is not complete", file=at.file, tensor=fqn)


def _tensor(fqn: str, about: PickledRecord, places: Places, path: str) -> SavedTensor:
    shape, properties = about.get("size"), about.get("properties")
    if not _is_shape(shape) or not isinstance(properties, PickledRecord):
        raise StateMismatch(f"{path} does not describe the tensor {fqn!r}", file=path, tensor=fqn)
    boxes = dict.fromkeys(_box(chunk, fqn, path) for chunk in _list(about.get("chunks"), fqn, path))
    check_tiled(fqn, shape, boxes, path)
    chunks = tuple(SavedChunk(box, _place(places, EntryKey(fqn, box.offset), path)) for box in boxes if box.volume)
    return SavedTensor(fqn, _dtype(properties, fqn, path), shape, chunks)


def _box(chunk: Any, fqn: str, path: str) -> Box:
    offset, shape = (chunk.get(name) if isinstance(chunk, PickledRecord) else None for name in ("offsets", "sizes"))
    if not _is_shape(offset) or not _is_shape(shape):
        raise StateMismatch(f"{path} has a chunk of {fqn!r} without offset or size", file=path, tensor=fqn)
    return Box(offset, shape)


def _dtype(properties: PickledRecord, fqn: str, path: str) -> str:
    state = properties.state
    dtype = state[0] if isinstance(state, tuple) and state else properties.get("dtype")
    name = dtype.name if isinstance(dtype, PickledGlobal) else repr(dtype)
    if name not in pickles.TORCH_DTYPES:
        raise StateMismatch(f"{fqn!r} is {name}, which no checkpoint can hold", file=path, tensor=fqn)
    return pickles.TORCH_DTYPES[name]


def _place(places: Places, key: EntryKey, path: str) -> StoredAt:
    if key not in places:
        where = "" if key.offset is None else f" at {list(key.offset)}"
        raise StateMismatch(f"{path} does not give a location for {key.fqn!r}{where}", file=path, tensor=key.fqn)
    return places[key]


def _paths(value: Any, path: str) -> dict[str, Path]:
    if value is None:
        return {}
    for fqn, keys in _dict(value, "paths", path).items():
        plain = isinstance(fqn, str) and isinstance(keys, tuple) and keys and all(isinstance(k, str | int) for k in keys)
        if not plain:
            raise StateMismatch(f"{path} has key paths that torch's planners do not write: {fqn!r:.80}", file=path)
    paths: dict[str, Path] = value
    return paths


def _flattened(value: Any, path: str) -> dict[str, Shape]:
    """True shapes of the tensors that Megatron-core 0.6 to 0.14 flattened, cell by cell."""
    shapes: dict[str, Shape] = {}
    for fqn, about in _dict(value or {}, "mcore_data", path).items():
        shape = about.get("nd_reformulated_orig_global_shape") if isinstance(about, dict) else None
        if shape is not None:
            if not isinstance(shape, tuple | list) or not all(type(n) is int and n > 0 for n in shape):
                raise StateMismatch(f"{path} has no valid original shape for {fqn!r}", file=path, tensor=str(fqn))
            shapes[str(fqn)] = tuple(shape)
    return shapes


def _is_shape(value: Any) -> TypeGuard[Shape]:
    return isinstance(value, tuple) and all(type(n) is int and n >= 0 for n in value)


def _dict(value: Any, name: str, path: str) -> dict[Any, Any]:
    if not isinstance(value, dict):
        raise StateMismatch(f"{path} has no {name}", file=path)
    return value


def _list(value: Any, fqn: str, path: str) -> list[Any]:
    if not isinstance(value, list):
        raise StateMismatch(f"{path} has no chunks of {fqn!r}", file=path, tensor=fqn)
    return value
