"""A tokenizer.model of SentencePiece as the metadata of a GGUF file, as llama.cpp's own conversion has it: a BPE by scores.

The file is a message of protobuf: pieces (field 1: text, score, type), how they were trained (2) and how texts are prepared
(3). PieceTokens that were added by the model's other files replace pieces of their numbers.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from holdfast_service.wings.convert.foreign.gguf.encoding import Value

FILE, ADDED = "tokenizer.model", "added_tokens.json"
PIECES_MAX = 2**22
_NORMAL, _CONTROL, _USER_DEFINED, _UNUSED = 1, 3, 4, 5  # the numbers of both formats
_BPE, _NO_MAP = 2, b""
_PADDING_SCORE, _ADDED_SCORE = -10000.0, -1000.0
_SPACE = "\u2581"


class PieceTokens(NamedTuple):
    """Metadata of the tokens, and their numbers by their texts."""

    metadata: dict[str, Value]
    ids: dict[str, int]


def read(data: bytes, settings: Mapping[str, Any], added: Mapping[str, Any], count: int) -> PieceTokens | str:
    """The tokens of a model with so many, or why llama.cpp cannot have them; `ValueError` for what is no such file.

    `settings` are tokenizer_config.json, `added` is added_tokens.json.
    """
    pieces, trained, prepared = list[dict[int, Any]](), dict[int, Any](), dict[int, Any]()
    for number, value in _fields(data):
        if number == 1 and len(pieces) < PIECES_MAX:
            pieces.append(dict(_fields(value)))
        elif number in (2, 3):
            (trained if number == 2 else prepared).update(_fields(value))
    if trained.get(3, 1) != _BPE:
        return f"{FILE} is not a BPE, the only model of SentencePiece that llama.cpp has under this name"
    if prepared.get(2, _NO_MAP) != _NO_MAP or prepared.get(4, 1):
        return f"{FILE} normalises texts before it splits them, which llama.cpp does not"
    if len(pieces) > count:
        return f"{FILE} has {len(pieces)} tokens, more than the model's vocab_size of {count}"
    texts = [f"[PAD{number}]" for number in range(count)]
    scores, kinds = [_PADDING_SCORE] * count, [_UNUSED] * count
    for number, piece in enumerate(pieces):
        texts[number] = piece.get(1, b"").decode()
        scores[number], kinds[number] = _float(piece.get(2, bytes(4))), int(piece.get(3, _NORMAL))
    for number, (text, special) in _added(settings, added).items():
        if not 0 <= number < count:
            return f"the added token {text!r} has number {number}, beyond the model's vocab_size of {count}"
        texts[number] = text if special else text.replace(_SPACE, " ")
        scores[number], kinds[number] = _ADDED_SCORE, _CONTROL if special else _USER_DEFINED
    metadata: dict[str, Value] = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.pre": "default",
        "tokenizer.ggml.tokens": texts,
        "tokenizer.ggml.scores": scores,
        "tokenizer.ggml.token_type": kinds,
        "tokenizer.ggml.add_space_prefix": bool(prepared.get(3, 1)),
    }
    return PieceTokens(metadata, {text: number for number, text in enumerate(texts)})


def _added(settings: Mapping[str, Any], added: Mapping[str, Any]) -> dict[int, tuple[str, bool]]:
    """Added tokens by their numbers: the text, and whether it is special."""
    found = {number: (text, False) for text, number in added.items()}
    for number, token in settings.get("added_tokens_decoder", {}).items():
        found[int(number)] = token["content"], bool(token.get("special"))
    return found


def _fields(data: bytes) -> Iterator[tuple[int, Any]]:
    """The fields of a message: numbers as int, others as bytes."""
    at = 0
    while at < len(data):
        key, at = _number(data, at)
        number, kind = key >> 3, key & 7
        value: Any
        if kind == 0:
            value, at = _number(data, at)
        elif kind in (1, 2, 5):
            length, at = _number(data, at) if kind == 2 else (8 if kind == 1 else 4, at)
            value, at = data[at : at + length], at + length
        else:
            raise ValueError(f"a field of kind {kind}")
        if at > len(data):
            raise ValueError("it is cut off")
        yield number, value


def _number(data: bytes, at: int) -> tuple[int, int]:
    value = 0
    for shift in range(0, 70, 7):
        if at >= len(data):
            raise ValueError("it is cut off")
        byte = data[at]
        value, at = value | (byte & 127) << shift, at + 1
        if byte < 128:
            return value, at
    raise ValueError("a number of over 64 bits")


def _float(data: Any) -> float:
    return float(struct.unpack("<f", data)[0])
