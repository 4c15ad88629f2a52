"""Groups of runs: all runs with one tag, such as those of a sweep, with their metrics and how their configs differ."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from math import isfinite
from typing import Literal, NamedTuple

from sqlalchemy import Text, or_, select, type_coerce

from holdfast_formats.errors import NoSuchResource
from holdfast_formats.rest import bodies
from holdfast_formats.rest.flat_values import flat
from holdfast_formats.rest.groups import GroupDetails, GroupMember, MeasuredRun, RunGroup
from holdfast_formats.rest.measurements import RunSummary
from holdfast_service.control.catalog import run_settings
from holdfast_service.control.catalog.catalog import Catalog
from holdfast_service.control.checkpoints import launch_records
from holdfast_service.control.database.schema import CheckpointRow
from holdfast_service.control.insight.run_orders import WantedRuns
from holdfast_service.control.insight.summary_queries import Summaries
from holdfast_service.control.insight.summary_rows import decoded_metrics
from holdfast_service.storage import Records

Mode = Literal["min", "max"]
MEMBERS_MAX = 200
DIFFERS_MAX = 50
VALUE_CHARACTERS_MAX = 200
FIRST_METRIC = "loss"  # is meant where no metric is asked for, if there is one of this name
KEPT_RUNS = 5000


class _Extremes(NamedTuple):
    """A metric of a run's sound checkpoints: its lowest and its highest value, each with its step."""

    low: tuple[float, int]
    high: tuple[float, int]


class _Known(NamedTuple):
    """What was read of a run when it was in the state of `key`: its newest attempt and checkpoint."""

    key: tuple[int, object]
    extremes: Mapping[str, _Extremes]
    config: Mapping[str, str]


class RunGroups:
    """Of one root. Thread-safe; reads only, and sees what the request sees.

    Metrics and configs of a run are read again when it has another attempt or another newest checkpoint.
    """

    def __init__(self, records: Records, catalog: Catalog, summaries: Summaries) -> None:
        self._records, self._catalog, self._summaries = records, catalog, summaries
        self._known: dict[str, _Known] = {}

    def page(self, metric: str, mode: Mode, cursor: str | None, limit: int) -> bodies.Page[RunGroup]:
        """A page of the groups, by tag."""
        tags = run_settings.tags(self._catalog, "", cursor, limit)
        groups = [self._of(one.tag, metric, mode) for one in tags.items]
        return bodies.Page(
            items=[RunGroup(**one.model_dump(include=set(RunGroup.model_fields))) for one in groups], next=tags.next
        )

    def one(self, tag: str, metric: str, mode: Mode) -> GroupDetails:
        """The group with its runs; `NoSuchResource` if no run has this tag."""
        found = self._of(tag, metric, mode)
        if not found.runs:
            raise NoSuchResource(f"no run has the tag {tag!r}", hint="`holdfast tags` lists the tags")
        return found

    def _of(self, tag: str, metric: str, mode: Mode) -> GroupDetails:
        names = self._names(tag)
        shown = self._summaries.some(names[:MEMBERS_MAX])
        known = self._read(names[:MEMBERS_MAX])
        metrics = Counter(name for one in shown for name in one.metrics)
        wanted = metric or (
            FIRST_METRIC if FIRST_METRIC in metrics else next((name for name, _ in metrics.most_common(1)), None)
        )
        differs = _differing([known[one.run].config for one in shown if one.run in known])
        members = [_member(one, known.get(one.run), wanted, mode, differs) for one in shown]
        sign = 1 if mode == "min" else -1
        members.sort(key=lambda one: (one.best is None, sign * one.best.value if one.best else 0.0, one.run))
        newest = [one for one in shown if wanted in one.metrics and one.last_commit is not None and one.newest is not None]
        last = max(newest, key=lambda one: str(one.last_commit), default=None)
        return GroupDetails(
            tag=tag,
            runs=len(names),
            states=dict(Counter(one.life for one in shown)),
            metric=wanted,
            metrics=sorted(metrics),
            best=members[0].best if members else None,
            last=None
            if last is None
            else MeasuredRun(run=last.run, step=last.newest or 0, value=last.metrics[wanted or ""]),
            differs=differs,
            members=members,
            left_out=max(len(names) - MEMBERS_MAX, 0),
        )

    def _names(self, tag: str) -> list[str]:
        names: list[str] = []
        cursor = None
        while True:
            cut = self._summaries.names(cursor, 1000, WantedRuns.parse(failed=False, tags=[tag]))
            names += cut.items
            if (cursor := cut.next) is None:
                return names

    def _read(self, runs: Sequence[str]) -> Mapping[str, _Known]:
        keys = {facts.run: (facts.attempt, facts.held) for facts in self._summaries.facts(runs)}
        known = {run: one for run in keys if (one := self._known.get(run)) is not None and one.key == keys[run]}
        if new := [run for run in keys if run not in known]:
            extremes = self._extremes(new)
            known |= {run: _Known(keys[run], extremes.get(run, {}), self._config(run)) for run in new}
            if len(self._known) > KEPT_RUNS:
                self._known = {}
            self._known |= {run: known[run] for run in new}
        return known

    def _extremes(self, runs: Sequence[str]) -> Mapping[str, Mapping[str, _Extremes]]:
        row = CheckpointRow
        sound = (row.damage.is_(None), row.abandoned.is_(False), or_(row.healthy.is_(None), row.healthy.is_(True)))
        wanted = select(row.run, row.step, type_coerce(row.metrics, Text)).where(row.run.in_(runs), *sound)
        found: dict[str, dict[str, _Extremes]] = {run: {} for run in runs}
        with self._catalog.database.read() as session:
            for run, step, metrics in session.execute(wanted):
                for name, value in decoded_metrics(metrics).items():
                    if isfinite(value):
                        before = found[run].get(name, _Extremes((value, step), (value, step)))
                        found[run][name] = _Extremes(min(before.low, (value, step)), max(before.high, (value, step)))
        return found

    def _config(self, run: str) -> Mapping[str, str]:
        """The config of the newest launch."""
        launches = launch_records.read(self._records, run)
        config = launches[-1].info.get("config") if launches else None
        return flat(config) if isinstance(config, dict) else {}


def _differing(configs: Iterable[Mapping[str, str]]) -> list[str]:
    """The keys with different values, or that some have and others have not; runs without a config do not count."""
    having = [config for config in configs if config]
    names = sorted({name for config in having for name in config})
    return [name for name in names if len({config.get(name) for config in having}) > 1][:DIFFERS_MAX]


def _member(
    summary: RunSummary, known: _Known | None, metric: str | None, mode: Mode, differs: Sequence[str]
) -> GroupMember:
    extremes = None if known is None or metric is None else known.extremes.get(metric)
    value, step = (0.0, 0) if extremes is None else extremes.low if mode == "min" else extremes.high
    config = {} if known is None else {name: known.config[name] for name in differs if name in known.config}
    return GroupMember(
        run=summary.run,
        life=summary.life,
        standing=summary.standing,
        newest=summary.newest,
        best=None if extremes is None else MeasuredRun(run=summary.run, step=step, value=value),
        last=summary.metrics.get(metric) if metric is not None else None,
        config={name: text[:VALUE_CHARACTERS_MAX] for name, text in config.items()},
    )
