"""The library that a Trainer is of: PaddleFormers, or PaddleNLP, which it descends from and has the same methods."""

from __future__ import annotations

import importlib
from typing import Any, NamedTuple

from holdfast_formats.errors import InvalidRequest

_NAMES = {"paddleformers": "PaddleFormers", "paddlenlp": "PaddleNLP"}  # by package


class Library(NamedTuple):
    """Its name, its package, and the class of its Trainer."""

    name: str
    package: str
    trainer: type

    @property
    def is_paddlenlp(self) -> bool:
        return self.package == "paddlenlp"

    @property
    def callback(self) -> Any:
        """The class of which callbacks are."""
        return self.module("trainer").TrainerCallback

    def module(self, name: str) -> Any:
        return importlib.import_module(f"{self.package}.{name}")


def library_of(trainer: object) -> Library:
    """The library of a Trainer. Raises `InvalidRequest` for any other object."""
    for kind in type(trainer).__mro__:
        package = kind.__module__.partition(".")[0]
        if kind.__name__ == "Trainer" and package in _NAMES:
            return Library(_NAMES[package], package, kind)
    raise InvalidRequest(
        f"attach takes a Trainer of PaddleFormers or PaddleNLP, not a {type(trainer).__name__}",
        hint='of a loop of your own: attach(model, optimizer, "run")',
    )
