"""Computes sizes from config.json: whole numbers, names, `+ - * //`, parentheses, and `a ?? b` for "b if a is missing".

An expression is kept as a postfix list, so that neither parsing nor evaluation recurses.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from holdfast_formats.errors import InvalidRequest

CHARACTERS_MAX = 200
VALUE_MAX = 2**53  # of a result and of every intermediate value

Expression = tuple[int | str, ...]  # numbers, names and operators, in postfix order

_TOKEN = re.compile(r"\s*(?:([0-9]+)|([A-Za-z_][A-Za-z0-9_]*)|(\?\?|//|[-+*()]))")
_BINDING = {"??": 1, "+": 2, "-": 2, "*": 3, "//": 3}


def parse(text: str) -> Expression:
    """Parse an expression into postfix order; `InvalidRequest` names the text that cannot be parsed."""
    if len(text) > CHARACTERS_MAX:
        raise InvalidRequest(
            f"the expression has {len(text)} characters, at most {CHARACTERS_MAX} are allowed: {text[:40]!r}…",
            hint="write it as two sizes, of which one uses the other's keys",
        )
    postfix: list[int | str] = []
    waiting: list[str] = []
    operand = False  # whether the last token ended an operand
    for token in _tokens(text):
        if (token == ")" or token in _BINDING) is not operand:
            raise InvalidRequest(
                f"expression {text!r}: unexpected {token!r}", hint="use names, integers, + - * // ?? and parentheses"
            )
        operand = token == ")" or token not in (*_BINDING, "(")
        if token == "(":
            waiting.append(token)
        elif token == ")":
            _unwind(waiting, postfix, 0)
            if not waiting:
                raise InvalidRequest(f"expression {text!r}: unmatched ')'", hint="add the '(' that it ends")
            waiting.pop()
        elif token in _BINDING:
            # `??` is right-associative; a ?? b ?? c is the first of the three that is present either way
            _unwind(waiting, postfix, _BINDING[token])
            waiting.append(token)
        else:
            postfix.append(int(token) if token.isdigit() else token)
    _unwind(waiting, postfix, 0)
    if waiting or not operand:
        raise InvalidRequest(f"expression {text!r} is incomplete", hint="it ends with a name, a number or ')'")
    return tuple(postfix)


def _tokens(text: str) -> list[str]:
    tokens, at, stop = [], 0, len(text.rstrip())
    while at < stop:
        match = _TOKEN.match(text, at)
        if match is None:
            raise InvalidRequest(
                f"expression {text!r}: cannot parse {text[at:].strip()[:12]!r}",
                hint="use names, integers, + - * // ?? and parentheses",
            )
        tokens.append(match[match.lastindex or 0])
        at = match.end()
    return tokens


def _unwind(waiting: list[str], postfix: list[int | str], binding: int) -> None:
    """Move the operators that bind at least as strongly to the output, back to the innermost parenthesis."""
    while waiting and waiting[-1] != "(" and _BINDING[waiting[-1]] >= binding:
        postfix.append(waiting.pop())


def names_in(expression: Expression) -> frozenset[str]:
    return frozenset(term for term in expression if isinstance(term, str) and term not in _BINDING)


def evaluate(expression: Expression, values: Mapping[str, int]) -> int | None:
    """The value of an expression, or None if it needs a name that `values` lacks.

    Raises `InvalidRequest` for a division by zero, a negative result and numbers beyond `VALUE_MAX`.
    """
    stack: list[int | None] = []
    for term in expression:
        if isinstance(term, int):
            stack.append(_bounded(term))
        elif term not in _BINDING:
            stack.append(values.get(term))
        else:
            right, left = stack.pop(), stack.pop()
            stack.append(_bounded(_apply(term, left, right)))
    (result,) = stack
    if result is not None and result < 0:
        raise InvalidRequest(
            f"a size evaluates to {result}, but must not be negative",
            hint="write a larger number first, or change the keys of config.json",
        )
    return result


def _apply(operator: str, left: int | None, right: int | None) -> int | None:
    if operator == "??":
        return right if left is None else left
    if left is None or right is None:
        return None
    if operator == "//":
        if right == 0:
            raise InvalidRequest(
                f"division by zero in a size: {left} // 0", hint="config.json has 0 for the divisor: correct it there"
            )
        return left // right
    return left + right if operator == "+" else left - right if operator == "-" else left * right


def _bounded(value: int | None) -> int | None:
    if value is not None and abs(value) > VALUE_MAX:
        raise InvalidRequest(f"a size exceeds {VALUE_MAX}", hint="correct the numbers in config.json, or the expression")
    return value


def sizes_for(sizes: Mapping[str, Expression], config: Mapping[str, Any], what: str = "size") -> dict[str, int]:
    """The sizes for which config.json has all keys; its `text_config` takes precedence.

    Raises `InvalidRequest` for invalid values, with `what` a size is.
    """
    nested = config.get("text_config")
    documents = [nested, config] if isinstance(nested, Mapping) else [config]
    values = {}
    for key in {key for size in sizes.values() for key in names_in(size)}:
        value = next((doc[key] for doc in documents if doc.get(key) is not None), None)
        if value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= VALUE_MAX:
            raise InvalidRequest(
                f"config.json has {key} = {value!r}, which is not a valid size", hint='rules "none" need no config'
            )
        values[key] = value
    known = {}
    for name, expression in sizes.items():
        try:
            size = evaluate(expression, values)
        except InvalidRequest as problem:
            raise InvalidRequest(f"{what} {name!r} for this config: {problem.detail}", hint=problem.hint) from None
        if size is not None:
            known[name] = size
    return known
