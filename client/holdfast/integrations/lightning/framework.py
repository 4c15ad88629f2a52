"""Chooses between Lightning's two packages, `lightning.pytorch` and `pytorch_lightning`, whose classes differ."""

from __future__ import annotations

import sys
from importlib import import_module
from importlib.util import find_spec
from typing import Any

_NEW, _OLD = "lightning.pytorch", "pytorch_lightning"


def name() -> str:
    """The package that the program has imported; if both or none, `lightning.pytorch`, if installed."""
    if _NEW in sys.modules or _OLD not in sys.modules:
        return _NEW if find_spec("lightning") is not None else _OLD
    return _OLD


def part(path: str) -> Any:
    """A module of the package, such as `callbacks`; the package itself for an empty path."""
    return import_module(f"{name()}.{path}" if path else name())


def fabric(path: str) -> Any:
    """A module of Fabric: `lightning.fabric`, or `lightning_fabric` beside `pytorch_lightning`."""
    return import_module(f"{'lightning.fabric' if name() == _NEW else 'lightning_fabric'}.{path}")
