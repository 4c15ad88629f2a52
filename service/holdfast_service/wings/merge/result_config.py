"""The config.json of a merged model: that of the base, with the result's dtype and layers."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from holdfast_formats.errors import StateMismatch
from holdfast_service.wings.convert.exports import hugging_face

_LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
_INNER = ("text_config", "llm_config", "language_config")  # of models with several parts


class ResultConfig:
    """A config.json that is being changed, and notes of the changes."""

    def __init__(self, data: bytes) -> None:
        self.data, self.notes = data, list[str]()

    def set_dtype(self, dtype: str) -> None:
        """`dtype`: transformers' name."""
        changed = hugging_face.with_dtype(self.data, dtype)
        if changed is not None:
            self.data = changed
            self.notes.append(f"the dtype in {hugging_face.CONFIG} is now {dtype}")

    def set(self, settings: Mapping[str, Any]) -> None:
        """Set some keys, where the config or one of its parts has them, or at the top."""
        document = self._document()
        inner = [one for one in (document.get(name) for name in _INNER) if isinstance(one, dict)]
        for key, value in settings.items():
            having = [one for one in (document, *inner) if key in one] or [document]
            for one in having:
                one[key] = value
            self.notes.append(f"{key} in {hugging_face.CONFIG} is now {json.dumps(value)}")
        self._write(document)

    def stack(self, layers: Sequence[int]) -> None:
        """Set the number of layers, and order lists with an entry for each layer; `layers`: their numbers before.

        `StateMismatch` for a config that is no JSON object, and for a list without an entry for a layer.
        """
        document = self._document()
        inside = _with_layers(document)
        key = None if inside is None else next(key for key in _LAYERS if _is_count(inside.get(key)))
        if inside is None or key is None:
            self.notes.append(f"{hugging_face.CONFIG} names no number of layers; the result has {len(layers)}")
            return
        count = inside[key]
        if list(layers) == list(range(count)):
            return
        for name, entries in inside.items():
            if isinstance(entries, list) and len(entries) == count and "layer" in name:
                inside[name] = [entries[number] for number in layers if number < count]
                if len(inside[name]) != len(layers):
                    raise StateMismatch(
                        f"{name} in {hugging_face.CONFIG} has {count} entries, but the recipe stacks layer {max(layers)}",
                        hint="set `base_model` to a model with as many layers as the recipe's sources",
                        key=name,
                    )
        inside[key] = len(layers)
        self._write(document)
        self.notes.append(f"{key} in {hugging_face.CONFIG} is now {len(layers)}")

    def _document(self) -> dict[str, Any]:
        try:
            document = json.loads(self.data)
        except (ValueError, RecursionError):
            document = None
        if not isinstance(document, dict):
            raise StateMismatch(f"{hugging_face.CONFIG} is no JSON object", hint="repair the base model's file")
        return document

    def _write(self, document: dict[str, Any]) -> None:
        self.data = json.dumps(document, indent=2, ensure_ascii=False).encode() + b"\n"


def _with_layers(document: dict[str, Any]) -> dict[str, Any] | None:
    """The part of a config that has the number of layers."""
    inner = [document.get(name) for name in _INNER]
    for one in (document, *inner):
        if isinstance(one, dict) and any(_is_count(one.get(key)) for key in _LAYERS):
            return one
    return None


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0
