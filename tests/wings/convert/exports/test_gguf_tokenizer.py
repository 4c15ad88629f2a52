"""A tokenizer.json as GGUF's metadata: byte-level BPE; of others the reason is given."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from holdfast_service.wings.convert.exports import gguf_tokenizer
from holdfast_service.wings.convert.foreign.gguf.encoding import Unsigned, Value
from tests.wings.convert.exports.sources import llama, made

QWEN = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
BYTES = {"type": "ByteLevel", "add_prefix_space": False}
BPE: dict[str, Any] = {
    "model": {"type": "BPE", "vocab": {"a": 0, "b": 1, "ab": 2}, "merges": [["a", "b"]]},
    "pre_tokenizer": BYTES,
    "added_tokens": [
        {"id": 3, "content": "<s>", "special": True},
        {"id": 4, "content": "<tool>", "special": False},
    ],
}
CONFIG = {"vocab_size": 6, "eos_token_id": [3, 4]}


def _read(tmp_path: Path, tokenizer: Any, **assets: Any) -> dict[str, Value] | str:
    held = {"tokenizer.json": tokenizer, **{name.replace("_json", ".json"): one for name, one in assets.items()}}
    data = {name: one if isinstance(one, bytes) else json.dumps(one).encode() for name, one in held.items()}
    return gguf_tokenizer.read(made(tmp_path / "step", {"model": llama(layers=1)}, assets=data).source, CONFIG)


def test_a_tokenizer(tmp_path: Path) -> None:
    settings = {"bos_token": {"content": "<s>"}, "add_bos_token": True, "chat_template": "old"}
    found = _read(tmp_path, BPE, tokenizer_config_json=settings, **{"chat_template.jinja": b"{{ messages }}"})
    assert found == {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": ["a", "b", "ab", "<s>", "<tool>", "[PAD5]"],
        "tokenizer.ggml.token_type": [1, 1, 1, 3, 4, 5],
        "tokenizer.ggml.merges": ["a b"],
        "tokenizer.ggml.bos_token_id": Unsigned(3),
        "tokenizer.ggml.eos_token_id": Unsigned(3),
        "tokenizer.ggml.add_bos_token": True,
        "tokenizer.chat_template": "{{ messages }}",
    }


@pytest.mark.parametrize(("pattern", "name"), [(QWEN, "qwen2"), (QWEN.replace(r"\p{N}|", r"\p{N}{1,3}|"), "llama-bpe")])
def test_patterns_that_llama_cpp_knows(tmp_path: Path, pattern: str, name: str) -> None:
    split = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
    steps = {"type": "Sequence", "pretokenizers": [split, {**BYTES, "use_regex": False}]}
    found = _read(tmp_path, {**BPE, "pre_tokenizer": steps})
    assert not isinstance(found, str)
    assert found["tokenizer.ggml.pre"] == name


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        ({"model": {"type": "Unigram"}}, "byte-level BPE"),
        ({"model": {**BPE["model"], "byte_fallback": True}}, "byte-level BPE"),
        ({"pre_tokenizer": {"type": "Metaspace"}}, "byte-level BPE"),
        ({"pre_tokenizer": None}, "byte-level BPE"),
        ({"pre_tokenizer": {**BYTES, "add_prefix_space": True}}, "byte-level BPE"),
        (
            {"pre_tokenizer": {"pretokenizers": [{"type": "Digits"}, {**BYTES, "use_regex": False}]}},
            "byte-level BPE",
        ),
        ({"model": {**BPE["model"], "vocab": {"a": 6}}}, "vocab_size"),
        ({"model": None}, "cannot be read"),
    ],
)
def test_why_there_is_none(tmp_path: Path, changed: dict[str, Any], why: str) -> None:
    found = _read(tmp_path, {**BPE, **changed})
    assert isinstance(found, str) and why in found


def test_a_checkpoint_without_one(tmp_path: Path) -> None:
    assert "has neither tokenizer.json nor tokenizer.model" in str(
        gguf_tokenizer.read(made(tmp_path / "step", {"model": llama(layers=1)}).source, CONFIG)
    )
