"""docs/rules.md: its examples load, and it names every key and every table."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from holdfast_formats.layout.rules import choose, decode, document, packaged

DOCS = Path(__file__).parents[4] / "docs"
PAGES = [DOCS / "rules.md", DOCS / "rules.zh-CN.md"]
CONFIG = {
    "architectures": ["AcmeForCausalLM"],
    "hidden_size": 64,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "num_hidden_layers": 4,
    "num_experts": 2,
    "vocab_size": 1000,
    "tie_word_embeddings": True,
}


def _examples(page: Path) -> list[dict[str, Any]]:
    return [decode(text) for text in re.findall(r"^```toml\n(.*?)^```$", page.read_text(), re.MULTILINE | re.DOTALL)]


def _named(page: Path) -> list[str]:
    return re.findall(r"`([^`\n]+)`", re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.MULTILINE | re.DOTALL))


def test_the_full_example_is_a_table() -> None:
    """The page's table loads, and says of each tensor what its comments say."""
    acme, _ = _examples(PAGES[0])
    rules = choose(CONFIG, ["embed.weight"], extra=acme)
    assert (rules.layers, rules.experts) == (4, 2)
    assert rules.aliases() == {"head.weight": "embed.weight"}
    key, up, norm = (rules.rule(f"model.blocks.3.{name}.weight") for name in ("attn.wk", "experts.1.up", "router"))
    assert key is not None and up is not None and norm is not None
    assert (key.shape, key.units, key.otherwise, key.stage) == ((16, 64), 2, "largest", 3)
    assert (up.shape, up.axis, up.expert, norm.dimension) == ((256, 64), "etp", 1, None)
    fused, stack = rules.stored("blocks.0.attn.wq.weight"), rules.fusion("blocks.0.experts.gate_up")
    assert fused is not None and stack is not None
    assert (fused.name, fused.groups, len(stack.of)) == ("blocks.0.attn.wqkv.weight", 2, 4)
    assert choose(None, ["model.blocks.0.attn.wqkv.weight"], extra=acme).layers == 1


def test_the_short_example_extends_a_table() -> None:
    """What it adds and what it builds on are both known."""
    _, mine = _examples(PAGES[0])
    rules = choose(CONFIG, [], extra=mine)
    added = rules.rule("value_head.weight")
    assert added is not None and added.shape == (1, 64)
    assert rules.rule("model.layers.0.mlp.up_proj.weight") is not None


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_key_and_every_table_is_named(page: Path) -> None:
    """A key that a rules file may have, a word that it may say, and a table that comes with us are all on the page."""
    named = {word.strip("[]") for word in _named(page)}
    structs = (document.Document, document.TensorRule, document.FusionRule, document.Tie, document.Synonyms, document.Scales)
    keys = {key for struct in structs for key in struct.__struct_fields__}
    words = {"refuse", "uneven", "replicate", "largest", "contiguous", "groups", "first", "last", "every", "layer"}
    assert keys | words | {"qkv", "gate_up", "tp", "etp"} | set(packaged()) <= named
