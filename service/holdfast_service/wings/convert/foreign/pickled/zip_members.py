"""The members of a zip file and their bytes in it, from the directory at its end; nothing is unpacked.

Only what torch writes is accepted: uncompressed members, one after the other, without gaps for others.
"""

from __future__ import annotations

import struct
import zlib
from itertools import pairwise
from typing import NamedTuple

from holdfast_formats.errors import CheckpointError, CorruptManifest, LimitExceeded, StateMismatch
from holdfast_formats.files import Files
from holdfast_formats.mapping.listing import StoredMember
from holdfast_service.wings.convert.foreign.pickled.stream import SMALLER

MEMBERS_MAX = 2**17
DIRECTORY_BYTES_MAX = 2**25
SCRIPT = "it is a TorchScript program: torch.save(torch.jit.load(FILE).state_dict(), 'model.pt') saves its weights"
NAME_BYTES_MAX = 512
READ_BYTES = 2**20  # at once
MAGIC = b"PK\x03\x04"
_LOCAL = struct.Struct("<4s5H3I2H")
_ENTRY = struct.Struct("<4s6H3I5H2I")
_END = struct.Struct("<4s4H2IH")
_END_64 = struct.Struct("<4sQ2H2I4Q")
_LOCATOR = struct.Struct("<4sIQI")
_NONE_32 = 2**32 - 1
_COPY = "copy the file again: it is damaged"


class ZipMember(NamedTuple):
    """A member: its header's first byte, and the first byte of what follows it in the file.

    `crc` is the CRC-32 of its content, 0 if there is none: torch can be configured not to compute it.
    """

    name: str
    header: int
    bytes: int
    stop: int
    crc: int = 0


class ZipWindow(NamedTuple):
    """Bytes [start, stop) of a file, which are a zip file."""

    files: Files
    path: str
    start: int
    stop: int

    def read(self, at: int, length: int) -> bytes:
        data = self.files.read(self.path, at, length) if self.start <= at <= at + length <= self.stop else b""
        if len(data) != length:
            raise self.broken(f"refers to {length} bytes at byte {at}, beyond its end")
        return data

    def broken(self, what: str) -> CheckpointError:
        return CorruptManifest(f"{self.path}: the zip file {what}", hint=_COPY, file=self.path)

    def refused(self, what: str, hint: str = "save it again with torch.save") -> CheckpointError:
        return StateMismatch(f"{self.path}: {what}", hint=hint, file=self.path)


def members(zip_file: ZipWindow) -> dict[str, ZipMember]:
    """All members by name, checked to be contiguous; errors name the file."""
    first, length, count = _directory(zip_file)
    if count > MEMBERS_MAX or length > DIRECTORY_BYTES_MAX:
        what = f"{zip_file.path} has {count} tensors, or other members, over the limit of {MEMBERS_MAX}"
        raise LimitExceeded(what, hint=SMALLER, file=zip_file.path)
    data = zip_file.read(first, length)
    zip_members: list[ZipMember] = []
    at = 0
    for _ in range(count):
        if at + _ENTRY.size > len(data):
            raise zip_file.broken("has a truncated directory")
        zip_members.append(_member(zip_file, data, at))
        at += _ENTRY.size + sum(_ENTRY.unpack_from(data, at)[10:13])
    if at != len(data):
        raise zip_file.broken("has extra bytes in its directory")
    return _apart(zip_file, zip_members, first)


def data_start(zip_file: ZipWindow, member: ZipMember) -> int:
    """The byte of the file at which a member's content begins; its own header must match the directory."""
    name = member.name.encode()
    read = zip_file.read(member.header, _LOCAL.size + len(name))
    head = _LOCAL.unpack_from(read)
    named = head[9] == len(name) and read.endswith(name)
    start: int = member.header + len(read) + head[10]
    if head[0] != MAGIC or not named or head[3] != 0 or start + member.bytes > member.stop:
        raise zip_file.broken(f"has inconsistent headers for its member {member.name!r}")
    return start


def check(zip_file: ZipWindow, member: ZipMember, start: int) -> None:
    """`CorruptExtent` unless the content from byte `start` on has the stated CRC-32."""
    crc = 0
    for at in range(start, start + member.bytes, READ_BYTES):
        crc = zlib.crc32(zip_file.read(at, min(READ_BYTES, start + member.bytes - at)), crc)
    StoredMember(member.name, start, member.bytes, member.crc).check(zip_file.path, crc)


def _directory(zip_file: ZipWindow) -> tuple[int, int, int]:
    """The directory's first byte, its length, and the number of members."""
    if zip_file.stop - zip_file.start < _END.size:
        raise zip_file.broken("is too short")
    at = zip_file.stop - _END.size
    end = _END.unpack(zip_file.read(at, _END.size))
    if end[0] != b"PK\x05\x06" or end[7] != 0:
        raise zip_file.broken("is cut off: it does not end with its directory")
    count, length, first = end[4], end[5], end[6]
    before = zip_file.read(at - _LOCATOR.size, _LOCATOR.size) if at - _LOCATOR.size >= zip_file.start else b""
    if before.startswith(b"PK\x06\x07"):  # torch always writes a zip64 directory, whose numbers take precedence
        at = zip_file.start + _LOCATOR.unpack(before)[2]
        end_64 = _END_64.unpack(zip_file.read(at, _END_64.size))
        if end_64[0] != b"PK\x06\x06":
            raise zip_file.broken("is cut off: it does not end with its directory")
        count, length, first = end_64[7], end_64[8], end_64[9]
    if zip_file.start + first + length != at:
        raise zip_file.broken("does not end with its directory")
    return zip_file.start + first, length, count


def _member(zip_file: ZipWindow, data: bytes, at: int) -> ZipMember:
    entry = _ENTRY.unpack_from(data, at)
    name_bytes, extra_bytes = entry[10], entry[11]
    raw = data[at + _ENTRY.size : at + _ENTRY.size + name_bytes]
    try:
        name = raw.decode("ascii")
    except UnicodeDecodeError:
        raise zip_file.broken(f"has a member {raw[:80]!r}, whose name is not ASCII") from None
    if entry[0] != b"PK\x01\x02" or not name or name_bytes > NAME_BYTES_MAX:
        raise zip_file.broken("has a malformed directory")
    if name.startswith("/") or "\\" in name or "\0" in name or {"", ".", ".."} & set(name.split("/")):
        raise zip_file.refused(f"its member {name!r} has a path outside the archive")
    extra_at = at + _ENTRY.size + name_bytes
    packed, size, header = _sizes(zip_file, entry, data[extra_at : extra_at + extra_bytes])
    if entry[4] != 0 or packed != size or entry[3] & 1:
        hint = SCRIPT if "/code/__torch__/" in name else "store the members uncompressed"
        raise zip_file.refused(f"its member {name!r} is compressed or encrypted", hint)
    return ZipMember(name, zip_file.start + header, size, 0, entry[7])


def _sizes(zip_file: ZipWindow, entry: tuple[int, ...], extra: bytes) -> tuple[int, int, int]:
    """Packed size, size and place of a member; values beyond 32 bits are in a separate field."""
    packed, size, header = entry[8], entry[9], entry[16]
    while len(extra) >= 4:
        kind, length = struct.unpack_from("<2H", extra)
        if kind == 1:
            wide = [int.from_bytes(extra[i : i + 8], "little") for i in range(4, 4 + length - 7, 8)][::-1]
            try:
                size = wide.pop() if size == _NONE_32 else size
                packed = wide.pop() if packed == _NONE_32 else packed
                header = wide.pop() if header == _NONE_32 else header
            except IndexError:
                raise zip_file.broken("has a member without a size") from None
        extra = extra[4 + length :]
    return packed, size, header


def _apart(zip_file: ZipWindow, zip_members: list[ZipMember], directory: int) -> dict[str, ZipMember]:
    """The members by name, each with its end; `CorruptManifest` if two share a name or bytes."""
    ordered = sorted(zip_members, key=lambda member: member.header)
    bounds = [*(member.header for member in ordered), directory]
    made: dict[str, ZipMember] = {}
    for member, (header, stop) in zip(ordered, pairwise(bounds), strict=True):
        if header < zip_file.start or header + _LOCAL.size + len(member.name) + member.bytes > stop:
            raise zip_file.broken(f"has a member {member.name!r} that overlaps another")
        if member.name in made:
            raise zip_file.broken(f"has two members {member.name!r}")
        made[member.name] = member._replace(stop=stop)
    return made
