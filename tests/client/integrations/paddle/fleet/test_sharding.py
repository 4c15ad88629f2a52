"""Which optimizers of fleet are refused, and what stages leave a rank."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from holdfast.integrations.paddle.fleet.sharding import OptimizerSharding
from holdfast_formats.errors import InvalidRequest


def wrapper(kind: str, **attributes: Any) -> Any:
    """An optimizer of this class, with Paddle's attributes, around a plain one."""
    inner = SimpleNamespace(_param_groups=[])
    return type(kind, (SimpleNamespace,), {})(_inner_opt=inner, **attributes)


@pytest.mark.parametrize(
    ("optimizer", "named"),
    [
        (wrapper("DygraphShardingOptimizer", tensor_fusion=True, comm_overlap=False), "tensor_fusion"),
        (wrapper("DygraphShardingOptimizer", tensor_fusion=False, comm_overlap=True), "comm_overlap"),
        (wrapper("DygraphShardingOptimizerV2", tensor_fusion=False, pp_overlap=True), "sharding_comm_overlap"),
        (wrapper("GroupShardedOptimizerStage2", offload=True), "offload"),
        (wrapper("HeterParallelOptimizer"), "HeterParallelOptimizer"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_cannot_be_placed_is_refused_by_name(optimizer: Any, named: str) -> None:
    with pytest.raises(InvalidRequest, match=f"not supported: .*{named}"):
        OptimizerSharding(optimizer)


def test_stage_1_leaves_each_rank_its_own_parameters() -> None:
    mine, others = SimpleNamespace(name="linear_0.w_0"), SimpleNamespace(name="linear_1.w_0")
    optimizer = wrapper(
        "DygraphShardingOptimizer",
        tensor_fusion=False,
        comm_overlap=False,
        _origin_parameter_list=[mine, others],
        _param2rank={"linear_0.w_0": 1, "linear_1.w_0": 0},
        _sharding_rank=1,
    )
    ((group, stepped),) = OptimizerSharding(optimizer).groups()
    assert group is None
    assert [(one.parameter, one.elsewhere) for one in stepped] == [(mine, False), (others, True)]


def test_groups_of_parameters_stay_groups() -> None:
    one = SimpleNamespace(name="a")
    groups = [{"params": [one], "weight_decay": 0.1}]
    ((group, stepped),) = OptimizerSharding(SimpleNamespace(_param_groups=groups)).groups()
    assert group is groups[0]
    assert [(each.parameter, each.group) for each in stepped] == [(one, groups[0])]


@pytest.mark.parametrize("overlap", ["_broadcast_overlap", "_all_gather_overlap_forward"])
def test_weights_that_arrive_after_a_step_are_refused_once_that_is_set(overlap: str) -> None:
    optimizer = wrapper("DygraphShardingOptimizerV2", tensor_fusion=False, pp_overlap=False, _parameter_list=[])
    sharding = OptimizerSharding(optimizer)
    assert list(sharding.groups()) == [(None, [])]
    setattr(optimizer, overlap, True)
    with pytest.raises(InvalidRequest, match=r"after a step has ended"):
        list(sharding.groups())
