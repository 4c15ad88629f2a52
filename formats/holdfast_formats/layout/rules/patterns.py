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

from holdfast_formats.errors import InvalidRequest

NAME_CHARACTERS_MAX = 512
NUMBER_DIGITS_MAX = 9
NUMBERED = ("layer", "expert")

_PLACE = re.compile(r"\{([^{}]*)\}")
_NUMBER = re.compile(r"([0-9]+)")
_PLACE_OR_NUMBER = re.compile(r"\{(layer|expert)\}|([0-9]+)")
_GAP = "\0"


class NameNumbers(NamedTuple):
    """The numbers in a tensor's name; None where it has none."""

    layer: int | None
    expert: int | None


class Pattern(NamedTuple):
    """A name in which only numbers are open: `pieces`, and between them `slots`, a placeholder or a fixed number."""

    pieces: tuple[str, ...]
    slots: tuple[str, ...]

    @property
    def key(self) -> str:
        """The text of all names of this pattern without their numbers."""
        return _GAP.join(self.pieces)

    @property
    def open(self) -> int:
        return sum(slot in NUMBERED for slot in self.slots)

    @property
    def text(self) -> str:
        return self._with([f"{{{slot}}}" if slot in NUMBERED else slot for slot in self.slots])

    def name(self, place: NameNumbers) -> str:
        return self._with([str(getattr(place, slot)) if slot in NUMBERED else slot for slot in self.slots])

    def match(self, numbers: Sequence[str]) -> NameNumbers | None:
        """The numbers of a name with this pattern's key, by meaning; None if another pattern matches instead."""
        if len(numbers) != len(self.slots):
            return None
        layer = expert = None
        for slot, number in zip(self.slots, numbers, strict=True):
            if slot not in NUMBERED:
                if slot != number:
                    return None
            elif len(number) > NUMBER_DIGITS_MAX or (number[0] == "0" and number != "0"):
                return None  # not as numbers are written: `layers.007`
            elif slot == "layer":
                layer = int(number)
            else:
                expert = int(number)
        return NameNumbers(layer, expert)

    def _with(self, words: Sequence[str]) -> str:
        return "".join(piece + word for piece, word in zip(self.pieces, (*words, ""), strict=True))


def split(name: str) -> tuple[str, list[str]]:
    pieces = _NUMBER.split(name)
    return _GAP.join(pieces[::2]), pieces[1::2]


def places(text: str) -> frozenset[str]:
    return frozenset(_PLACE.findall(text))


def compile_pattern(text: str) -> Pattern:
    """Compile a pattern in which all words are expanded; `InvalidRequest` with its text if it is invalid or ambiguous."""
    if not 0 < len(text) <= NAME_CHARACTERS_MAX:
        raise InvalidRequest(f"a pattern must have 1 to {NAME_CHARACTERS_MAX} characters, not {len(text)}: {text[:80]!r}")
    pieces: list[str] = []
    slots: list[str] = []
    at = 0
    for match in _PLACE_OR_NUMBER.finditer(text):
        pieces.append(text[at : match.start()])
        slots.append(match[1] or match[2])
        at = match.end()
    pieces.append(text[at:])
    if not all(pieces[1:-1]):
        raise InvalidRequest(f"pattern {text!r}: put text between two numeric placeholders, or their boundary is ambiguous")
    if any(slots.count(word) > 1 for word in NUMBERED):
        raise InvalidRequest(f"pattern {text!r} has a placeholder twice")
    if any("{" in piece or "}" in piece or _GAP in piece for piece in pieces):
        raise InvalidRequest(
            f"cannot parse pattern {text!r}",
            hint="placeholders are {root}, {layer}, {expert} and {part}, with braces",
        )
    return Pattern(tuple(pieces), tuple(slots))


def count(texts: Sequence[str], words: Mapping[str, Sequence[str]]) -> int:
    """The number of patterns that `expand` makes of these texts, without making them."""
    used = frozenset().union(*map(places, texts)) & words.keys()
    return len(texts) * prod(len(words[place]) for place in used)


def expand(texts: Sequence[str], words: Mapping[str, Sequence[str]]) -> list[tuple[Pattern, ...]]:
    """These texts as patterns, all of them together for every choice of the words that they use.

    Raises `InvalidRequest` if a text has a placeholder for which `words` lists nothing.
    """
    used = sorted(frozenset().union(*map(places, texts)) - set(NUMBERED))
    for place in used:
        if not words.get(place):
            raise InvalidRequest(f"{' and '.join(map(repr, texts[:2]))}: no values are listed for {{{place}}}")
    found = []
    for choice in product(*(words[place] for place in used)):
        written = dict(zip(used, choice, strict=True))
        found.append(tuple(compile_pattern(_write_out(text, written)) for text in texts))
    return found


def _write_out(text: str, words: Mapping[str, str]) -> str:
    return _PLACE.sub(lambda match: words.get(match[1], match[0]), text)
