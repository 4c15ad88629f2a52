"""Patterns of tensor names: `{layer}` and `{expert}` match numbers, `{root}` and `{part}` listed words.

Words are expanded, into one pattern each. Names are indexed by their text without numbers, so a table of hundreds of
patterns costs one dictionary lookup.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from itertools import product
from math import prod
from typing import NamedTuple

from holdfast_formats.errors import InvalidRequest, StateMismatch

NAME_CHARACTERS_MAX = 512
NUMBER_DIGITS_MAX = 9
NUMBERED = ("layer", "expert")

_PLACE = re.compile(r"\{([^{}]*)\}")
_NUMBER = re.compile(r"([0-9]+)")
_PLACE_OR_NUMBER = re.compile(r"\{(layer|expert)\}|([0-9]+)")
_GAP = "\0"


class OpenNumber(NamedTuple):
    """A number in a name that a variable gives; the name has the variable's value plus `offset`."""

    variable: str
    offset: int = 0


class NamePattern(NamedTuple):
    """A name, of which some numbers may be open: text between them in `pieces`, then each number."""

    text: str
    pieces: tuple[str, ...]
    slots: tuple[OpenNumber | str, ...]  # a text is a number as it is
    variables: frozenset[str] = frozenset()

    @property
    def key(self) -> str:
        return _GAP.join(self.pieces)

    def name(self, values: Mapping[str, int]) -> str:
        """The name with these values; `StateMismatch` for a negative number."""
        if not self.variables:
            return self.text
        made = [self.pieces[0]]
        for slot, piece in zip(self.slots, self.pieces[1:], strict=True):
            number = slot if isinstance(slot, str) else values[slot.variable] + slot.offset
            if isinstance(number, int) and number < 0:
                raise StateMismatch(
                    f"{self.text!r} has no name for {number}", hint="drop what has no number here, by `-> _`"
                )
            made += (str(number), piece)
        return "".join(made)

    def match(self, numbers: Sequence[str]) -> dict[str, int] | None:
        """The variables' values in a name with this pattern's key; None if its fixed numbers differ."""
        if len(numbers) != len(self.slots):
            return None
        values: dict[str, int] = {}
        for slot, number in zip(self.slots, numbers, strict=True):
            if isinstance(slot, str):
                if slot != number:
                    return None
                continue
            if len(number) > NUMBER_DIGITS_MAX or (number[0] == "0" and number != "0"):
                return None  # not as numbers are written: `layers.007`
            value = int(number) - slot.offset
            if values.setdefault(slot.variable, value) != value:
                return None
        return values


def split(name: str) -> tuple[str, list[str]]:
    pieces = _NUMBER.split(name)
    return _GAP.join(pieces[::2]), pieces[1::2]


def places(text: str) -> frozenset[str]:
    return frozenset(_PLACE.findall(text))


def compile_pattern(text: str) -> NamePattern:
    """Compile a pattern in which all words are expanded; `InvalidRequest` with its text if it is invalid or ambiguous."""
    if not 0 < len(text) <= NAME_CHARACTERS_MAX:
        raise InvalidRequest(
            f"a pattern must have 1 to {NAME_CHARACTERS_MAX} characters, not {len(text)}: {text[:80]!r}",
            hint="write a whole name, in which {layer}, {expert}, {root} and {part} may stand",
        )
    pieces: list[str] = []
    slots: list[OpenNumber | str] = []
    at = 0
    for match in _PLACE_OR_NUMBER.finditer(text):
        pieces.append(text[at : match.start()])
        slots.append(OpenNumber(match[1]) if match[1] else match[2])
        at = match.end()
    pieces.append(text[at:])
    if not all(pieces[1:-1]):
        raise InvalidRequest(
            f"pattern {text!r}: put text between two numeric placeholders, or their boundary is ambiguous",
            hint="as in experts.{expert}.layer.{layer}",
        )
    numbers = [slot.variable for slot in slots if isinstance(slot, OpenNumber)]
    if len(numbers) > len(set(numbers)):
        raise InvalidRequest(f"pattern {text!r} has a placeholder twice", hint="use {layer} and {expert} once each")
    if any("{" in piece or "}" in piece or _GAP in piece for piece in pieces):
        raise InvalidRequest(
            f"cannot parse pattern {text!r}",
            hint="placeholders are {root}, {layer}, {expert} and {part}, with braces",
        )
    return NamePattern(text, tuple(pieces), tuple(slots), frozenset(numbers))


def count(texts: Sequence[str], words: Mapping[str, Sequence[str]]) -> int:
    """The number of patterns that `expand` makes of these texts, without making them."""
    used = frozenset().union(*map(places, texts)) & words.keys()
    return len(texts) * prod(len(words[place]) for place in used)


def expand(texts: Sequence[str], words: Mapping[str, Sequence[str]]) -> list[tuple[NamePattern, ...]]:
    """These texts as patterns, all of them together for every choice of the words that they use.

    Raises `InvalidRequest` if a text has a placeholder for which `words` lists nothing.
    """
    used = sorted(frozenset().union(*map(places, texts)) - set(NUMBERED))
    for place in used:
        if not words.get(place):
            raise InvalidRequest(
                f"{' and '.join(map(repr, texts[:2]))}: no values are listed for {{{place}}}",
                hint=f'add {place} = ["…", "…"] to the {"table" if place == "root" else "entry"}',
            )
    expanded = []
    for choice in product(*(words[place] for place in used)):
        written = dict(zip(used, choice, strict=True))
        expanded.append(tuple(compile_pattern(_write_out(text, written)) for text in texts))
    return expanded


def _write_out(text: str, words: Mapping[str, str]) -> str:
    return _PLACE.sub(lambda match: words.get(match[1], match[0]), text)
