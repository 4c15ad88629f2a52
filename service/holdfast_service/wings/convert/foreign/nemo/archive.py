"""The files in a NeMo archive, a tar that may be compressed by gzip. They are read in their places; nothing is unpacked."""

from __future__ import annotations

import tarfile
from collections.abc import Callable
from typing import Any, NamedTuple

from holdfast_formats.errors import CheckpointError, CorruptManifest, InvalidRequest, LimitExceeded, StateMismatch
from holdfast_formats.files import Files, check_position, split_path
from holdfast_service.wings.convert.foreign import file_signs
from holdfast_service.wings.convert.foreign.nemo import gzip_stream
from holdfast_service.wings.convert.foreign.nemo.gzip_stream import GzipStream

ENDING = ".nemo"
MEMBERS_MAX = 2**16
NAMES_BYTES_MAX = 2**16  # of a long name, or of the other settings of a member
_BLOCK = tarfile.BLOCKSIZE
_PADDING_MAX = 2**20  # after the end
_LONG_NAME, _SETTINGS, _SETTINGS_OF_ALL = b"L", b"x", b"g"
_UNPACK = "unpack it yourself, and import the directory"

ReadInto = Callable[[int, memoryview], int]


class _Member(NamedTuple):
    start: int
    size: int


class ArchivedFiles:
    """The members of an archive as files. A change of the archive changes the stamps of all of them."""

    def __init__(self, files: Files, name: str) -> None:
        """Reads the members' headers. Errors by the archive's name: `CorruptManifest` for what is no complete tar,
        `StateMismatch` for links, paths that lead out, and names that come twice, `LimitExceeded`.
        """
        self._files, self._name = files, name
        head = files.read(name, 0, file_signs.HEAD_BYTES)
        file_signs.check_head(name, head)
        self._packed = GzipStream(files, name) if head.startswith(gzip_stream.MAGIC) else None
        size = files.size(name) if self._packed is None else self._packed.size
        self._members = _Tar(name, self._read_into, size or 0).members()
        self._below: dict[str, set[str]] = {}
        for path in self._members:
            names = split_path(path)
            for depth in range(len(names)):
                self._below.setdefault("/".join(names[:depth]), set()).add(names[depth])
        both = next((path for path in self._below if path in self._members), None)
        if both is not None:
            raise StateMismatch(f"{name}: {both!r} is a file and a directory", hint=_UNPACK, file=name)

    @property
    def label(self) -> str:
        return f"{self._files.label}/{self._name}"

    def size(self, path: str) -> int | None:
        member = self._members.get(path)
        return None if member is None else member.size

    def stamp(self, path: str) -> str:
        member = self._members.get(path)
        return "" if member is None else f"{member.size:x}.{self._files.stamp(self._name)}"

    def list(self, path: str) -> list[str]:
        return sorted(self._below.get(path, ()))

    def read(self, path: str, offset: int = 0, length: int | None = None) -> bytes:
        left = max(0, (self.size(path) or 0) - offset)
        made = bytearray(left if length is None else min(length, left))
        return bytes(made[: self.read_into(path, offset, made)])

    def read_into(self, path: str, offset: int, buffer: Any) -> int:
        member = self._members.get(path)
        if member is None:
            raise InvalidRequest(f"{self._name} has no file {path!r}")
        check_position(path, offset, 0)
        view = memoryview(buffer)
        wanted = min(view.nbytes, member.size - offset)
        return self._read_into(member.start + offset, view.cast("B")[:wanted]) if wanted > 0 else 0

    def read_stored(self, path: str, offset: int, buffer: Any) -> int:
        return self.read_into(path, offset, buffer)

    def _read_into(self, offset: int, view: memoryview) -> int:
        if self._packed is not None:
            return self._packed.read_into(offset, view)
        return self._files.read_into(self._name, offset, view)


class _Tar:
    """Reads the headers of a tar of so many bytes, one after the other."""

    def __init__(self, name: str, read_into: ReadInto, size: int) -> None:
        self._name, self._read_into, self._size = name, read_into, size
        self._at = 0

    def members(self) -> dict[str, _Member]:
        found: dict[str, _Member] = {}
        settings: dict[str, str] = {}
        for count in range(MEMBERS_MAX):
            about = self._header(count)
            if about is None:
                self._check_rest()
                return found
            start = self._at
            if about.type in (_LONG_NAME, _SETTINGS, _SETTINGS_OF_ALL):
                settings |= self._settings(about)
                self._skip(about.size)
                continue
            if any(key.startswith("GNU.sparse") for key in settings):
                raise self._refused(f"{about.name!r} has holes")
            path, size = self._path(settings.get("path", about.name)), self._number(settings.get("size"), about.size)
            settings = {}
            if about.type == tarfile.DIRTYPE:
                continue
            if about.type not in (tarfile.REGTYPE, tarfile.AREGTYPE):
                raise self._refused(f"{path!r} is a link or a device")
            if path in found or not path:
                raise self._refused(f"{path!r} is there twice" if path else "a file has no name")
            found[path] = _Member(start, size)
            self._skip(size)
        raise LimitExceeded(f"{self._name} has over {MEMBERS_MAX} files", hint=_UNPACK, file=self._name)

    def _header(self, count: int) -> tarfile.TarInfo | None:
        """The next header; None at the end."""
        block = self._take(_BLOCK)
        if not any(block):
            return None
        try:
            about = tarfile.TarInfo.frombuf(block, "utf-8", "surrogateescape")
        except (tarfile.HeaderError, ValueError) as error:
            what = f"has no header of a tar at byte {self._at - _BLOCK}" if count else "is no tar"
            raise self._damaged(f"{what}: {error}") from error
        if about.size < 0:
            raise self._damaged(f"has a file of {about.size} bytes at byte {self._at - _BLOCK}")
        return about

    def _settings(self, about: tarfile.TarInfo) -> dict[str, str]:
        """What stands before a member's own header: its long name, or its settings in the newer form."""
        if about.size > NAMES_BYTES_MAX:
            raise LimitExceeded(f"{self._name} has a name of {about.size} bytes", hint=_UNPACK, file=self._name)
        at = self._at
        data = self._take(about.size)
        self._at = at
        if about.type == _LONG_NAME:
            return {"path": data.rstrip(b"\0").decode("utf-8", "surrogateescape")}
        held: dict[str, str] = {}
        while data:
            digits, _, _ = data[:20].partition(b" ")
            length = self._number(digits.decode("ascii", "replace"), 0)
            key, equals, value = data[len(digits) + 1 : max(length - 1, 0)].partition(b"=")
            if not equals or not 0 < length <= len(data):
                raise self._damaged(f"has settings at byte {at} that cannot be read")
            held[key.decode("utf-8", "replace")] = value.decode("utf-8", "surrogateescape")
            data = data[length:]
        return held

    def _path(self, path: str) -> str:
        try:
            return "/".join(split_path("/".join(name for name in path.rstrip("/").split("/") if name != ".")))
        except InvalidRequest as error:
            raise self._refused(f"{path[:80]!r} leads out of the archive, or is no name") from error

    def _number(self, text: str | None, otherwise: int) -> int:
        if text is None:
            return otherwise
        if not (text.isascii() and text.isdigit() and len(text) < 20):
            raise self._damaged(f"has a number {text[:20]!r} before byte {self._at}")
        return int(text)

    def _skip(self, length: int) -> None:
        """Go to the next header after so many bytes."""
        self._at += length + -length % _BLOCK
        if self._at > self._size:
            raise self._damaged(f"ends at byte {self._size}, in the middle of a file")

    def _take(self, length: int) -> bytes:
        data = bytearray(length)
        if self._at + length > self._size or (length and self._read_into(self._at, memoryview(data)) != length):
            raise self._damaged(f"ends at byte {self._size}, without the end of a tar")
        self._at += length
        return bytes(data)

    def _check_rest(self) -> None:
        rest = self._size - self._at
        if rest > _PADDING_MAX or any(self._take(rest)):
            raise self._refused(f"{rest} bytes follow the end of the tar")

    def _damaged(self, what: str) -> CheckpointError:
        return CorruptManifest(f"{self._name} {what}", hint="copy the file again: it is not complete", file=self._name)

    def _refused(self, what: str) -> CheckpointError:
        return StateMismatch(f"{self._name}: {what}", hint=_UNPACK, file=self._name)
