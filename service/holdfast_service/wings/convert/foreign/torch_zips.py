"""Torch's files as zips: the bytes around the elements of tensors, which are streamed between them.

As in `torch.save`, the records are stored uncompressed, the elements begin at a multiple of 64 bytes, and their CRC-32
follows them.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Callable, Mapping, Sequence
from math import prod
from typing import Any, NamedTuple

from holdfast_formats.errors import InvalidRequest
from holdfast_formats.mapping.box_moves import MappedTensor
from holdfast_formats.mapping.listing import TensorKey
from holdfast_formats.mapping.target_files import GrowingFile, LiteralBytes, TargetFile
from holdfast_formats.region import Shape
from holdfast_formats.tensors import TensorSpec
from holdfast_service.wings.convert.foreign import pickle_writer
from holdfast_service.wings.convert.foreign.pickle_writer import GlobalCall, NamedGlobal, PersistentId
from holdfast_service.wings.convert.foreign.pickled import dtypes

ALIGNMENT_BYTES = 64
ROOT = "archive"
_LONG = 0xFFFFFFFF  # marks a size in a zip64 field
_MANY = 0xFFFE  # entries of a directory without one
_RECORDS = {"version": b"3\n", "byteorder": b"little"}

_STORAGES = {dtype: f"torch.{name}" for name, dtype in dtypes.STORAGES.items()}


class _Record(NamedTuple):
    """A record of a zip, from byte `start` on. `described`: its CRC-32 follows its data."""

    name: str
    size: int
    start: int
    described: bool

    def local(self, crc: int, padding: int | None = None) -> bytes:
        """The header before the data, with so many bytes of padding at its end."""
        extra = self._long_sizes() + (b"" if padding is None else b"FB" + struct.pack("<H", padding) + b"Z" * padding)
        known = (0, 0, 0) if self.described else (crc, self.size, self.size)
        if self.size >= _LONG:
            known = (known[0], _LONG, _LONG)
        return b"PK\x03\x04" + self._header(known, len(extra)) + self._path + extra

    def entry(self, crc: int) -> bytes:
        extra, shown = self._long_sizes(), min(self.size, _LONG)
        if self.start >= _LONG:  # readers expect the fields that are marked, in this order
            extra, shown = struct.pack("<HHQQQ", 1, 24, self.size, self.size, self.start), _LONG
        fields = struct.pack("<H", self._version) + self._header((crc, shown, shown), len(extra))
        place = struct.pack("<HHHII", 0, 0, 0, 0, min(self.start, _LONG))
        return b"PK\x01\x02" + fields + place + self._path + extra

    def descriptor(self, crc: int) -> bytes:
        return b"PK\x07\x08" + struct.pack("<IQQ" if self.size >= _LONG else "<III", crc, self.size, self.size)

    def _header(self, known: tuple[int, int, int], extra_bytes: int) -> bytes:
        flags = 0x808 if self.described else 0x800
        return struct.pack("<HHHHHIIIHH", self._version, flags, 0, 0, 0, *known, len(self._path), extra_bytes)

    def _long_sizes(self) -> bytes:
        return struct.pack("<HHQQ", 1, 16, self.size, self.size) if self.size >= _LONG else b""

    @property
    def _path(self) -> bytes:
        return f"{ROOT}/{self.name}".encode()

    @property
    def _version(self) -> int:
        return 45 if max(self.size, self.start) >= _LONG else 20


class ZipAround(NamedTuple):
    """The bytes of a zip around its last record, whose data are `data_bytes` long."""

    head: bytes
    data_bytes: int
    entries: tuple[bytes, ...]
    last: _Record

    @property
    def tail_bytes(self) -> int:
        return len(self.tail(0))

    @property
    def total_bytes(self) -> int:
        return len(self.head) + self.data_bytes + self.tail_bytes

    def tail(self, crc: int) -> bytes:
        """The bytes after the data, which include their CRC-32."""
        described = self.last.descriptor(crc)
        at = len(self.head) + self.data_bytes + len(described)
        return described + _directory((*self.entries, self.last.entry(crc)), at)


def of_tensor(spec: TensorSpec, within: Callable[[GlobalCall], Any] | None = None) -> ZipAround:
    """The zip of a row-major tensor, as `torch.save` writes it; with `within`, of a value that has the tensor in it.

    `InvalidRequest` for a dtype that torch lacks.
    """
    tensor = _tensor(spec, 0)
    value = tensor if within is None else within(tensor)
    return _around({"data.pkl": pickle_writer.dumps(value), **_RECORDS}, "data/0", spec.nbytes)


def file_of(name: str, value: Any) -> TargetFile:
    """A file of `torch.save` with a value of which each `MappedTensor` is a tensor with its own storage.

    `InvalidRequest` for a dtype that torch lacks, and for values that no pickle here can hold.
    """
    tensors: list[MappedTensor] = []
    file, records = GrowingFile(), list[tuple[_Record, int | TensorKey]]()
    pickled = pickle_writer.dumps(_with_storages(value, tensors))
    for path, data in {"data.pkl": pickled, **_RECORDS}.items():
        record = _Record(path, len(data), file.bytes, False)
        records.append((record, zlib.crc32(data)))
        file.put(record.local(zlib.crc32(data)) + data)
    described: list[tuple[int, _Record, TensorKey]] = []
    for number, tensor in enumerate(tensors):
        record = _Record(f"data/{number}", tensor.spec.nbytes, file.bytes, True)
        padding = -(file.bytes + len(record.local(0, 0))) % ALIGNMENT_BYTES
        file.put(record.local(0, padding))
        file.stream(tensor)
        described.append((file.bytes, record, tensor.key))
        file.skip(len(record.descriptor(0)))
        records.append((record, tensor.key))
    at = file.bytes

    def sealed(crcs: Mapping[TensorKey, int]) -> tuple[LiteralBytes, ...]:
        entries = [record.entry(crc if isinstance(crc, int) else crcs[crc]) for record, crc in records]
        ends = [LiteralBytes(start, record.descriptor(crcs[key])) for start, record, key in described]
        return (*ends, LiteralBytes(at, _directory(entries, at)))

    file.skip(len(_directory([record.entry(0) for record, _ in records], at)))
    return file.made(name, sealed)


def _with_storages(value: Any, tensors: list[MappedTensor]) -> Any:
    """The value with calls in place of tensors, which are added to `tensors`, each with the number of its storage."""
    if isinstance(value, MappedTensor):
        tensors.append(value)
        return _tensor(value.spec, len(tensors) - 1)
    if type(value) is dict:
        return {key: _with_storages(one, tensors) for key, one in value.items()}
    return type(value)(_with_storages(one, tensors) for one in value) if type(value) in (list, tuple) else value


def of_value(value: Any) -> bytes:
    pickled = pickle_writer.dumps(value)
    around = _around(_RECORDS, "data.pkl", len(pickled))
    return around.head + pickled + around.tail(zlib.crc32(pickled))


def _tensor(spec: TensorSpec, number: int) -> GlobalCall:
    if spec.dtype not in dtypes.TORCH_NAMES:
        raise InvalidRequest(
            f"tensor {spec.name!r} is {spec.dtype}, for which torch has no dtype",
            hint="export only the model with `--as hf`",
            tensor=spec.name,
        )
    known = spec.dtype in _STORAGES
    kind = _STORAGES.get(spec.dtype, dtypes.UNTYPED)
    length = prod(spec.shape) if known else spec.nbytes
    storage = PersistentId(("storage", NamedGlobal(kind), str(number), "cpu", length))
    hooks = GlobalCall(NamedGlobal("collections.OrderedDict"), ())
    arguments = (storage, 0, tuple(spec.shape), _steps(spec.shape), False, hooks)
    if known:
        return GlobalCall(NamedGlobal("torch._utils._rebuild_tensor_v2"), arguments)
    dtype = NamedGlobal(dtypes.TORCH_NAMES[spec.dtype])
    return GlobalCall(NamedGlobal("torch._utils._rebuild_tensor_v3"), (*arguments, dtype))


def _steps(shape: Shape) -> Shape:
    """torch's strides: a dimension without elements counts as one."""
    return tuple(prod(max(n, 1) for n in shape[d + 1 :]) for d in range(len(shape)))


def _directory(entries: Sequence[bytes], at: int) -> bytes:
    """The zip's directory of these entries, which begins at this byte, and its end."""
    directory, count = b"".join(entries), len(entries)
    long = b""
    if at >= _LONG or count > _MANY:
        long = b"PK\x06\x06" + struct.pack("<QHHIIQQQQ", 44, 45, 45, 0, 0, count, count, len(directory), at)
        long += b"PK\x06\x07" + struct.pack("<IQI", 0, at + len(directory), 1)
    shown = min(count, _MANY + 1)
    end = struct.pack("<HHHHIIH", 0, 0, shown, shown, len(directory), min(at, _LONG), 0)
    return directory + long + b"PK\x05\x06" + end


def _around(records: dict[str, bytes], last: str, data_bytes: int) -> ZipAround:
    head, entries = b"", []
    for name, data in records.items():
        crc, record = zlib.crc32(data), _Record(name, len(data), len(head), False)
        entries.append(record.entry(crc))
        head += record.local(crc) + data
    record = _Record(last, data_bytes, len(head), True)
    padding = -(len(head) + len(record.local(0, 0))) % ALIGNMENT_BYTES
    return ZipAround(head + record.local(0, padding), data_bytes, tuple(entries), record)
