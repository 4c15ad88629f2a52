"""Summaries of runs, and the board of all of them, from the rows of `summary_rows`."""

from __future__ import annotations

import threading
import time
from bisect import bisect_right
from collections.abc import Callable, Collection, Mapping, Sequence
from itertools import islice
from typing import NamedTuple

from sqlalchemy import select

from holdfast_formats import naming
from holdfast_formats.errors import Damaged, NoSuchRun, StorageFailed
from holdfast_formats.rest import bodies
from holdfast_formats.rest.measurements import RunSummary
from holdfast_service.control.catalog.catalog import Catalog
from holdfast_service.control.catalog.listing import named
from holdfast_service.control.catalog.pages import bad_cursor, bounded, decode_cursor, page
from holdfast_service.control.checkpoints.run_files import read_run_file
from holdfast_service.control.database.schema import RunRow
from holdfast_service.control.insight import run_lifecycle
from holdfast_service.control.insight.acknowledgements import Acknowledgements, AlertKey
from holdfast_service.control.insight.attention import DEATH
from holdfast_service.control.insight.copy_lags import CopyLags
from holdfast_service.control.insight.facts import NO_COPIES, UNKNOWN, Facts, ReplicaCounts, RunActivity
from holdfast_service.control.insight.run_figures import RunRows, read
from holdfast_service.control.insight.run_orders import WantedRuns
from holdfast_service.control.insight.summary import interval, nonfinite, summarise
from holdfast_service.control.insight.summary_board import KeptSummaries, SummaryBoard, seen
from holdfast_service.storage import Store

POLICY_KNOWN_S = 5.0  # a run's file is read again after so long, in a directory,
POLICIES_READ = 10  # so many of a page at a time
BATCH = 200
EVERY_RUN = WantedRuns()


Lives = Callable[[Collection[str] | None], Mapping[str, RunActivity]]


def no_lives(_: Collection[str] | None) -> Mapping[str, RunActivity]:
    """Nothing is known of ranks."""
    return {}


class _Policy(NamedTuple):
    read: float  # time.monotonic()
    quota_bytes: int | None
    makes_room: bool


class Summaries:
    """Summaries of the runs of one root. Thread-safe; reads only."""

    def __init__(
        self,
        store: Store,
        catalog: Catalog,
        lives: Lives = no_lives,
        clock: Callable[[], float] = time.time,
        policy_known_s: float = POLICY_KNOWN_S,
        lags: CopyLags | None = None,
    ) -> None:
        """`lives` returns the states of runs' ranks. Pages are up to `fresh_s` old. A run's policy is read again after
        `policy_known_s`, and once it was applied: in a bucket, a page or a scrape is not to cost a request for each run.
        `lags` says how far replicas are behind.
        """
        self._lags = lags
        self._store, self._catalog = store, catalog
        self._lives, self._clock = lives, clock
        self.acknowledgements = Acknowledgements(catalog.database)
        self._policies: dict[str, _Policy] = {}
        self._reading = threading.Lock()
        self._policy_known_s = policy_known_s
        self._kept = KeptSummaries()
        self._board = SummaryBoard(self._of_all, self.acknowledgements, self._kept)

    def one(self, run: str) -> RunSummary:
        run_summaries = self.some([run])
        if not run_summaries:
            raise NoSuchRun(f"the run {run!r} does not exist", hint="`holdfast ls` lists the runs")
        return run_summaries[0]

    def some(self, runs: Sequence[str]) -> list[RunSummary]:
        """The summaries of the existing ones of these runs, as of now."""
        return self._marked([summarise(facts) for facts in self.facts(runs)])

    def _marked(self, run_summaries: list[RunSummary]) -> list[RunSummary]:
        if not any(one.attention for one in run_summaries):
            return run_summaries
        return seen(run_summaries, self.acknowledgements.known([one.run for one in run_summaries]))

    def page(self, cursor: str | None, limit: int, wanted: WantedRuns = EVERY_RUN) -> bodies.Page[RunSummary]:
        """A page of summaries of these runs, in their order.

        Their order, except by name, is some seconds old; the summaries on the page are less than a second old
        (time-dependent text of runs that are not training is up to `STILL_S` old).
        """
        cut = self.names(cursor, limit, wanted)
        summaries = [self._kept.of(facts) for facts in self.facts(cut.items)]
        return bodies.Page(items=self._marked(summaries), next=cut.next)

    def names(self, cursor: str | None, limit: int, wanted: WantedRuns) -> bodies.Page[str]:
        """A page of the names of these runs, as far as they may be seen, in their order."""
        kind = f"summary-{wanted.order.kind}"
        after, most = decode_cursor(kind, cursor), bounded(limit) + 1
        keys = self._by_name(after, most, wanted) if wanted.order.by_name else self._by_value(after, most, wanted)
        cut = page(kind, keys, limit, lambda key: key)
        return bodies.Page(items=[wanted.order.run_of(key) for key in cut.items], next=cut.next)

    def board(self) -> list[RunSummary]:
        """The summaries of all visible runs: those that need attention first, then active ones, then the others by age. They
        are some seconds old; acknowledgements are not.
        """
        return self._board.all()

    def policy_applied(self, run: str) -> None:
        """A run's policy was applied, and may be another one than before."""
        self._policies.pop(run, None)

    def death_seen(self, run: str) -> None:
        """The run's file has a new state of acknowledgement: remove a snooze of the alert."""
        self.acknowledgements.remove([AlertKey(run, DEATH)])
        self.renew()

    def renew(self) -> None:
        """Somebody has changed what is said of a run, and looks whether it is."""
        self._board.renew()

    def _by_name(self, after: str | None, limit: int, wanted: WantedRuns) -> list[str]:
        if after is not None and not naming.is_run_name(after):
            raise bad_cursor()
        names = named(wanted.prefix, wanted.words, wanted.tags).limit(limit)
        if not wanted.failed:
            names = names.where(RunRow.name.not_in(self._board.failed()))
        if wanted.order.descends:
            names = names.order_by(RunRow.name.desc())
            names = names if after is None else names.where(RunRow.name < after)
        else:
            names = names.order_by(RunRow.name)
            names = names if after is None else names.where(RunRow.name > after)
        with self._catalog.database.read() as session:
            return list(session.scalars(names))

    def _by_value(self, after: str | None, limit: int, wanted: WantedRuns) -> list[str]:
        """The keys of runs that are there and may be seen."""
        order = wanted.order
        if after is not None and not order.is_key(after):
            raise bad_cursor()
        keys = self._board.keys(wanted)
        ahead = iter(keys if after is None else keys[bisect_right(keys, after) :])
        names_found: list[str] = []
        while len(names_found) < limit and (batch := list(islice(ahead, BATCH))):
            names = [order.run_of(key) for key in batch]
            present = set(self._existing(names))
            names_found += [key for key, name in zip(batch, names, strict=True) if name in present]
        return names_found[:limit]

    def _existing(self, names: list[str]) -> Collection[str]:
        with self._catalog.database.read() as session:
            return session.scalars(select(RunRow.name).where(RunRow.name.in_(names))).all()

    def _of_all(self) -> list[Facts]:
        with self._catalog.database.read() as session:
            rows = read(session)
        return self._facts(sorted(rows), rows, self._lives(None))

    def facts(self, runs: Sequence[str]) -> list[Facts]:
        """The present facts of the existing ones of these runs, in their order."""
        if not runs:
            return []
        with self._catalog.database.read() as session:
            rows = read(session, runs)
        return self._facts([run for run in runs if run in rows], rows, self._lives(runs))

    def _facts(self, runs: Sequence[str], rows: Mapping[str, RunRows], lives: Mapping[str, RunActivity]) -> list[Facts]:
        free, now = self._store.free_bytes(), self._clock()
        policies = self._of_files(runs)
        return [
            Facts(
                run=run,
                attempt=rows[run].attempt,
                now=now,
                held=rows[run].figures.held,
                saves=rows[run].figures.saves,
                declared=rows[run].figures.declared,
                copies=self._copies(run, rows[run].figures.copies),
                free_bytes=free,
                quota_bytes=policies[run].quota_bytes,
                makes_room=policies[run].makes_room,
                life=lives.get(run, UNKNOWN).life,
                since=lives.get(run, UNKNOWN).since,
                settings=rows[run].settings,
                keep_last=rows[run].keep_last,
                warned=rows[run].figures.warned,
            )
            for run in runs
        ]

    def _copies(self, run: str, counts: Mapping[str, ReplicaCounts]) -> Mapping[str, ReplicaCounts]:
        """With how far each replica is behind, also those without a copy of the run."""
        lags = {} if self._lags is None else self._lags.seen_of(run)
        behind = {name: counts.get(name, NO_COPIES)._replace(lag=lag) for name, lag in lags.items()}
        return {**counts, **behind} if behind else counts

    def runs(self, names: Sequence[str]) -> list[bodies.Run]:
        """Those of these runs that exist, in their order, with what they are doing."""
        found: list[bodies.Run] = []
        for facts in self.facts(names):
            life, since = run_lifecycle.state_of(facts, interval(facts.saves)[0])
            found.append(
                bodies.Run(
                    name=facts.run,
                    attempt=facts.attempt,
                    keep_last=facts.keep_last,
                    checkpoints=facts.held.checkpoints,
                    newest=facts.held.newest_sound,
                    bytes=facts.held.bytes,
                    state=facts.life,
                    life=life,
                    life_since=since,
                    standing=run_lifecycle.standing(life, nonfinite(facts.held)),
                    owner=facts.settings.owner,
                    tags=list(facts.settings.tags),
                )
            )
        return found

    def _of_files(self, runs: Sequence[str]) -> Mapping[str, _Policy]:
        """The settings in the runs' files. Reading a file costs more than all else of a run, so few are read again at a
        time; in a bucket, which may not answer, beside what asks for them.
        """
        found, now = {run: one for run in runs if (one := self._policies.get(run)) is not None}, time.monotonic()
        new = [run for run in runs if run not in found]
        old = sorted(found, key=lambda run: found[run].read)
        again = [run for run in old[:POLICIES_READ] if now - found[run].read > self._policy_known_s]
        beside = again if self._policy_known_s > POLICY_KNOWN_S else []
        for run in [*new, *([] if beside else again)]:
            self._policies[run] = found[run] = self._read_policy(run)
        if beside and self._reading.acquire(blocking=False):
            threading.Thread(target=self._read_again, args=(beside,), name="holdfast-policies", daemon=True).start()
        return found

    def _read_again(self, runs: Sequence[str]) -> None:
        try:
            for run in runs:
                self._policies[run] = self._read_policy(run)
        finally:
            self._reading.release()

    def _read_policy(self, run: str) -> _Policy:
        try:
            policy = read_run_file(self._store.files, run).in_force
        except (Damaged, StorageFailed) as error:  # damage is reported when the file is changed
            known = self._policies.get(run) if isinstance(error, StorageFailed) else None
            return (known or _Policy(0.0, None, False))._replace(read=time.monotonic())
        return _Policy(time.monotonic(), policy.quota_bytes, policy.limits)
