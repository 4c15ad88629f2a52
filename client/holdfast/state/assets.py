"""Assets: the small files beside the weights (config.json, tokenizer files) that make a checkpoint loadable by name."""

from __future__ import annotations

import json
import os
import stat
import tempfile
from collections.abc import Mapping, Sequence
from os import PathLike
from pathlib import Path
from types import MappingProxyType
from typing import Any

from holdfast_formats import naming
from holdfast_formats.errors import InvalidRequest, LimitExceeded
from holdfast_formats.staging.slot_table import ASSET_BYTES_MAX

NO_ASSETS: Mapping[str, bytes] = MappingProxyType({})
ROOM_BYTES_MIN = 2**16
_ACCEPTED = "pass bytes, text, a JSON value, or the path of a file"


def collect(assets: Any) -> dict[str, bytes]:
    """The files of `assets`, by name.

    Accepted are: a file's path, a directory's path (its regular files), a mapping as `of_step` takes it, an object with
    `save_pretrained(directory)` (a config, a tokenizer), and sequences of these. Raises `InvalidRequest` for anything else
    or a name that the format uses itself, `LimitExceeded` when they are too large.
    """
    if assets is None:
        return {}
    contents = _collect(assets)
    for name, content in contents.items():
        naming.check_asset(name)
        _check_size(name, len(content))
    return contents


def of_step(assets: Mapping[str, Any] | None, rank: int) -> dict[str, bytes]:
    """The assets of one save: bytes, text as UTF-8, JSON values as text, or the present content of the file at a path.

    Only rank 0's are stored. Of other ranks only the names are checked. Raises `InvalidRequest` for what cannot be stored,
    and `LimitExceeded` for what is too large.
    """
    if assets is None:
        return {}
    if not isinstance(assets, Mapping):
        raise InvalidRequest(
            f"assets of a save must be a mapping of file names to contents, not a {type(assets).__name__}",
            hint='for example save(step, assets={"trainer_state.json": {"epoch": 3}})',
        )
    for name in assets:
        naming.check_asset(_text(name))
    return collect(assets) if rank == 0 else {}


def room_to_grow(assets: Mapping[str, bytes]) -> int:
    """Extra bytes to reserve for the assets of later saves: a log file grows from save to save."""
    return max(sum(map(len, assets.values())), ROOM_BYTES_MIN) if assets else 0


def _check_size(name: str, size: int) -> None:
    if size > ASSET_BYTES_MAX:
        raise LimitExceeded(
            f"asset {name!r} has {size} bytes, over the limit of {ASSET_BYTES_MAX}",
            hint="keep a large file beside the checkpoints, or put its arrays into the state as tensors",
        )


def _collect(assets: Any) -> dict[str, bytes]:
    if isinstance(assets, str | Path):
        return _from_path(Path(assets))
    if isinstance(assets, Mapping):
        return {_text(name): _encode(name, content) for name, content in assets.items()}
    if hasattr(assets, "save_pretrained"):
        with tempfile.TemporaryDirectory(prefix="holdfast-assets-") as directory:
            assets.save_pretrained(directory)
            if not any(Path(directory).iterdir()):
                raise InvalidRequest(
                    f"save_pretrained() of the asset {type(assets).__name__} wrote no file",
                    hint="pass a config, tokenizer or processor of transformers, or the files themselves",
                )
            return _from_path(Path(directory))
    if isinstance(assets, Sequence):
        merged: dict[str, bytes] = {}
        for one in assets:
            merged.update(_collect(one))
        return merged
    raise InvalidRequest(
        f"assets cannot be a {type(assets).__name__}",
        hint="pass paths, a mapping of names to contents, or objects with save_pretrained()",
    )


def _from_path(path: Path) -> dict[str, bytes]:
    if path.is_dir():
        return {f.name: f.read_bytes() for f in sorted(path.iterdir()) if f.is_file() and _belongs(f.name)}
    if path.is_file():
        return {path.name: path.read_bytes()}
    raise InvalidRequest(f"the asset {path} does not exist", hint="check the path")


def _belongs(name: str) -> bool:
    """Whether a file of an asset directory is an asset. Weights are not, because the checkpoint has its own."""
    return not name.startswith(".") and not name.endswith((".safetensors", ".safetensors.index.json", ".bin", ".pt"))


def _text(name: object) -> str:
    if not isinstance(name, str):
        raise InvalidRequest(f"asset name {name!r} is not text", hint="asset names are plain file names")
    return name


def _encode(name: str, content: Any) -> bytes:
    if isinstance(content, bytes | bytearray | memoryview):
        return bytes(content)
    if isinstance(content, PathLike):
        return _content_of(name, Path(content))
    try:
        if isinstance(content, str):
            return content.encode()
        return json.dumps(content, indent=2, ensure_ascii=False, allow_nan=False).encode() + b"\n"
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidRequest(
            f"asset {name!r} is neither bytes nor text in UTF-8 nor JSON: {error}",
            hint=f"{_ACCEPTED}; JSON has no NaN and no infinities: write them as text or null",
        ) from error


def _content_of(name: str, path: Path) -> bytes:
    """The content of a regular file. Its size is checked first: it may be larger than the memory."""
    try:
        with open(path, "rb", opener=_open_at_once) as file:
            status = os.fstat(file.fileno())
            if not stat.S_ISREG(status.st_mode):
                raise InvalidRequest(f"asset {name!r}: {path} is not a regular file", hint=_ACCEPTED)
            _check_size(name, status.st_size)
            return file.read(ASSET_BYTES_MAX + 1)
    except OSError as error:
        raise InvalidRequest(f"asset {name!r} cannot be read: {error}", hint=_ACCEPTED) from error


def _open_at_once(path: str, flags: int) -> int:
    """Open without waiting for a writer, if it is a pipe."""
    return os.open(path, flags | os.O_NONBLOCK)
