"""Detects what is in a file's place: nothing, a link, a pointer of Git LFS, a web page, or an archive; and reads JSON."""

from __future__ import annotations

import json
from typing import Any

from holdfast_formats.errors import CheckpointError, CorruptManifest, InvalidRequest, LimitExceeded
from holdfast_formats.files import Files

CONFIG_BYTES_MAX = 2**24
HEAD_BYTES = 64
_POINTER = b"version https://git-lfs"
_PAGES = (b"<!doctype html", b"<html")
_ARCHIVES = (".tar", ".tar.gz", ".tgz", ".zip")


def absent(files: Files, path: str, why: str = "") -> CheckpointError:
    """The error for a file that is missing, or is not a regular file. `why` it is needed."""
    directory, _, name = path.rpartition("/")
    if name in files.list(directory):
        return InvalidRequest(
            f"{path} is not a regular file", hint="symbolic links are not followed: copy their targets", file=path
        )
    return CorruptManifest(
        f"{path} is missing{why}",
        hint="download or copy it again: it was interrupted, or mixes two versions",
        file=path,
    )


def check_head(path: str, head: bytes) -> None:
    """`CorruptManifest` for a file whose first bytes show that it only replaces the real one."""
    if head.startswith(_POINTER):
        raise CorruptManifest(
            f"{path} is a Git LFS pointer, not the file itself",
            hint="fetch the file: `git lfs pull` in the repository, or `hf download`",
            file=path,
        )
    if head.lstrip().lower().startswith(_PAGES):
        raise CorruptManifest(f"{path} is a web page, not the file itself", hint="download it again", file=path)


def read_object(files: Files, path: str, bytes_max: int = CONFIG_BYTES_MAX) -> dict[str, Any]:
    """A file's JSON object; `CorruptManifest` for anything else, `LimitExceeded` for one that is too large."""
    size = files.size(path)
    if size is None:
        raise CorruptManifest(f"{path} is not a regular file", hint="copy the file that it links to", file=path)
    if size > bytes_max:
        raise LimitExceeded(f"{path} has {size} bytes, over the limit of {bytes_max}", file=path)
    try:
        document = json.loads(files.read(path, 0, bytes_max))
    except (ValueError, RecursionError) as error:
        raise CorruptManifest(f"cannot read {path}: {error}", file=path) from error
    if not isinstance(document, dict):
        raise CorruptManifest(f"{path} is not a JSON object", file=path)
    return document


def archive(name: str) -> str:
    """Advice for an archive, by its name; empty for anything else."""
    packed = name.lower().endswith(_ARCHIVES)
    return f"{name} is an archive: unpack it into a directory and import the directory" if packed else ""
