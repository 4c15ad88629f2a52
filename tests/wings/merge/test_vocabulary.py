"""ModelTokens of merged models: vocabularies that are read, cut and united, and chat templates."""

from __future__ import annotations

import json
from typing import Any

import pytest

from holdfast_formats.errors import StateMismatch
from holdfast_service.wings.merge.recipe import read_recipe
from holdfast_service.wings.merge.vocabulary import ModelTokens, commonest, read_tokens, template_of, united, used

TEXT = "{merge_method: passthrough, models: [{model: a@1}], tokenizer: TOKENIZER, chat_template: 'auto'}"


def tokens(words: list[str], *added: str, kind: str = "BPE", about: dict[str, Any] | None = None) -> ModelTokens:
    vocab: Any = {word: number for number, word in enumerate(words)}
    if kind == "Unigram":
        vocab = [[word, -1.0] for word in words]
    entries = [{"id": len(words) + i, "content": word, "special": True} for i, word in enumerate(added)]
    document = {"model": {"type": kind, "vocab": vocab, "merges": ["a b", ["a", "z"]]}, "added_tokens": entries}
    return read_tokens("m", json.dumps(document).encode(), json.dumps(about or {}).encode())


def test_what_a_recipe_says() -> None:
    recipe = read_recipe(
        TEXT.replace(
            "TOKENIZER",
            "{source: b@1, pad_to_multiple_of: 8, tokens: {x: {source: c@1, force: true}, y: {source: {kind: zero}}, "
            "z: {source: {kind: model_token, model: d@1, token_id: 7}}, u: }}",
        )
    )
    made = recipe.tokenizer
    assert made is not None and made.multiple == 8 and recipe.chat_template == "auto"
    assert [str(one) for one in made.named] == ["b@1", "c@1", "d@1"]
    told = [(one.token, one.usual, one.row, one.force) for one in made.tokens]
    assert told == [("x", False, "x", True), ("y", False, "y", False), ("z", False, 7, False), ("u", True, "u", False)]
    assert made.tokens[1].model is None
    simple = read_recipe(TEXT.replace("tokenizer: TOKENIZER", "tokenizer_source: union")).tokenizer
    assert simple is not None and (simple.source, simple.tokens, simple.multiple) == ("union", (), 1)
    assert read_recipe(TEXT.replace("tokenizer: TOKENIZER", "seed: 1")).tokenizer is None


@pytest.mark.parametrize("kind", ["BPE", "Unigram"])
def test_numbers(kind: str) -> None:
    """Of the vocabulary, and of added tokens, also those that only tokenizer_config.json has."""
    made = tokens(["a", "b"], "<s>", kind=kind, about={"added_tokens_decoder": {"3": {"content": "<p>"}}})
    assert made.numbers == {"a": 0, "b": 1, "<s>": 2, "<p>": 3}
    cut = used(made, 1)
    assert cut.numbers == {"a": 0} and cut.added == [] and cut.about == {"added_tokens_decoder": {}}
    assert used(made, 9) is made
    assert kind == "Unigram" or cut.document["model"]["merges"] == [["a", "z"]]


def test_united() -> None:
    """The first keeps its numbers; plain tokens of the others follow, then added ones with their properties."""
    first = tokens(["a", "b"], "<s>", about={"added_tokens_decoder": {}})
    made = united(first, [tokens(["b", "c"], "<e>"), tokens(["<e>", "d"])], ["<x>", "a"])
    assert made.numbers == {"a": 0, "b": 1, "<s>": 2, "c": 3, "d": 4, "<e>": 5, "<x>": 6}
    entries = {one["content"]: one for one in made.added}
    assert entries["<e>"]["special"] and not entries["c"]["special"] and entries["c"]["id"] == 3
    assert made.about["added_tokens_decoder"]["5"]["content"] == "<e>" and first.added == tokens(["a", "b"], "<s>").added
    assert united(first, [first], []) is first


WRONG = {
    "no JSON": b"{",
    "a list": b"[]",
    "no model": b"{}",
    "no vocabulary": b'{"model": {"vocab": 3}}',
    "numbers that are none": b'{"model": {"vocab": {"a": "0"}}}',
    "a negative number": b'{"model": {"vocab": {"a": -1}}}',
    "a number that is too large": b'{"model": {"vocab": {"a": 99999999}}}',
    "an added token without a number": b'{"model": {"vocab": {"a": 0}}, "added_tokens": [{"content": "b"}]}',
    "no tokens": b'{"model": {"vocab": {}}}',
}


@pytest.mark.parametrize("what", WRONG)
def test_what_is_no_tokenizer(what: str) -> None:
    with pytest.raises(StateMismatch, match=r"m: tokenizer\.json") as refused:
        read_tokens("m", WRONG[what], None)
    assert "save_pretrained" in refused.value.hint


def test_templates() -> None:
    """The one that most models have; a file comes before tokenizer_config.json."""
    assert template_of({"chat_template": "a"}, b"b") == "b" and template_of({"chat_template": "a"}, None) == "a"
    assert template_of({"chat_template": [{"name": "default", "template": "c"}]}, None) == "c"
    assert template_of({}, None) is None
    assert commonest(["a", "b\n", None, "b", "a "]) == "a" and commonest([None]) is None
