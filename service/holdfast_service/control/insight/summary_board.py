"""The summaries of all runs, some seconds old, in their list orders.

An open overview requests them every other second, so unchanged ones are cached. The verdict of a run that is not training
changes with its facts only; everything else in it changes by the hour.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from holdfast_formats.rest.measurements import Acknowledgement, Attention, RunSummary
from holdfast_service.control.database.visible import sees_all, visible
from holdfast_service.control.insight.acknowledgements import Acknowledgements, AlertKey
from holdfast_service.control.insight.cached_value import CachedValue
from holdfast_service.control.insight.facts import Facts
from holdfast_service.control.insight.run_orders import ATTENTION, RunOrder, WantedRuns
from holdfast_service.control.insight.summary import age_s, summarise, training

FRESH_S, OLD_S = 4.0, 10.0
STILL_S = 10.0  # age limit of time-dependent text of a run that is not training
ORDERS_KEPT = 32
BY_NEED = RunOrder(ATTENTION)


class KeptSummaries:
    """Summaries of runs, recomputed where their facts have changed. Thread-safe."""

    def __init__(self) -> None:
        self._made: dict[str, tuple[Facts, RunSummary]] = {}

    def of(self, facts: Facts) -> RunSummary:
        """The run's summary; the texts of a run that is not training are up to `STILL_S` old."""
        kept = self._made.get(facts.run)
        if kept is None or not _says_the_same(kept[0], facts):
            summary = summarise(facts)
            self._made[facts.run] = facts, summary
            return summary
        return kept[1].model_copy(update={"free_bytes": facts.free_bytes, "last_commit_age_s": age_s(facts)})

    def forget_others(self, runs: set[str]) -> None:
        for run in self._made.keys() - runs:  # others add some meanwhile
            self._made.pop(run, None)


def _says_the_same(before: Facts, now: Facts) -> bool:
    """Whether only the time and the disk's free bytes have changed."""
    if training(before) or not 0 <= now.now - before.now < STILL_S or _saves_left(now) != _saves_left(before):
        return False
    return now._replace(now=before.now, free_bytes=before.free_bytes) == before


def _saves_left(facts: Facts) -> int:
    return facts.free_bytes // facts.held.newest_bytes if facts.free_bytes is not None and facts.held.newest_bytes else 0


class _Marked(NamedTuple):
    """All summaries with acknowledgements: their two sources, and their orders."""

    made: list[RunSummary]
    known: Mapping[AlertKey, Acknowledgement]
    summaries: list[RunSummary]  # by need
    failed: frozenset[str]  # the runs that failed to start
    tags: Mapping[str, list[str]]  # by run
    keys: dict[RunOrder, list[str]]


class SummaryBoard:
    """Thread-safe. A request sees only its runs."""

    def __init__(
        self, facts: Callable[[], Sequence[Facts]], acknowledgements: Acknowledgements, kept: KeptSummaries
    ) -> None:
        """`facts` returns the facts of all runs."""
        self._facts, self._acknowledgements, self._kept = facts, acknowledgements, kept
        self._marked: _Marked | None = None
        self._summaries = CachedValue(self._look, FRESH_S, OLD_S)

    def all(self) -> list[RunSummary]:
        """Runs that need attention first, then active ones, then the others by age. Acknowledgements are less than half a
        second old.
        """
        summaries = self._now().summaries
        return summaries if sees_all() else [summary for summary in summaries if visible(summary.run)]

    def keys(self, wanted: WantedRuns) -> list[str]:
        marked, order = self._now(), wanted.order
        known = marked.keys.get(order)
        if known is None:
            known = sorted(order.key(summary) for summary in marked.summaries)
            if len(marked.keys) >= ORDERS_KEPT:
                marked.keys.clear()
            marked.keys[order] = known
        hidden = frozenset() if wanted.failed else marked.failed
        if wanted.every and not hidden and sees_all():
            return known
        named = ((key, order.run_of(key)) for key in known)
        return [
            key for key, run in named if wanted.has(run, marked.tags.get(run, ())) and run not in hidden and visible(run)
        ]

    def failed(self) -> frozenset[str]:
        """The runs that failed to start."""
        return self._now().failed

    def renew(self) -> None:
        """Make the next query read the present state."""
        self._summaries.renew()

    def _now(self) -> _Marked:
        summaries, known, last = self._summaries.get(), self._acknowledgements.everything(), self._marked
        if last is not None and last.made is summaries and last.known is known:
            return last
        failed = frozenset(summary.run for summary in summaries if summary.life == "failed")
        tags = {summary.run: summary.tags for summary in summaries if summary.tags}
        marked = _Marked(summaries, known, sorted(seen(summaries, known), key=BY_NEED.key), failed, tags, {})
        self._marked = marked
        return marked

    def _look(self) -> list[RunSummary]:
        found = self._facts()
        self._kept.forget_others({facts.run for facts in found})
        return [self._kept.of(facts) for facts in found]


def seen(summaries: list[RunSummary], known: Mapping[AlertKey, Acknowledgement]) -> list[RunSummary]:
    """The summaries with their acknowledgements, as copies."""
    runs = {key.run for key in known}
    return [_seen(summary, known) if summary.run in runs else summary for summary in summaries]


def key_of(run: str, item: Attention) -> AlertKey:
    return AlertKey(run, item.code, item.subject or "")


def _seen(summary: RunSummary, known: Mapping[AlertKey, Acknowledgement]) -> RunSummary:
    pairs = ((item, known.get(key_of(summary.run, item))) for item in summary.attention)
    marked = [item if one is None else item.model_copy(update={"acknowledged": one}) for item, one in pairs]
    return summary.model_copy(update={"attention": marked})
