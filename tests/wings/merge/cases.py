"""The merges that are compared with mergekit: methods, parameters, and the tensors that go in."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

SEED = 7
TENSOR = "model.layers.1.mlp.up_proj.weight"
SHAPE = (24, 40)


class Case(NamedTuple):
    """One merge by one method: of each model its parameters, and those that all share."""

    method: str
    models: tuple[dict[str, float], ...]
    shared: Mapping[str, Any] = {}
    base: bool = False  # whether a method that needs no base gets one

    @property
    def has_base(self) -> bool:
        return self.base or self.method not in ("linear", "nuslerp", "multislerp", "karcher")

    @property
    def name(self) -> str:
        return f"{self.method}-{'-'.join(f'{key}={value}' for key, value in self.shared.items())}" + "+base" * self.base

    @property
    def exact(self) -> str:
        """What is computed in float64 for the second reference: the sums of L1 norms, or all; empty for none."""
        if self.method in OF_ANGLES:
            return "all"
        return "sums" if self.shared.get("rescale", self.method.startswith(("dare", "della"))) else ""


OF_ANGLES = ("nuslerp", "multislerp", "karcher", "model_stock", "sce")  # in F32, torch's sums differ with each processor
THREE = ({"weight": 1.0}, {"weight": 0.3}, {"weight": -0.2})
PAIR, ALONE = THREE[:2], ({}, {}, {})
DENSE = tuple({**one, "density": density} for one, density in zip(THREE, (0.5, 0.33, 1.0), strict=True))
OUTLIERS = tuple({**one, "gamma": gamma} for one, gamma in zip(DENSE, (0.01, 0.1, 0.01), strict=True))
RANKED = tuple({**one, "epsilon": epsilon} for one, epsilon in zip(DENSE, (0.15, 0.1, 0.2), strict=True))

CASES = (
    Case("linear", THREE),
    Case("linear", THREE, {"normalize": False}),
    Case("slerp", ({},), {"t": 0.3}),
    Case("slerp", ({},), {"t": 0.75}),
    Case("task_arithmetic", THREE),
    Case("task_arithmetic", THREE, {"normalize": True, "lambda": 0.7}),
    Case("ties", DENSE),
    Case("ties", DENSE, {"rescale": True, "lambda": 1.3}),
    Case("ties", DENSE, {"normalize": False}),
    Case("dare_ties", DENSE),
    Case("dare_ties", DENSE, {"rescale": False, "normalize": True}),
    Case("dare_linear", DENSE),
    Case("breadcrumbs", OUTLIERS),
    Case("breadcrumbs_ties", OUTLIERS, {"rescale": True, "normalize": True}),
    Case("della", RANKED),
    Case("della_linear", RANKED, {"lambda": 0.5}),
    Case("della_linear", RANKED, {"rescale": False}),
    Case("nuslerp", PAIR),
    Case("nuslerp", PAIR, {"nuslerp_flatten": False}),
    Case("nuslerp", PAIR, {"nuslerp_flatten": False, "nuslerp_row_wise": True}),
    Case("nuslerp", PAIR, {"nuslerp_flatten": True}, base=True),
    Case("nuslerp", PAIR, {"nuslerp_flatten": False, "nuslerp_row_wise": False}, base=True),
    Case("multislerp", THREE),
    Case("multislerp", THREE, {"normalize_weights": False, "eps": 1e-6}, base=True),
    Case("karcher", ALONE),
    Case("karcher", ALONE, {"max_iter": 2, "tol": 1e-7}),
    Case("model_stock", ALONE),
    Case("model_stock", ALONE, {"filter_wise": True}),
    Case("sce", ALONE),
    Case("sce", ALONE, {"select_topk": 0.3}),
    Case("ram", ALONE, {"epsilon": 0.1}),
    Case("ramplus_tl", ALONE, {"epsilon": 0.1, "r": 0.4, "alpha": 0.7}),
    Case("ramplus_tl", ALONE),
    Case("nearswap", ({},), {"t": 0.03}),
    Case("arcee_fusion", ({},)),
)


def inputs(case: Case) -> list[NDArray[np.float32]]:
    """Models near their base, which is last where the method has one. Some magnitudes of task vectors are equal, unless they
    are ranked: mergekit leaves the order of equal ones to torch, which sorts them in any order.
    """
    chance = np.random.default_rng(5)
    base = chance.standard_normal(SHAPE, np.float32)
    tied = 0 if case.method.startswith("della") else 8
    base[:tied] = np.round(base[:tied] * 8) / 8
    made = []
    for _ in case.models:
        delta = chance.standard_normal(SHAPE, np.float32) * np.float32(0.1)
        delta[:tied] = np.round(delta[:tied] * 32) / 32
        made.append(base + delta)
    return [*made, base] if case.has_base else made
