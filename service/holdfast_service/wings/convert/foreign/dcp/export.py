"""Exports tensors and values as a directory that `torch.distributed.checkpoint.load` reads."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from holdfast_files.opened import join
from holdfast_formats.errors import InvalidRequest
from holdfast_formats.mapping.box_moves import MappedTensor
from holdfast_formats.mapping.listing import TensorKey
from holdfast_formats.mapping.target_files import GrowingFile, LiteralBytes, Sealing, TargetFile
from holdfast_formats.region import Shape
from holdfast_service.wings.convert.foreign import pickle_writer, torch_zips
from holdfast_service.wings.convert.foreign.dcp import export_names
from holdfast_service.wings.convert.foreign.dcp.export_names import ExportedLeaf
from holdfast_service.wings.convert.foreign.pickle_writer import GlobalCall, MadeObject, NamedGlobal, ObjectKeys
from holdfast_service.wings.convert.foreign.pickled.dtypes import TORCH_NAMES
from holdfast_service.wings.convert.foreign.torch_zips import ALIGNMENT_BYTES, ZipAround

FILE_BYTES_MAX = 5_000_000_000  # a larger tensor has a file of its own
METADATA = ".metadata"
VERSION = "1.0.0"
_PACKAGE = "torch.distributed.checkpoint"
_STORAGE_INFO = NamedGlobal(f"{_PACKAGE}.filesystem._StorageInfo")


class DcpExport(NamedTuple):
    """The files of a DCP directory, `.metadata` as the last, and each omitted key with the reason."""

    files: tuple[TargetFile, ...]
    left_out: tuple[tuple[str, str], ...]


class _Entry(NamedTuple):
    leaf: ExportedLeaf
    file: str
    start: int
    length: int


def target_files(
    tensors: Iterable[MappedTensor],
    documents: Mapping[str, Mapping[str, Any]],
    layout: str,
    file_bytes_max: int = FILE_BYTES_MAX,
) -> DcpExport:
    """Plan the files for tensors by their keys and for the JSON documents of state.json by group and key.

    Raises `InvalidRequest` for an unknown layout, and `StateMismatch` for duplicate keys.
    """
    held = {tensor.key: tensor for tensor in tensors}
    left_out = [
        (f"{group}/{name}", f"torch has no dtype for {tensor.spec.dtype}")
        for (group, name), tensor in held.items()
        if tensor.spec.dtype not in TORCH_NAMES
    ]
    held = {key: tensor for key, tensor in held.items() if tensor.spec.dtype in TORCH_NAMES}
    named = export_names.names_of(held, documents, layout)
    made = files_of(named.leaves, file_bytes_max=file_bytes_max)
    return made._replace(left_out=(*named.left_out, *left_out, *made.left_out))


def files_of(leaves: Iterable[ExportedLeaf], directory: str = "", file_bytes_max: int = FILE_BYTES_MAX) -> DcpExport:
    """The files of these entries of a state dict, below a directory of the target."""
    writer, left_out = _Files(file_bytes_max), list[tuple[str, str]]()
    for leaf in leaves:
        if leaf.tensor is None:
            try:
                writer.add_value(leaf)
            except InvalidRequest as error:
                left_out.append((leaf.fqn, error.detail))
        else:
            writer.add_tensor(leaf, leaf.tensor)
    metadata = pickle_writer.dumps(_metadata(writer.entries))
    files = (*writer.finish(), TargetFile(METADATA, len(metadata), (LiteralBytes(0, metadata),)))
    return DcpExport(tuple(file._replace(name=join(directory, file.name)) for file in files), tuple(left_out))


class _Files:
    """Fills files in turn, each of at most `file_bytes_max` bytes if it has more than one entry."""

    def __init__(self, file_bytes_max: int) -> None:
        self.entries: list[_Entry] = []
        self._file_bytes_max = file_bytes_max
        self._made: list[TargetFile] = []
        self._open()

    def add_value(self, leaf: ExportedLeaf) -> None:
        data = torch_zips.of_value(leaf.value)
        self._begin(leaf, len(data))
        self._file.put(data)

    def add_tensor(self, leaf: ExportedLeaf, tensor: MappedTensor) -> None:
        around = torch_zips.of_tensor(tensor.spec)
        self._begin(leaf, around.total_bytes)
        self._file.put(around.head)
        self._file.stream(tensor)
        self._tails[tensor.key] = self._file.bytes, around
        self._file.skip(around.tail_bytes)

    def finish(self) -> list[TargetFile]:
        if self._file.bytes:
            self._made.append(self._file.made(self._name, _sealing(self._tails) if self._tails else None))
        return self._made

    @property
    def _name(self) -> str:
        return f"__0_{len(self._made)}.distcp"

    def _open(self) -> None:
        self._file = GrowingFile()
        self._tails: dict[TensorKey, tuple[int, ZipAround]] = {}

    def _begin(self, leaf: ExportedLeaf, length: int) -> None:
        padding = -self._file.bytes % ALIGNMENT_BYTES
        if self._file.bytes and self._file.bytes + padding + length > self._file_bytes_max:
            self.finish()
            self._open()
            padding = 0
        self._file.put(bytes(padding))
        self.entries.append(_Entry(leaf, self._name, self._file.bytes, length))


def _sealing(tails: Mapping[TensorKey, tuple[int, ZipAround]]) -> Sealing:
    return lambda crcs: tuple(LiteralBytes(start, around.tail(crcs[key])) for key, (start, around) in tails.items())


def _metadata(entries: Iterable[_Entry]) -> MadeObject:
    described: dict[str, Any] = {}
    stored: list[tuple[MadeObject, MadeObject]] = []
    paths: dict[str, Any] = {}
    for leaf, file, start, length in entries:
        fqn = leaf.fqn
        index: dict[str, Any] = {"fqn": fqn, "index": None}
        paths[fqn] = leaf.path
        described[fqn] = _object("BytesStorageMetadata")
        if leaf.tensor is not None:
            spec = leaf.tensor.spec
            origin = (0,) * len(spec.shape)
            index |= {"index": 0, "offset": _size(origin)}
            chunk = _object("ChunkStorageMetadata", offsets=_size(origin), sizes=_size(spec.shape))
            described[fqn] = _object(
                "TensorStorageMetadata", properties=_properties(spec.dtype), size=_size(spec.shape), chunks=[chunk]
            )
        place = {"relative_path": file, "offset": start, "length": length}
        stored.append((_object("MetadataIndex", **index), MadeObject(_STORAGE_INFO, place)))
    about = _object("StorageMeta", checkpoint_id=None, save_id=None, load_id=None, modules=[])
    return _object(
        "Metadata",
        state_dict_metadata=described,
        planner_data=paths,
        storage_data=ObjectKeys(stored),
        storage_meta=about,
        version=VERSION,
    )


def _object(kind: str, **attributes: Any) -> MadeObject:
    return MadeObject(NamedGlobal(f"{_PACKAGE}.metadata.{kind}"), attributes or None)


def _size(shape: Shape) -> GlobalCall:
    return GlobalCall(NamedGlobal("torch.Size"), (tuple(shape),))


def _properties(dtype: str) -> MadeObject:
    layout = GlobalCall(NamedGlobal("torch.serialization._get_layout"), ("torch.strided",))
    contiguous = GlobalCall(NamedGlobal(f"{_PACKAGE}.metadata._MEM_FORMAT_ENCODING"), (0,))
    state = (NamedGlobal(TORCH_NAMES[dtype]), layout, False, contiguous, False)
    return MadeObject(NamedGlobal(f"{_PACKAGE}.metadata.TensorProperties"), state)
