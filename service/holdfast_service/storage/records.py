"""The interface of control files: small files of a root that are not part of a checkpoint, such as the attempts, run.json,
claims and quotas. Each is read and written as a whole.

It needs no directories, renames or locks, so that an object store can implement it. Every implementation must pass the
tests in `tests/suites/records_suite.py`. Paths are relative, as for `Tier`.

Decision: `swap` compares bytes and not a tag, because an inode and a time of change come back after two quick changes, while
equal bytes cannot hide a lost change.
"""

from __future__ import annotations

from typing import Protocol

from holdfast_formats.files import Files


class Records(Files, Protocol):
    """Control files. Every failure is one of `NoSpace`, `StorageFailed`, `NoSuchResource`, `InvalidRequest`."""

    def put_first(self, path: str, data: bytes) -> bool:
        """A new file, durable with its name when this returns; False if one exists, which stays.

        Of several nodes that do this at once, one succeeds, and the others find the whole file.
        """

    def replace(self, path: str, data: bytes) -> None:
        """Replace a file by `data`, or create it, atomically; durable, with its name, when this returns."""

    def swap(self, path: str, before: bytes | None, data: bytes) -> bool:
        """`replace` if the file's bytes are still `before`, None for no file; False, and nothing changes, if they are not.

        Of several nodes that swap the same bytes at once, one succeeds. `InUse` while another node is swapping, where that
        can last: try again.
        """

    def remove_file(self, path: str) -> None:
        """Remove one file."""

    def is_empty(self, path: str) -> bool:
        """Whether this is an empty directory, or, where there are none, nothing; False for a file and for a link."""

    def remove_empty(self, path: str) -> bool:
        """Remove an empty directory, where there are directories; False if something is in it, or it is none. True for a
        missing one.
        """


def has_bytes(files: Files, path: str, expected: bytes | None) -> bool:
    """Whether a file has exactly these bytes, None for no file. A larger file is not read."""
    size = files.size(path)
    if size is None or expected is None:
        return size is None and expected is None
    return size == len(expected) and files.read(path, 0, size) == expected
