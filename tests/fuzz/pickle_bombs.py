"""Pickles of some megabytes that stand for very much: memory, work, depth. Each must be refused, or read, in little of all.

    python -m tests.fuzz.pickle_bombs PATH

prints what became of the one in a file, and the memory and time that it took.
"""

from __future__ import annotations

import os
import struct
import sys
import time
from collections.abc import Callable
from typing import Any

from .pickle_worker import peak_bytes, read_one

PROTO = b"\x80\x04"
_EMPTY_LIST = b"]\x94"


def _number(n: int) -> bytes:
    return b"J" + struct.pack("<i", n)


def _doubling() -> bytes:
    """Each tuple has the one before twice: 2**90 values in 400 bytes."""
    return PROTO + b")\x94" + b"".join(b"h" + bytes((n, 104, n)) + b"\x86\x94" for n in range(90)) + b"."


def _doubling_key() -> bytes:
    """The same as a key, whose hash would take 2**90 steps."""
    return PROTO + b"}" + _doubling()[2:-1] + b"Ns."


def _collisions() -> bytes:
    """Keys that all have one hash."""
    step = 2**61 - 1
    keys = b"".join(b"\x8a\x1e" + (step * n).to_bytes(30, "little") + b"N" for n in range(1, 300_000))
    return PROTO + b"}(" + keys + b"u."


def _tuple_keys() -> bytes:
    return PROTO + b"}(" + b"".join(_number(n) + b"\x85N" for n in range(500_000)) + b"u."


BOMBS: dict[str, Callable[[], bytes]] = {
    "doubling": _doubling,
    "doubling-key": _doubling_key,
    "collisions": _collisions,
    "tuple-keys": _tuple_keys,
    "itself": lambda: PROTO + _EMPTY_LIST + b"h\x00a.",
    "itself-in-dict": lambda: PROTO + b"}\x94K\x01h\x00s.",
    "itself-by-tuple": lambda: PROTO + _EMPTY_LIST + b"h\x00\x85\x94a.",
    "deep-lists": lambda: PROTO + b"]" * 900_000 + b"a" * 899_999 + b".",
    "deep-tuples": lambda: PROTO + b")" + b"\x85" * 5_000_000 + b".",
    "marks": lambda: PROTO + b"(" * 5_000_000 + b".",
    "nothing": lambda: PROTO + b"N0" * 20_000_000 + b"N.",
    "stack": lambda: PROTO + b"N" * 20_000_000 + b"t.",
    "stacks-below-marks": lambda: PROTO + (b"N" * 900_000 + b"(") * 40 + b"t.",
    "empty-lists": lambda: PROTO + b"]" + (b"(" + b"]" * 900 + b"e") * 20_000 + b".",
    "empty-dicts": lambda: PROTO + b"]" + (b"(" + b"}" * 900 + b"e") * 20_000 + b".",
    "small-tuples": lambda: PROTO + b"]" + (b"(" + b")\x85" * 900 + b"e") * 20_000 + b".",
    "small-dicts": lambda: PROTO + b"]" + (b"(" + b"}K\x01Ns" * 900 + b"e") * 5_000 + b".",
    "one-dict": lambda: PROTO + b"}" + b"".join(_number(n) + b"Ns" for n in range(2_000_000)) + b".",
    "one-set": lambda: PROTO + b"\x8f(" + b"".join(map(_number, range(600_000))) + b"\x90.",
    "numbers": lambda: PROTO + b"]" + b"".join(b"(" + _number(n) * 900 + b"e" for n in range(1000, 16_000)) + b".",
    "texts": lambda: PROTO + b"]" + (b"(" + b"\x8c\xff" + b"a" * 255 + b"e") * 400_000 + b".",
    "wide-texts": lambda: PROTO + b"](" + (b"X\x00\x00\x10\x00" + b"a" * (2**20 - 4) + "\U0001f600".encode()) * 60 + b"e.",
    "memo": lambda: PROTO + b"N" + b"\x94" * 16_000_000 + b".",
    "memo-far": lambda: PROTO + b"Nr\xff\xff\xff\x7f.",
    "copies": lambda: (
        PROTO + b"cbuiltins\nset\n\x940](" + b"".join(map(_number, range(500_000))) + b"e\x940"
        b"]" + b"h\x00h\x01\x85Ra" * 1_000_000 + b"."
    ),
    "records": lambda: PROTO + b"ctests.fuzz.pickle_seeds\nRecord\n\x940](" + b"h\x00)\x81" * 1_000_000 + b"e.",
    "arrays-in-memo": lambda: (
        PROTO + b"cnumpy.core.multiarray\n_reconstruct\ncnumpy\nndarray\nK\x00\x85C\x01b\x87R" + b"\x94" * 10_000_000 + b"."
    ),
    "wide-references": lambda: PROTO + b"](" + b"N" * 900_000 + b"e\x940](" + b"h\x00" * 900_000 + b"e.",
}


class OnDisk:
    """One file of a directory of the machine."""

    def __init__(self, path: str) -> None:
        self.path = path

    def read(self, path: str, offset: int = 0, length: int | None = None) -> bytes:
        with open(self.path, "rb") as file:
            file.seek(offset)
            return file.read(length)

    def read_into(self, path: str, offset: int, buffer: Any) -> int:
        raise AssertionError("values are not read")

    def size(self, path: str) -> int | None:
        return os.path.getsize(self.path)

    def list(self, path: str) -> list[str]:
        return ["f"]


def main(path: str) -> None:
    start = time.monotonic()
    print(read_one(OnDisk(path), False), peak_bytes(), round(time.monotonic() - start, 2))


if __name__ == "__main__":
    main(sys.argv[1])
