"""Optimizer state of other programs in the form from which a torch trainer's `restore()` resumes.

Tensors are `NAME/exp_avg`, `NAME/exp_avg_sq` and `NAME/step` (F32, no dimension) in group `optim`, in the weights' names and
layout; masters are `NAME` in group `master`. Their document has the key `optimizer`, the usual name in trainers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

GROUP = "optim"
MASTER_GROUP = "master"
KEY = "optimizer"

# Names under which optimizers keep a parameter's full-precision copy in their per-parameter state.
MASTER_KEYS = frozenset(
    {
        "master_param",  # Transformer Engine, apex
        "master_params",
        "master_weight",
        "master_weights",
        "master",
        "fp32_param",
        "fp32_params",
        "fp32_master",
        "fp32_weight",
        "main_param",  # Megatron
        "param_fp32",
        "param_master",
    }
)


def document(groups: Sequence[tuple[Sequence[str], Mapping[str, Any]]]) -> dict[str, Any]:
    """The optimizer's document, for `documents["optim"]["optimizer"]`: the parameter names and hyper-parameters of each
    group. Without hyper-parameters, a trainer keeps its own.
    """
    by_first_name = {names[0]: _ordered({"params": list(names), **hyper}) for names, hyper in groups if names}
    return {
        "$keys": ["groups", "state", "masters", "kinds"],
        "groups": _ordered(by_first_name),
        "state": {},
        "masters": {},
        "kinds": {},
    }


def _ordered(held: dict[str, Any]) -> dict[str, Any]:
    return held if list(held) == sorted(held) else {"$keys": list(held), **held}
