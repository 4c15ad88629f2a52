"""The small files of a merged model: those of the base, with the result's dtype, layers, tokens and chat template."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from holdfast_formats.errors import NoSuchResource, StateMismatch
from holdfast_service.wings.convert.exports import hugging_face
from holdfast_service.wings.merge import vocabulary
from holdfast_service.wings.merge.sources import MergeSource, MergeSources
from holdfast_service.wings.merge.vocabulary import ModelTokens

_LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")
_VOCABULARY = "vocab_size"
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

    def set_rows(self, rows: int) -> None:
        """Set the size of the vocabulary."""
        document = self._document()
        for one in (document, *(document.get(name) for name in _INNER)):
            if isinstance(one, dict) and _is_count(one.get(_VOCABULARY)) and one[_VOCABULARY] != rows:
                one[_VOCABULARY] = rows
                self._write(document)
                self.notes.append(f"{_VOCABULARY} in {hugging_face.CONFIG} is now {rows}")
                return

    def set_ids(self, of: bytes, name: str) -> None:
        """Take the numbers of special tokens from another model's config.json."""
        document, other = self._document(), ResultConfig(of)._document()
        changed = {key: other[key] for key in _IDS if key in other and document.get(key) != other[key]}
        if changed:
            self._write({**document, **changed})
            self.notes.append(f"{', '.join(changed)} in {hugging_face.CONFIG} come from {name}")

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


def small_file(source: MergeSource, sources: MergeSources, name: str) -> bytes | None:
    """A model's small file; None if it has none of this name."""
    made = source.listing.made_assets.get(name)
    if made is not None:
        return made
    if name not in source.listing.assets:
        return None
    return sources.watched.read(f"{source.number}/{name}", 0, vocabulary.BYTES_MAX)


def tokens_of(source: MergeSource, sources: MergeSources) -> ModelTokens:
    """A model's tokens; `NoSuchResource` without a tokenizer that the library `tokenizers` reads."""
    document = small_file(source, sources, vocabulary.TOKENIZER)
    if document is None:
        raise NoSuchResource(
            f"{source.name} has no {vocabulary.TOKENIZER}, by which the recipe's tokenizer is made",
            hint="write it by AutoTokenizer.from_pretrained(MODEL).save_pretrained(MODEL)",
        )
    return vocabulary.read_tokens(source.name, document, small_file(source, sources, vocabulary.ABOUT))


class ResultFiles:
    """The small files of a result: `copied` from the base by name, and `made` here."""

    def __init__(self, source: MergeSource, left: Sequence[str]) -> None:
        self.copied = [name for name in source.listing.assets if name not in left]
        self.made = {name: data for name, data in source.listing.made_assets.items() if name not in left}
        self.notes = list[str]()

    def put(self, name: str, data: bytes) -> None:
        self.remove(name)
        self.made[name] = data

    def remove(self, *names: str) -> list[str]:
        """Leave files out; those that were there."""
        gone = [name for name in names if name in self.copied or name in self.made]
        self.copied = [name for name in self.copied if name not in names]
        self.made = {name: data for name, data in self.made.items() if name not in names}
        return gone

    def take_tokenizer(self, source: MergeSource, sources: MergeSources) -> None:
        """Take all files of another model's tokenizer."""
        self.remove(*vocabulary.FILES)
        for name in vocabulary.FILES:
            data = small_file(source, sources, name)
            if data is not None:
                self.put(name, data)
        self.notes.append(f"the tokenizer comes from {source.name}")

    def put_tokenizer(self, tokens: ModelTokens, before: ModelTokens) -> None:
        """Write a tokenizer that was changed; files that have only the old vocabulary are left out, with a note."""
        if tokens.numbers == before.numbers:
            return
        self.put(vocabulary.TOKENIZER, vocabulary.written(tokens.document))
        if tokens.about:
            self.put(vocabulary.ABOUT, vocabulary.written(tokens.about))
        self.notes.append(f"the tokenizer has {len(tokens.numbers)} tokens; {before.name}'s has {len(before.numbers)}")
        gone = self.remove(*vocabulary.VOCABULARIES)
        if gone:
            self.notes.append(f"left out, as they have only the old tokens: {', '.join(gone)}")

    def put_template(self, template: str, about: Mapping[str, Any]) -> None:
        """Write a chat template; `about` is the tokenizer's configuration."""
        self.remove(vocabulary.TEMPLATE, "chat_template.json")
        self.put(vocabulary.ABOUT, vocabulary.written({**about, "chat_template": template}))
        self.notes.append("the chat template is the recipe's")
