"""Which elements of each parameter the optimizer of this rank steps, and under which name it keeps their state.

All names are those of Paddle 3.3.1. Few of them are public there, so what is not as expected is refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import chain
from typing import Any, NamedTuple

from holdfast.integrations.paddle.fleet.places import ElementRange, slice_of
from holdfast.integrations.paddle.fleet.wrappers import optimizers_inside
from holdfast.integrations.paddle.watch import identical
from holdfast_formats.errors import InvalidRequest

SLICE = "slice@"  # before a parameter's name: the part of it that stage 3 steps
_OVERLAPS = (
    "_broadcast_overlap",
    "_all_gather_overlap_forward",
)  # set after construction: weights change while a save copies


class Stepped(NamedTuple):
    """A parameter of the model as the optimizer of this rank steps it.

    `kept` is the tensor that the optimizer has for it, under whose name it keeps accumulators and masters. `span` are the
    parameter's elements in it, which padding may follow; None if it is the parameter itself. `elsewhere`: other ranks step
    all of it, and this one keeps nothing. `group` is the user's own group of it, if there are any.
    """

    parameter: Any
    kept: Any
    span: ElementRange | None = None
    elsewhere: bool = False
    group: dict[str, Any] | None = None


class SteppedGroup(NamedTuple):
    """A group that the user gave, None for one list of parameters, and its parameters."""

    given: dict[str, Any] | None
    members: list[Stepped]


class OptimizerSharding:
    """How an optimizer of fleet, or a plain one, is divided among ranks. `inner` keeps the state."""

    def __init__(self, optimizer: Any) -> None:
        """Raises `InvalidRequest` for wrappers and options whose state cannot be placed."""
        chain = list(optimizers_inside(optimizer))
        self.inner = chain[-1]
        self._divided = _divided(chain)
        self._slices: dict[str, Any] = {}  # of stage 3, by the parameter's name
        self._known: list[SteppedGroup] = []  # of an optimizer that is not divided
        self._of: list[Any] = []  # the groups and parameters that they were made of

    def groups(self) -> list[SteppedGroup]:
        """All parameters in the optimizer's own groups. Of one that is not divided, the identical list while they stay."""
        groups = list(self._whole_groups())
        listed = groups and isinstance(groups[0], dict)
        if listed and type(self._divided).__name__ == "GroupShardedStage3":
            raise _refused("groups of parameters under stage 3 of sharding", "pass the optimizer a list of parameters")
        of = [*groups, *chain.from_iterable(group["params"] for group in groups)] if listed else groups
        if self._divided is None and self._known and identical(self._of, of):
            return self._known
        in_groups = [(one, one["params"]) for one in groups] if listed else [(None, groups)]
        found = [
            SteppedGroup(given, [self._stepped(one)._replace(group=given) for one in members])
            for given, members in in_groups
        ]
        self._known, self._of = found, of
        return found

    def _whole_groups(self) -> Any:
        if any(getattr(self._divided, name, False) for name in _OVERLAPS):
            raise _refused(
                "weights that ranks send after a step has ended (broadcast or all-gather overlap)", "leave it off"
            )
        kind = type(self._divided).__name__
        if kind == "DygraphShardingOptimizer":
            return self._divided._origin_parameter_list
        if kind == "DygraphShardingOptimizerV2":
            return self._divided._parameter_list
        if kind == "GroupShardedStage3":
            return self._divided._ori_param_groups
        return self.inner._param_groups

    def _stepped(self, parameter: Any) -> Stepped:
        kind = type(self._divided).__name__
        if kind == "DygraphShardingOptimizer":
            return _owned(parameter, self._divided._param2rank, self._divided._sharding_rank)
        if kind == "GroupShardedOptimizerStage2":
            return _owned(parameter, self._divided.param2rank, self._divided._rank)
        if kind == "DygraphShardingOptimizerV2":
            return _sliced(parameter, self._divided)
        if kind == "GroupShardedStage3":
            return _segmented(parameter, self._divided, self._slices)
        return Stepped(parameter, parameter)


def _owned(parameter: Any, owners: Mapping[str, int], rank: int) -> Stepped:
    """Stages 1 and 2: each parameter is one rank's."""
    return Stepped(parameter, parameter, elsewhere=owners[parameter.name] != rank)


def _sliced(parameter: Any, optimizer: Any) -> Stepped:
    """Stage 1 with split_param: a range of a buffer in which each parameter is padded."""
    buffers = optimizer.param2bucket.get(parameter.name)
    if not buffers or len(buffers) > 1:
        raise InvalidRequest(
            f"{parameter.name} is in {len(buffers or ())} communication buffers, which Holdfast does not expect",
            hint="Holdfast is tested with Paddle 3.3.1; report the version that you have",
        )
    view = buffers[0]._sharding_param_grad_view[parameter.name]
    kept, begin, end = optimizer._slice_params[parameter.name], view._param_begin, view._param_end
    if begin < end and not kept._is_initialized():
        view.fill_slice_param(kept)  # as the first step would
    return Stepped(parameter, kept, slice_of(view._index, int(parameter._numel()), begin, end), elsewhere=begin >= end)


def _segmented(parameter: Any, layer: Any, known: dict[str, Any]) -> Stepped:
    """Stage 3: an even part of the padded parameter, or, of a small one, all of it."""
    parts = layer._param2buffer.get(parameter.name)
    if parts is None:
        return Stepped(parameter, parameter)
    begin, end = parts[layer._rank]
    if parameter.name not in known:
        known[parameter.name] = _slice(parameter, end - begin)
    return Stepped(parameter, known[parameter.name], slice_of(0, int(parameter._numel()), begin, end))


def _slice(parameter: Any, size: int) -> Any:
    """A parameter as stage 3 gives the optimizer in a step, without memory."""
    from paddle.base.framework import EagerParamBase

    kept = EagerParamBase(shape=[size], dtype=parameter.dtype, name=f"{SLICE}{parameter.name}")
    kept.stop_gradient = parameter.stop_gradient
    kept.optimize_attr["learning_rate"] = parameter.optimize_attr["learning_rate"]
    return kept


class Weight(NamedTuple):
    """The tensor with this rank's elements of a parameter of the model, and which they are; None if it is the parameter."""

    tensor: Any
    span: ElementRange | None


def weight(name: str, parameter: Any, layer: Any) -> Weight:
    """`layer` is the wrapper of stage 3, if there is one: a rank has a part of each parameter that is not gathered now."""
    part = getattr(parameter, "fw_storage", None)
    if part is None:
        return Weight(parameter, None)
    if layer is None:
        raise InvalidRequest(
            f"{name} is divided by stage 3 of sharding, and the layer in the state is not the one that divides it",
            hint="pass what group_sharded_parallel returned: state(model, optimizer)",
            tensor=name,
        )
    begin, end = layer._param2buffer[parameter.name][layer._rank]
    return Weight(part, slice_of(0, int(parameter._numel()), begin, end))


def _divided(chain: list[Any]) -> Any:
    """The object that knows the division: an optimizer of the chain, the layer of stage 3, or None. Checks all of them."""
    found = None
    for one in chain:
        kind = type(one).__name__
        if kind in ("DygraphShardingOptimizer", "DygraphShardingOptimizerV2"):
            if one.tensor_fusion or (kind == "DygraphShardingOptimizer" and one.comm_overlap):
                raise _refused("tensor_fusion and comm_overlap of sharding_configs", "leave them False, or use split_param")
            if kind == "DygraphShardingOptimizerV2" and one.pp_overlap:
                raise _refused("sharding_comm_overlap of pp_configs", "leave it False")
            found = one
        elif kind == "GroupShardedOptimizerStage2" or hasattr(one, "update_slice"):
            if one.offload:
                raise _refused("group_sharded_parallel(offload=True)", "leave the optimizer on its device")
            found = one if kind == "GroupShardedOptimizerStage2" else one.update_slice.__self__
        elif kind not in ("HybridParallelOptimizer", "MixPrecisionOptimizer") and one is not chain[-1]:
            raise _refused(f"the optimizer {kind}", "use the optimizers of fleet.distributed_optimizer")
    return found


def _refused(what: str, instead: str) -> InvalidRequest:
    return InvalidRequest(f"not supported: {what}, whose parts of the state Holdfast cannot place", hint=instead)
