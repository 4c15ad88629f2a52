"""rules.patterns: names with places for numbers and words."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast_formats.errors import InvalidRequest
from holdfast_formats.layout.rules.patterns import (
    NAME_CHARACTERS_MAX,
    compile_pattern,
    count,
    expand,
    places,
    split,
)


def _match(text: str, name: str) -> dict[str, int] | None:
    pattern = compile_pattern(text)
    key, numbers = split(name)
    return pattern.match(numbers) if key == pattern.key else None


@pytest.mark.parametrize(
    ("text", "name", "place"),
    [
        ("norm.weight", "norm.weight", {}),
        ("h.{layer}.ln_1.weight", "h.12.ln_1.weight", {"layer": 12}),
        ("h.{layer}.ln_1.weight", "h.12.ln_2.weight", None),
        ("l.{layer}.e.{expert}.w1", "l.3.e.0.w1", {"layer": 3, "expert": 0}),
        ("e.{expert}.l.{layer}", "e.5.l.6", {"layer": 6, "expert": 5}),
        ("layer_{layer}.up", "layer_7.up", {"layer": 7}),
        ("{layer}.up", "7.up", {"layer": 7}),
        ("l.{layer}", "l.7", {"layer": 7}),
        ("l.{layer}", "l.07", None),
        ("l.{layer}", "l.0", {"layer": 0}),
        ("l.{layer}", "l.1234567890", None),
        ("l.{layer}", "l.x", None),
        ("l.{layer}", "l.7.8", None),
        ("l\0.{layer}", "l", None),
    ],
)
def test_a_name_gives_its_numbers(text: str, name: str, place: dict[str, int] | None) -> None:
    """A name of a pattern gives layer and expert; other numbers must be as written, and numbers as one writes them."""
    if "\0" in text:
        with pytest.raises(InvalidRequest, match="cannot parse pattern"):
            compile_pattern(text)
    else:
        assert _match(text, name) == place


def test_a_name_with_the_keys_own_mark_in_it_does_not_match() -> None:
    """The mark that stands for numbers in a key, written out in a name, is no number."""
    pattern = compile_pattern("l.{layer}.up")
    key, numbers = split("l.\0.up")
    assert key == pattern.key
    assert pattern.match(numbers) is None


@given(st.integers(0, 999_999_999), st.integers(0, 999_999_999))
def test_names_and_numbers_are_each_others_inverse(layer: int, expert: int) -> None:
    """The name that a pattern makes of a place gives that place again, and the text stays what it was."""
    text = "model.layers.{layer}.mlp.experts.{expert}.w2.weight"
    place = {"layer": layer, "expert": expert}
    assert _match(text, compile_pattern(text).name(place)) == place
    assert compile_pattern(text).text == text
    assert compile_pattern(text).variables == {"layer", "expert"}


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "1 to 512 characters"),
        ("x" * (NAME_CHARACTERS_MAX + 1), "1 to 512 characters"),
        ("l.{layer}.{layer}", "placeholder twice"),
        ("l.{layer}{expert}", "two numeric placeholders"),
        ("w1{layer}", "two numeric placeholders"),
        ("l.{lay}.x", "cannot parse pattern"),
        ("l.{layer.x", "cannot parse pattern"),
        ("l.}", "cannot parse pattern"),
    ],
)
def test_patterns_that_no_name_could_be_told_by_are_refused(text: str, why: str) -> None:
    """Unknown and unfinished places, places twice and numbers without anything between them are refused."""
    with pytest.raises(InvalidRequest, match="pattern") as refused:
        compile_pattern(text)
    assert why in refused.value.detail


def test_words_are_written_out_together() -> None:
    """Texts of one entry take the same word at a time, and every choice of root and part is made."""
    words = {"root": ["model.", ""], "part": ["weight", "bias"]}
    texts = ["{root}qkv.{part}", "{root}q.{part}"]
    written = [tuple(pattern.text for pattern in group) for group in expand(texts, words)]
    assert sorted(written) == sorted((f"{r}qkv.{p}", f"{r}q.{p}") for r in words["root"] for p in words["part"])
    assert count(texts, words) == 2 * len(written)
    assert expand(["a.{layer}"], words) == [(compile_pattern("a.{layer}"),)]
    assert count(["a.{layer}", "b"], words) == 2


@pytest.mark.parametrize("words", [{}, {"part": []}])
def test_a_place_without_words_is_refused(words: dict[str, list[str]]) -> None:
    """`{part}` with nothing listed for it, or a place that does not exist, is named."""
    with pytest.raises(InvalidRequest, match=r"'a\.\{part\}': no values are listed for \{part\}"):
        expand(["a.{part}"], words)


def test_places_are_the_words_in_braces() -> None:
    """All places of a text, whether they exist or not."""
    assert places("{root}l.{layer}.{huh}") == {"root", "layer", "huh"}
