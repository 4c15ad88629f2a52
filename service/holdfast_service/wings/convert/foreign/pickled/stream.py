"""The bytes of a pickle, read in pieces of a bounded size; long payloads are skipped and never read."""

from __future__ import annotations

from holdfast_formats.errors import CheckpointError, CorruptManifest, LimitExceeded, StateMismatch
from holdfast_formats.files import Files

READ_BYTES_MIN = 4096
READ_BYTES_MAX = 2**18
PICKLE_BYTES_MAX = 2**27  # of opcodes and their short arguments
LINE_BYTES_MAX = 512  # names in `GLOBAL`
SMALLER = "save it in several files, each with a part of its tensors and values"
AGAIN = "save it again with the program that wrote it, as tensors and plain values"


class PickleStream:
    """A cursor over bytes [start, stop) of a file. Errors name the file and the byte of the last opcode."""

    def __init__(self, files: Files, path: str, start: int, stop: int) -> None:
        self.path, self.stop = path, stop
        self.opcode_at = start
        self._files, self._start, self._skipped = files, start, 0
        self._buffer, self._base, self._at = b"", start, 0
        self._ahead = READ_BYTES_MIN

    @property
    def where(self) -> int:
        """Position of the next byte in the file."""
        return self._base + self._at

    def opcode(self) -> int:
        """The next opcode; later errors name its byte."""
        self.opcode_at = self._base + self._at
        if self._at >= len(self._buffer):
            self._fill(1)
        self._at += 1
        return self._buffer[self._at - 1]

    def take(self, count: int) -> bytes:
        """The next bytes; callers limit their number."""
        if self._at + count > len(self._buffer):
            self._fill(count)
        self._at += count
        return self._buffer[self._at - count : self._at]

    def number(self, width: int) -> int:
        return int.from_bytes(self.take(width), "little")

    def line(self) -> str:
        found = bytearray()
        while (byte := self.take(1)) != b"\n":
            found += byte
            if len(found) > LINE_BYTES_MAX:
                raise self.limit(f"has a name of over {LINE_BYTES_MAX} bytes")
        try:
            return found.decode("ascii")
        except UnicodeDecodeError:
            raise self.refused("has a name that is not ASCII") from None

    def skip(self, count: int) -> int:
        """Skip bytes; returns the byte of the file at which they begin."""
        first = self.where
        if count > self.stop - first:
            raise self.cut_off(f"{count} bytes of a value, of which only {self.stop - first} remain")
        self._skipped += count
        if self._at + count <= len(self._buffer):
            self._at += count
        else:
            self._buffer, self._base, self._at = b"", first + count, 0
            self._ahead = READ_BYTES_MIN  # not twice the file, where long and short values take turns
        return first

    def again(self, offset: int, length: int) -> bytes:
        """Read a few bytes that were skipped, or read before."""
        return self._files.read(self.path, offset, length)

    def check_length(self) -> None:
        """`LimitExceeded` if more was read than a pickle's own part may have."""
        if self.where - self._start - self._skipped > PICKLE_BYTES_MAX:
            raise self.limit(f"has over {PICKLE_BYTES_MAX} bytes in addition to its arrays")

    def refused(self, what: str, hint: str = AGAIN) -> CheckpointError:
        return StateMismatch(self._said(what), hint=hint, file=self.path)

    def limit(self, what: str) -> CheckpointError:
        return LimitExceeded(self._said(what), hint=SMALLER, file=self.path)

    def cut_off(self, what: str) -> CheckpointError:
        text = f"{self.path} ends at byte {self.stop}, and byte {self.opcode_at} begins {what}"
        return CorruptManifest(text, hint="copy the file again: it is not complete", file=self.path)

    def _said(self, what: str) -> str:
        return f"{self.path}, byte {self.opcode_at}: the pickle {what}"

    def _fill(self, count: int) -> None:
        first = self.where
        if count > self.stop - first:
            raise self.cut_off(f"a value of {count} bytes, of which {self.stop - first} are there")
        length = min(max(count, self._ahead), self.stop - first)
        self._ahead = min(2 * self._ahead, READ_BYTES_MAX)
        self._buffer, self._base, self._at = self._files.read(self.path, first, length), first, 0
        if len(self._buffer) < length:
            raise CorruptManifest(
                f"{self.path} was truncated while being read",
                hint="import it again when no process is writing it",
                file=self.path,
            )
