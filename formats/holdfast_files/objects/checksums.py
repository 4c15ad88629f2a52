"""The headers by which a server checks a body that is sent to it."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Sequence
from typing import Literal

from holdfast_files.objects import native_crc32

Checksum = Literal["md5", "crc32", "none"]


def headers(checksum: Checksum, views: Sequence[memoryview]) -> dict[str, str]:
    """Those of a body in several pieces of memory."""
    if checksum == "none":
        return {}
    return {"Content-MD5": md5(views)} if checksum == "md5" else {"x-amz-checksum-crc32": crc32(views)}


def md5(views: Sequence[memoryview]) -> str:
    running = hashlib.md5(usedforsecurity=False)
    for view in views:
        running.update(view)
    return base64.b64encode(running.digest()).decode()


def crc32(views: Sequence[memoryview]) -> str:
    running = 0
    for view in views:
        running = native_crc32.crc32(view, running)
    return base64.b64encode(running.to_bytes(4, "big")).decode()
