"""What a Trainer has logged: its state as JSON, and the metrics of a step."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from holdfast_formats.errors import InvalidRequest


def as_json(values: Mapping[str, Any], hint: str, default: Callable[[Any], Any] | None = None) -> str:
    """The TrainerState as text, because losses may be NaN, which Trainers read and write as it is."""
    try:
        return json.dumps(values, sort_keys=True, default=default)
    except (TypeError, ValueError) as error:
        raise InvalidRequest(
            f"trainer.state cannot be written as JSON: {error}", hint=f"log numbers as Python floats, {hint}"
        ) from error


def metrics(history: Sequence[Mapping[str, Any]], step: int, key: str) -> dict[str, float]:
    """The numbers that were logged for this step, which entries of the history name under `key`."""
    values: dict[str, float] = {}
    for entry in reversed(history):
        if entry.get(key) != step:
            break
        values = {name: value for name, value in entry.items() if type(value) in (int, float)} | values
    return {name: value for name, value in values.items() if name != key}
