r"""A part of regular expressions that cannot take long: each repeat ends where its text ends, but for two.

Allowed are characters, `\.`, `\d`, `\w`, `.`, `[…]`, the repeats `* + ? {m,n}` of one of these, and groups: one of several
texts, `(q|k|v)`, or any of the above, `(.*)`. What the engine of Python could try in many ways is refused: a repeat before
what it could take as well. Two such repeats may stand in an expression, because `.*` is what people write.
"""

from __future__ import annotations

import re
from typing import NamedTuple

from holdfast_formats.errors import InvalidRequest, LimitExceeded

CHARACTERS_MAX = 512
NAME_CHARACTERS_MAX = 1024
VAGUE_MAX = 2  # repeats before something that they could take as well
REPEATS_MAX = 64
STEPS_MAX = 2 * 10**9  # of the engine, for all names together
_ALPHABET = frozenset(map(chr, range(32, 127))) | {"\x7f\x80"}  # one character represents all others
_DIGITS = frozenset("0123456789")
_WORD = _DIGITS | frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ_")
_REPEAT = re.compile(r"[*+?]|\{([0-9]{1,4})(?:,([0-9]{1,4}))?\}")
_SPECIAL = frozenset(".^$*+?{}[]\\|()")


class _Atom(NamedTuple):
    """What one element can begin with, whether it may be empty, and whether its length may vary."""

    first: frozenset[str]
    empty: bool
    varies: bool


class SafeExpression:
    """A compiled expression with a limit on matching work."""

    def __init__(self, text: str) -> None:
        self.text, self._power = text, _power(text)
        self._compiled = re.compile(text)
        self.groups = self._compiled.groups
        self._left = STEPS_MAX

    def match(self, name: str) -> re.Match[str] | None:
        """`re.fullmatch`; `LimitExceeded` where all names together take too many steps."""
        if len(name) > NAME_CHARACTERS_MAX:
            raise LimitExceeded(
                f"name {name[:80]!r}… has {len(name)} characters; an expression takes {NAME_CHARACTERS_MAX}",
                hint="use $LAYER_ID and whole names in place of the expression",
            )
        self._left -= len(name) ** self._power
        if self._left < 0:
            raise LimitExceeded(
                f"/{self.text}/ takes too long for so many names", hint="write [^.]+ instead of .*, or use $LAYER_ID"
            )
        return self._compiled.fullmatch(name)


def _power(text: str) -> int:
    """The exponent of a match's time in the name's length; `InvalidRequest` for anything that is not allowed."""
    if not 0 < len(text) <= CHARACTERS_MAX:
        raise InvalidRequest(
            f"an expression has 1 to {CHARACTERS_MAX} characters, not {len(text)}", hint="split it into two statements"
        )
    atoms = _atoms(text)
    if len(atoms) > CHARACTERS_MAX or sum(atom.varies for atom in atoms) > REPEATS_MAX:
        raise InvalidRequest(
            f"/{text}/ has too many repeats", hint="write one statement for each kind of name, or use $LAYER_ID"
        )
    vague = 0
    follows: frozenset[str] = frozenset()
    for atom in reversed(atoms):
        vague += bool(atom.varies and atom.first & follows)
        follows = atom.first | follows if atom.empty else atom.first
    if vague > VAGUE_MAX:
        raise InvalidRequest(
            f"/{text}/ has {vague} repeats that could end in several places, {VAGUE_MAX} are allowed",
            hint="write [^.]+ instead of .*",
        )
    try:
        re.compile(text)
    except (re.error, OverflowError) as problem:
        raise InvalidRequest(f"/{text}/: {problem}", hint=r"write \. for a point, and \( for a parenthesis") from None
    return max(min(vague + 1, sum(atom.varies for atom in atoms)), 1)


def _atoms(text: str) -> list[_Atom]:
    atoms: list[_Atom] = []
    at, inside = 0, False
    while at < len(text):
        if text[at] == "(":
            choice = _choice(text, at)
            if choice is not None:
                atoms.append(_Atom(frozenset(word[0] for word in choice[0]), False, False))
                at = choice[1]
                _unrepeated(text, at)
                continue
            if inside or text[at + 1 : at + 2] == "?":
                raise _refused(text, at, "groups cannot be nested, nor begin with ?")
            inside, at = True, at + 1
            continue
        if text[at] == ")":
            if not inside:
                raise _refused(text, at, "a ) without its (")
            inside, at = False, at + 1
            _unrepeated(text, at)
            continue
        signs, at = _signs(text, at)
        repeat = _REPEAT.match(text, at)
        if repeat is None:
            atoms.append(_Atom(signs, False, False))
            continue
        at = repeat.end()
        if text[at : at + 1] in ("?", "+", "*", "{"):
            raise _refused(text, at, "a repeat of a repeat")
        low = {"*": 0, "+": 1, "?": 0}.get(repeat[0], int(repeat[1] or 0))
        fixed = repeat[1] is not None and repeat[2] is None
        atoms.append(_Atom(signs, low == 0, not fixed))
    if inside:
        raise _refused(text, len(text), "a ( without its )")
    return atoms


def _choice(text: str, at: int) -> tuple[list[str], int] | None:
    """The texts of a group of alternatives and where it ends; None if it is another group."""
    end = text.find(")", at)
    body = text[at + 1 : end] if end > 0 else ""
    if "|" not in body:
        return None
    words = [word.replace("\\.", ".") for word in body.split("|")]
    if any(not word or (set(word) - {"."}) & _SPECIAL for word in words) or any(
        a.startswith(b) for i, a in enumerate(words) for j, b in enumerate(words) if i != j
    ):
        raise _refused(text, at, "alternatives must be plain texts, and none may begin with another")
    return words, end + 1


def _unrepeated(text: str, at: int) -> None:
    if _REPEAT.match(text, at):
        raise _refused(text, at, "a repeated group")


def _signs(text: str, at: int) -> tuple[frozenset[str], int]:
    sign = text[at]
    if sign == "\\":
        return _escaped(text, at), at + 2
    if sign == ".":
        return _ALPHABET, at + 1
    if sign == "[":
        return _bracket(text, at)
    if sign in _SPECIAL:
        raise _refused(text, at, f"{sign!r} here")
    return frozenset({_sign(sign)}), at + 1


def _sign(sign: str) -> str:
    return sign if sign in _ALPHABET else "\x7f\x80"


def _escaped(text: str, at: int) -> frozenset[str]:
    sign = text[at + 1 : at + 2]
    if sign == "d":
        return _DIGITS | {"\x7f\x80"}
    if sign == "w":
        return _WORD | {"\x7f\x80"}
    if not sign or sign.isalnum() or sign not in _ALPHABET:
        raise _refused(text, at, "a \\ before anything but d, w and signs")
    return frozenset({sign})


def _bracket(text: str, at: int) -> tuple[frozenset[str], int]:
    end = text.find("]", at + 2)
    if end < 0:
        raise _refused(text, at, "a [ without its ]")
    body = text[at + 1 : end]
    other, body = body.startswith("^"), body.removeprefix("^")
    if not body or set(body) & set("[&~|") or not body.isascii():
        raise _refused(text, at, "brackets may hold characters, ranges, \\d, \\w and \\.")
    characters: set[str] = set()
    i = 0
    while i < len(body):
        if body[i] == "\\":
            characters |= _escaped(body, i)
            i += 2
        elif body[i + 1 : i + 2] == "-" and i + 2 < len(body) and body[i + 2] != "\\":
            characters |= set(map(chr, range(ord(body[i]), ord(body[i + 2]) + 1)))
            i += 3
        else:
            characters.add(body[i])
            i += 1
    return (_ALPHABET - characters if other else frozenset(characters)), end + 1


def _refused(text: str, at: int, what: str) -> InvalidRequest:
    return InvalidRequest(
        f"/{text}/, character {at + 1}: {what} is not allowed",
        hint=r"use characters, \d, \w, ., [^.], the repeats * + ? {m,n} of one of them, and (a|b)",
    )
