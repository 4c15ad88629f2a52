"""Finds what summaries are made of: a handful of queries for a page of runs, each bounded by the page."""

from __future__ import annotations

import re
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from itertools import islice
from typing import Literal, NamedTuple

import msgspec
from sqlalchemy import Text, case, func, select, type_coerce
from sqlalchemy.orm import Session, aliased

from holdfast_formats.errors import Damaged, NoSuchRun
from holdfast_formats.moments import seconds_of
from holdfast_formats.rest import bodies
from holdfast_formats.rest.observed import RunSummary
from holdfast_service.control.catalog import run_settings
from holdfast_service.control.catalog.catalog import Catalog
from holdfast_service.control.catalog.pages import bad_cursor, bounded, decode_cursor, page
from holdfast_service.control.catalog.run_settings import RunSettings
from holdfast_service.control.checkpoints.run_files import read_run_file
from holdfast_service.control.database.schema import AttemptRow, CheckpointRow, ReplicaRow, RoundRow, RunRow
from holdfast_service.control.database.visible import visible
from holdfast_service.control.insight import run_lives
from holdfast_service.control.insight.attention import weight
from holdfast_service.control.insight.cached_value import Remembered
from holdfast_service.control.insight.facts import NOTHING, UNKNOWN, CheckpointFacts, Facts, Lived, ReplicaCounts, Save
from holdfast_service.control.insight.summary import SAVES, interval, summarise
from holdfast_service.storage import Tier

ATTEMPTS = 64  # the newest attempts, which the time between failures is taken from
POLICY_KNOWN_S = 5.0  # a run's file is read again after so long,
POLICIES_READ = 10  # so many of a page at a time
RANKED_FRESH_S, RANKED_OLD_S = 10.0, 60.0
BATCH = 200
_decode = msgspec.json.Decoder(dict[str, float]).decode
Order = Literal["name", "attention"]
_KEY = re.compile(r"[0-9]{6}[A-Za-z0-9._-]{1,128}")  # see `_key`


class _Policy(NamedTuple):
    read: float  # time.monotonic()
    quota_bytes: int | None
    makes_room: bool


class Summaries:
    """Summaries of the runs of one root. Thread-safe; reads only."""

    def __init__(
        self,
        tier: Tier,
        catalog: Catalog,
        lives: Callable[[], Mapping[str, Lived]] = dict,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """`lives` says what is known of the ranks of runs."""
        self._tier, self._catalog = tier, catalog
        self._lives, self._clock = lives, clock
        self._policies: dict[str, _Policy] = {}
        self._ranked = Remembered(self._rank, RANKED_FRESH_S, RANKED_OLD_S)

    def one(self, run: str) -> RunSummary:
        """The summary of a run; `NoSuchRun`."""
        found = self._of([run])
        if not found:
            raise NoSuchRun(f"the run {run!r} does not exist", hint="`holdfast ls` lists the runs")
        return found[0]

    def page(self, cursor: str | None, limit: int, prefix: str = "", order: Order = "name") -> bodies.Page[RunSummary]:
        """A page of summaries of runs whose name begins with `prefix`: by name, or those first that need attention.

        What stands where by attention is up to a minute old; what is said of the runs of the page is not.
        """
        kind = f"summary-{order}"
        after = decode_cursor(kind, cursor)
        keys = self._keys(after, bounded(limit) + 1, prefix, order)
        cut = page(kind, keys, limit, lambda key: key)
        known = {summary.run: summary for summary in self._of([_run_of(key, order) for key in cut.items])}
        items = [known[run] for run in (_run_of(key, order) for key in cut.items) if run in known]
        return bodies.Page(items=items, next=cut.next)

    def _keys(self, after: str | None, limit: int, prefix: str, order: Order) -> list[str]:
        if order == "attention":
            return self._by_attention(after, limit, prefix)
        wanted = select(RunRow.name).order_by(RunRow.name).limit(limit)
        if prefix:
            wanted = wanted.where(func.substr(RunRow.name, 1, len(prefix)) == prefix)
        if after is not None:
            wanted = wanted.where(RunRow.name > after)
        with self._catalog.database.read() as session:
            return list(session.scalars(wanted))

    def _by_attention(self, after: str | None, limit: int, prefix: str) -> list[str]:
        """The keys of runs that are there and may be seen. The ranking is of all runs, and everybody's."""
        if after is not None and _KEY.fullmatch(after) is None:
            raise bad_cursor()
        ahead = (
            key
            for key in self._ranked.get()
            if (after is None or key > after) and (run := _run_of(key, "attention")).startswith(prefix) and visible(run)
        )
        found: list[str] = []
        with self._catalog.database.read() as session:
            while len(found) < limit and (batch := list(islice(ahead, BATCH))):
                names = [_run_of(key, "attention") for key in batch]
                there = set(session.scalars(select(RunRow.name).where(RunRow.name.in_(names))))
                found += [key for key, name in zip(batch, names, strict=True) if name in there]
        return found[:limit]

    def _rank(self) -> list[str]:
        """A key for every run, which put in order bring those first that need attention most."""
        with self._catalog.database.read() as session:
            names = list(session.scalars(select(RunRow.name)))
        batches = (names[at : at + BATCH] for at in range(0, len(names), BATCH))
        return sorted(_key(summary) for batch in batches for summary in self._of(batch))

    def _of(self, runs: Sequence[str]) -> list[RunSummary]:
        return [summarise(facts) for facts in self.facts(runs)]

    def facts(self, runs: Sequence[str]) -> list[Facts]:
        """What is known now of those of these runs that exist, in their order."""
        if not runs:
            return []
        with self._catalog.database.read() as session:
            columns = (RunRow.name, RunRow.attempt, RunRow.owner, RunRow.archived, RunRow.acknowledged)
            rows = session.execute(select(*columns).where(RunRow.name.in_(runs)))
            rows_by_run = {run: (attempt, RunSettings(own, put, seen)) for run, attempt, own, put, seen in rows}
            held, saves = _held(session, runs), _saves(session, runs)
            declared, copies = _declared(session, runs), _copies(session, runs)
        free, lives, now = self._tier.free_bytes(), self._lives(), self._clock()
        known = [run for run in runs if run in rows_by_run]
        policies = self._of_files(known)
        return [
            Facts(
                run=run,
                attempt=rows_by_run[run][0],
                now=now,
                held=held.get(run, CheckpointFacts()),
                saves=tuple(saves.get(run, ())),
                declared=tuple(declared.get(run, ())),
                copies=copies.get(run, {}),
                free_bytes=free,
                quota_bytes=policies[run].quota_bytes,
                makes_room=policies[run].makes_room,
                life=lives.get(run, UNKNOWN).life,
                since=lives.get(run, UNKNOWN).since,
                settings=rows_by_run[run][1],
            )
            for run in known
        ]

    def states(self, runs: Sequence[bodies.Run]) -> list[bodies.Run]:
        """The same runs, with what they are doing and who answers for them; saves are looked at only of those that train."""
        lives, settings = self._lives(), run_settings.known(self._catalog, [run.name for run in runs])
        training = [run.name for run in runs if lives.get(run.name, UNKNOWN).life == "running"]
        facts = {found.run: found for found in self.facts(training)}
        told: list[bodies.Run] = []
        for run in runs:
            lived, said = lives.get(run.name, UNKNOWN), settings.get(run.name, RunSettings())
            found = facts.get(run.name)
            found = found or Facts(run.name, run.attempt, self._clock(), life=lived.life, since=lived.since, settings=said)
            life, since = run_lives.state_of(found, interval(found.saves)[0])
            more = {"state": lived.life, "life": life, "life_since": since, "owner": said.owner}
            told.append(run.model_copy(update=more))
        return told

    def _of_files(self, runs: Sequence[str]) -> Mapping[str, _Policy]:
        """What the runs' files say. Reading a file costs more than all else of a run, so few are read anew at a time."""
        new = [run for run in runs if run not in self._policies]
        now = time.monotonic()
        old = sorted(runs if not new else set(runs) - set(new), key=lambda run: self._policies[run].read)
        for run in [*new, *(run for run in old[:POLICIES_READ] if now - self._policies[run].read > POLICY_KNOWN_S)]:
            self._policies[run] = self._read_policy(run)
        return self._policies

    def _read_policy(self, run: str) -> _Policy:
        try:
            policy = read_run_file(self._tier, run).in_force
        except Damaged:  # whoever changes it is told
            return _Policy(time.monotonic(), None, False)
        return _Policy(time.monotonic(), policy.quota_bytes, policy.limits)


def _key(summary: RunSummary) -> str:
    errors, warnings = weight(summary)
    return f"{999 - min(errors, 999):03d}{999 - min(warnings, 999):03d}{summary.run}"


def _run_of(key: str, order: Order) -> str:
    return key[6:] if order == "attention" else key


def _held(session: Session, runs: Collection[str]) -> dict[str, CheckpointFacts]:
    """What stands of each run, in one pass over its checkpoints, and its newest one."""
    row, living = CheckpointRow, CheckpointRow.abandoned.is_(False)
    totals = (
        select(
            row.run,
            func.count().label("checkpoints"),
            func.sum(row.bytes).label("bytes"),
            func.max(case((living, row.step))).label("newest"),
            func.max(case((row.verified & living, row.step))).label("newest_verified"),
            func.max(case((row.healthy.is_not(False) & row.damage.is_(None) & living, row.step))).label("newest_healthy"),
            func.count(case((row.damage.is_not(None), row.step))).label("damaged"),
            func.max(case((row.damage.is_not(None), row.step))).label("newest_damaged"),
        )
        .where(row.run.in_(runs))
        .group_by(row.run)
        .subquery()
    )
    sound = aliased(row)
    newest = (row.bytes, row.created, row.healthy, row.same_as, row.nonfinite, sound.created)
    joined = select(totals, *newest).join(row, (row.run == totals.c.run) & (row.step == totals.c.newest))
    joined = joined.outerjoin(sound, (sound.run == totals.c.run) & (sound.step == totals.c.newest_verified))
    found = (tuple(values) for values in session.execute(joined))
    return {run: CheckpointFacts(count, int(size), *others) for run, count, size, *others in found}


def _saves(session: Session, runs: Collection[str]) -> dict[str, list[Save]]:
    """The newest rounds of each run, the newest first."""
    row, behind = RoundRow, aliased(RoundRow)
    oldest = select(behind.id).where(behind.run == RunRow.name).order_by(behind.id.desc()).offset(SAVES - 1).limit(1)
    columns = (row.run, row.step, row.attempt, row.state, row.opened, row.ended, row.code)
    wanted = (
        select(*columns, type_coerce(row.measured, Text))  # decoded below, several times faster than by the column's type
        .select_from(RunRow)
        .join(row, (row.run == RunRow.name) & (row.id >= func.coalesce(oldest.scalar_subquery(), 0)))
        .where(RunRow.name.in_(runs))
        .order_by(row.run, row.id.desc())
    )
    found: dict[str, list[Save]] = defaultdict(list)
    for run, step, attempt, state, opened, ended, code, measured in session.execute(wanted):
        over = None if ended is None else seconds_of(ended)
        phases = _decode(measured) if measured else NOTHING
        found[run].append(Save(step, attempt, state, seconds_of(opened), over, code, phases))
    return found


def _declared(session: Session, runs: Collection[str]) -> dict[str, list[float]]:
    """When the newest attempts of each run were declared, the newest first."""
    columns = select(AttemptRow.run, AttemptRow.declared).join(RunRow, RunRow.name == AttemptRow.run)
    recent = columns.where(AttemptRow.run.in_(runs), AttemptRow.attempt > RunRow.attempt - ATTEMPTS)
    found: dict[str, list[float]] = defaultdict(list)
    for run, declared in session.execute(recent.order_by(AttemptRow.attempt.desc())):
        found[run].append(seconds_of(declared))
    return found


def _copies(session: Session, runs: Collection[str]) -> dict[str, Mapping[str, ReplicaCounts]]:
    row = ReplicaRow
    newest = func.max(case((row.state == "present", row.step)))
    damaged = func.count(case((row.state == "damaged", row.step)))
    wanted = select(row.run, row.tier, newest, damaged).where(row.run.in_(runs)).group_by(row.run, row.tier)
    found: dict[str, dict[str, ReplicaCounts]] = defaultdict(dict)
    for run, tier, step, count in session.execute(wanted):
        found[run][tier] = ReplicaCounts(step, count)
    return dict(found)
