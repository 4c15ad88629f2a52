"""The summaries of all runs, some seconds old, in the orders in which they are listed.

They are made for every question, and an open overview asks every other second: so what has not changed is kept. What a
summary says of a run that nobody trains changes with what is known of it; all else in it changes by the hour.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from holdfast_formats.rest.observed import Acknowledgement, Attention, RunSummary
from holdfast_service.control.database.visible import sees_all, visible
from holdfast_service.control.insight.acknowledgements import Acknowledgements, AlertKey
from holdfast_service.control.insight.cached_value import Remembered
from holdfast_service.control.insight.facts import Facts
from holdfast_service.control.insight.run_orders import ATTENTION, RunOrder, WantedRuns
from holdfast_service.control.insight.summary import age_s, summarise, training

FRESH_S, OLD_S = 4.0, 10.0
STILL_S = 10.0  # what a summary says of the time alone, of a run that nobody trains, is at most so old
ORDERS_KEPT = 32
BY_NEED = RunOrder(ATTENTION)


class KeptSummaries:
    """Summaries of runs, made again where something is known that was not known. Thread-safe."""

    def __init__(self) -> None:
        self._made: dict[str, tuple[Facts, RunSummary]] = {}

    def of(self, facts: Facts) -> RunSummary:
        """The run's summary; what it says in words of a run that nobody trains is up to `STILL_S` old."""
        kept = self._made.get(facts.run)
        if kept is None or not _says_the_same(kept[0], facts):
            made = summarise(facts)
            self._made[facts.run] = facts, made
            return made
        return kept[1].model_copy(update={"free_bytes": facts.free_bytes, "last_commit_age_s": age_s(facts)})

    def forget_others(self, runs: set[str]) -> None:
        """Forget all runs but these."""
        for run in self._made.keys() - runs:  # others add some meanwhile
            self._made.pop(run, None)


def _says_the_same(before: Facts, now: Facts) -> bool:
    """Whether a summary still says it: nothing has changed but the time and the disk's free bytes."""
    if training(before) or not 0 <= now.now - before.now < STILL_S or _saves_left(now) != _saves_left(before):
        return False
    return now._replace(now=before.now, free_bytes=before.free_bytes) == before


def _saves_left(facts: Facts) -> int:
    return facts.free_bytes // facts.held.newest_bytes if facts.held.newest_bytes else 0


class _Marked(NamedTuple):
    """All summaries, with who has acknowledged what: from which two they were made, and in which orders they stand."""

    made: list[RunSummary]
    known: Mapping[AlertKey, Acknowledgement]
    summaries: list[RunSummary]  # by need
    failed: frozenset[str]  # the runs that failed to start
    keys: dict[RunOrder, list[str]]


class SummaryBoard:
    """Thread-safe. A request sees its runs alone."""

    def __init__(
        self, facts: Callable[[], Sequence[Facts]], acknowledgements: Acknowledgements, kept: KeptSummaries
    ) -> None:
        """`facts` says what is known of all runs."""
        self._facts, self._acknowledgements, self._kept = facts, acknowledgements, kept
        self._marked: _Marked | None = None
        self._summaries = Remembered(self._look, FRESH_S, OLD_S)

    def all(self) -> list[RunSummary]:
        """Those first that need attention, then those that train, then the others by age. What is acknowledged is not half a
        second old.
        """
        found = self._now().summaries
        return found if sees_all() else [summary for summary in found if visible(summary.run)]

    def keys(self, wanted: WantedRuns) -> list[str]:
        """Keys of the wanted runs, in their order."""
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
        return [key for key, run in named if wanted.has(run) and run not in hidden and visible(run)]

    def failed(self) -> frozenset[str]:
        """The runs that failed to start."""
        return self._now().failed

    def renew(self) -> None:
        """The next question is answered with how it is then."""
        self._summaries.renew()

    def _now(self) -> _Marked:
        made, known, last = self._summaries.get(), self._acknowledgements.everything(), self._marked
        if last is not None and last.made is made and last.known is known:
            return last
        failed = frozenset(summary.run for summary in made if summary.life == "failed")
        marked = _Marked(made, known, sorted(seen(made, known), key=BY_NEED.key), failed, {})
        self._marked = marked
        return marked

    def _look(self) -> list[RunSummary]:
        found = self._facts()
        self._kept.forget_others({facts.run for facts in found})
        return [self._kept.of(facts) for facts in found]


def seen(summaries: list[RunSummary], known: Mapping[AlertKey, Acknowledgement]) -> list[RunSummary]:
    """The summaries, with who has acknowledged what; those that were given stay as they are."""
    runs = {key.run for key in known}
    return [_seen(summary, known) if summary.run in runs else summary for summary in summaries]


def key_of(run: str, item: Attention) -> AlertKey:
    """By what an alert of a run is acknowledged."""
    return AlertKey(run, item.code, item.subject or "")


def _seen(summary: RunSummary, known: Mapping[AlertKey, Acknowledgement]) -> RunSummary:
    found = ((item, known.get(key_of(summary.run, item))) for item in summary.attention)
    marked = [item if one is None else item.model_copy(update={"acknowledged": one}) for item, one in found]
    return summary.model_copy(update={"attention": marked})
