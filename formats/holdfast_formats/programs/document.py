"""A program's TOML file: its keys, their kinds and limits. docs/programs.md explains them to authors."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, NamedTuple

import msgspec
from msgspec import Meta, Struct

from holdfast_formats import toml_text
from holdfast_formats.decoding import converter
from holdfast_formats.errors import InvalidRequest
from holdfast_formats.layout.rules.expressions import Expression, parse
from holdfast_formats.programs.names import NameIndex
from holdfast_formats.programs.statements import ProgramStatement, parse_statements

TEXT_BYTES_MAX = 2**24
_FUSED_BY_RANK = frozenset({"fused_qkv_old", "fused_ffn"})

Text = Annotated[str, Meta(min_length=1, max_length=512)]
Words = Annotated[list[Text], Meta(max_length=64)]
Size = Text | Annotated[int, Meta(ge=0, le=2**53)]
Name = Annotated[str, Meta(pattern="^[a-z][a-z0-9_.-]{0,63}$")]


class InverseText(Struct, frozen=True, forbid_unknown_fields=True):
    """`[inverse]`: a hand-written inverse."""

    statements: str


class ProgramText(Struct, frozen=True, forbid_unknown_fields=True, rename={"source": "from", "target": "to"}):
    name: Name
    source: Name
    target: Name
    statements: str
    about: Annotated[str, Meta(max_length=2000)] = ""
    model_types: Words = []
    sizes: dict[Text, Size] = {}
    inverse: InverseText | None = None


class Program(NamedTuple):
    """A parsed program: its layouts of names, and its statements; `back` is its hand-written inverse."""

    name: str
    source: str
    target: str
    statements: tuple[ProgramStatement, ...]
    sizes: Mapping[str, Expression] = {}
    model_types: tuple[str, ...] = ()
    back: tuple[ProgramStatement, ...] | None = None
    about: str = ""

    def for_one_rank(self) -> Program:
        """The program whose results are fused for one rank: how a live tensor is fused by rank depends on the mesh."""
        statements = tuple(_for_one_rank(one) for one in self.statements)
        return self if statements == self.statements else self._replace(statements=statements)

    def takes(self, name: str) -> bool:
        """Whether a statement refers to a checkpoint's tensor of this name."""
        index = NameIndex([name])
        operands = (operand for statement in self.statements for operand in statement.left)
        return any(
            operand.rest
            or (operand.regex is not None and operand.regex.match(name) is not None)
            or (operand.pattern is not None and any(index.find(operand.pattern)))
            for operand in operands
        )


def _for_one_rank(one: ProgramStatement) -> ProgramStatement:
    if not one.words & _FUSED_BY_RANK or len(one.right) > 1:
        return one
    of_results = "ranks" if len(one.left) > 1 else "dst_ranks"
    return one._replace(numbers={name: number for name, number in one.numbers.items() if name != of_results})


_convert = converter(ProgramText)


def read_program(text: bytes | str) -> Program:
    """Read a program's TOML; `InvalidRequest` with the key, or the line and column of the statement, that is wrong."""
    data = text.encode() if isinstance(text, str) else text
    if len(data) > TEXT_BYTES_MAX:
        raise InvalidRequest(
            f"the program has {len(data)} bytes; at most {TEXT_BYTES_MAX} are allowed",
            hint="write $LAYER_ID or $EXPERT_ID in place of numbers",
        )
    try:
        values = toml_text.decode(data)
        written = _convert(values)
    except (msgspec.DecodeError, ValueError, RecursionError) as problem:
        raise InvalidRequest(f"the program is not valid: {problem}", hint="see docs/programs.md for an example") from None
    return _compiled(written)


def statements_only(text: str, sizes: Mapping[str, Size] | None = None, name: str = "statements") -> Program:
    """Read a program of statements alone, in which other names pass unchanged, as in AOA."""
    return _compiled(ProgramText(name, "source", "target", f"{text}\n* -> *", sizes=dict(sizes or {})))


def _compiled(written: ProgramText) -> Program:
    try:
        sizes = {name: parse(str(size)) for name, size in written.sizes.items()}
        back = None if written.inverse is None else _parsed(written.inverse.statements, sizes, "[inverse] ")
        return Program(
            name=written.name,
            source=written.source,
            target=written.target,
            statements=_parsed(written.statements, sizes, ""),
            sizes=sizes,
            model_types=tuple(written.model_types),
            back=back,
            about=written.about,
        )
    except InvalidRequest as problem:
        raise InvalidRequest(f"program {written.name!r}: {problem.detail}", hint=problem.hint, **problem.members) from None


def _parsed(text: str, sizes: Mapping[str, Expression], place: str) -> tuple[ProgramStatement, ...]:
    try:
        program_statements = parse_statements(text, tuple(sizes))
    except InvalidRequest as problem:
        raise InvalidRequest(f"{place}{problem.detail}", hint=problem.hint, **problem.members) from None
    if not program_statements:
        raise InvalidRequest(f"{place}there are no statements", hint="write one, such as * -> *, which keeps all names")
    return program_statements
