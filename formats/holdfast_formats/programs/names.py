"""Names in statements: text, numbers that are open (`$LAYER_ID`, `*`), and ranges; and the tensors that have such names."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

from holdfast_formats.errors import InvalidRequest
from holdfast_formats.layout.rules.patterns import NamePattern, OpenNumber, split

STAR = "*"
VARIABLES = ("LAYER_ID", "EXPERT_ID", "LAYER_ID_OFFSET")

_OPEN = re.compile(r"\$([A-Z_]+)|(\*)")


def pattern(text: str, right: bool) -> NamePattern:
    """Compile a name; `InvalidRequest` for a variable that does not exist, or that has no clear boundary."""
    at, flat, slots = 0, "", list[OpenNumber]()
    for match in _OPEN.finditer(text):
        flat += text[at : match.start()] + "0"
        at = match.end()
        before, after = text[: match.start()][-1:], text[at : at + 1]
        if before.isdigit() or after.isdigit() or after in ("$", "*"):
            raise InvalidRequest(
                f"{text!r}: no other number may follow or precede {match[0]!r}", hint="put a letter or a dot between them"
            )
        variable = match[1] or STAR
        if variable not in (*VARIABLES, STAR):
            raise InvalidRequest(f"{text!r} has ${variable}", hint=f"variables are {', '.join('$' + v for v in VARIABLES)}")
        slots.append(OpenNumber(variable, -1 if right and variable == "LAYER_ID_OFFSET" else 0))
    if "$" in flat + text[at:]:
        raise InvalidRequest(f"{text!r}: a $ must begin a variable", hint=f"one of {', '.join('$' + v for v in VARIABLES)}")
    if sum(slot.variable == STAR for slot in slots) > 1:
        raise InvalidRequest(f"{text!r} has more than one *", hint="use $LAYER_ID and $EXPERT_ID")
    return _pattern(text, slots)


def _pattern(text: str, open_numbers: list[OpenNumber]) -> NamePattern:
    marked = _OPEN.sub("\1", text)
    pieces, slots = [""], list[OpenNumber | str]()
    waiting = iter(open_numbers)
    for token in re.split("(\1|[0-9]+)", marked):
        if token == "\1":
            slots.append(next(waiting))
        elif token.isdigit() and token.isascii():
            slots.append(token)
        else:
            pieces[-1] += token
            continue
        pieces.append("")
    return NamePattern(text, tuple(pieces), tuple(slots), frozenset(slot.variable for slot in open_numbers))


class NameIndex:
    """Names indexed by their text without numbers, to match patterns quickly."""

    def __init__(self, names: Iterable[str] = ()) -> None:
        self._held: dict[str, dict[str, list[str]]] = {}
        for name in names:
            self.add(name)

    def add(self, name: str) -> None:
        key, numbers = split(name)
        self._held.setdefault(key, {})[name] = numbers

    def remove(self, name: str) -> None:
        self._held[split(name)[0]].pop(name, None)

    def find(self, wanted: NamePattern) -> Iterator[tuple[str, dict[str, int]]]:
        for name, numbers in self._held.get(wanted.key, {}).items():
            values = wanted.match(numbers)
            if values is not None:
                yield name, values

    def names(self) -> list[str]:
        return sorted(name for held in self._held.values() for name in held)
