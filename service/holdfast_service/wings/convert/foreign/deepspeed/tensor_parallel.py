"""Joins what tensor-parallel ranks hold, by the rules in the checkpoint, as DeepSpeed's own `ds_to_universal` does.

The rules are patterns of parameters, which the training program gave (`universal_checkpoint_info`): equal on all ranks, cut
by columns, two matrices in one, or with rows that pad the vocabulary. All other parameters are cut by rows.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from holdfast_formats import dtypes
from holdfast_formats.errors import StateMismatch
from holdfast_formats.mapping import optimizer_state
from holdfast_formats.mapping.listing import ForeignPiece, ForeignTensor
from holdfast_formats.region import Box, Shape, intersect
from holdfast_formats.tensors import TensorSpec
from holdfast_service.wings.convert.foreign.deepspeed.files import OF_PARTS, refused

INFO = "universal_checkpoint_info"
_REPLICATED = ("tp_replicated_parameter_patterns", "parameter_to_average_patterns")
_COLUMNS, _HALVES = "parameter_with_row_parallelism_patterns", "parameter_with_2_sub_params_cat_dim_0"
_VOCABULARY, _WORDS = "vocabulary_parameter_patterns", "original_vocab_size"
_NOT_READ = ("parameter_with_sub_params", "affine_map", "autotp_unsupported_parameter_patterns", "expert_parameter_patterns")
_PATTERNS_MAX, _PATTERN_MAX, _REPEATED_MAX = 1024, 512, 2
_NAME_MAX = 512
_SIMPLE = re.compile(r"(?:[\w\-/:.^$+*?]|\\[.\-_d]|\[\w+\])*")  # others may take forever

Part = tuple[Shape, tuple[ForeignPiece, ...]]


class JoiningRules(NamedTuple):
    """Patterns by their kind, the number of words, and parameters of other names: buffers, and those that are tied."""

    patterns: Mapping[str, Sequence[re.Pattern[str]]]
    words: int | None
    buffers: frozenset[str]
    tied: Mapping[str, str]
    path: str

    def fits(self, kind: str, name: str) -> bool:
        return any(pattern.match(name) for pattern in self.patterns.get(kind, ()))

    def is_replicated(self, name: str) -> bool:
        return name in self.buffers or any(self.fits(kind, name) for kind in _REPLICATED)


def rules(model: Mapping[str, Any], path: str) -> JoiningRules:
    """The rules in a file of model states; `StateMismatch` without any, and for those that only DeepSpeed applies."""
    info = model.get(INFO)
    if not isinstance(info, dict):
        raise refused(
            path, f"is one of several tensor-parallel ranks, and has no {INFO!r} that says how to join them", OF_PARTS
        )
    beyond = next((key for key in _NOT_READ if info.get(key)), None)
    if beyond is not None or model.get("frozen_param_shapes"):
        what = f"{INFO}.{beyond}" if beyond else "frozen_param_shapes"
        raise refused(path, f"has {what!r}, by which only DeepSpeed joins tensor-parallel ranks", OF_PARTS)
    patterns = {kind: _patterns(info.get(kind) or [], kind, path) for kind in (*_REPLICATED, _COLUMNS, _HALVES, _VOCABULARY)}
    words = info.get(_WORDS)
    if patterns[_VOCABULARY] and (type(words) is not int or words < 1):
        raise refused(path, f"has no number {INFO}.{_WORDS}", OF_PARTS)
    tied = model.get("shared_params") or {}
    return JoiningRules(patterns, words, frozenset(model.get("buffer_names") or ()), tied, path)


def _patterns(given: Any, kind: str, path: str) -> list[re.Pattern[str]]:
    if not isinstance(given, list) or len(given) > _PATTERNS_MAX:
        raise refused(path, f"has {INFO}.{kind}, which is not a list of patterns", OF_PARTS)
    made = []
    for text in given:
        simple = isinstance(text, str) and len(text) <= _PATTERN_MAX and _SIMPLE.fullmatch(text) is not None
        if not simple or sum(map(text.count, "+*")) > _REPEATED_MAX:
            raise refused(path, f"has a pattern {str(text)[:80]!r} in {INFO}.{kind}, which is not applied", OF_PARTS)
        try:
            made.append(re.compile(text))
        except re.error as error:
            raise refused(path, f"has a pattern {text[:80]!r} in {INFO}.{kind}: {error}", OF_PARTS) from error
    return made


def joined(ranks: Sequence[Iterable[ForeignTensor]], known: JoiningRules) -> Iterator[ForeignTensor]:
    """Each tensor of all ranks. `StateMismatch` for parts that do not fit each other."""
    held = [{tensor.key: tensor for tensor in rank} for rank in ranks]
    if any(one.keys() != held[0].keys() for one in held):
        raise refused(known.path, "and those of the other tensor-parallel ranks have different tensors", OF_PARTS)
    for key in held[0]:
        yield _joined([one[key] for one in held], known)


def _joined(parts: Sequence[ForeignTensor], known: JoiningRules) -> ForeignTensor:
    first = parts[0]
    name, spec = first.spec.name, first.spec
    if spec.group == optimizer_state.GROUP:
        name = name.rpartition("/")[0]
    name = known.tied.get(name, name)
    if len(name) > _NAME_MAX:
        raise refused(known.path, f"has a name of {len(name)} characters: {name[:80]!r}", OF_PARTS)
    if first.decoder is not None:
        if any(one != first for one in parts):
            raise _odd(first, "is another number on other ranks")
        return first
    if known.is_replicated(name):
        if any(one.spec != spec for one in parts):
            raise _odd(first, "has another shape or type on other ranks, which should have the same")
        others = (piece for one in parts[1:] for piece in one.pieces)
        return first._replace(copies=(*(piece for one in parts for piece in one.copies), *others))
    axis, halves = 1 if known.fits(_COLUMNS, name) else 0, 2 if known.fits(_HALVES, name) else 1
    if any(
        one.spec.dtype != spec.dtype
        or len(one.spec.shape) <= axis
        or _without(one, axis) != _without(first, axis)
        or one.spec.shape[axis] % halves
        or bool(one.copies) != bool(first.copies)
        for one in parts
    ):
        raise _odd(first, "has parts on other ranks that do not fit")
    shape, pieces = _cat([(one.spec.shape, one.pieces) for one in parts], axis, halves, spec.dtype)
    copies = _cat([(one.spec.shape, one.copies) for one in parts], axis, halves, spec.dtype)[1]
    if known.fits(_VOCABULARY, name) and known.words is not None and known.words < shape[0]:
        shape = (known.words, *shape[1:])
        pieces, copies = (
            tuple(_moved(one, Box((0,) * len(shape), shape), (0,) * len(shape), spec.dtype)) for one in (pieces, copies)
        )
    return ForeignTensor(TensorSpec(spec.group, spec.name, spec.dtype, shape), pieces, copies)


def _cat(parts: Sequence[Part], axis: int, halves: int, dtype: str) -> Part:
    """Parts one after the other along an axis: first the first halves of all, then the second ones."""
    made, at = list[ForeignPiece](), 0
    for half in range(halves):
        for shape, pieces in parts:
            length = shape[axis] // halves
            box = Box(
                tuple(half * length if n == axis else 0 for n in range(len(shape))),
                tuple(length if n == axis else size for n, size in enumerate(shape)),
            )
            made += _moved(pieces, box, tuple(at if n == axis else 0 for n in range(len(shape))), dtype)
            at += length
    return tuple(at if n == axis else size for n, size in enumerate(parts[0][0])), tuple(made)


def _moved(pieces: Iterable[ForeignPiece], box: Box, at: Shape, dtype: str) -> Iterator[ForeignPiece]:
    """What pieces have in a box of their tensor, as pieces of a tensor in which the box begins `at`."""
    for piece in pieces:
        common = intersect(piece.box, box)
        if common is None:
            continue
        inner = common.within(piece.box).offset
        first = sum(i * step for i, step in zip(inner, piece.strides, strict=True))
        place = Box(tuple(a + o for a, o in zip(at, common.within(box).offset, strict=True)), common.shape)
        yield piece._replace(start=piece.start + first * dtypes.bits(dtype) // 8, box=place)


def _without(tensor: ForeignTensor, axis: int) -> Shape:
    return (*tensor.spec.shape[:axis], *tensor.spec.shape[axis + 1 :])


def _odd(tensor: ForeignTensor, what: str) -> StateMismatch:
    file = tensor.pieces[0].file if tensor.pieces else ""
    return StateMismatch(f"{file}: {tensor.spec.name!r} {what}", hint=OF_PARTS, file=file, tensor=tensor.spec.name)
