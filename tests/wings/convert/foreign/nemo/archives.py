"""Archives for the tests of NeMo, as Python's tarfile writes them, which NeMo calls."""

from __future__ import annotations

import io
import tarfile


def member(name: str, data: bytes = b"", kind: bytes = tarfile.REGTYPE, link: str = "") -> tuple[tarfile.TarInfo, bytes]:
    about = tarfile.TarInfo(name)
    about.type, about.linkname = kind, link
    about.size = len(data)
    about.mtime = 1.5  # which needs settings of its own, as files of a disk do
    return about, data


def packed(*members: tuple[tarfile.TarInfo, bytes], form: int = tarfile.PAX_FORMAT) -> bytes:
    made = io.BytesIO()
    with tarfile.open(fileobj=made, mode="w", format=form) as tar:
        for about, data in members:
            tar.addfile(about, io.BytesIO(data))
    return made.getvalue()
