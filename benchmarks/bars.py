"""What the project promises of itself beside its peers, as ratios within one run."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from .peers import PEERS
from .summary import LIMITS, Figure, Results, figure

OURS, STAGED, RESTORE = "holdfast", "holdfast-staged", "Holdfast restore, digests checked"
SAVE_S_MAX, SMALL_SAVE_S_MAX = 0.010, 0.050


class Bar(NamedTuple):
    """A promise, what was measured, and whether the median keeps it; `kept` is None when nothing was measured."""

    text: str
    measured: Figure | None
    kept: bool | None


def bars(results: Results, ranks: int, small: bool) -> list[Bar]:
    """`small` is a state of many small tensors, for which only the time of save() is promised."""
    allowed = SMALL_SAVE_S_MAX if small else SAVE_S_MAX
    found = [_at_most(f"save() returns, s, ≤ {allowed}", results.figure(ranks, OURS, "warm.save"), allowed)]
    if small:
        return found
    return found + _saving(results, ranks) + _loading(results, ranks)


def _saving(results: Results, ranks: int) -> list[Bar]:
    others = [spec.name for spec in PEERS.values() if spec.module != "holdfast" and spec.saves]
    behind = [name for name in others if PEERS[name].background]
    memcpy = (LIMITS, "memcpy")
    lost = results.by_round(ranks, OURS, "trained.lost")
    durable = results.by_round(ranks, OURS, "warm.durable")
    return [
        _at_most('wait="staged" ÷ memcpy, ≤ 1.1', results.ratio(ranks, (STAGED, "warm.staged"), memcpy), 1.1),
        _at_most(
            "first staged ÷ warm staged, ≤ 1.3", results.ratio(ranks, (STAGED, "first.staged"), (STAGED, "warm.staged")), 1.3
        ),
        _at_most("time lost ÷ memcpy, ≤ 0.6", results.ratio(ranks, (OURS, "trained.lost"), memcpy), 0.6),
        _at_most("time lost ÷ the best peer's, ≤ 0.5", _against(lost, results, ranks, others, "trained.lost"), 0.5),
        _at_least("disk limit ÷ durable, ≥ 0.9", results.ratio(ranks, (LIMITS, "write"), (OURS, "warm.durable")), 0.9),
        _at_least("disk limit ÷ durable since staged, ≥ 0.9", _since_staged(results, ranks), 0.9),
        _at_most(
            "durable ÷ the best asynchronous peer's, ≤ 0.5", _against(durable, results, ranks, behind, "warm.durable"), 0.5
        ),
        _at_most(
            "durable ÷ safetensors + fsync, < 1",
            results.ratio(ranks, (OURS, "warm.durable"), ("safetensors", "warm.durable")),
            1.0,
        ),
    ]


def _loading(results: Results, ranks: int) -> list[Bar]:
    cold = results.by_round(ranks, OURS, f"load.{RESTORE}.cold")
    loaders = [(peer, way) for peer, way in results.loads(ranks) if peer != OURS]
    fastest: dict[int, float] = {}
    for peer, way in loaders:
        for number, seconds in results.by_round(ranks, peer, f"load.{way}.cold").items():
            fastest[number] = min(seconds, fastest.get(number, seconds))
    ours = (OURS, f"load.{RESTORE}.warm")
    again = (OURS, f"reshard.{RESTORE}.warm")
    by_hand = ("safetensors", "reshard.safetensors, sliced by hand.warm")
    copied = ("safetensors", "load.safetensors load_file + copy.warm")
    return [
        _at_most("warm load ÷ (load_file + copy), ≤ 1.3", results.ratio(ranks, ours, copied), 1.3),
        _at_most("cold load ÷ the fastest peer's, ≤ 1", figure(cold[n] / fastest[n] for n in cold if n in fastest), 1.0),
        _at_most("load from a held slot ÷ memcpy, ≤ 1.3", results.ratio(ranks, (OURS, "held"), (LIMITS, "memcpy")), 1.3),
        _at_most("reshard ÷ safetensors by hand, warm, ≤ 1", results.ratio(ranks, again, by_hand), 1.0),
        _at_least("dcp.load ÷ reshard, warm, ≥ 4", results.ratio(ranks, ("dcp-sync", "reshard.dcp.load.warm"), again), 4.0),
    ]


def _since_staged(results: Results, ranks: int) -> Figure | None:
    """The disk's limit beside what the daemon took, once it had everything."""
    limit = results.by_round(ranks, LIMITS, "write")
    staged, durable = (results.by_round(ranks, OURS, f"warm.{metric}") for metric in ("staged", "durable"))
    return figure(limit[n] / (durable[n] - staged[n]) for n in durable if n in limit and n in staged)


def _against(ours: dict[int, float], results: Results, ranks: int, peers: Iterable[str], metric: str) -> Figure | None:
    """Ours divided by the best peer's of the same run. The best is who has the best median, not the luckiest of each run."""
    medians = {peer: results.figure(ranks, peer, metric) for peer in peers if not results.wrong(ranks, peer)}
    known = {peer: found.median for peer, found in medians.items() if found is not None}
    if not known:
        return None
    best = results.by_round(ranks, min(known, key=lambda peer: known[peer]), metric)
    return figure(ours[number] / best[number] for number in ours if best.get(number))


def _at_most(text: str, measured: Figure | None, limit: float) -> Bar:
    return Bar(text, measured, None if measured is None else measured.median <= limit)


def _at_least(text: str, measured: Figure | None, limit: float) -> Bar:
    return Bar(text, measured, None if measured is None else measured.median >= limit)
