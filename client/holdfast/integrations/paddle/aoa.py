"""Paddle's AOA statements, from Hugging Face's tensors to a live model's, as a program that also goes back.

Paddle reads them more freely than Holdfast: a tensor may be used twice, a cast may round, and parts of a join are taken to
be equal. Here each statement becomes one that can be inverted, or is refused.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from holdfast_formats.errors import InvalidRequest
from holdfast_formats.layout.rules.patterns import NamePattern
from holdfast_formats.programs import Program
from holdfast_formats.programs.inverse_names import Counts, stored_names, way_back
from holdfast_formats.programs.names import NameIndex
from holdfast_formats.programs.statements import Operand, ProgramStatement, parse_statements

HINT = "pass a program of your own (docs/programs.md): layout=holdfast_paddle.layout(model, 'mine.toml')"
_FUSED = frozenset({"fused_qkv", "fused_qkv_old", "fused_ffn"})
_BY_RANK = frozenset({"fused_qkv_old", "fused_ffn"})
_CASTS = ("dtype", "src_dtype", "dst_dtype")
SOURCE, TARGET = "hf", "paddle"
_HEAD = "lm_head.weight"


class LiveTensor(NamedTuple):
    """A tensor of the live model: its shape on this rank, over how many ranks it is cut, and whether a Linear layer owns it,
    which holds [in, out].
    """

    shape: tuple[int, ...]
    ranks: int = 1
    turned: bool = False


def made_program(name: str, texts: Iterable[str], live: Mapping[str, LiveTensor]) -> Program:
    """The program that makes `live`, by their names, of Hugging Face's tensors.

    `texts` are the model's own statements. A Linear weight that none of them makes is transposed; everything else keeps its
    name and shape. Raises `InvalidRequest` with the statement for one that Holdfast cannot read or invert.
    """
    try:
        statements = _settled(_parsed(texts), live)
        made = _made(statements, live)
        turned = [f"{each}^T -> {each}" for each, one in live.items() if one.turned and each not in made]
        rest = parse_statements("\n".join([*turned, "* -> *"]), ())
        program = Program(name, SOURCE, TARGET, (*statements, *map(_optional, rest)))
        stored_names(way_back(program), {each: one.shape for each, one in live.items()}, {}, Counts({}, frozenset()))
    except InvalidRequest as problem:
        raise InvalidRequest(f"program {name!r}: {problem.detail}", hint=HINT, **problem.members) from None
    return program


def _parsed(texts: Iterable[str]) -> Sequence[ProgramStatement]:
    """All statements but those that make tensors of nothing: a live tensor that Paddle fills itself is stored as it is."""
    statements = parse_statements("\n".join(texts), ())
    return [one for one in statements if not one.left[0].nothing]


def _settled(statements: Sequence[ProgramStatement], live: Mapping[str, LiveTensor]) -> list[ProgramStatement]:
    index = NameIndex(live)
    settled: list[ProgramStatement] = []
    plain: dict[str, int] = {}  # where the statement is that renames a tensor
    for written in statements:
        one = _by_ranks(_equal_parts(_optional(_uncast(written))), index, live)
        text = _text(one)
        if not one.plain or text is None:
            settled.append(one)
        elif text not in plain:
            plain[text] = len(settled)
            settled.append(one)
        elif one.right[0].pattern is not None and any(True for _ in index.find(one.right[0].pattern)):
            if one.right[0].pattern.text.endswith(_HEAD):  # tied to the embeddings: checkpoints call it so
                settled += map(_optional, parse_statements(f"{_HEAD} -> {one.right[0].pattern.text}", ()))
            else:
                settled[plain[text]] = _copied(settled[plain[text]], one.right)
    return settled


def _optional(one: ProgramStatement) -> ProgramStatement:
    """A model's statements are for all variants of the model, and a rank may hold a part of it."""
    return one if one.left[0].rest else one._replace(words=one.words | {"optional"})


def _uncast(one: ProgramStatement) -> ProgramStatement:
    """Tensors are stored in their live dtypes: no digit is lost, and readers cast."""
    return one._replace(texts={key: text for key, text in one.texts.items() if key not in _CASTS})


def _equal_parts(one: ProgramStatement) -> ProgramStatement:
    """Joined parts are equal, as Paddle's own inverse takes them to be; here a restore checks that they are."""
    if len(one.left) < 2 or one.words & (_FUSED | {"stack", "same"}) or "sizes" in one.lists:
        return one
    return one._replace(texts={**one.texts, "sizes": "equal"})


def _by_ranks(one: ProgramStatement, index: NameIndex, live: Mapping[str, LiveTensor]) -> ProgramStatement:
    """Fusing by rank needs the number of ranks over which the live tensor is cut."""
    if not one.words & _BY_RANK or "ranks" in one.numbers or len(one.left) == len(one.right):
        return one
    names = [name for pattern in _patterns(one) for name, _ in index.find(pattern)]
    ranks = {live[name].ranks for name in names}
    if len(ranks) > 1:
        raise InvalidRequest(f"{one.where}: its tensors are cut over {' and '.join(map(str, sorted(ranks)))} ranks")
    return one._replace(numbers={**one.numbers, "ranks": (ranks.pop(),)}) if ranks - {1} else one


def _copied(one: ProgramStatement, more: Iterable[Operand]) -> ProgramStatement:
    right = (*one.right, *(each for each in more if each not in one.right))
    return one if right == one.right else one._replace(right=right, words=one.words | {"same"})


def _patterns(one: ProgramStatement) -> list[NamePattern]:
    return [operand.pattern for operand in one.right if operand.pattern is not None]


def _text(one: ProgramStatement) -> str | None:
    pattern = one.left[0].pattern
    return None if pattern is None else pattern.text


def _made(statements: Iterable[ProgramStatement], live: Mapping[str, LiveTensor]) -> set[str]:
    index = NameIndex(live)
    return {name for one in statements for pattern in _patterns(one) for name, _ in index.find(pattern)}
