"""Finds the stored tensors of a trainer's tensors without a checkpoint, by the program's inverse.

Ranks have parts of tensors, and not all tensors, so the inverse is followed by names alone. The shapes of the stored tensors
come from elsewhere; here are those that follow from uncut shapes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple

from holdfast_formats.errors import InvalidRequest
from holdfast_formats.programs.document import Program
from holdfast_formats.programs.environment import Environment
from holdfast_formats.programs.inversion import inverted
from holdfast_formats.programs.names import NameIndex
from holdfast_formats.programs.operations import Ranks, number
from holdfast_formats.programs.statements import Operand, ProgramStatement
from holdfast_formats.region import Shape


class StoredName(NamedTuple):
    """A stored tensor: the trainer's tensors with parts of it, and its shape, if theirs determine it."""

    of: tuple[str, ...]
    shape: Shape | None


class Counts(NamedTuple):
    """Sizes of stacks, by the variable of the statement, where ranks may hold only a part."""

    known: Mapping[str, int]
    cut: frozenset[str]  # variables whose stacks are divided among ranks


def way_back(program: Program) -> tuple[ProgramStatement, ...]:
    """The statements from a trainer's tensors to the stored ones.

    Statements that drop tensors which a checkpoint may lack are omitted: such a checkpoint is saved. Raises `InvalidRequest`
    with the first statement that has no inverse.
    """
    for one in program.statements:
        if one.right[0].nothing and "optional" not in one.words:
            raise InvalidRequest(
                f"program {program.name!r} drops what a checkpoint must have: {one.where}", hint="add the attribute optional"
            )
    kept = tuple(one for one in program.statements if not one.right[0].nothing)
    return inverted(program._replace(statements=kept)).statements


def lenient(statements: tuple[ProgramStatement, ...]) -> tuple[ProgramStatement, ...]:
    """Make the tensors of all statements optional, for a part of a model."""
    return tuple(one if one.left[0].rest else one._replace(words=one.words | {"optional"}) for one in statements)


def stored_names(
    back: tuple[ProgramStatement, ...], live: Mapping[str, Shape], sizes: Mapping[str, int], counts: Counts
) -> dict[str, StoredName]:
    """The stored tensors with parts in live ones of these local shapes, by name.

    Raises `InvalidRequest` with the statement if the size of a stack is unknown, and with the names of live tensors that no
    statement has.
    """
    names = _Names(live, sizes, counts)
    for statement in back:
        names.run(statement)
    if names.untouched and not names.passing:
        some = ", ".join(map(repr, sorted(names.untouched)[:4]))
        raise InvalidRequest(
            f"no statement defines what {some} {'are' if len(names.untouched) > 1 else 'is'} in the checkpoint",
            hint="add a statement that makes it, keep all others unchanged with * -> *, or leave it out of the state",
            tensors=sorted(names.untouched),
        )
    return names.held


def shapes_back(back: tuple[ProgramStatement, ...], live: Mapping[str, Shape], sizes: Mapping[str, int]) -> dict[str, Shape]:
    """The shapes of the inverse's results for whole tensors; `StateMismatch` with the statement for others."""
    around = Environment(live, sizes, Ranks())
    for statement in lenient(back):
        around.run(statement, None)
    return {name: one.shape for name, one in around.held.items()}


class _Names:
    def __init__(self, live: Mapping[str, Shape], sizes: Mapping[str, int], counts: Counts) -> None:
        self.held = {name: StoredName((name,), shape) for name, shape in live.items()}
        self.untouched, self.passing = set(live), False
        self._index, self._sizes, self._counts = NameIndex(live), sizes, counts

    def run(self, statement: ProgramStatement) -> None:
        """Remove the names on the left, and add those on the right."""
        if statement.left[0].rest:
            self.passing = True
            return
        taken: dict[str, StoredName] = {}
        stored_names: dict[str, StoredName] = {}
        for operand in statement.left:
            for name, values in self._found(operand):
                taken[name] = self.held[name]
                for output in self._outputs(statement, name, values):
                    before = stored_names.get(output)
                    shape = None if before is not None else self._shape(statement, name)
                    of = (*(before.of if before is not None else ()), *self.held[name].of)
                    stored_names[output] = StoredName(tuple(dict.fromkeys(of)), shape)
        for name in taken:
            self.untouched.discard(name)
            del self.held[name]
            self._index.remove(name)
        for name, one in stored_names.items():
            self.held[name] = one
            self._index.add(name)

    def _found(self, operand: Operand) -> list[tuple[str, Mapping[str, int]]]:
        if operand.pattern is not None:
            return list(self._index.find(operand.pattern))
        if operand.regex is None:
            return []  # `_`: a stored tensor that is made of nothing
        return [(name, {}) for name in self._index.names() if operand.regex.match(name) is not None]

    def _outputs(self, statement: ProgramStatement, name: str, values: Mapping[str, int]) -> Iterator[str]:
        regex = statement.left[0].regex
        among = frozenset[str]().union(*(one.pattern.variables for one in statement.left if one.pattern is not None))
        for operand in statement.right:
            if operand.nothing:
                continue
            if operand.pattern is None:
                match = regex.match(name) if regex is not None else None
                yield match.expand(operand.template) if match is not None else operand.template
                continue
            opened = operand.pattern.variables - values.keys()
            if opened <= among:  # a whole name beside names with numbers has one for each of those
                if not opened:
                    yield operand.pattern.name(values)
                continue
            variable = min(opened)  # a statement opens one
            for each in range(self._count(statement, variable, name)):
                yield operand.pattern.name({**values, variable: each})

    def _count(self, statement: ProgramStatement, variable: str, name: str) -> int:
        stated = statement.numbers.get("count")
        if stated is not None:
            return number(stated, self._sizes, statement.where)
        shape, axis = self.held[name].shape, self._axis(statement)
        if variable not in self._counts.cut and shape is not None and axis < len(shape) and "unstack" in statement.words:
            return shape[axis]
        if variable not in self._counts.known:
            raise InvalidRequest(
                f"{statement.where}: the number of resulting tensors is unknown",
                hint="add count=, or give the model's config.json",
            )
        return self._counts.known[variable]

    def _shape(self, statement: ProgramStatement, name: str) -> Shape | None:
        shape, axis = self.held[name].shape, self._axis(statement)
        if shape is None or statement.plain or "same" in statement.words:
            return shape
        simple = statement.permute is None and statement.slices is None and "rotary" not in statement.texts
        turned = any(operand.turned for operand in (*statement.left, *statement.right))
        if "unstack" in statement.words and simple and not turned and axis < len(shape):
            return (*shape[:axis], *shape[axis + 1 :])
        return None

    def _axis(self, statement: ProgramStatement) -> int:
        stated = statement.numbers.get("axis")
        return 0 if stated is None else number(stated, self._sizes, statement.where)
