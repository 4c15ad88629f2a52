"""The powers of beta that Paddle's Adam keeps: β^(t+1) after t steps, multiplied up in float32."""

from __future__ import annotations

from functools import cache, lru_cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

POWERS = ("beta1_pow_acc", "beta2_pow_acc")
STEPS_MAX = 2**22  # that are tabulated


class StepRange(NamedTuple):
    """The numbers of steps after which a power has a value: `first` alone, or, `open`, any from there on."""

    first: int
    open: bool


def power(beta: float, steps: int) -> float:
    """The power after so many steps."""
    products = _products(beta, steps + 1)
    value = products[min(steps, len(products) - 1)]
    for _ in range(0 if _is_settled(products) else steps + 1 - len(products)):
        value *= products[0]
    return float(value)


def steps_of(beta: float, value: float) -> StepRange | None:
    """After how many steps the power is exactly `value`; None if it never is."""
    size = 1024
    while True:
        products = _products(beta, size)
        if value >= products[-1] or size >= STEPS_MAX:
            break
        size *= 4
    descending = -products
    place = int(np.searchsorted(descending, -np.float32(value)))
    if place == len(products) or float(products[place]) != value:
        return None
    last = len(products) - 1
    return StepRange(place, place == last and _is_settled(products))


@lru_cache(maxsize=256)  # most parameters have the same
def steps_of_both(betas: tuple[float, float], values: tuple[float, ...]) -> StepRange | None:
    """After how many steps the powers of both betas have these values; None if they never do."""
    return common(*(steps_of(beta, value) for beta, value in zip(betas, values, strict=True)))


def common(one: StepRange | None, other: StepRange | None) -> StepRange | None:
    """The numbers of steps in both."""
    if one is None or other is None:
        return None
    first = max(one.first, other.first)
    if any(not each.open and each.first != first for each in (one, other)):
        return None
    return StepRange(first, one.open and other.open)


def _products(beta: float, size: int) -> NDArray[np.float32]:
    """β, β², …: at least `size` of them, or up to the last that differs from the one before."""
    return _table(np.float32(beta).item(), 1 << max(size - 1, 1).bit_length())


@cache
def _table(beta: float, size: int) -> NDArray[np.float32]:
    with np.errstate(under="ignore"):
        products = np.multiply.accumulate(np.full(min(size, STEPS_MAX), beta, np.float32), dtype=np.float32)
    same = np.flatnonzero(products[1:] == products[:-1])
    return products[: int(same[0]) + 1] if len(same) else products


def _is_settled(products: NDArray[np.float32]) -> bool:
    return bool(np.float32(products[-1] * products[0]) == products[-1])
