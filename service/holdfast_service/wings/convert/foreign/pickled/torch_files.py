"""Files of `torch.save`: zip files of a pickle and its storages, and the older form without a zip."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, NamedTuple

from holdfast_formats import dtypes
from holdfast_formats.errors import CorruptManifest
from holdfast_formats.files import Files
from holdfast_formats.mapping.listing import StoredMember
from holdfast_service.wings.convert.foreign.pickled import zip_members
from holdfast_service.wings.convert.foreign.pickled.calls import Unfit
from holdfast_service.wings.convert.foreign.pickled.dtypes import STORAGE_CLASSES
from holdfast_service.wings.convert.foreign.pickled.machine import PickleMachine
from holdfast_service.wings.convert.foreign.pickled.stream import PickleStream
from holdfast_service.wings.convert.foreign.pickled.values import PickledArray, PickledGlobal
from holdfast_service.wings.convert.foreign.pickled.zip_members import ZipMember, ZipWindow

LEGACY_MAGIC = 0x1950A86A20F9469CFC6C
PICKLE_START = b"\x80"
_LEGACY_PROTOCOL = 1001
_SIZE_BYTES = 8
VALUE_BYTES_MAX = 64  # of a storage whose CRC-32 is compared at once: a number, which a caller may use before all is copied
_MARKS = {"data.pkl", "byteorder", "version", ".format_version", ".storage_alignment", ".data/serialization_id"}


class _StorageId(NamedTuple):
    """A persistent id: the storage's key, its type, and its number of elements."""

    key: str
    dtype: str
    elements: int

    @property
    def nbytes(self) -> int:
        return self.elements * dtypes.bits(self.dtype) // 8


def _storage_id(given: Any, parts: int) -> _StorageId:
    """Parse one of torch's persistent ids; `Unfit` for any other."""
    if not (type(given) is tuple and len(given) == parts and given[0] == "storage" and type(given[1]) is PickledGlobal):
        raise Unfit("refers to something outside the pickle that is not a storage")
    _, kind, key, location, elements = given[:5]
    if type(key) is not str:
        raise Unfit("has a storage without a key")
    if kind.name not in STORAGE_CLASSES:
        raise Unfit(f"has a storage {kind.name}, of a type that no checkpoint can hold")
    if type(elements) is not int or not 0 <= elements < 2**60 or location == "meta":
        raise Unfit(f"has a storage {key[:40]!r} without data")
    if parts == 6 and given[5] is not None:
        raise Unfit(f"has a storage {key[:40]!r} that is a view of another")
    return _StorageId(key, STORAGE_CLASSES[kind.name], elements)


def _values(storage: _StorageId, offset: int, file: str, member: StoredMember | None = None) -> PickledArray:
    return PickledArray(storage.dtype, (storage.elements,), (1,), storage.key, offset, file, member)


def read_zip(zip_file: ZipWindow, allowed: Collection[str], opaque: bool = False) -> Any:
    """The value of a zip file; `opaque` as of a `PickleMachine`. Errors by file and byte, also for unused members."""
    held = zip_members.members(zip_file)
    roots = {name[: -len("data.pkl")] for name in held if name.endswith("/data.pkl") and name.count("/") == 1}
    if any(name.rpartition("/")[2] == "constants.pkl" for name in held):
        raise zip_file.refused("it was not written by torch.save", zip_members.SCRIPT)
    if len(roots) != 1:
        raise zip_file.refused("the zip file does not have exactly one data.pkl")
    (root,) = roots
    data = f"{root}data/"
    unknown = [name for name in held if name not in {root + mark for mark in _MARKS} and not name.startswith(data)]
    if unknown:
        raise zip_file.refused(f"it has a member {unknown[0]!r}, which torch.save does not write")
    _check_order_of_bytes(zip_file, held.get(f"{root}byteorder"))
    storages = _ZipStorages(zip_file, held, data)
    start = zip_members.data_start(zip_file, held[f"{root}data.pkl"])
    zip_members.check(zip_file, held[f"{root}data.pkl"], start)
    stream = PickleStream(zip_file.files, zip_file.path, start, start + held[f"{root}data.pkl"].bytes)
    value = PickleMachine(stream, allowed, storages.find, opaque).run()
    if stream.where != stream.stop:
        raise stream.refused(f"ends at byte {stream.where}, before the end of its member")
    unused = [name for name in held if name.startswith(data) and name[len(data) :] not in storages.found]
    if unused:
        raise zip_file.refused(f"no tensor refers to its member {unused[0]!r}")
    return value


def _check_order_of_bytes(zip_file: ZipWindow, member: ZipMember | None) -> None:
    if member is None:
        return
    order = zip_file.read(zip_members.data_start(zip_file, member), min(member.bytes, 16))
    if order != b"little":
        raise zip_file.refused(f"its values are in the byte order {order!r}; only little-endian values can be read")


class _ZipStorages:
    def __init__(self, zip_file: ZipWindow, held: dict[str, ZipMember], data: str) -> None:
        self._zip, self._held, self._data = zip_file, held, data
        self.found: dict[str, StoredMember] = {}

    def find(self, given: Any) -> PickledArray:
        storage = _storage_id(given, 5)
        member = self._held.get(self._data + storage.key)
        if member is None or member.bytes != storage.nbytes:
            problem = "is missing" if member is None else f"has {member.bytes} bytes instead of {storage.nbytes}"
            raise Unfit(f"has a storage {storage.key[:40]!r}, which {problem}")
        if storage.key not in self.found:
            start = zip_members.data_start(self._zip, member)
            if member.bytes <= VALUE_BYTES_MAX:
                zip_members.check(self._zip, member, start)
            self.found[storage.key] = StoredMember(member.name, start, member.bytes, member.crc)
        stored = self.found[storage.key]
        return _values(storage, stored.start, self._zip.path, stored if stored.crc else None)


def read_legacy(files: Files, path: str, size: int, allowed: Collection[str], opaque: bool = False) -> Any:
    """The value of a file in the older form. Its pickle is read twice, because the storages' places follow it."""
    at = 0
    heads = []
    for _ in range(3):
        stream = PickleStream(files, path, at, size)
        heads.append(PickleMachine(stream, ()).run())
        at = stream.where
    magic, protocol, machine = heads
    if magic != LEGACY_MAGIC or protocol != _LEGACY_PROTOCOL or not isinstance(machine, dict):
        raise stream.refused("does not have the header that torch.save writes before a value")
    if machine.get("little_endian") is not True:
        raise stream.refused("has big-endian values; only little-endian values can be read")
    storages = _LegacyStorages(path)
    first = PickleStream(files, path, at, size)
    PickleMachine(first, allowed, storages.note, opaque).run()
    keys = PickleStream(files, path, first.where, size)
    order = PickleMachine(keys, ()).run()
    storages.place(files, order, keys)
    return PickleMachine(PickleStream(files, path, at, size), allowed, storages.find, opaque).run()


class _LegacyStorages:
    """The storages behind the pickle: first their names, then their places."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._named: dict[str, _StorageId] = {}
        self._starts: dict[str, int] = {}

    def note(self, given: Any) -> PickledArray:
        storage = _storage_id(given, 6)
        if storage.nbytes != self._named.setdefault(storage.key, storage).nbytes:
            raise Unfit(f"gives two lengths for storage {storage.key[:40]!r}")
        return _values(storage, 0, self._path)

    def find(self, given: Any) -> PickledArray:
        storage = _storage_id(given, 6)
        return _values(storage, self._starts[storage.key], self._path)

    def place(self, files: Files, order: Any, stream: PickleStream) -> None:
        """Find the storages that follow in this order, each after its number of elements."""
        known = isinstance(order, list) and all(type(key) is str for key in order)
        if not known or len(order) != len(self._named) or set(order) != self._named.keys():
            raise stream.refused("is followed by different storages than it names")
        at = stream.where
        for key in order:
            storage = self._named[key]
            head = files.read(self._path, at, _SIZE_BYTES)
            at += _SIZE_BYTES
            if len(head) < _SIZE_BYTES or at + storage.nbytes > stream.stop:
                raise CorruptManifest(
                    f"{self._path} ends at byte {stream.stop}, inside storage {storage.key!r}",
                    hint="copy the file again: it is not complete",
                    file=self._path,
                )
            if int.from_bytes(head, "little") != storage.elements:
                raise stream.refused(f"gives storage {storage.key[:40]!r} a length other than the one stored at byte {at}")
            self._starts[storage.key] = at
            at += storage.nbytes
        if at != stream.stop:
            raise stream.refused(f"is followed by {stream.stop - at} unused bytes")
