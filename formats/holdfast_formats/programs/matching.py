"""Matches statements with tensors: one step for each choice of variables that the names allow."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple

from holdfast_formats.errors import InvalidRequest, StateMismatch
from holdfast_formats.layout.rules.patterns import NamePattern
from holdfast_formats.programs.names import NameIndex
from holdfast_formats.programs.operations import Ranks, Step
from holdfast_formats.programs.statements import RANGE_MAX, Operand, ProgramStatement
from holdfast_formats.region import Shape

STEPS_MAX = 2_000_000  # of a program

_Choice = tuple[tuple[str, int], ...]  # values of variables, sorted


class Surroundings(NamedTuple):
    """A statement's inputs: the present tensors, and the sizes of the model."""

    names: NameIndex
    shapes: Mapping[str, Shape]  # of what the index has, and of what was used before
    sizes: Mapping[str, int]
    ranks: Ranks


def steps(statement: ProgramStatement, around: Surroundings) -> Iterator[Step]:
    """The steps of a statement, in the order of their numbers. `StateMismatch` with a missing name."""
    left, right = statement.left, statement.right
    if left[0].regex is not None:
        yield from _by_regex(statement, around)
        return
    if left[0].nothing:
        yield Step(statement, (), tuple(_written(operand) for operand in right), around.sizes, around.ranks)
        return
    wanted = frozenset().union(*(operand.pattern.variables for operand in right if operand.pattern is not None))
    dropping = right[0].nothing
    gathered, opened = _gathered(statement, dropping, wanted), wanted - _variables(left)
    held = [_held(operand, around, gathered) for operand in left]
    choices = _choices(held, gathered)
    if not choices and "optional" not in statement.words:
        raise StateMismatch(
            f"{statement.where}: no tensor has the name {_name(left[0])!r}",
            hint="add the attribute `optional` if a checkpoint may lack it",
        )
    for choice in choices:
        inputs = tuple(
            name
            for operand, candidate in zip(left, held, strict=True)
            for name in _at(operand, candidate, choice, statement)
        )
        values = dict(choice)
        outputs = () if dropping else tuple(_outputs(statement, values, opened, inputs, around))
        yield Step(statement, inputs, outputs, around.sizes, around.ranks)


def _name(operand: Operand) -> str:
    return operand.pattern.text if operand.pattern is not None else operand.template


def _written(operand: Operand) -> str:
    assert operand.pattern is not None  # parsed so
    return operand.pattern.text


def _variables(operands: Iterable[Operand]) -> frozenset[str]:
    return frozenset().union(*(operand.pattern.variables for operand in operands if operand.pattern is not None))


def _gathered(statement: ProgramStatement, dropping: bool, wanted: frozenset[str]) -> str | None:
    """The variable whose tensors are all joined, if there is one."""
    lacking = sorted(_variables(statement.left) - wanted)
    if dropping or not lacking:
        return None
    if len(lacking) > 1:
        raise InvalidRequest(
            f"{statement.where}: {' and '.join(lacking)} are on the left only", hint="join one, then the other"
        )
    if len(statement.left) > 1:
        raise InvalidRequest(
            f"{statement.where}: {lacking[0]} is on the left only, so the left side must be a single name",
            hint=f"join each with {lacking[0]} into a tensor of its own, then join these in a second statement",
        )
    return lacking[0]


class _Found(NamedTuple):
    pattern: NamePattern
    names: Mapping[_Choice, str]
    rows: Mapping[_Choice, Sequence[tuple[int, str]]] = {}  # of a gathered variable's tensors: its value and the name


def _held(operand: Operand, around: Surroundings, gathered: str | None) -> _Found:
    assert operand.pattern is not None  # parsed so
    wanted = operand.pattern
    if not wanted.variables:
        return _Found(wanted, {(): wanted.text} if wanted.text in around.shapes else {})
    names = {tuple(sorted(values.items())): name for name, values in around.names.find(wanted)}
    rows: dict[_Choice, list[tuple[int, str]]] = {}
    if gathered in wanted.variables:
        for choice, name in names.items():
            rest = tuple(item for item in choice if item[0] != gathered)
            rows.setdefault(rest, []).append((dict(choice)[gathered], name))
    return _Found(wanted, names, rows)


def _choices(held: list[_Found], gathered: str | None) -> list[_Choice]:
    choices = {tuple(item for item in choice if item[0] != gathered) for operand in held for choice in operand.names}
    if any(choice for choice in choices):
        choices.discard(())  # a whole name beside names with numbers
    return sorted(choices)


def _at(operand: Operand, candidate: _Found, choice: _Choice, statement: ProgramStatement) -> list[str]:
    own = tuple(item for item in choice if item[0] in candidate.pattern.variables)
    if candidate.pattern.variables <= {name for name, _ in choice}:
        name = candidate.names.get(own)
        if name is None:
            raise StateMismatch(
                f"{statement.where}: {candidate.pattern.name(dict(choice))!r} is missing",
                hint="others joined by this statement exist",
                tensor=candidate.pattern.name(dict(choice)),
            )
        return [name]
    (variable,) = candidate.pattern.variables - {name for name, _ in choice}  # the gathered one
    rows = sorted(candidate.rows.get(own, ()))
    for (before, _), (after, name) in pairwise(rows):
        if after != before + 1:
            missing = candidate.pattern.name({**dict(choice), variable: before + 1})
            raise StateMismatch(
                f"{statement.where}: {missing!r} is missing; the next is {name!r}",
                hint="complete the source, or join them by name: a.0.b, a.2.b -> c",
                tensor=missing,
            )
    if rows and rows[0][0] and ("stack" in statement.words or "count" in statement.numbers):
        missing = candidate.pattern.name({**dict(choice), variable: 0})
        raise StateMismatch(
            f"{statement.where}: {missing!r} is missing; the first is {rows[0][1]!r}",
            hint="complete the source, or join them by name: a.1.b, a.2.b -> c",
            tensor=missing,
        )
    return [name for _, name in rows]


def _outputs(
    statement: ProgramStatement,
    values: Mapping[str, int],
    opened: frozenset[str],
    inputs: tuple[str, ...],
    around: Surroundings,
) -> Iterator[str]:
    """The names on the right; a variable that is only there numbers the parts of the tensor on the left."""
    step = Step(statement, inputs, (), around.sizes, around.ranks)
    count = step.number("count")
    if count is not None and not opened and len(inputs) != count:
        raise StateMismatch(
            f"{statement.where}: {len(inputs)} tensors exist, but count= is {count}",
            hint=f"write count={len(inputs)}, or complete the source",
        )
    if not opened:
        for operand in statement.right:
            yield operand.pattern.name(values) if operand.pattern is not None else operand.template
        return
    if len(opened) > 1 or len(statement.right) > 1:
        raise InvalidRequest(
            f"{statement.where}: {' and '.join(sorted(opened))} only on the right, where one is allowed, in one name",
            hint="write two statements, each with one such variable",
        )
    if count is None and "unstack" in statement.words:
        shape, axis = around.shapes[inputs[0]], step.number("axis") or 0
        shape = shape[::-1] if statement.left[0].turned else shape
        count = shape[axis] if axis < len(shape) else 1
    if count is None:
        raise InvalidRequest(
            f"{statement.where}: the number of resulting tensors is unknown; add count=, or unstack",
            hint="as in a -> b.$EXPERT_ID.c, count=8",
        )
    if not 0 < count <= RANGE_MAX:
        raise StateMismatch(
            f"{statement.where}: {count} tensors, where 1 to {RANGE_MAX} are allowed",
            hint="change count=, or the axis= that is unstacked; config.json may be another model's",
        )
    (variable,) = opened
    pattern = statement.right[0].pattern
    assert pattern is not None  # variables are in patterns
    for value in range(count):
        yield pattern.name({**values, variable: value})


def _by_regex(statement: ProgramStatement, around: Surroundings) -> Iterator[Step]:
    regex = statement.left[0].regex
    assert regex is not None  # the caller checked it
    matched = False
    for name in around.names.names():
        match = regex.match(name)
        if match is None:
            continue
        matched = True
        outputs = (
            () if statement.right[0].nothing else tuple(_expanded(statement, match, operand) for operand in statement.right)
        )
        yield Step(statement, (name,), outputs, around.sizes, around.ranks)
    if not matched and "optional" not in statement.words:
        raise StateMismatch(
            f"{statement.where}: no tensor has such a name", hint="add the attribute `optional` if that is intended"
        )


def _expanded(statement: ProgramStatement, match: re.Match[str], operand: Operand) -> str:
    if operand.pattern is not None:
        if operand.pattern.variables:
            raise InvalidRequest(f"{statement.where}: variables and expressions exclude each other", hint=r"write /…\1…/")
        return operand.pattern.text
    try:
        return match.expand(operand.template)
    except (re.error, IndexError) as problem:
        raise InvalidRequest(
            f"{statement.where}: /{operand.template}/: {problem}",
            hint=r"write \1 for the first group, as in /blocks\.(\d+)/ -> /layers.\1/",
        ) from None
