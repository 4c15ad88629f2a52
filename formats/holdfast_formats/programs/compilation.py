"""Compiles a program for one checkpoint: its statements run over the parameters, and related tensors follow.

A parameter has its tensor in group `model`, perhaps others in `master` and `ema`, and optimizer state in `optim`, under its
name, a slash and a word. All follow it; nothing is read.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from holdfast_formats.errors import InvalidRequest, LimitExceeded, StateMismatch
from holdfast_formats.layout.rules.expressions import sizes_for
from holdfast_formats.mapping.box_moves import MappedTensor
from holdfast_formats.mapping.listing import TensorKey, is_of_rank
from holdfast_formats.mapping.optimizer_state import GROUP as OPTIMIZER
from holdfast_formats.mapping.optimizer_state import MASTER_GROUP
from holdfast_formats.programs.compiled import CompiledProgram
from holdfast_formats.programs.document import Program
from holdfast_formats.programs.environment import SHOWN_MAX, Environment
from holdfast_formats.programs.following import FollowingTensors, Plane, Planes
from holdfast_formats.programs.operations import Ranks
from holdfast_formats.region import Shape
from holdfast_formats.tensors import TensorSpec

PARAMETER_GROUPS = ("model", MASTER_GROUP, "ema", "adapter")


def compile_program(
    program: Program,
    specs: Mapping[TensorKey, TensorSpec],
    config: Mapping[str, Any],
    *,
    targets: Mapping[TensorKey, TensorSpec] | None = None,
    ranks: Ranks | None = None,
) -> CompiledProgram:
    """Compile a program for a checkpoint with these tensors and this config.json.

    `targets`, if given, are the required results: each with its shape and, in group `model`, its dtype. Raises
    `StateMismatch` with the statement and the tensor that do not fit, `InvalidRequest` for an invalid program.
    """
    try:
        return _compiled(program, specs, config, targets, ranks or Ranks())
    except (InvalidRequest, LimitExceeded, StateMismatch) as problem:
        kind = type(problem)
        raise kind(f"program {program.name!r}: {problem.detail}", hint=problem.hint, **problem.members) from None


def _compiled(
    program: Program,
    specs: Mapping[TensorKey, TensorSpec],
    config: Mapping[str, Any],
    targets: Mapping[TensorKey, TensorSpec] | None,
    ranks: Ranks,
) -> CompiledProgram:
    planes, others = planes_of(specs)
    parameters = _shapes(planes)
    wanted = None if targets is None else {key.name: spec for key, spec in targets.items() if key.group == "model"}
    around = arranged(program, parameters, sizes_for(program.sizes, config), ranks, wanted)
    compiled_program = FollowingTensors(around, parameters).planes(planes)
    kept = {key: _as_it_is(specs[key]) for key in others}
    doubled = sorted(compiled_program.tensors.keys() & kept.keys())
    if doubled:
        raise StateMismatch(
            f"{doubled[0].name!r} of group {doubled[0].group} already exists",
            hint="give the tensor on the right another name, or drop the one that is there: NAME -> _",
            tensor=doubled[0].name,
        )
    result = compiled_program._replace(program=program.name, tensors={**compiled_program.tensors, **kept})
    if targets is not None:
        check_targets(result, targets)
    return result


def arranged(
    program: Program,
    parameters: Mapping[str, Shape],
    sizes: Mapping[str, int],
    ranks: Ranks,
    wanted: Mapping[str, TensorSpec] | None = None,
) -> Environment:
    """The parameters after all statements; `wanted` are the required results, if known."""
    around = Environment(parameters, sizes, ranks)
    for statement in program.statements:
        around.run(statement, wanted)
    _finish(around, wanted)
    return around


def planes_of(specs: Mapping[TensorKey, TensorSpec]) -> tuple[Planes, list[TensorKey]]:
    """Each kind of tensors of parameters, by the parameters' names; and the keys of all others.

    Without any parameter, the owners of optimizer state count as parameters.
    """
    planes: dict[Plane, dict[str, TensorSpec]] = {}
    others = []
    parameters = {key.name for key in specs if key.group in PARAMETER_GROUPS and not is_of_rank(key.name)}
    for key, spec in specs.items():
        name, _, word = key.name.rpartition("/")
        if key.group in PARAMETER_GROUPS and not is_of_rank(key.name):
            planes.setdefault(Plane(key.group, ""), {})[key.name] = spec
        elif key.group == OPTIMIZER and name and (name in parameters or not parameters):
            planes.setdefault(Plane(OPTIMIZER, f"/{word}"), {})[name] = spec
        else:
            others.append(key)
    return planes, others


def _shapes(planes: Planes) -> dict[str, Shape]:
    """The shape of every parameter: of its weight, else its master, else its largest optimizer state."""
    shapes: dict[str, Shape] = {}
    for group in (*PARAMETER_GROUPS, OPTIMIZER):
        taken: dict[str, Shape] = {}
        for plane, held in planes.items():
            if plane.group != group:
                continue
            for name, spec in held.items():
                if name not in shapes and len(spec.shape) >= len(taken.get(name, ())):
                    taken[name] = spec.shape
        shapes |= taken
    return shapes


def _finish(around: Environment, wanted: Mapping[str, TensorSpec] | None) -> None:
    """Check that all remaining names were made, or pass through `* -> *`; with targets, a used tensor may be one too."""
    if wanted is not None:
        for name in wanted.keys() - around.held.keys():
            spent = around.spent(name)
            if spent is not None and name not in around.dropped:
                around.held[name] = spent
    left = around.unnamed()
    if left and not around.passing:
        names = ", ".join(map(repr, left[:SHOWN_MAX]))
        raise StateMismatch(
            f"{len(left)} tensors are in no statement: {names}{' …' if len(left) > SHOWN_MAX else ''}",
            hint="drop one with name -> _, or keep all others unchanged with * -> *",
            tensor=left[0],
        )


def _as_it_is(spec: TensorSpec) -> MappedTensor:
    key = TensorKey(spec.group, spec.name)
    one = Environment({spec.name: spec.shape}, {}, Ranks()).held[spec.name]
    return MappedTensor(spec, tuple(move._replace(source=key) for move in one.moves))


def check_targets(compiled_program: CompiledProgram, targets: Mapping[TensorKey, TensorSpec]) -> None:
    """`StateMismatch` unless exactly these tensors are made; groups that are not made at all are not checked."""
    groups = {key.group for key in compiled_program.tensors}
    missing = sorted(key for key in targets if key.group in groups and key not in compiled_program.tensors)
    if missing:
        raise StateMismatch(
            f"{_some(missing)} would not be made", hint="add a statement that makes it", tensor=missing[0].name
        )
    over = sorted(
        key for key in compiled_program.tensors if key not in targets and key.group in {one.group for one in targets}
    )
    if over:
        raise StateMismatch(
            f"{_some(over)} would be made, but the target does not have them",
            hint="drop it with a statement NAME -> _",
            tensor=over[0].name,
        )
    for key, mapped in compiled_program.tensors.items():
        wanted = targets.get(key)
        if wanted is not None and wanted.shape != mapped.spec.shape:
            raise StateMismatch(
                f"{key.name!r} would have the shape {list(mapped.spec.shape)}, not {list(wanted.shape)}",
                hint="transpose it with ^T, or pad or cut it with pad_to= or slice=; config.json may be another model's",
                tensor=key.name,
            )
        if wanted is not None and wanted.dtype != mapped.spec.dtype:
            raise StateMismatch(
                f"{key.name!r} would have the dtype {mapped.spec.dtype}, not {wanted.dtype}",
                hint="a statement with dtype= casts it",
                tensor=key.name,
            )


def _some(keys: Iterable[TensorKey]) -> str:
    names = [repr(key.name) for key in keys]
    return ", ".join(names[:SHOWN_MAX]) + (f" and {len(names) - SHOWN_MAX} more" if len(names) > SHOWN_MAX else "")
