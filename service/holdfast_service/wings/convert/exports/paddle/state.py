"""A checkpoint in PaddlePaddle's terms: names, the layout of its Linear weights, the state of its AdamW and trainer.

A Linear weight is [in, out] there; moments are `moment1_0` and `moment2_0`; `beta1_pow_acc_0` is β^(t+1) after t steps,
multiplied up in F32.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from typing import Any, NamedTuple, TypeVar

import numpy as np

from holdfast_formats.dtypes import FLOATS
from holdfast_formats.errors import InvalidRequest, NoSuchResource, StateMismatch
from holdfast_formats.mapping import optimizer_state
from holdfast_formats.mapping.box_moves import MappedTensor
from holdfast_formats.mapping.listing import TensorKey
from holdfast_formats.mapping.reading import elements
from holdfast_formats.programs import arrangement
from holdfast_formats.programs.arrangement import Arrangement
from holdfast_formats.tensors import TensorSpec
from holdfast_service.wings.convert.exports import weights
from holdfast_service.wings.convert.exports.ordered_tensors import Arranged, arrange, config_of
from holdfast_service.wings.convert.exports.plan import ExportOptions, LeftOut, other_groups, values_of_weights
from holdfast_service.wings.convert.exports.safetensors_files import KnownTensor
from holdfast_service.wings.convert.exports.source import ExportSource
from holdfast_service.wings.convert.exports.tied_tensors import renamed, said, tied
from holdfast_service.wings.convert.foreign.paddle.transposition import linears

MOMENTS = {"exp_avg": "moment1_0", "exp_avg_sq": "moment2_0"}
STEP = "step"
POWERS = ("beta1_pow_acc_0", "beta2_pow_acc_0")
STEP_MAX = 2**24  # F32 counts exactly up to here
MASTER = optimizer_state.MASTER_GROUP
_USED = frozenset({"model", MASTER, optimizer_state.GROUP})
_HINT = "export only the model with `--as hf`, which PaddleFormers can load"
# What an import from Paddle keeps of its trainer, which goes back as it came.
TRAINER_KEYS = ("paddle_trainer_state", "paddle_scheduler")
KEPT = frozenset(f"extra/{key}" for key in TRAINER_KEYS)
NO_PLACE = "PaddleFormers' trainer cannot store it"

Known = TypeVar("Known")


class Betas(NamedTuple):
    """AdamW's β1 and β2, or powers of them."""

    first: float
    second: float


class ParameterState(NamedTuple):
    """A parameter's moments by Paddle's names, β1^(t+1) and β2^(t+1), and the number of steps t."""

    moments: Mapping[str, MappedTensor]
    powers: Betas
    step: int


class PaddleState(NamedTuple):
    """The contents of an export for Paddle. Masters and moments are in F32 and in Paddle's layout; the model's weights
    are the checkpoint's. Tied parameters have both names.
    """

    model: Mapping[str, MappedTensor]
    masters: Mapping[str, MappedTensor]
    optimizer: Mapping[str, ParameterState]
    layout: PaddleLayout
    notes: tuple[str, ...]
    left_out: tuple[LeftOut, ...]

    @property
    def step(self) -> int | None:
        """Steps of all parameters; None without state, or if they differ."""
        steps = {one.step for one in self.optimizer.values()}
        return steps.pop() if len(steps) == 1 else None


class PaddleLayout(NamedTuple):
    """The matrices that Paddle holds transposed; with `made` none: a program has converted them."""

    config: Mapping[str, Any]
    made: bool

    def of(self, name: str, mapped: MappedTensor) -> MappedTensor:
        """A tensor of the parameter `name` in Paddle's layout; `StateMismatch` for an unknown model class."""
        if self.made or len(mapped.spec.shape) != 2 or not name.endswith(".weight"):
            return mapped
        table = linears(self.config, ())
        if table.pattern is None:
            raise StateMismatch(
                f"Holdfast does not know which weights of {table.model!r} PaddleFormers stores transposed",
                hint="pass --program with statements for this model, such as `(.*)q_proj.weight^T -> …`",
                tensor=name,
            )
        return transposed(mapped) if table.has(name) else mapped


def collect(source: ExportSource, options: ExportOptions, model_too: bool) -> PaddleState:
    """The checkpoint for Paddle. A program makes masters and optimizer; with `model_too` the model's weights as well.

    Raises `StateMismatch` for optimizer state without a place in Paddle's AdamW, and if moments, steps and weights do
    not belong together; `InvalidRequest` for unsupported options.
    """
    if options.layout is not None or options.weights != "model":
        raise InvalidRequest("--layout and --weights do not apply to Paddle checkpoints", hint=_HINT)
    arranged = arrange(source, options.program)
    plain = arranged if model_too or options.program is None else arrange(source, None)
    chosen = weights.choose(source, plain, options)
    layout = PaddleLayout(model_config(source), options.program is not None)
    masters, optimizer = training(source, arranged, layout)
    notes = [*chosen.notes, *(note for note in arranged.notes if note not in chosen.notes)]
    ties = {} if options.program is not None else dict(source.ties("model"))
    notes += said(ties)
    return PaddleState(
        tied(chosen.tensors, ties),
        tied(masters, ties),
        {**optimizer, **{alias: _tied_state(optimizer[t], alias) for alias, t in ties.items() if t in optimizer}},
        layout,
        tuple(notes),
        (*chosen.left_out, *other_groups(source, _USED, NO_PLACE, KEPT), *values_of_weights(source)),
    )


def training(
    source: ExportSource, arranged: Arranged, layout: PaddleLayout
) -> tuple[dict[str, MappedTensor], dict[str, ParameterState]]:
    """Masters and optimizer state of the arranged model. Raises as `collect`."""
    masters: dict[str, MappedTensor] = {}
    for name, master in arranged.group(MASTER).items():
        _check_fits(master, name, arranged.group("model"), MASTER)
        masters[name] = layout.of(name, full(master, TensorKey("master_weights", name)))
    return masters, _optimizer(source, arranged, layout, arranged.group(optimizer_state.GROUP))


def transposed(mapped: MappedTensor) -> MappedTensor:
    spec = mapped.spec
    turned = arrangement.transposed(Arrangement(spec.shape, mapped.moves), range(len(spec.shape))[::-1])
    return mapped._replace(spec=TensorSpec(spec.group, spec.name, spec.dtype, turned.shape), moves=turned.moves)


def power_tensor(group: str, name: str, value: float) -> KnownTensor:
    return KnownTensor(TensorSpec(group, name, "F32", (1,)), np.array([value], "<f4").tobytes())


@cache
def power(beta: float, step: int) -> float:
    """β^(step + 1) as Paddle's multiplication in F32 gives it."""
    factor = np.float32(beta)
    value = factor
    for _ in range(step):
        following = np.float32(value * factor)
        if following == value:  # 0, or the smallest number that the factor no longer changes
            break
        value = following
    return float(value)


def model_config(source: ExportSource) -> Mapping[str, Any]:
    """config.json; `NoSuchResource` if it is missing or no object: Paddle's layout follows from it."""
    config = config_of(source)
    if not config:
        raise NoSuchResource(
            "the checkpoint has no config.json, whose model class decides which weights Paddle transposes",
            hint="pass it as an asset when you save: Checkpointer(assets=…)",
        )
    return config


def full(mapped: MappedTensor, key: TensorKey) -> MappedTensor:
    """Converted to F32, as Paddle's masters and moments are; `StateMismatch` if that loses digits."""
    spec = mapped.spec
    if spec.dtype not in FLOATS or spec.dtype == "F64":
        raise StateMismatch(
            f"{spec.name!r} is {spec.dtype}; Paddle keeps masters and moments in F32", hint=_HINT, tensor=spec.name
        )
    return mapped._replace(spec=TensorSpec(key.group, key.name, "F32", spec.shape))


def _optimizer(
    source: ExportSource, arranged: Arranged, layout: PaddleLayout, state: Mapping[str, MappedTensor]
) -> dict[str, ParameterState]:
    by_parameter: dict[str, dict[str, MappedTensor]] = {}
    documents = source.listing.documents if state else {}
    if any(map(optimizer_state.is_numbered, documents.get(optimizer_state.GROUP, {}).values())):
        raise StateMismatch(
            "the optimizer numbers its parameters, as torch's does, and Paddle's has their names",
            hint=f"{_HINT}; or restore the checkpoint with its model, whose names the next save records, and export that",
        )
    for name, tensor in state.items():
        parameter, _, key = name.rpartition("/")
        if key not in MOMENTS and key != STEP:
            raise StateMismatch(f"Paddle's AdamW cannot store {name!r}", hint=_HINT, tensor=name)
        _check_fits(tensor, parameter, arranged.group("model"), optimizer_state.GROUP)
        by_parameter.setdefault(parameter, {})[key] = tensor
    betas = _of_groups(documents, arranged, lambda group: _pair(group.get("betas")))
    counts = _of_groups(documents, arranged, lambda group: _count(group.get("step")))
    parameters = {}
    for name, held in by_parameter.items():
        missing = [key for key in MOMENTS if key not in held]
        if missing:
            raise StateMismatch(f"the optimizer state of {name!r} lacks {missing[0]!r}", hint=_HINT, tensor=name)
        if name not in betas:
            raise StateMismatch(f"no parameter group of the optimizer has betas for {name!r}", hint=_HINT, tensor=name)
        step = _step(source, held[STEP]) if STEP in held else counts.get(name)
        if step is None:
            raise StateMismatch(f"the optimizer state of {name!r} lacks {STEP!r}", hint=_HINT, tensor=name)
        parameters[name] = _parameter(name, held, betas[name], step, layout)
    return parameters


def _check_fits(mapped: MappedTensor, parameter: str, model: Mapping[str, MappedTensor], group: str) -> None:
    """`StateMismatch` for state that belongs to no weight, or has another shape; step counts have none."""
    if parameter not in model:
        raise StateMismatch(
            f"group {group} has state for {parameter!r}, which the model does not have", hint=_HINT, tensor=parameter
        )
    name, shape = mapped.spec.name, model[parameter].spec.shape
    if mapped.spec.shape != shape and not name.endswith(f"/{STEP}"):
        raise StateMismatch(
            f"{name!r} of group {group} has shape {list(mapped.spec.shape)}, but its weight has {list(shape)}",
            hint=_HINT,
            tensor=name,
        )


def _parameter(name: str, held: Mapping[str, MappedTensor], betas: Betas, step: int, layout: PaddleLayout) -> ParameterState:
    moments = {
        theirs: layout.of(name, full(held[key], TensorKey("optimizer", f"{name}/{theirs}")))
        for key, theirs in MOMENTS.items()
    }
    return ParameterState(moments, Betas(power(betas.first, step), power(betas.second, step)), step)


def _tied_state(state: ParameterState, alias: str) -> ParameterState:
    moments = {kind: renamed(mapped, mapped.spec.group, f"{alias}/{kind}") for kind, mapped in state.moments.items()}
    return state._replace(moments=moments)


def _step(source: ExportSource, mapped: MappedTensor) -> int:
    if np.prod(mapped.spec.shape) == 1:
        value = float(elements(source.files, source.listing.tensors, mapped, 0, 1)[0])
        if 0 <= value <= STEP_MAX and value == int(value):
            return int(value)
    raise StateMismatch(f"{mapped.spec.name!r} is not a valid step count", hint=_HINT, tensor=mapped.spec.name)


def _of_groups(
    documents: Mapping[str, Mapping[str, Any]], arranged: Arranged, of: Callable[[Mapping[str, Any]], Known | None]
) -> dict[str, Known]:
    """A hyper-parameter of every parameter that has it, by its new name; `StateMismatch` for one made of parameters
    with different values.
    """
    knowns: dict[str, Known] = {}
    for group in parameter_groups(documents):
        value, params = of(group), group.get("params")
        if value is None or not isinstance(params, list):
            continue
        for name in (new for old in params if isinstance(old, str) for new in arranged.became(old)):
            if knowns.setdefault(name, value) != value:
                raise StateMismatch(f"{name!r} is made from parameters whose betas or steps differ", hint=_HINT, tensor=name)
    return knowns


def parameter_groups(documents: Mapping[str, Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    found: list[Mapping[str, Any]] = []
    for document in documents.get(optimizer_state.GROUP, {}).values():
        groups = document.get("groups") if isinstance(document, dict) else None
        found += [group for group in groups.values() if isinstance(group, dict)] if isinstance(groups, dict) else []
    return found


def _pair(value: Any) -> Betas | None:
    """Two numbers below 1, a list or tuple in an optimizer's JSON document."""
    listed = value.get("$tuple") if isinstance(value, dict) else value
    if not isinstance(listed, list) or len(listed) != 2:
        return None
    if not all(isinstance(one, int | float) and not isinstance(one, bool) and 0 <= one < 1 for one in listed):
        return None
    return Betas(float(listed[0]), float(listed[1]))


def _count(value: Any) -> int | None:
    """A group's step count, as fused optimizers have it."""
    return value if isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= STEP_MAX else None
