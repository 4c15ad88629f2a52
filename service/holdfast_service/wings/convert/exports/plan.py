"""The options of an export, and what it writes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Literal, NamedTuple, get_args

from holdfast_formats.dtypes import FLOATS
from holdfast_formats.errors import InvalidRequest
from holdfast_formats.mapping.listing import ForeignTensor, TensorKey, is_of_rank
from holdfast_formats.mapping.target_files import LiteralBytes, TargetFile
from holdfast_formats.programs.compiled import CompiledProgram
from holdfast_service.wings.convert.exports.source import ExportSource

Weights = Literal["model", "ema", "master"]
WEIGHTS: tuple[str, ...] = get_args(Weights)
_SPELLED = {"FP64": "F64", "FP32": "F32", "FP16": "F16", "HALF": "F16", "FLOAT": "F32", "DOUBLE": "F64"}
_SPELLED |= {name.upper(): dtype for dtype, name in FLOATS.items()}


class ExportOptions(NamedTuple):
    """Options of an export: which weights, in which dtype (a safetensors name), in which layout, and under the names of
    a mapping program, compiled for the checkpoint.
    """

    weights: Weights = "model"
    dtype: str | None = None
    layout: str | None = None
    program: CompiledProgram | None = None


class LeftOut(NamedTuple):
    what: str
    reason: str


class ExportPlan(NamedTuple):
    """The files of an export, and `notes`: sentences about changes and choices. `computed` are tensors that the files are
    made of besides those of the source.
    """

    files: tuple[TargetFile, ...]
    notes: tuple[str, ...] = ()
    left_out: tuple[LeftOut, ...] = ()
    computed: Mapping[TensorKey, ForeignTensor] = {}

    @property
    def bytes(self) -> int:
        return sum(file.bytes for file in self.files)

    @property
    def tensors(self) -> int:
        return sum(len(file.tensors) for file in self.files)


class ExportKind(NamedTuple):
    """A kind of export: its name for `--as`, its description, and its function."""

    name: str
    title: str
    plan: Callable[[ExportSource, ExportOptions], ExportPlan]


def dtype_named(text: str) -> str:
    """The safetensors name of a float dtype: `bf16`, `bfloat16`, `BF16`. `InvalidRequest` for others."""
    upper = text.upper()
    dtype = _SPELLED.get(upper, upper)
    if dtype not in FLOATS:
        raise InvalidRequest(f"weights cannot be exported as {text!r}", hint=f"one of {', '.join(FLOATS.values())}")
    return dtype


def weights_named(text: str) -> Weights:
    for known in get_args(Weights):
        if text == known:
            return known  # type: ignore[no-any-return]
    raise InvalidRequest(f"unknown choice of weights {text!r}", hint=f"one of {', '.join(WEIGHTS)}")


def small_file(name: str, data: bytes) -> TargetFile:
    return TargetFile(name, len(data), (LiteralBytes(0, data),))


def copied_assets(source: ExportSource, without: frozenset[str] = frozenset()) -> list[TargetFile]:
    return [small_file(name, source.read_asset(name)) for name in source.assets if name not in without]


def values_of_weights(source: ExportSource, groups: frozenset[str] = frozenset({"model"})) -> list[LeftOut]:
    """Values of modules beside their weights (`get_extra_state`), which files of weights cannot hold."""
    held = {f"{group}/{key}" for group in groups for key in source.listing.documents.get(group, {})}
    held |= {name for name in source.ranked if name.partition("/")[0] in groups}
    apart = sorted(f"{group}/{name}" for group in groups for name in source.group(group) if is_of_rank(name))
    left_out = [LeftOut("values " + ", ".join(sorted(held)), "the format stores only tensors")] if held else []
    return [*left_out, *(LeftOut(name, "it belongs to a non-tensor value, or to one rank") for name in apart)]


def other_groups(
    source: ExportSource, used: frozenset[str], reason: str, kept: frozenset[str] = frozenset()
) -> list[LeftOut]:
    """Groups that an export cannot hold, and their values that are not tensors, except those `kept` (group/key)."""
    left_out = [
        LeftOut(f"group {group} ({len(named)} tensors)", reason)
        for group, named in ((group, source.group(group)) for group in sorted(source.groups))
        if group not in used and named
    ]
    values = {f"{group}/{key}" for group, held in source.listing.documents.items() for key in held if group not in used}
    values |= {name for name in source.ranked if name.partition("/")[0] not in used}
    values -= kept
    return [*left_out, LeftOut("values " + ", ".join(sorted(values)), reason)] if values else left_out
