"""Operations of a statement on the tensors on its left, for one choice of its variables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from holdfast_formats import dtypes
from holdfast_formats.errors import InvalidRequest, StateMismatch
from holdfast_formats.layout.rules.expressions import Expression, evaluate, names_in
from holdfast_formats.programs import arrangement
from holdfast_formats.programs.arrangement import Arrangement
from holdfast_formats.programs.statements import ProgramStatement

_FLOATS = {"float16": "F16", "bfloat16": "BF16", "float32": "F32", "float64": "F64", "float": "F32", "half": "F16"}
_FLOATS |= {"float8_e4m3fn": "F8_E4M3", "float8_e5m2": "F8_E5M2"}
_WHOLE = {"uint8": "U8", "int8": "I8", "int16": "I16", "int32": "I32", "int64": "I64", "bool": "BOOL"}
_DTYPES = _FLOATS | _WHOLE


class Ranks(NamedTuple):
    """How many ranks hold tensors cut along their fused dimension, by name, or for all: of the source, and of the result.
    Needed by `fused_ffn` and `fused_qkv_old` if the statement does not state it.
    """

    source: Mapping[str, int] | int = 1
    target: Mapping[str, int] | int = 1

    def of_source(self, name: str) -> int:
        return self.source if isinstance(self.source, int) else self.source.get(name, 1)

    def of_target(self, name: str) -> int:
        return self.target if isinstance(self.target, int) else self.target.get(name, 1)


class Step(NamedTuple):
    """One statement for one choice of its variables: the names that it reads and makes."""

    statement: ProgramStatement
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    sizes: Mapping[str, int]
    ranks: Ranks

    @property
    def where(self) -> str:
        return self.statement.where

    def number(self, name: str) -> int | None:
        expression = self.statement.numbers.get(name)
        return None if expression is None else number(expression, self.sizes, self.where)

    def needed(self, name: str) -> int:
        value = self.number(name)
        if value is None:
            raise InvalidRequest(
                f"{self.where}: {name}= is missing", hint=f"write {name}=, with a number or a size in braces"
            )
        return value

    def listed(self, name: str) -> tuple[int, ...] | None:
        held = self.statement.lists.get(name)
        return None if held is None else tuple(number(one, self.sizes, self.where) for one in held)

    def dtype(self, name: str) -> str | None:
        text = self.statement.texts.get(name)
        return None if text is None else dtype_named(text, self.where)


def number(expression: Expression, sizes: Mapping[str, int], where: str) -> int:
    """The value of a number in a statement; `InvalidRequest` with `where` if a size is unknown for this config."""
    value = evaluate(expression, sizes)
    if value is None:
        missing = sorted(names_in(expression) - set(sizes))
        raise InvalidRequest(
            f"{where}: the size {', '.join(map(repr, missing))} is unknown",
            hint="pass the model's config.json: the current one lacks values that the program's [sizes] need",
        )
    return value


def dtype_named(text: str, where: str) -> str:
    """safetensors' name of a dtype, as torch, Paddle or safetensors call it."""
    bare = text.rpartition(".")[2]
    dtype = _DTYPES.get(bare, bare)
    if dtype not in dtypes.BITS:
        raise InvalidRequest(f"{where}: there is no dtype {text!r}", hint=f"one of {', '.join(_DTYPES)}")
    return dtype


def operate(step: Step, inputs: Sequence[Arrangement]) -> list[Arrangement]:
    """The tensors on the right; `StateMismatch` with the statement where shapes do not fit."""
    try:
        return _operate(step, inputs)
    except StateMismatch as problem:
        raise StateMismatch(f"{step.where}: {problem.detail}", hint=problem.hint, **problem.members) from None


def _operate(step: Step, inputs: Sequence[Arrangement]) -> list[Arrangement]:
    program_statement = step.statement
    results = list(inputs)
    if program_statement.plain and len(results) == 1:
        return results
    if any(operand.turned for operand in program_statement.left):
        turns = (
            program_statement.left if len(program_statement.left) == len(results) else program_statement.left * len(results)
        )
        results = [_reversed(one) if operand.turned else one for one, operand in zip(results, turns, strict=True)]
    if program_statement.slices is not None:
        results = [_sliced(step, one) for one in results]
    results = _regrouped(step, results)
    if "rotary" in program_statement.texts:
        results = [_rotated(step, one) for one in results]
    if "pad_to" in program_statement.numbers:
        results = [_padded(step, one) for one in results]
    if program_statement.permute is not None:
        results = [_permuted(one, program_statement.permute, step.outputs[0]) for one in results]
    if any(operand.turned for operand in program_statement.right):
        turns = (
            program_statement.right
            if len(program_statement.right) == len(results)
            else program_statement.right * len(results)
        )
        results = [_reversed(one) if operand.turned else one for one, operand in zip(results, turns, strict=True)]
    dtype = step.dtype("dst_dtype") or step.dtype("dtype")
    return results if dtype is None else [_cast(one, dtype, name) for one, name in zip(results, step.outputs, strict=True)]


def _regrouped(step: Step, arrangements: list[Arrangement]) -> list[Arrangement]:
    """The statement's joining or splitting: as many tensors as are on the right."""
    words, many = step.statement.words, len(step.outputs)
    if "same" in words:
        return _same(step, arrangements)
    if "stack" in words:
        axis = _axis(step, 0, len(arrangements[0].shape) + 1)
        return [arrangement.joined([arrangement.lifted(one, axis) for one in arrangements], axis, step.outputs[0])]
    if "unstack" in words:
        return _unstacked(step, arrangements[0])
    if words & {"fused_qkv", "fused_qkv_old", "fused_ffn"}:
        return _fused(step, arrangements)
    if len(arrangements) > 1:
        axis = _axis(step, 0, len(arrangements[0].shape))
        _check_sizes(step, [one.shape[axis] for one in arrangements])
        return [arrangement.joined(arrangements, axis, step.outputs[0])]
    if many > 1 or "sizes" in step.statement.lists:
        return _split(step, arrangements[0])
    return arrangements


def _axis(step: Step, default: int, dimensions: int) -> int:
    axis = step.number("axis")
    axis = default if axis is None else axis
    if axis >= dimensions:
        raise StateMismatch(
            f"{step.inputs[0]!r}: there is no dimension {axis}", hint=f"it has {dimensions} dimensions, counted from 0"
        )
    return axis


def _check_sizes(step: Step, lengths: list[int]) -> None:
    """Check the sizes that the statement states for joined tensors."""
    wanted = step.listed("sizes")
    if wanted is not None and list(wanted) != lengths:
        raise StateMismatch(
            f"{step.outputs[0]!r} is made of {lengths}, but sizes= is {list(wanted)}",
            hint=f"write sizes={lengths}, or leave sizes= out",
        )
    if "sizes" in step.statement.texts and len(set(lengths)) > 1:
        raise StateMismatch(
            f"{step.outputs[0]!r} is made of unequal parts: {lengths}", hint=f"write sizes={lengths}, or leave sizes= out"
        )


def _split(step: Step, one: Arrangement) -> list[Arrangement]:
    axis = _axis(step, 0, len(one.shape))
    sizes, many = step.listed("sizes"), len(step.outputs)
    if sizes is None:
        if one.shape[axis] % many:
            raise StateMismatch(
                f"{step.inputs[0]!r}: {one.shape[axis]} in dimension {axis} cannot be split into {many} equal parts",
                hint="give the length of each part: sizes=[…]",
            )
        sizes = (one.shape[axis] // many,) * many
    if len(sizes) != many:
        raise InvalidRequest(
            f"{step.where}: sizes= has {len(sizes)} numbers for {many} tensors",
            hint="give one number for each tensor on the right",
        )
    return arrangement.unbraided(one, axis, 1, sizes, step.inputs[0])


def _unstacked(step: Step, one: Arrangement) -> list[Arrangement]:
    axis = _axis(step, 0, len(one.shape))
    if one.shape[axis] != len(step.outputs):
        raise StateMismatch(
            f"{step.inputs[0]!r} has {one.shape[axis]} in dimension {axis}, not {len(step.outputs)}",
            hint="change axis= or count=; config.json may be another model's",
        )
    arrangement.check_cuts(one, len(step.outputs), step.inputs[0])
    parts = (arrangement.picked(one, axis, i, 1) for i in range(len(step.outputs)))
    return [arrangement.lowered(part, axis) for part in parts]


def _fused(step: Step, arrangements: list[Arrangement]) -> list[Arrangement]:
    axis = _axis(step, 1, len(arrangements[0].shape))
    words, many = step.statement.words, len(step.outputs)
    parts = 2 if "fused_ffn" in words else 3
    if (len(arrangements), many) == (1, 1) and "fused_qkv" not in words:
        taken = _taken_apart(
            step, arrangements[0], axis, parts, _ranks(step, "src_ranks", step.ranks.of_source(step.inputs[0]))
        )
        times = _ranks(step, "dst_ranks", step.ranks.of_target(step.outputs[0]))
        return [arrangement.braided(taken, axis, times, step.outputs[0])]
    if len(arrangements) == parts and many == 1:
        times = _ranks(step, "ranks", step.ranks.of_target(step.outputs[0]))
        if "fused_ffn" not in words:
            _check_heads(step, [one.shape[axis] for one in arrangements], axis)
        times = step.needed("num_key_value_groups") if "fused_qkv" in words else times
        return [arrangement.braided(arrangements, axis, times, step.outputs[0])]
    if len(arrangements) == 1 and many == parts:
        times = _ranks(step, "ranks", step.ranks.of_source(step.inputs[0]))
        times = step.needed("num_key_value_groups") if "fused_qkv" in words else times
        return _taken_apart(step, arrangements[0], axis, parts, times)
    kind = "gate and up" if parts == 2 else "query, key and value"
    raise InvalidRequest(
        f"{step.where}: {kind} become one tensor, or one becomes {kind}",
        hint="as in q, k, v -> qkv, fused_qkv, or gate_up -> gate, up, fused_ffn",
    )


def _ranks(step: Step, name: str, default: int) -> int:
    value = step.number(name)
    return default if value is None else value


def _check_heads(step: Step, lengths: list[int], axis: int) -> None:
    heads, groups = step.needed("num_heads"), step.needed("num_key_value_groups")
    if not heads or not groups or heads % groups:
        raise StateMismatch(
            f"{heads} heads cannot be divided among {groups} key-value groups",
            hint="num_heads= must be a multiple of num_key_value_groups=; config.json may be another model's",
        )
    query, key, value = lengths
    if query % heads or key % groups or query // heads != key // groups or key != value:
        raise StateMismatch(
            f"{lengths} in dimension {axis} are not {heads} heads and twice {groups} key-value heads of one size",
            hint="axis= is 0 for torch's [out, in] and for biases, 1 for Paddle's [in, out]",
        )


def _taken_apart(step: Step, one: Arrangement, axis: int, parts: int, times: int) -> list[Arrangement]:
    """Gate and up, or query, key and value, out of a tensor that has them in `times` pieces."""
    name, length = step.inputs[0], one.shape[axis]
    if parts == 2:
        if times < 1 or length % (2 * times):
            raise StateMismatch(
                f"{name!r}: {length} in dimension {axis} are not gate and up of {times} ranks",
                hint="change ranks= or src_ranks=; axis= is 0 for torch's [out, in], 1 for Paddle's [in, out]",
            )
        return arrangement.unbraided(one, axis, times, [length // 2 // times] * 2, name)
    heads, groups = step.needed("num_heads"), step.needed("num_key_value_groups")
    total = heads + 2 * groups
    if times < 1 or not total or length % total or heads % times or groups % times or heads % max(groups, 1):
        raise StateMismatch(
            f"{name!r}: {length} in dimension {axis} are not {heads} heads and twice {groups} key-value heads in "
            f"{times} pieces",
            hint="axis= is 0 for torch's [out, in] and for biases, 1 for Paddle's [in, out]",
        )
    head = length // total
    return arrangement.unbraided(
        one, axis, times, [heads // times * head, groups // times * head, groups // times * head], name
    )


def _same(step: Step, arrangements: list[Arrangement]) -> list[Arrangement]:
    """Copies of one tensor, or one of several that must be equal."""
    if len(arrangements) == 1:
        return arrangements * len(step.outputs)
    for name, one in zip(step.inputs, arrangements, strict=True):
        if one.shape != arrangements[0].shape:
            raise StateMismatch(
                f"{name!r} has the shape {list(one.shape)}, not {list(arrangements[0].shape)}",
                hint="leave the odd one out of the statement, and drop it with NAME -> _",
                tensor=name,
            )
        if one.sources != (name,) or len(one.moves) != 1 or one.moves[0].axes != tuple(range(len(one.shape))):
            raise InvalidRequest(
                f"{step.where}: `same` applies only to stored tensors, but {name!r} was made from others",
                hint="write this statement before those that change the tensor",
            )
    names = tuple(step.inputs)
    return [arrangements[0]._replace(same=(*arrangements[0].same, names))]


def _rotated(step: Step, one: Arrangement) -> Arrangement:
    """Rows of each head in the other order of rotary embeddings: interleaved pairs, or the first halves before the
    second.
    """
    axis, name, heads = _axis(step, 0, len(one.shape)), step.outputs[0], step.needed("num_heads")
    length = one.shape[axis]
    if not heads or length % (2 * heads):
        raise StateMismatch(
            f"{step.inputs[0]!r}: {length} in dimension {axis} are not {heads} heads of pairs",
            hint="change num_heads= or axis=; config.json may be another model's",
        )
    head, kind = length // heads, step.statement.texts["rotary"]
    arrangement.check_cuts(one, 2 * heads, name)
    rotated = []
    for start in range(0, length, head):
        if kind == "interleaved":
            halves = [arrangement.picked(one, axis, start + half * head // 2, head // 2) for half in (0, 1)]
            rotated.append(arrangement.interleaved(halves, axis, name))
        else:
            pairs = [arrangement.picked(one, axis, start + i, head // 2, 2) for i in (0, 1)]
            rotated.append(arrangement.joined(pairs, axis, name))
    return arrangement.joined(rotated, axis, name)


def _sliced(step: Step, one: Arrangement) -> Arrangement:
    bounds = step.statement.slices or ()
    if len(bounds) > len(one.shape):
        raise StateMismatch(
            f"{step.inputs[0]!r} has {len(one.shape)} dimensions, slice= has {len(bounds)}",
            hint=f"write at most {len(one.shape)} ranges, as in slice=[0:32000, :]",
        )
    for axis, (low, high) in enumerate(bounds):
        begin = 0 if low is None else number(low, step.sizes, step.where)
        end = one.shape[axis] if high is None else number(high, step.sizes, step.where)
        if not begin <= end <= one.shape[axis]:
            raise StateMismatch(
                f"{step.inputs[0]!r} has {one.shape[axis]} in dimension {axis}, not {begin}:{end}",
                hint="change slice=; config.json may be another model's",
            )
        one = arrangement.picked(one, axis, begin, end - begin)
    return one


def _padded(step: Step, one: Arrangement) -> Arrangement:
    axis, size, held = _axis(step, 0, len(one.shape)), step.needed("pad_to"), step.number("size")
    name = step.inputs[0]
    if held is not None and one.shape[axis] != held:
        raise StateMismatch(
            f"{name!r} has {one.shape[axis]} in dimension {axis}, but size= is {held}",
            hint=f"write size={one.shape[axis]}; config.json may be another model's",
            tensor=name,
        )
    if size < one.shape[axis]:
        raise StateMismatch(
            f"{name!r} has {one.shape[axis]} in dimension {axis}, more than pad_to={size}",
            hint="a larger pad_to=, or slice= to cut it",
            tensor=name,
        )
    return arrangement.padded(one, axis, size)


def _reversed(one: Arrangement) -> Arrangement:
    return arrangement.transposed(one, range(len(one.shape))[::-1])


def _permuted(one: Arrangement, order: tuple[int, ...], name: str) -> Arrangement:
    wanted = order or tuple(range(len(one.shape)))[::-1]
    if sorted(wanted) != list(range(len(one.shape))):
        raise StateMismatch(
            f"{name!r} has {len(one.shape)} dimensions, which permute={list(order)} does not order",
            hint=f"write each number from 0 to {len(one.shape) - 1} once",
        )
    return arrangement.transposed(one, wanted)


def _cast(one: Arrangement, dtype: str, name: str) -> Arrangement:
    if one.dtype not in (None, dtype):
        raise InvalidRequest(f"{name!r} would be cast to {one.dtype}, then to {dtype}", hint="cast it once")
    return one._replace(dtype=dtype)
