"""What a case of the corpus is, and what is known of it between two processes."""

from __future__ import annotations

import fnmatch
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch

from tests.integrations.recording import digest

Tensors = Mapping[str, torch.Tensor]
Digests = dict[str, str]
NOTHING: Mapping[str, str] = {}


class Case(NamedTuple):
    """One checkpoint of a library.

    `make` writes it, as the library does. `read` gives its tensors by the library's own loader of files, under
    `group/name`, as they are to be imported. `load` gives what the library itself makes of the checkpoint (a model's
    tensors, for example): the same of the source and of the export. All three run in the case's environment.
    """

    name: str
    library: str  # the package whose version is told
    make: Callable[[Path], object]
    read: Callable[[Path], Tensors] | None = None  # None: it is refused
    load: Callable[[Path], Tensors] | None = None
    words: tuple[str, ...] = ()  # options of the import
    exported: tuple[str, ...] = ("--as", "hf")  # options of the export
    load_exported: Callable[[Path], Tensors] | None = None  # if it is not `load`
    left_out: Mapping[str, str] = NOTHING  # patterns of what `read` gives and the import does not, and why
    source: str = "."  # what is imported, below the directory that `make` writes to
    environment: str = "everyday"

    def why_left_out(self, name: str) -> str | None:
        """Why the import does not have a tensor; None if it must."""
        return next((why for pattern, why in self.left_out.items() if fnmatch.fnmatchcase(name, pattern)), None)


def digests(tensors: Tensors) -> Digests:
    """Shape, type and every bit of each tensor."""
    return {name: digest(tensor) for name, tensor in sorted(tensors.items())}


def aliases(tensors: Tensors) -> dict[str, str]:
    """Further names of tensors that have several, and the first name of each."""
    first: dict[tuple[Any, ...], str] = {}
    found = {}
    for name, tensor in sorted(tensors.items()):
        place = (tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride())
        if tensor.numel() and first.setdefault(place, name) != name:
            found[name] = first[place]
    return found


def prefixed(group: str, tensors: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """The tensors of a mapping, under the names of a group."""
    return {f"{group}/{name}": value for name, value in tensors.items() if isinstance(value, torch.Tensor)}


def flat(value: Any, name: str = "") -> dict[str, torch.Tensor]:
    """The tensors of nested mappings and lists, under paths."""
    if isinstance(value, torch.Tensor):
        return {name: value}
    if isinstance(value, Mapping):
        pairs = [(str(key), one) for key, one in value.items()]
    elif isinstance(value, list | tuple):
        pairs = [(str(number), one) for number, one in enumerate(value)]
    else:
        return {}
    return {path: found for key, one in pairs for path, found in flat(one, f"{name}/{key}" if name else key).items()}


def written(path: Path, document: Any) -> None:
    """Write JSON."""
    path.write_text(json.dumps(document, indent=1))
