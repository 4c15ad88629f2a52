"""A program's inverse: each statement's own, in reverse order; or the reason why there is none."""

from __future__ import annotations

from collections.abc import Iterable

from holdfast_formats.errors import InvalidRequest
from holdfast_formats.layout.rules.expressions import evaluate
from holdfast_formats.programs.document import Program
from holdfast_formats.programs.following import lossless
from holdfast_formats.programs.operations import dtype_named
from holdfast_formats.programs.statements import Number, Operand, ProgramStatement

_FUSED = frozenset({"fused_qkv", "fused_qkv_old", "fused_ffn"})
_BY_HAND = "write the inverse by hand under [inverse]"


def inverted(program: Program, *, trusting: bool = False) -> Program:
    """The program from `target` to `source`: hand-written or derived.

    Applied after the program, it restores every element. `trusting` assumes that joined parts are equal, and casts exact, as
    Paddle's own engine does. Raises `InvalidRequest` with the first statement that has no inverse.
    """
    if program.back is not None:
        statements = program.back
    else:
        _check_copies(program)
        statements = tuple(_statement(program, one, trusting) for one in reversed(program.statements))
    return Program(
        name=f"{program.name}-inverse",
        source=program.target,
        target=program.source,
        statements=statements,
        sizes=program.sizes,
        model_types=program.model_types,
        back=program.statements,
        about=program.about,
    )


def _statement(program: Program, one: ProgramStatement, trusting: bool) -> ProgramStatement:
    program_statement = _turned_round(program, one, trusting)
    return program_statement._replace(text=f"inverse of {one.text}")


def _turned_round(program: Program, one: ProgramStatement, trusting: bool) -> ProgramStatement:
    if one.left[0].rest:
        return one
    if one.left[0].regex is not None:
        raise _none(program, one, "an expression has no inverse")
    if one.right[0].nothing:
        if "zeros" in one.words and "shape" in one.lists and "dtype" in one.texts:
            return one._replace(left=one.right, right=one.left)
        raise _none(program, one, "what is dropped is lost")
    if one.left[0].nothing:
        if "shape" not in one.lists or "dtype" not in one.texts:
            raise _none(program, one, "shape= and dtype= are missing")
        return one._replace(left=one.right, right=one.left, words=one.words | {"zeros"})
    if one.slices is not None:
        raise _none(program, one, "the elements outside a slice are lost")
    if one.permute is not None and (one.numbers or one.words - {"optional"} or len(one.left) + len(one.right) > 2):
        raise _none(program, one, "permute= and another change in one statement", "split it into two statements")
    if "rotary" in one.texts and ("pad_to" in one.numbers or len(one.left) + len(one.right) > 2):
        raise _none(program, one, "rotary= and another change in one statement", "split it into two statements")
    back = one._replace(left=one.right, right=one.left, texts=_texts(program, one, trusting))
    if one.permute is not None:
        if any(operand.turned for operand in (*one.left, *one.right)):
            raise _none(program, one, "permute= and ^T in one statement", "split it into two statements")
        order = one.permute
        return back._replace(permute=tuple(order.index(d) for d in range(len(order))) if order else ())
    return _regrouped(program, one, back, trusting)


def _regrouped(program: Program, one: ProgramStatement, back: ProgramStatement, trusting: bool) -> ProgramStatement:
    if "pad_to" in one.numbers:
        return _cut_again(program, one, back)
    if one.words & _FUSED:
        swapped = {"src_ranks": "dst_ranks", "dst_ranks": "src_ranks"}
        return back._replace(numbers={swapped.get(name, name): value for name, value in one.numbers.items()})
    if "stack" in one.words:
        return back._replace(words=one.words - {"stack"} | {"unstack"})
    if "unstack" in one.words:
        return back._replace(words=one.words - {"unstack"} | {"stack"})
    if "same" in one.words:
        return back
    left, right = _open(one.left), _open(one.right)
    if len(one.right) > 1 or right - left:  # split
        equal = {} if "sizes" in one.lists else {"sizes": "equal"}
        return back._replace(texts={**back.texts, **equal})
    if len(one.left) > 1 or left - right:  # joined
        if "sizes" not in one.lists and "sizes" not in one.texts and not trusting:
            raise _none(program, one, "the length of each part is missing", "add sizes=equal, or sizes=[…]")
        if left - right and "count" not in one.numbers:
            raise _none(program, one, "the number of parts is missing", "add count=")
        return back._replace(texts={name: text for name, text in back.texts.items() if name != "sizes"})
    return back


def _cut_again(program: Program, one: ProgramStatement, back: ProgramStatement) -> ProgramStatement:
    size = one.numbers.get("size")
    axis = evaluate(one.numbers.get("axis", (0,)), {})
    if size is None or axis is None:
        raise _none(program, one, "the size before padding is missing", "add size=")
    if len(one.left) + len(one.right) > 2 or one.words - {"optional"}:
        raise _none(program, one, "pad_to= and another change in one statement", "split it into two statements")
    bounds: list[tuple[Number | None, Number | None]] = [(None, None)] * axis
    rest = {name: value for name, value in one.numbers.items() if name not in ("pad_to", "size", "axis")}
    return back._replace(numbers=rest, slices=(*bounds, ((0,), size)))


def _open(operands: Iterable[Operand]) -> frozenset[str]:
    return frozenset().union(*(operand.pattern.variables for operand in operands if operand.pattern is not None))


def _texts(program: Program, one: ProgramStatement, trusting: bool) -> dict[str, str]:
    """The inverse's dtypes and order of rotary pairs."""
    texts = dict(one.texts)
    if "rotary" in texts:
        texts["rotary"] = "halves" if texts["rotary"] == "interleaved" else "interleaved"
    after = texts.pop("dst_dtype", None) or texts.pop("dtype", None)
    if after is None:
        return texts
    before = texts.pop("src_dtype", None)
    if before is None:
        if trusting:
            return texts
        raise _none(program, one, "the dtype before the cast is missing", "add src_dtype=")
    if not trusting and not lossless(dtype_named(before, one.where), dtype_named(after, one.where)):
        raise _none(program, one, f"a cast from {before} to {after} loses digits")
    return {**texts, "src_dtype": after, "dst_dtype": before}


def _check_copies(program: Program) -> None:
    """`InvalidRequest` for a tensor used twice without `same`: nothing guarantees that both stay equal."""
    spent: dict[str, ProgramStatement] = {}
    kept: set[str] = set()
    for one in program.statements:
        left = [operand.pattern.text for operand in one.left if operand.pattern is not None]
        right = {operand.pattern.text for operand in one.right if operand.pattern is not None}
        for name in left:
            if name in spent or (name in kept and name not in right):
                raise _none(program, one, f"{name!r} is used a second time", "write a -> b, c, same")
        spent.update(dict.fromkeys(left, one))
        for name in right:
            spent.pop(name, None)
        kept = (kept - right) | (right if one.plain and left == list(right) else set())


def _none(program: Program, one: ProgramStatement, why: str, hint: str = _BY_HAND) -> InvalidRequest:
    return InvalidRequest(f"program {program.name!r} has no inverse: {one.where}: {why}", hint=hint, line=one.line)
