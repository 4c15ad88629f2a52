"""Assets: the small files beside the weights (config.json, tokenizer files) that make a checkpoint loadable by name."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from holdfast_formats import naming
from holdfast_formats.errors import InvalidRequest, LimitExceeded
from holdfast_formats.staging.slot_table import ASSET_BYTES_MAX


def collect(assets: Any) -> dict[str, bytes]:
    """Return the files behind `assets`, by name.

    Accepted are: a file's path, a directory's path (its regular files), a mapping of names to bytes, text or JSON values, an
    object that writes itself with `save_pretrained(directory)` (a config, a tokenizer), and sequences of these. Raises
    `InvalidRequest` for anything else or a name that the format uses itself, `LimitExceeded` when they are too large.
    """
    if assets is None:
        return {}
    found = _collect(assets)
    for name, content in found.items():
        naming.check_asset(name)
        if len(content) > ASSET_BYTES_MAX:
            raise LimitExceeded(f"asset {name!r} has {len(content)} bytes, over the limit of {ASSET_BYTES_MAX}")
    return found


def _collect(assets: Any) -> dict[str, bytes]:
    if isinstance(assets, str | Path):
        return _from_path(Path(assets))
    if isinstance(assets, Mapping):
        return {str(name): _encode(str(name), content) for name, content in assets.items()}
    if hasattr(assets, "save_pretrained"):
        with tempfile.TemporaryDirectory(prefix="holdfast-assets-") as directory:
            assets.save_pretrained(directory)
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
    raise InvalidRequest(f"the asset {path} does not exist")


def _belongs(name: str) -> bool:
    """Whether a file of an asset directory is an asset. Weights are not, because the checkpoint has its own."""
    return not name.startswith(".") and not name.endswith((".safetensors", ".safetensors.index.json", ".bin", ".pt"))


def _encode(name: str, content: Any) -> bytes:
    if isinstance(content, bytes | bytearray | memoryview):
        return bytes(content)
    if isinstance(content, str):
        return content.encode()
    try:
        return json.dumps(content, indent=2, ensure_ascii=False).encode() + b"\n"
    except (TypeError, ValueError) as error:
        raise InvalidRequest(f"asset {name!r} is neither bytes, text nor JSON: {error}") from error
