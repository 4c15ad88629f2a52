"""The tokenizer as the metadata of a GGUF file: byte-level BPE in tokenizer.json, whose pattern llama.cpp knows by name, or
SentencePiece in tokenizer.model.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from typing import Any

from holdfast_service.wings.convert.exports import gguf_sentencepiece
from holdfast_service.wings.convert.exports.source import ExportSource
from holdfast_service.wings.convert.foreign.gguf.encoding import Unsigned, Value

TOKENIZER, SETTINGS, TEMPLATE = "tokenizer.json", "tokenizer_config.json", "chat_template.jinja"
_NORMAL, _CONTROL, _USER_DEFINED, _UNUSED = 1, 3, 4, 5
_CONTRACTIONS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_WORDS = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_PATTERNS = {  # llama.cpp's names
    None: "gpt-2",  # the pattern that ByteLevel has itself
    rf"{_CONTRACTIONS}|{_WORDS}|\p{{N}}{{1,3}}|{_REST}": "llama-bpe",
    rf"{_CONTRACTIONS}|{_WORDS}|\p{{N}}|{_REST}": "qwen2",
}
_SPECIAL = {"bos": "bos_token", "eos": "eos_token", "unknown": "unk_token", "padding": "pad_token"}


def read(source: ExportSource, config: Mapping[str, Any]) -> dict[str, Value] | str:
    """The metadata of the checkpoint's tokenizer, or why it has none. Of both files, the one that llama.cpp has is taken."""
    why = list[str]()
    for name, way in ((TOKENIZER, _of_json), (gguf_sentencepiece.FILE, _of_sentencepiece)):
        if name not in source.assets:
            continue
        try:
            found = way(source, config)
        except (ValueError, RecursionError, KeyError, TypeError, AttributeError, struct.error) as error:
            found = f"{name} cannot be read: {type(error).__name__}: {error}"
        if not isinstance(found, str):
            return found
        why.append(found)
    return "; ".join(why) or f"the checkpoint has neither {TOKENIZER} nor {gguf_sentencepiece.FILE}"


def _of_json(source: ExportSource, config: Mapping[str, Any]) -> dict[str, Value] | str:
    return _metadata(_document(source, TOKENIZER), _settings(source), config)


def _of_sentencepiece(source: ExportSource, config: Mapping[str, Any]) -> dict[str, Value] | str:
    settings, name = _settings(source), gguf_sentencepiece.ADDED
    added = _document(source, name) if name in source.assets else {}
    count = config["vocab_size"]
    found = gguf_sentencepiece.read(source.read_asset(gguf_sentencepiece.FILE), settings, added, count)
    return found if isinstance(found, str) else found.metadata | _common(settings, config, found.ids, count)


def _metadata(document: Mapping[str, Any], settings: Mapping[str, Any], config: Mapping[str, Any]) -> dict[str, Value] | str:
    model = document["model"]
    name = _pattern_name(document)
    if model.get("type") != "BPE" or model.get("byte_fallback") or name is None:
        return f"{TOKENIZER} is not a byte-level BPE with a pattern of GPT-2, Llama 3 or Qwen 2"
    added = {one["id"]: one for one in document.get("added_tokens", ())}
    ids = {token: number for token, number in model["vocab"].items()} | {one["content"]: n for n, one in added.items()}
    by_id = {number: token for token, number in ids.items()}
    count = config["vocab_size"]
    if any(not 0 <= number < count for number in by_id):
        return f"{TOKENIZER} has tokens beyond the model's vocab_size of {count}"
    kinds = {n: _CONTROL if one.get("special") else _USER_DEFINED for n, one in added.items()}
    made: dict[str, Value] = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": name,
        "tokenizer.ggml.tokens": [by_id.get(number, f"[PAD{number}]") for number in range(count)],
        "tokenizer.ggml.token_type": [kinds.get(number, _NORMAL if number in by_id else _UNUSED) for number in range(count)],
        "tokenizer.ggml.merges": [one if isinstance(one, str) else " ".join(one) for one in model["merges"]],
    }
    return made | _common(settings, config, ids, count)


def _common(settings: Mapping[str, Any], config: Mapping[str, Any], ids: Mapping[str, int], count: int) -> dict[str, Value]:
    """Special tokens and the template, which tokenizers of all kinds have."""
    made: dict[str, Value] = {}
    for key, token in _SPECIAL.items():
        number = _special_id(settings.get(token), ids)
        number = config.get(f"{token}_id") if number is None else number
        number = number[0] if isinstance(number, list) and number else number
        if type(number) is int and 0 <= number < count:
            made[f"tokenizer.ggml.{key}_token_id"] = Unsigned(number)
    for key in ("add_bos_token", "add_eos_token"):
        if isinstance(settings.get(key), bool):
            made[f"tokenizer.ggml.{key}"] = settings[key]
    if isinstance(settings.get("chat_template"), str):
        made["tokenizer.chat_template"] = settings["chat_template"]
    return made


def _pattern_name(document: Mapping[str, Any]) -> str | None:
    """llama.cpp's name for how the tokenizer splits a text; None if it has none."""
    held = document.get("pre_tokenizer") or {}
    steps = held.get("pretokenizers", [held])
    if not steps or steps[-1].get("type") != "ByteLevel" or steps[-1].get("add_prefix_space"):
        return None
    splits, own = steps[:-1], steps[-1].get("use_regex", True)
    if not splits and own:
        return _PATTERNS[None]
    if own or len(splits) != 1 or splits[0].get("type") != "Split" or splits[0].get("behavior") != "Isolated":
        return None
    return _PATTERNS.get(splits[0]["pattern"].get("Regex", ""))


def _special_id(token: Any, ids: Mapping[str, int]) -> int | None:
    content = token.get("content") if isinstance(token, dict) else token
    return ids.get(content) if isinstance(content, str) else None


def _settings(source: ExportSource) -> dict[str, Any]:
    """tokenizer_config.json, with the template that newer programs keep in a file of its own."""
    settings = dict(_document(source, SETTINGS)) if SETTINGS in source.assets else {}
    if TEMPLATE in source.assets:
        settings["chat_template"] = source.read_asset(TEMPLATE).decode()
    return settings


def _document(source: ExportSource, name: str) -> Mapping[str, Any]:
    document = json.loads(source.read_asset(name))
    if not isinstance(document, dict):
        raise TypeError(f"{name} is no object")
    return document
