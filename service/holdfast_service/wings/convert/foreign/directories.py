"""Directories and links in a foreign checkpoint that no kind here reads.

Most are irrelevant: logs, pictures, caches. One with files of tensors may be a second adapter, another layer, or training
state, and is refused.
"""

from __future__ import annotations

import re

from holdfast_formats.errors import StateMismatch
from holdfast_formats.files import Files

LEVELS_MAX = 3
LISTED_MAX = 1000  # names of a directory and all below it
OTHER_STEP = re.compile(r"(checkpoint-|global_step|step-)\d+")
NOT_COMPARED = "weights for another program: not compared, not imported"
# Weights once more, for other programs, by the names that repositories of models give these directories.
_COPIES = frozenset({"original", "onnx", "openvino", "coreml", "tensorrt", "gguf"})
_TENSORS = re.compile(
    r".+\.(safetensors|bin|pt|pth|ckpt|pkl|pickle|npz|npy|h5|msgpack|distcp|pdparams|pdopt|pdema|pdiparams)(_shard_\d+)?"
    r"|\.metadata|.*\.metadata",
    re.IGNORECASE,
)


def why_unused(files: Files, name: str) -> str:
    """Why a name that is no regular file is not imported; `StateMismatch` if it may hold tensors."""
    if name.startswith("."):
        return "a hidden directory, such as a cache or version control"
    if OTHER_STEP.fullmatch(name):
        return "a separate checkpoint; import its directory separately"
    if name in _COPIES:
        return NOT_COMPARED
    if _TENSORS.fullmatch(name):
        raise _refused(name, "is not a regular file and may hold training state", "copy the file that it links to")
    reason = _first(files, name)
    if reason is not None:
        raise _refused(
            reason,
            "is in a directory that this kind of import does not read, but may hold weights or training state",
            f"import {name} separately; move it out of the directory to import the rest",
        )
    return "neither a regular file nor a directory with tensors; links are not followed"


def _first(files: Files, directory: str) -> str | None:
    """The first file with tensors among a limited number of names; a directory of very many names counts as one."""
    waiting, listed = [(directory, 1)], 0
    while waiting:
        path, level = waiting.pop()
        for name in files.list(path):
            inner = f"{path}/{name}"
            listed += 1
            if listed > LISTED_MAX or _TENSORS.fullmatch(name):
                return inner
            if level < LEVELS_MAX and files.size(inner) is None:
                waiting.append((inner, level + 1))
    return None


def _refused(path: str, what: str, hint: str) -> StateMismatch:
    return StateMismatch(f"{path} {what}", hint=hint, file=path)
