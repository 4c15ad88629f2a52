"""A tokenizer.model as GGUF's metadata; of one that llama.cpp would read otherwise, the reason is given."""

from __future__ import annotations

import json
import random
import struct
from pathlib import Path
from typing import Any

import pytest

from holdfast_service.wings.convert.exports import gguf_sentencepiece, gguf_tokenizer
from holdfast_service.wings.convert.exports.gguf_sentencepiece import PieceTokens
from holdfast_service.wings.convert.foreign.gguf.encoding import Unsigned
from tests.wings.convert.exports.sources import llama, made

PIECES = [("<unk>", 0.0, 2), ("<s>", 0.0, 3), ("<0x41>", 0.0, 6), ("\u2581a", -1.5, 1), ("b", -2.5, 1)]
TRAINED, PREPARED = {3: 2}, {3: 1, 4: 0}


def number(value: int) -> bytes:
    made = bytearray()
    while value > 127:
        made.append(value & 127 | 128)
        value >>= 7
    return bytes((*made, value))


def message(fields: dict[int, Any]) -> bytes:
    """A message of protobuf, as SentencePiece writes its parts."""
    made = b""
    for field, value in fields.items():
        if isinstance(value, int):
            made += number(field << 3) + number(value)
        elif isinstance(value, float):
            made += number(field << 3 | 5) + struct.pack("<f", value)
        else:
            made += number(field << 3 | 2) + number(len(value)) + value
    return made


def model(pieces: list[tuple[str, float, int]] = PIECES, **parts: dict[int, Any]) -> bytes:
    held = b"".join(message({1: message({1: text.encode(), 2: score, 3: kind})}) for text, score, kind in pieces)
    return held + message({2: message(parts.get("trained", TRAINED)), 3: message(parts.get("prepared", PREPARED))})


def test_a_tokenizer(tmp_path: Path) -> None:
    """With the tokens that other files add, and rows of the embedding that have none."""
    decoder = {"1": {"content": "<s>", "special": True}, "5": {"content": "<tool>\u2581x", "special": False}}
    assets = {
        "tokenizer.model": model(),
        "added_tokens.json": json.dumps({"<more>": 6}).encode(),
        "tokenizer_config.json": json.dumps({"bos_token": "<s>", "added_tokens_decoder": decoder}).encode(),
        "tokenizer.json": json.dumps({"model": {"type": "BPE", "byte_fallback": True, "vocab": {}, "merges": []}}).encode(),
    }
    source = made(tmp_path / "step", {"model": llama(layers=1)}, assets=assets).source
    assert gguf_tokenizer.read(source, {"vocab_size": 8, "eos_token_id": 4}) == {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.pre": "default",
        "tokenizer.ggml.tokens": ["<unk>", "<s>", "<0x41>", "\u2581a", "b", "<tool> x", "<more>", "[PAD7]"],
        "tokenizer.ggml.scores": [0.0, -1000.0, 0.0, -1.5, -2.5, -1000.0, -1000.0, -10000.0],
        "tokenizer.ggml.token_type": [2, 3, 6, 1, 1, 4, 4, 5],
        "tokenizer.ggml.add_space_prefix": True,
        "tokenizer.ggml.bos_token_id": Unsigned(1),
        "tokenizer.ggml.eos_token_id": Unsigned(4),
    }


@pytest.mark.parametrize(
    ("data", "added", "why"),
    [
        (model(trained={3: 1}), {}, "is not a BPE"),
        (model(trained={4: 8}), {}, "is not a BPE"),
        (model(prepared={2: b"map", 4: 0}), {}, "normalises texts"),
        (model(prepared={3: 1}), {}, "normalises texts"),
        (model(PIECES * 2), {}, "has 10 tokens, more than"),
        (model(), {"<far>": 99}, "'<far>' has number 99"),
    ],
)
def test_why_there_is_none(data: bytes, added: dict[str, int], why: str) -> None:
    found = gguf_sentencepiece.read(data, {}, added, 8)
    assert isinstance(found, str) and why in found


def test_another_file_of_this_name(tmp_path: Path) -> None:
    """Such as tiktoken's: the reason names the file, and the model is exported without a tokenizer."""
    source = made(tmp_path / "step", {"model": llama(layers=1)}, assets={"tokenizer.model": b"IQ== 0\nIg== 1\n"}).source
    found = gguf_tokenizer.read(source, {"vocab_size": 8})
    assert isinstance(found, str) and found.startswith("tokenizer.model ")


def test_damage() -> None:
    """Any cut and any changed byte is read or refused, as what such a file may raise."""
    data, draw = model(), random.Random(0)
    cuts = [data[:at] for at in range(len(data))]
    for _ in range(500):
        changed = bytearray(data)
        changed[draw.randrange(len(data))] = draw.randrange(256)
        cuts.append(bytes(changed))
    for one in cuts:
        try:
            assert isinstance(gguf_sentencepiece.read(one, {}, {}, 8), str | PieceTokens)
        except (ValueError, TypeError, AttributeError, struct.error):
            continue
