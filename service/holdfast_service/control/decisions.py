"""The interface between the daemon and control: the calls with which it asks what to do. No tensor bytes here.

Saves never wait for the catalog: attempts, saves and directories are known here, and the catalog is updated later.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any, Literal, cast

from holdfast_formats import naming
from holdfast_formats.disk.manifest import Manifest
from holdfast_formats.errors import (
    AlreadyCommitted,
    CatalogUnavailable,
    CheckpointError,
    Damaged,
    GenerationDropped,
    NoSuchResource,
    NotFound,
    RoundAborted,
    StorageFailed,
)
from holdfast_formats.lineage import NO_INTENT, Intent
from holdfast_formats.lineage import Key as Launch
from holdfast_formats.moments import utc_now
from holdfast_formats.naming import Place
from holdfast_formats.rest import bodies
from holdfast_formats.rest.observed import Life
from holdfast_formats.rest.operations import Level
from holdfast_formats.rest.statistics import Statistics
from holdfast_formats.staging.blocks import SharePlan
from holdfast_formats.staging.joint import JointlyStaged
from holdfast_formats.staging.part import DecodedPart
from holdfast_formats.staging.plan import WritePlan
from holdfast_formats.staging.slot_table import SlotTable
from holdfast_service.control import root_care
from holdfast_service.control.catalog import salvage
from holdfast_service.control.catalog.attempts import Attempts, Member
from holdfast_service.control.catalog.book import Book
from holdfast_service.control.catalog.catalog import Catalog
from holdfast_service.control.catalog.events import Events
from holdfast_service.control.catalog.rounds import Rounds
from holdfast_service.control.catalog.shared_attempts import SharedAttempts
from holdfast_service.control.catalog.statistics import StatisticsStore
from holdfast_service.control.checkpoints import commit, planner, replicas, roots, share_planner
from holdfast_service.control.checkpoints.commit import About
from holdfast_service.control.checkpoints.imports import Imports
from holdfast_service.control.checkpoints.readers import CHECK, Readers
from holdfast_service.control.checkpoints.replicas import RepairBook, ReplicaBook
from holdfast_service.control.checkpoints.run_files import RunFiles
from holdfast_service.control.cluster.cluster import Cluster, changing, deciding, repairing, replica_duty
from holdfast_service.control.findings.checks import Findings
from holdfast_service.control.findings.health import HealthRecords
from holdfast_service.control.findings.shared_checks import SharedChecks
from holdfast_service.control.insight.facts import UNKNOWN, Lived
from holdfast_service.control.launches.choosing import Choices, Known, RestoreQuestion, stands
from holdfast_service.control.launches.standing import Standing
from holdfast_service.control.retention.admission import Admission
from holdfast_service.control.retention.empty_runs import EmptyRuns
from holdfast_service.control.retention.rotation import Rotation
from holdfast_service.control.root_care import RootCare
from holdfast_service.storage import PosixStore, Store, Tier

log = logging.getLogger(__name__)

ASK_S = 10.0
SETTLE_POLL_S = 0.2
NAMES_S = 90.0  # clients of network file systems remember for no longer, unless told to, which names there are
LOOK_S = 2.0  # how long the catalog is asked which rounds were sealed


class Decisions:
    """Attempts, saves, commits and removals of one root. Thread-safe.

    In a `cluster`, daemons of other nodes may serve the same root with the same catalog.
    """

    def __init__(
        self, tier: Tier, catalog: Catalog, keep_last: int | None, node: str = "node", cluster: Cluster | None = None
    ) -> None:
        self._tier, self._catalog, self._keep_last, self._cluster = tier, catalog, keep_last, cluster
        self.store: Store = PosixStore(tier)
        catalog.node = self._node = node
        self.book = Book(catalog.database, self._returned)
        self.attempts = Attempts(tier) if cluster is None else SharedAttempts(tier, cluster)
        self.events = Events(catalog.database, node, utc_now)
        self._rounds = Rounds(catalog, self.book, utc_now)
        self.statistics = StatisticsStore(catalog.database)
        self._health = HealthRecords(tier, self.statistics, self.events)
        self._files = RunFiles(tier)
        self.readers = Readers()
        self.rotation = Rotation(self.store, catalog, self._files, self.readers)
        self.rotation.events = self.events
        self.findings = Findings(catalog, self.events, self.book, utc_now, self.rotation.due)
        self.empty_runs = EmptyRuns(tier, catalog, self.attempts, self._files, self.events)
        self._admission = Admission(tier, catalog, self._files, self.rotation, self.book.ask)
        self.standing = Standing(self.store, catalog, self.book, self.findings)
        known = Known(self._health, self.findings, self.readers, self.standing.left)
        self._absences = roots.Absences(0.0 if cluster is None else NAMES_S)
        self._choices = Choices(self.store, catalog, self.attempts, self.book, known, self._tell)
        self._choices.absences = self._absences
        self.claim: Callable[[], None] = lambda: None  # raises where the catalog that is back is another root's
        self._started = False  # what an earlier daemon left in the catalog was put right
        self.care: RootCare | None = None  # of a root that several nodes serve
        self.shared_checks: SharedChecks | None = None
        if cluster is not None:
            self._share(cluster)

    def _share(self, cluster: Cluster) -> None:
        self.care = RootCare(self._tier, self.store, self._catalog, cluster, self.events, self.rotation.due)
        self.shared_checks = SharedChecks(cluster.membership, self.findings)
        self._files.elsewhere = lambda run: cluster.locks.locked(changing(run))
        self.rotation.elsewhere = lambda run: cluster.locks.locked(deciding(run))
        self.readers.announce, self.readers.elsewhere = cluster.holds.announce, cluster.holds.elsewhere
        cluster.holds.here = self.readers.places

    def close(self) -> None:
        """Remove what is due, write the remaining records to the catalog, stop."""
        self.rotation.close()
        self.book.close()

    def recover(self, adopt: Callable[[], Collection[int]] = tuple) -> None:
        """At start: remove leftovers that were never committed, update the catalog from the directories, end old saves.

        Between the two, `adopt` takes over what an earlier daemon left in memory. Without a catalog only its part waits.
        """
        if self._cluster is None:  # else others may be writing there: see `RootCare`
            root_care.sweep(self.store)
        self._started = False
        self.book.unknown()
        while not self.book.settle() and self.book.trouble is None:
            pass
        adopt()
        why = "the daemon ended before this save was complete"
        self.book.tell(
            "which saves ended with the last daemon",
            lambda: self._catalog.abort_open_rounds(utc_now(), "round-aborted", why, keep=self._rounds.ids()),
        )

    def writers(self) -> set[str]:
        """The nodes whose daemons are up, this one among them."""
        members = () if self._cluster is None else self._cluster.membership.members()
        return {self._node, *(member.name for member in members if member.live)}

    def overtaken(self, runs: Collection[str]) -> Mapping[str, int]:
        """The newest attempts of these runs, of those that have begun on another node since this was last asked."""
        return self.attempts.refresh(runs) if isinstance(self.attempts, SharedAttempts) and runs else {}

    def settled_elsewhere(self, run: str, wait_s: float) -> bool:
        """Wait until no other node writes a save of this run of which all ranks have sealed; False when it takes longer."""
        limit = time.monotonic() + wait_s
        while self._is_writing_elsewhere(run):
            if time.monotonic() >= limit:
                return False
            time.sleep(SETTLE_POLL_S)
        return True

    def _is_writing_elsewhere(self, run: str) -> bool:
        if not isinstance(self.attempts, SharedAttempts) or self._cluster is None:
            return False
        try:
            return self.attempts.sealed_elsewhere(run) or self._cluster.rounds.is_writing(run)
        except CatalogUnavailable:
            return False

    def _returned(self) -> None:
        """The catalog is there, for the first time or again: it may be an older one, another one, or one without rows."""
        database = self._catalog.database
        if database.unsound:
            salvage.mend(database)
        self.claim()
        if not self._started:
            self.events.skip_lost_ids()
        self._rounds.look_again()
        for run, step, problem in roots.reconcile(self.store, self._catalog, absences=self._absences):
            log.error("cannot read %s@%s: %s", run, step, problem.detail)
        self.attempts.merge(self._catalog.declared())
        self._catalog.note_attempts(self.attempts.known())
        if self._started:
            return
        for found in self._catalog.settle_committed_rounds(utc_now()):
            text = f"step {found.step} is committed; the daemon ended before it could report it"
            self.events.record("checkpoint-committed", text, found.run, found.step)
        self._started = True

    def hello(  # noqa: PLR0913 - each is one thing that a rank says
        self,
        run: str,
        launch: str,
        world: int,
        keep_last: int | None,
        rank: int = 0,
        session: str = "",
        take_over: bool = False,
    ) -> int:
        """The attempt number of this launch; the first rank of a launch declares it.

        `keep_last` is the run's policy until one is set. New to a run, it removes nothing committed before this launch.
        """
        naming.check_run(run)
        self._learn_attempts()
        member = Member(rank, session, world, take_over)
        attempt, new = self.attempts.declare(run, launch, lambda: self._rounds.complete(run), member)
        if new:
            at = utc_now()
            self.book.tell(
                f"that attempt {attempt} of {run} has started",
                lambda: self._catalog.declare_attempt(run, launch, world, at, attempt),
            )
            text = f"attempt {attempt} has started with {world} {'rank' if world == 1 else 'ranks'}"
            self._tell("attempt-declared", text, run, attempt=attempt, world=world, launch=launch)
        try:
            before = self._files.read(run)
            wanted = keep_last if keep_last is not None else before.keep_last or self._keep_last
            since = before.keep_last_since if keep_last in (None, before.keep_last) else attempt
            now = {"keep_last": wanted, "keep_last_since": since}
            file = self._files.change(run, lambda file: file.model_copy(update=now))
            if file.policy is not None and keep_last not in (None, file.policy.last):
                log.info("%s: keep_last=%s of the trainer is ignored: the run has a retention policy", run, keep_last)
            if new or file != before:
                last = file.in_force.last
                self.book.tell("how much is kept", lambda: self._catalog.set_keep_last(run, last))
        except Damaged as error:  # training goes on; nothing of the run is removed until its file is mended
            log.error("%s", error)
        except CatalogUnavailable as away:  # a rank that comes back: what it asks for was in force before
            log.warning("keep_last=%s of %s is not in force yet: %s", keep_last, run, away.detail)
        self.standing.learn(run)
        return attempt

    def admit_run(self, run: str, tenant: str) -> None:
        """`LimitExceeded` for a new run of a caller who has too many runs without a save."""
        self.empty_runs.admit(run, tenant)

    def denied(self, run: str, keep_last: int | None, owner: bool) -> tuple[str, ...]:
        """The notice for a rank whose `keep_last` is not in force without an admin."""
        if owner or keep_last is None:
            return ()
        try:
            held = self._files.read(run).in_force.last
        except Damaged:
            held = None
        if held == keep_last:
            return ()
        holds = "keeps all checkpoints" if held is None else f"keeps the last {held}"
        return (
            f"keep_last={keep_last} is not in force: the run {holds} until an admin runs `holdfast keep {run} --last N`",
        )

    def _learn_attempts(self) -> None:
        """In a root that has no file of them yet, or has lost it, the catalog knows which attempts were declared."""
        if self.attempts.complete:
            return
        try:
            self.attempts.merge(self.book.ask(self._catalog.declared, ASK_S))
        except CatalogUnavailable:
            if roots.runs(self._tier):
                raise
            self.attempts.merge({})  # nothing was ever saved here

    def lives(self, here: Mapping[str, tuple[int, Life]]) -> dict[str, Lived]:
        """What is known of the ranks of all runs, with what is known `here` of those that came to this daemon."""
        found = {run: (known.attempt, Lived(known.life, known.since)) for run, known in self.attempts.known().items()}
        if self._cluster is not None:
            found |= {run: lived for run, lived in self._noted().items() if lived[0] > found.get(run, (0, UNKNOWN))[0]}
        for run, (attempt, life) in here.items():
            if run in found and found[run][0] == attempt and found[run][1].life != life:
                found[run] = attempt, Lived(life)
        return {run: lived for run, (_, lived) in found.items()}

    def _noted(self) -> dict[str, tuple[int, Lived]]:
        """What other nodes have noted of runs."""
        try:
            noted = self._catalog.lives()
        except CatalogUnavailable:
            return {}
        return {run: (attempt, Lived(cast(Life, life), since)) for run, (attempt, life, since) in noted.items()}

    def running(self) -> dict[str, int]:
        """The attempts whose ranks were here when it was last known."""
        return {run: known.attempt for run, known in self.attempts.known().items() if known.life == "running"}

    def became(self, run: str, attempt: int, life: Life) -> None:
        """Record that the ranks of an attempt are running, ended or lost; durable, so that the next daemon knows it."""
        at = utc_now()
        if not self.attempts.became(run, attempt, life, at):
            return
        since = None if life == "running" else at
        if self._cluster is not None:  # other nodes show it too
            self.book.tell("whether a run's ranks live", lambda: self._catalog.note_life(run, attempt, life, since))
        if life != "running":
            how = "has ended" if life == "ended" else "is lost: its ranks disappeared without closing their Checkpointer"
            level: Level = "info" if life == "ended" else "error"
            self._tell(f"run-{life}", f"attempt {attempt} {how}", run, level=level, attempt=attempt)

    def declared(self, run: str, launch: str, rank: int = 0, session: str = "", world: int = 0) -> bool:
        """Whether this launch has an attempt already, which this rank, spoken for by this checkpointer, can join."""
        return self.attempts.of(run, launch, Member(rank, session, world)) is not None

    def begin(
        self, run: str, step: int, attempt: int, world: int, intent: Intent = NO_INTENT, *, quiet: bool = False
    ) -> int:
        """Start the save of this step, or find it; `StaleAttempt` (I6) or `AlreadyCommitted` if it is not allowed. `quiet`:
        its lowest rank is on another node, which records how it goes on.
        """
        naming.check_run(run)
        naming.check_step(step)
        self.attempts.refuse_older(run, attempt)
        self._refuse_committed(run, step, attempt, intent)
        return self._rounds.open(run, step, attempt, world, quiet)

    def _refuse_committed(self, run: str, step: int, attempt: int, intent: Intent) -> None:
        """`AlreadyCommitted` where the step may not be saved, as far as can be seen now: to publish it is to look again."""
        try:
            self.standing.place(run, step, attempt, intent)
        except AlreadyCommitted:
            raise
        except CheckpointError as error:  # training does not wait for storage, nor fail by it
            log.warning("cannot tell yet whether %s@%s may be saved: %s", run, step, error.detail)

    def resume(self, run: str, step: int, attempt: int, world: int, intent: Intent | None = None) -> int:
        """Continue a save of an earlier daemon, or start it; refuses like `begin`, if the `intent` is known.

        A save that all ranks had sealed continues although a newer attempt waits for its end (I6).
        """
        naming.check_step(step)
        self.attempts.saw(run, attempt)
        if attempt == self.attempts.newest(run) or not self._was_complete(run, step, attempt):
            self.attempts.refuse_older(run, attempt)
        if intent is not None:
            self._refuse_committed(run, step, attempt, intent)
        return self._rounds.open(run, step, attempt, world)

    def _was_complete(self, run: str, step: int, attempt: int) -> bool:
        if self.attempts.owes(run, step, attempt):
            return True
        try:
            return self.book.ask(lambda: self._catalog.is_sealed(run, step, attempt), LOOK_S)
        except CatalogUnavailable as away:
            log.info("cannot tell whether %s@%s was complete: %s", run, step, away.detail)
            return False

    def committed(self, run: str, step: int) -> Launch | None:
        """The attempt that committed this step, and its turn; None when it is no checkpoint."""
        return self.standing.launch(run, step)

    def sealed(self, round_id: int, ranks: int) -> None:
        self._rounds.seal(round_id, ranks)

    def plan(self, tables: Sequence[SlotTable]) -> WritePlan:
        return planner.plan(tables)

    def plan_share(self, parts: Sequence[tuple[str, DecodedPart]], me: int) -> SharePlan:
        return share_planner.plan_share(parts, me)

    def admit(self, plan: WritePlan) -> None:
        """Whether what is planned fits; `QuotaExceeded` or `NoSpace` with the numbers, before a byte of it is written."""
        self._admission.admit(plan)

    def commit(
        self,
        round_id: int,
        plan: WritePlan,
        measured: Mapping[str, float] | None = None,
        staged: JointlyStaged | None = None,
    ) -> Manifest:
        """Publish, then record, with what was `measured` so far; when this returns the checkpoint may be announced.

        `staged` is what several nodes have written together. The directory is the truth: a failure to record does not undo
        it; the next scan of the directories repairs that.
        """
        began = time.monotonic()
        try:
            self.attempts.keep_speakers(plan.run)
        except CheckpointError as error:  # their loss only lets a launch's name be used twice
            log.warning("cannot write who speaks for the ranks of %s: %s", plan.run, error.detail)
        try:
            made = self._publish(plan, staged)
        except StorageFailed as error:
            if error.members.get("outcome") == "unknown":
                self.book.tell(
                    "which checkpoints are in the directories",
                    lambda: roots.reconcile(self.store, self._catalog, absences=self._absences),
                )
            raise
        known = {**(measured or {}), "commit_s": time.monotonic() - began, "bytes": float(made.bytes)}
        self.standing.made(made)
        self.findings.made(made.run, made.step)
        self.book.tell(f"that the checkpoint {made.run}@{made.step} is committed", lambda: self._list(made))
        self._rounds.end(round_id, "committed", measured=known)
        self._clear(staged.place if staged else Place(made.run, made.step, made.attempt))  # what stood there
        self._clear(naming.replaced_place(made.run, made.step))
        self._tell(
            "checkpoint-committed", f"step {made.step} is committed", made.run, made.step, bytes=made.bytes, measured=known
        )
        self._let_go(made.run, made.attempt)  # what all ranks have saved anew, all of them have restored
        return made

    def joined(self, round_id: int, run: str, step: int, attempt: int, measured: Mapping[str, float]) -> None:
        """Another node has committed a save in which ranks of this one took part."""
        self.findings.made(run, step)
        self.standing.look_again(run, step)
        self._rounds.left(round_id, measured)
        self._let_go(run, attempt)

    def _publish(self, plan: WritePlan, staged: JointlyStaged | None) -> Manifest:
        """As `_publish_as_seen`. Where the storage knows better than the names that this node remembers, it is waited for
        until they agree (I14).
        """
        try:
            return self._publish_as_seen(plan, staged)
        except (AlreadyCommitted, NoSuchResource, RoundAborted) as error:
            if self._cluster is None or not self._appears(plan.run, plan.step):
                raise
            log.info("%s@%s can be seen now, and is looked at again: %s", plan.run, plan.step, error.detail)
            return self._publish_as_seen(plan, staged)

    def _appears(self, run: str, step: int) -> bool:
        """Whether a checkpoint of this step stands, perhaps one that another node has published a moment ago."""
        limit = time.monotonic() + self._absences.patience_s
        while not (stands(self._tier, run, step) and step in self.store.steps(run)):
            if time.monotonic() >= limit:
                return False
            time.sleep(SETTLE_POLL_S)
        return True

    def _publish_as_seen(self, plan: WritePlan, staged: JointlyStaged | None) -> Manifest:
        """Publish, in the place of what stands there if that may be replaced: as of now, not of when the round began."""
        if isinstance(self.attempts, SharedAttempts):
            self.attempts.refuse_overtaken(plan.run, plan.attempt, lambda question: self.book.ask(question, LOOK_S))
        if staged is not None:
            there = commit.published_already(self.store, plan, staged)
            if there is not None:
                return there
        lineage, over = self.standing.place(plan.run, plan.step, plan.attempt, plan.intent)
        about = About(lineage, over)
        if not over:
            return self._make_visible(plan, about, staged)
        self._let_go(plan.run, plan.attempt)  # all ranks have sealed since: what they restored they read no more
        try:
            with self.rotation.replacing(plan.run, plan.step):
                if not stands(self._tier, plan.run, plan.step):  # retention let it go in this very moment
                    about = About(lineage)
                return self._make_visible(plan, about, staged)
        finally:
            self.book.tell(f"which checkpoint is at {plan.run}@{plan.step}", lambda: self._replaced(plan.run, plan.step))

    def _make_visible(self, plan: WritePlan, about: About, staged: JointlyStaged | None) -> Manifest:
        if staged is not None:
            return commit.publish_joint(self.store, plan, staged, about)
        return commit.publish(self.store, plan, utc_now(), about=about)

    def _replaced(self, run: str, step: int) -> None:
        """The catalog is told which one stands there now: until then nobody judges it by what is known of the other."""
        made = bodies.describe(roots.load_manifest(self._tier, run, step))
        try:
            known = bodies.as_committed(self._catalog.checkpoint(run, step))
        except NotFound:
            known = None
        if known != made:
            self._catalog.record_checkpoint(made, roots.stamp(self.store, run, step))
            replicas.removed(self._catalog.database, run, step)
        self.rotation.listed(run, step)

    def _list(self, made: Manifest) -> None:
        if stands(self._tier, made.run, made.step):  # else it was removed while the catalog was away
            self._catalog.record_checkpoint(bodies.describe(made), roots.stamp(self.store, made.run, made.step))

    def _clear(self, place: Place) -> None:
        """Remove what is staged at a place; what cannot be removed now, the next sweep removes."""
        try:
            self.store.discard(place)
        except CheckpointError as failure:
            log.warning("%s stays until it is swept: %s", place.path, failure.detail)

    def abort(
        self,
        round_id: int,
        error: CheckpointError,
        staging: Place | None,
        measured: Mapping[str, float] | None = None,
    ) -> None:
        """End a save without a checkpoint and remove its staged files; leftovers are removed by the next sweep."""
        state: Literal["aborted", "dropped"] = "dropped" if isinstance(error, GenerationDropped) else "aborted"
        kind = "save-dropped" if state == "dropped" else "save-aborted"
        level: Level = "info" if state == "dropped" else "warning"

        detail, problem = error.detail, error.problem()  # the error itself holds on to who met it

        def tell(run: str, step: int) -> None:
            self._tell(kind, f"step {step} was not saved: {detail}", run, step, level, problem=problem)

        self._rounds.end(round_id, state, error.code, error.detail, measured or {}, tell)
        if staging is not None and error.members.get("outcome") != "unknown":  # else it may be what a power cut brings back
            self._clear(staging)

    def watch_links(self, run: str, directory: str) -> None:
        """Links in this directory keep checkpoints of the run from now on."""
        self.rotation.watch_links(naming.check_run(run), directory)

    def measured(self, round_id: int, measured: Mapping[str, float]) -> None:
        """Note what was found out of a save since it ended."""
        self._rounds.measure(round_id, measured)

    def choose(
        self, run: str, attempt: int, turn: int, step: int | None, groups: Collection[str], healthy: bool = False
    ) -> int | None:
        """The step that every rank of this attempt restores as its `turn`-th; None when there is nothing to restore."""
        if self._cluster is not None:
            self.standing.begins(run, (attempt, turn))
        return self._choices.choose(RestoreQuestion(run, attempt, turn, step, groups, healthy))

    def recorded(self, wait_s: float) -> bool:
        """Wait until the catalog knows all that was decided; False when the time is over."""
        return self.book.recorded(wait_s)

    def reading(self, run: str, step: int) -> AbstractContextManager[None]:
        """Nothing removes the checkpoint while the block reads it; `NoSuchCheckpoint` for one that is being removed."""
        return self.readers.reading(run, step, "the daemon")

    def checking(self, run: str, step: int) -> AbstractContextManager[None]:
        """As `reading`, for a check: it ends when `is_awaited` says that a save waits to take the checkpoint's place."""
        return self.readers.reading(run, step, CHECK)

    @contextmanager
    def repairing(self, run: str, step: int) -> Iterator[None]:
        """No other node repairs this checkpoint, in the same place of staging, for the length of the block; as far as the
        catalog can be asked. `CatalogUnavailable` if another one takes long.
        """
        with ExitStack() as held:
            if self._cluster is not None:
                try:
                    held.enter_context(self._cluster.locks.locked(repairing(run, step)))
                except CatalogUnavailable as away:
                    if self.book.trouble is None:
                        raise
                    log.warning("%s@%s is repaired without asking other nodes: %s", run, step, away.detail)
            yield

    def checking_by_all(self, run: str, step: int) -> bodies.Checking | None:
        """How far all nodes together are with the check of a checkpoint; None if they do not do one."""
        found = None if self.shared_checks is None else self.shared_checks.progress(run, step)
        return None if found is None else bodies.Checking(done_bytes=found.done, total_bytes=found.total)

    def is_awaited(self, run: str, step: int) -> bool:
        """Whether checks of this checkpoint have to end."""
        return self.readers.is_awaited(run, step)

    def replica_book(self) -> ReplicaBook:
        """What is known of copies in other tiers."""
        return ReplicaBook(self._tier, self._catalog, self.events)

    def has_replica(self, name: str) -> bool:
        """Whether it is this node that copies to a replica, of several that were given one of this name."""
        return self._cluster is None or self._cluster.duties.has(replica_duty(name))

    def imports(self) -> Imports:
        """How checkpoints from elsewhere are brought in."""
        return Imports(self.store, self._catalog, self.events, self.admit, self.standing.way)

    def repair_book(self) -> RepairBook:
        """Where repairs are recorded."""
        return RepairBook(self._tier, self._catalog, self.events)

    def is_examined(self, run: str, step: int) -> bool:
        """Whether there are statistics of this checkpoint."""
        return self.statistics.has(run, step)

    def before(self, run: str, step: int) -> Manifest | None:
        """The checkpoint that the changes of a new one are measured from; None when there is none."""
        return self._health.before(run, step)

    def examined(self, made: Manifest, found: Statistics) -> None:
        """What was found of a checkpoint's tensors while it was read back; comes before `verified`."""
        self._health.take(made, found)

    def parted(self, run: str, attempt: int) -> None:
        """The ranks of this attempt are here no more."""
        self._let_go(run, attempt)
        if self._cluster is not None:
            self._cluster.crews.parted(run)

    def _let_go(self, run: str, attempt: int) -> None:
        """The ranks of this attempt read what they restored no more."""
        if self._choices.parted(run, attempt) and self._cluster is not None:
            self._cluster.membership.beat_soon()

    def _tell(self, kind: str, text: str, run: str, step: int | None = None, level: Level = "info", **detail: Any) -> None:
        at = utc_now()
        self.book.tell(f"that {text}", lambda: self.events.record(kind, text, run, step, level, at=at, **detail))
