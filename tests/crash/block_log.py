"""A disk that writes down what is done to it: one file of a FUSE file system, for a loop device to stand on.

    block_log.py IMAGE DIRECTORY LOG

It speaks the kernel's FUSE protocol by itself, so that nothing has to be installed; root alone may. `DIRECTORY/disk` holds
the image's bytes in memory, and every write and flush of it goes into the log, and so does what is written to
`DIRECTORY/mark`. The log is written when DIRECTORY is unmounted.
"""

from __future__ import annotations

import ctypes
import errno
import os
import pickle
import stat
import struct
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

WRITE_BYTES_MAX = 128 * 1024
MARK_BYTES = 4096
_MAJOR, _MINOR, _BIG_WRITES = 7, 31, 1 << 5
_MS_NOSUID, _MS_NODEV = 2, 4
_ROOT, _DISK, _MARK = 1, 2, 3
_NAMES = {b"disk": _DISK, b"mark": _MARK}
_HEADER = struct.Struct("<IIQQIIIHH")
_REPLY = struct.Struct("<IiQ")
_ATTRIBUTES = struct.Struct("<6Q10I")
_VALID_S = 3600
_LOOKUP, _FORGET, _GETATTR, _SETATTR, _OPEN, _READ, _WRITE, _STATFS, _RELEASE, _FSYNC = 1, 2, 3, 4, 14, 15, 16, 17, 18, 20
_FLUSH, _INIT, _OPENDIR, _RELEASEDIR, _INTERRUPT, _DESTROY, _BATCH_FORGET = 25, 26, 27, 29, 36, 38, 42


class Wrote(NamedTuple):
    """Bytes that the disk took, and may hold in a cache of its own until the next flush."""

    offset: int
    data: bytes


class Flushed(NamedTuple):
    """All that was written before is durable."""


class Marked(NamedTuple):
    """Not of the disk: what a test wrote to `mark`, at this moment."""

    text: str


Event = Wrote | Flushed | Marked


class Disk:
    """Answers the kernel."""

    def __init__(self, image: bytes) -> None:
        self.log: list[Event] = []
        self._data = bytearray(image)
        self._answers: dict[int, Callable[[int, memoryview], bytes]] = {
            _INIT: self._init,
            _LOOKUP: self._lookup,
            _GETATTR: lambda node, body: struct.pack("<QII", _VALID_S, 0, 0) + self._attributes(node),
            _SETATTR: lambda node, body: struct.pack("<QII", _VALID_S, 0, 0) + self._attributes(node),
            _OPEN: lambda node, body: struct.pack("<QII", 0, 0, 0),
            _OPENDIR: lambda node, body: struct.pack("<QII", 0, 0, 0),
            _READ: self._read,
            _WRITE: self._write,
            _STATFS: lambda node, body: struct.pack("<5Q4I24x", 0, 0, 0, 0, 0, 4096, 255, 4096, 0),
            _FSYNC: self._fsync,
            **dict.fromkeys((_RELEASE, _RELEASEDIR, _FLUSH, _DESTROY), lambda node, body: b""),
        }

    def serve(self, device: int) -> None:
        """Answer until the file system is unmounted."""
        while True:
            try:
                request = os.read(device, WRITE_BYTES_MAX + 8192)
            except OSError as error:
                if error.errno == errno.ENODEV:
                    return
                if error.errno in (errno.EINTR, errno.ENOENT):
                    continue
                raise
            _, code, unique, node, *_ = _HEADER.unpack_from(request)
            if code in (_FORGET, _BATCH_FORGET, _INTERRUPT):
                continue
            failure, answer = 0, b""
            try:
                answer = self._answers[code](node, memoryview(request)[_HEADER.size :])
            except KeyError:
                failure = errno.ENOSYS
            except FileNotFoundError:
                failure = errno.ENOENT
            os.write(device, _REPLY.pack(_REPLY.size + len(answer), -failure, unique) + answer)

    def _init(self, node: int, body: memoryview) -> bytes:
        _, _, read_ahead, _ = struct.unpack_from("<4I", body)
        return struct.pack(
            "<4IHHIIHHII24x", _MAJOR, _MINOR, read_ahead, _BIG_WRITES, 16, 12, WRITE_BYTES_MAX, 1, 32, 0, 0, 0
        )

    def _lookup(self, node: int, body: memoryview) -> bytes:
        found = _NAMES.get(bytes(body).rstrip(b"\0"))
        if found is None:
            raise FileNotFoundError
        return struct.pack("<4QII", found, 0, _VALID_S, _VALID_S, 0, 0) + self._attributes(found)

    def _attributes(self, node: int) -> bytes:
        size = {_ROOT: 0, _DISK: len(self._data), _MARK: MARK_BYTES}[node]
        mode = stat.S_IFDIR | 0o700 if node == _ROOT else stat.S_IFREG | 0o600
        return _ATTRIBUTES.pack(node, size, size // 512, 0, 0, 0, 0, 0, 0, mode, 1, 0, 0, 0, 4096, 0)

    def _read(self, node: int, body: memoryview) -> bytes:
        _, offset, size = struct.unpack_from("<QQI", body)
        return bytes(self._data[offset : offset + size]) if node == _DISK else bytes(size)

    def _write(self, node: int, body: memoryview) -> bytes:
        _, offset, size = struct.unpack_from("<QQI", body)
        data = bytes(body[40 : 40 + size])
        if node == _MARK:
            self.log.append(Marked(data.decode()))
        else:
            self._data[offset : offset + size] = data
            self.log.append(Wrote(offset, data))
        return struct.pack("<II", size, 0)

    def _fsync(self, node: int, body: memoryview) -> bytes:
        if node == _DISK:
            self.log.append(Flushed())
        return b""


def mount(source: str, target: Path, kind: str, options: str) -> None:
    """mount(2); OSError."""
    libc = ctypes.CDLL(None, use_errno=True)
    flags = _MS_NOSUID | _MS_NODEV
    if libc.mount(source.encode(), os.fsencode(target), kind.encode(), ctypes.c_ulong(flags), options.encode()):
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code), str(target))


def main() -> None:
    image, directory, log = map(Path, sys.argv[1:])
    disk = Disk(image.read_bytes())
    device = os.open("/dev/fuse", os.O_RDWR | os.O_CLOEXEC)
    mount("holdfast-disk", directory, "fuse", f"fd={device},rootmode=40000,user_id=0,group_id=0,max_read={WRITE_BYTES_MAX}")
    print("mounted", flush=True)
    disk.serve(device)
    plain = [(type(event).__name__, *event) for event in disk.log]
    log.write_bytes(pickle.dumps(plain))


def read_log(path: Path) -> list[Event]:
    """What `main` wrote."""
    kinds = {kind.__name__: kind for kind in (Wrote, Flushed, Marked)}
    return [kinds[name](*fields) for name, *fields in pickle.loads(path.read_bytes())]


if __name__ == "__main__":
    main()
