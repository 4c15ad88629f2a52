"""The source of an import: a directory, one file with the configuration and tokenizer beside it, the files in an archive of
NeMo, or a model's directory in the cache of huggingface_hub, which means its snapshot.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from holdfast_formats.errors import InvalidRequest
from holdfast_formats.files import Files
from holdfast_service.storage import hub_snapshot, read_once, tier_at
from holdfast_service.wings.convert.foreign import file_signs
from holdfast_service.wings.convert.foreign.nemo import archive
from holdfast_service.wings.convert.foreign.nemo.archive import ArchivedFiles

COMPANIONS = re.compile(
    r"(adapter_|generation_|preprocessor_|processor_)?config\.json|merges\.txt|vocab\.(json|txt)|.+\.(model|tiktoken)"
    r"|(tokenizer|tokenizer_config|special_tokens_map|added_tokens)\.json|chat_template\.(json|jinja)"
)
_OF_SEVERAL = re.compile(  # files that only mean something with others beside them
    r".+-\d{5}-of-(?!00001)\d{5}\.(safetensors|bin|gguf)|.+\.index\.json|.+\.distcp|\.metadata|config\.json"
    r"|(mp_rank|(bf16_)?zero_pp_rank)_.+\.pt",
    re.IGNORECASE,
)
REVISION_BYTES_MAX = 256
SNAPSHOTS, MAIN = "snapshots", "refs/main"


class OneFile:
    """One file of a directory, and the small files that belong to any model there."""

    def __init__(self, directory: Files, name: str) -> None:
        self._directory, self._name = directory, name

    @property
    def label(self) -> str:
        return self._directory.label

    def size(self, path: str) -> int | None:
        return self._directory.size(path) if self._has(path) else None

    def stamp(self, path: str) -> str:
        return self._directory.stamp(path) if self._has(path) else ""

    def list(self, path: str) -> list[str]:
        return [] if path else [name for name in self._directory.list("") if self._has(name)]

    def read(self, path: str, offset: int = 0, length: int | None = None) -> bytes:
        return self._directory.read(path, offset, length)

    def read_into(self, path: str, offset: int, buffer: Any) -> int:
        return self._directory.read_into(path, offset, buffer)

    def read_stored(self, path: str, offset: int, buffer: Any) -> int:
        return self._directory.read_stored(path, offset, buffer)

    def _has(self, path: str) -> bool:
        return path == self._name or COMPANIONS.fullmatch(path) is not None


def check_source(path: Path) -> None:
    """`InvalidRequest` for what is neither a directory nor a file, or an archive."""
    if not path.exists():
        raise InvalidRequest(f"there is no directory or file {path}", hint="check the path")
    unpack = path.is_file() and file_signs.archive(path.name)
    if unpack:
        raise InvalidRequest(f"{path} is a file that holds others", hint=unpack)


def open_source(path: Path) -> Files:
    """The files to import from; `InvalidRequest` for a path that leads to none, to one file of several that belong together,
    and for several snapshots.
    """
    check_source(path)
    if path.is_file():
        in_snapshot = path.parent.resolve()  # where it is a link to a blob without a name
        place = in_snapshot / path.name if in_snapshot.parent.name == SNAPSHOTS else path.resolve()
        return _one_file(hub_snapshot.opened(place.parent), place.name, str(path.parent))
    return hub_snapshot.opened(_snapshot(path.resolve()))


def open_below(place: Path, below: str) -> Files:
    """The same for a directory or file below `place`, whose links are not followed, but for those of a hub's snapshot."""
    whole = tier_at(place)
    if not below or whole.list(below):
        found = _snapshot(place / below)
        return _opened_below(place, found.relative_to(place).as_posix() if found != place else "")
    parent, _, name = below.rpartition("/")
    directory = _opened_below(place, parent) if name in whole.list(parent) else whole
    if (directory is whole and parent) or directory.size(name) is None:
        raise InvalidRequest(f"there is no {below!r} with files below the export root", hint="check the path")
    return _one_file(directory, name, parent or ".")


def _one_file(directory: Files, name: str, path: str) -> Files:
    """The file of a directory, which the user calls `path`."""
    if _OF_SEVERAL.fullmatch(name):
        raise InvalidRequest(f"{name} is only a part of a checkpoint", hint=f"import its directory: {path}")
    once = read_once(directory)
    return ArchivedFiles(once, name) if name.lower().endswith(archive.ENDING) else OneFile(once, name)


def _opened_below(place: Path, below: str) -> Files:
    if "/" not in below:  # else a hub's blobs would be outside `place`
        return tier_at(place / below if below else place)
    return hub_snapshot.opened(place / below)


def _snapshot(directory: Path) -> Path:
    """The snapshot of a model's directory in a hub's cache; any other directory itself."""
    files = tier_at(directory)
    names = files.list(SNAPSHOTS)
    if not names or not files.list("blobs"):
        return directory
    size = files.size(MAIN)
    main = "" if size is None else files.read(MAIN, 0, REVISION_BYTES_MAX).decode(errors="replace").strip()
    if main in names:
        return directory / SNAPSHOTS / main
    if len(names) == 1:
        return directory / SNAPSHOTS / names[0]
    raise InvalidRequest(
        f"{directory} has {len(names)} snapshots, and refs/main names none of them",
        hint=f"pass one of them: {', '.join(f'{SNAPSHOTS}/{name}' for name in names[:4])}",
    )
