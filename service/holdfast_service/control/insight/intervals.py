"""How often to save: what a save costs against what a failure costs. Seconds in, seconds out.

J. W. Young, "A first order approximation to the optimum checkpoint interval", Communications of the ACM 17 (9), 1974: √(2CM)
for a cost C of a save and a mean time M between failures. J. T. Daly, "A higher order estimate of the optimum checkpoint
interval for restart dumps", Future Generation Computer Systems 22 (3), 2006, equation 37: the higher-order terms where C is
no longer small against M. Both count as cost the time for which training is blocked; an asynchronous save costs only its
stall.
"""

from __future__ import annotations

from math import sqrt


def young(cost_s: float, failures_s: float) -> float:
    """Young's first-order optimum."""
    return sqrt(2 * cost_s * failures_s)


def daly(cost_s: float, failures_s: float) -> float:
    """Daly's optimum, of training between two saves; M itself where a save costs 2M or more."""
    if cost_s >= 2 * failures_s:
        return failures_s
    ratio = cost_s / (2 * failures_s)
    return young(cost_s, failures_s) * (1 + sqrt(ratio) / 3 + ratio / 9) - cost_s


def recommended(cost_s: float | None, failures_s: float | None, durable_s: float | None) -> float | None:
    """The interval to save at, begin to begin, in seconds; None where cost or failures are unknown.

    Never below the time that a save takes to become durable: storage would fall behind, and saves would be dropped.
    """
    if cost_s is None or failures_s is None or failures_s <= 0 or cost_s < 0:
        return None
    return max(daly(cost_s, failures_s) + cost_s, durable_s or 0.0) or None


def lost(cost_s: float | None, interval_s: float | None, failures_s: float | None, durable_s: float | None) -> float | None:
    """The fraction of time spent on saving and on repeated work; None where cost or interval are unknown.

    A failure costs half an interval on average, and the time for which the newest save was not durable yet. Without failures
    so far, none is assumed.
    """
    if cost_s is None or not interval_s:
        return None
    again = 0.0 if not failures_s else (interval_s / 2 + (durable_s or 0.0)) / failures_s
    return min(cost_s / interval_s + again, 1.0)
