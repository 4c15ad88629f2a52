"""The interface between the daemon and control: the calls with which it asks what to do. No tensor bytes here.

Saves never wait for the catalog: attempts, saves and directories are known here, and the catalog is updated later.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

from holdfast_formats import naming
from holdfast_formats.disk.manifest import Manifest
from holdfast_formats.errors import (
    CatalogUnavailable,
    CheckpointError,
    StorageFailed,
)
from holdfast_formats.lineage import NO_INTENT, Intent
from holdfast_formats.lineage import Key as Launch
from holdfast_formats.moments import utc_now
from holdfast_formats.naming import Place
from holdfast_formats.rest import bodies
from holdfast_formats.rest.observed import Life
from holdfast_formats.rest.operations import Level
from holdfast_formats.rest.retention import RetentionPolicy
from holdfast_formats.rest.runs import RunLaunch
from holdfast_formats.rest.statistics import Statistics
from holdfast_formats.staging.blocks import SharePlan
from holdfast_formats.staging.joint import JointlyStaged, ShareHandover
from holdfast_formats.staging.part import DecodedPart
from holdfast_formats.staging.plan import WritePlan
from holdfast_formats.staging.slot_table import SlotTable
from holdfast_service.control import root_care
from holdfast_service.control.catalog.attempts import Attempts, Member
from holdfast_service.control.catalog.book import Book
from holdfast_service.control.catalog.catalog import Catalog
from holdfast_service.control.catalog.events import Events
from holdfast_service.control.catalog.rounds import Rounds
from holdfast_service.control.catalog.shared_attempts import SharedAttempts
from holdfast_service.control.catalog.statistics import StatisticsStore
from holdfast_service.control.checkpoints import commit, planner, roots, share_planner
from holdfast_service.control.checkpoints.imports import Imports
from holdfast_service.control.checkpoints.readers import CHECK, Readers
from holdfast_service.control.checkpoints.replicas import RepairBook, ReplicaBook
from holdfast_service.control.checkpoints.run_abouts import RunAbouts
from holdfast_service.control.checkpoints.run_files import RunFiles
from holdfast_service.control.cluster.cluster import Cluster, changing, deciding, repairing, replica_duty
from holdfast_service.control.cluster.duties import THINNING, UPKEEP
from holdfast_service.control.findings import missing
from holdfast_service.control.findings.checks import Findings
from holdfast_service.control.findings.health import HealthRecords
from holdfast_service.control.findings.shared_checks import SharedChecks
from holdfast_service.control.following import FollowingCatalog
from holdfast_service.control.insight.facts import Lived
from holdfast_service.control.insight.lives import KnownLives
from holdfast_service.control.jobs.staged import wanted_places
from holdfast_service.control.launches.choosing import Choices, Copies, Known, Mend, Mending, RestoreQuestion
from holdfast_service.control.launches.save_permits import SavePermits
from holdfast_service.control.launches.standing import Standing
from holdfast_service.control.publishing import Publishing
from holdfast_service.control.retention.admission import Admission, counted_bytes
from holdfast_service.control.retention.empty_runs import EmptyRuns
from holdfast_service.control.retention.rotation import Rotation
from holdfast_service.control.retention.run_renaming import RunRenaming
from holdfast_service.control.retention.run_trash import RunTrash
from holdfast_service.control.retention.thinning import Thinning
from holdfast_service.control.retention.wishes import RetentionWishes
from holdfast_service.control.root_care import RootCare
from holdfast_service.control.root_watch import RootWatch
from holdfast_service.control.save_records import SaveRecords
from holdfast_service.control.staged_before import StagedBefore
from holdfast_service.storage import PosixStore, Store, Tier

log = logging.getLogger(__name__)

NAMES_S = 90.0  # clients of network file systems remember for no longer, unless told to, which names there are


class Decisions:
    """Attempts, saves, commits and removals of one root. Thread-safe.

    In a `cluster`, daemons of other nodes may serve the same root with the same catalog.
    """

    def __init__(
        self, tier: Tier, catalog: Catalog, keep_last: int | None, node: str = "node", cluster: Cluster | None = None
    ) -> None:
        self._tier, self._catalog, self._cluster = tier, catalog, cluster
        self.store: Store = PosixStore(tier)
        catalog.node = self._node = node
        self.book = Book(catalog.database, self._returned)
        self.attempts = Attempts(tier) if cluster is None else SharedAttempts(tier, cluster)
        self.events = Events(catalog.database, node, utc_now)
        self.events.later = self.book.tell
        self._rounds = Rounds(catalog, self.book, utc_now)
        self.staged_before = StagedBefore(self.store, catalog, self.book, self._rounds, self.events)
        self.statistics = StatisticsStore(catalog.database)
        self._health = HealthRecords(tier, self.statistics, self.events)
        self._files = RunFiles(tier)
        self._files.is_run = self.attempts.has
        self._files.has_saved = lambda run: catalog.has_saved(run, self.attempts.newest(run))
        self.abouts = RunAbouts(tier, catalog, self._files, self.events)
        self.readers = Readers()
        self.rotation = Rotation(self.store, catalog, self._files, self.readers, lambda: self.watch)
        self.rotation.events = self.events
        self.findings = Findings(catalog, self.events, self.book, utc_now, self.rotation.due, self.rotation.looks)
        self.empty_runs = EmptyRuns(tier, catalog, self.attempts, self._files, self.events)
        self.trash = RunTrash(tier, self.store, catalog, self.attempts, self.rotation, self.events)
        self._admission = Admission(tier, catalog, self._files, self.rotation, self.book.ask)
        self._admission.empty_trash = self.trash.make_room
        self.standing = Standing(self.store, catalog, self.book, self.findings)
        self.trash.forgotten, self.trash.later = self.standing.forget, self.book.tell
        self.renaming = RunRenaming(tier, catalog, self.attempts, self.rotation, self.trash, self.events)
        self.renaming.renamed, self.renaming.is_alone = self.standing.forget, cluster is None
        self._absences = roots.Absences(0.0 if cluster is None else NAMES_S)
        self.thinning = Thinning(self.store, catalog, self.book, self.rotation, self._files)
        self.thinning.made = self.standing.made
        self.watch, self._mending = self._root_watch(), Mending()
        known = Known(
            self._health,
            self.findings,
            self.readers,
            self.standing.left,
            self.watch.relist,
            self._absences,
            self._mending,
        )
        self._choices = Choices(self.store, catalog, self.attempts, self.book, known, self._tell)
        self._wishes = RetentionWishes(self._files, catalog, self.book, keep_last)
        self._lives = KnownLives(self.attempts, catalog, self.book, self._tell, shared=cluster is not None)
        self._permits = SavePermits(self.attempts, self.standing, catalog, self.book)
        self._publishing = Publishing(self.store, catalog, self.attempts, self.book, self.standing, self.rotation)
        self._publishing.let_go = self._let_go
        self._records = SaveRecords(self.store, catalog, self.book, self._rounds, self._tell)
        self._following = FollowingCatalog(self.store, catalog, self.attempts, self._rounds, self.events, self._absences)
        self.on_commit: Callable[[Manifest], None] = lambda made: None  # must not wait
        self.claim: Callable[[], None] = lambda: None  # raises where the catalog that is back is another root's
        self.care: RootCare | None = None  # of a root that several nodes serve
        self.shared_checks: SharedChecks | None = None
        if cluster is not None:
            self._share(cluster)

    def _root_watch(self) -> RootWatch:
        cluster = self._cluster
        return RootWatch(
            self.store,
            self._catalog,
            self.rotation,
            self.findings,
            self.events,
            self._absences,
            thinned=self.thinning.record,
            replaced=self.standing.look_again,
            is_mine=lambda: cluster is None or cluster.duties.has(UPKEEP),
        )

    def keep_usually(self, policy: RetentionPolicy) -> None:
        """What is thinned and compacted of runs that have no policy of their own."""
        self._files.usual = policy

    def _share(self, cluster: Cluster) -> None:
        self.care = RootCare(self._tier, self.store, self._catalog, cluster, self.events, self.rotation.due)
        self.care.absences = self._absences
        self.shared_checks = SharedChecks(cluster.membership, self.findings)
        self._files.elsewhere = lambda run: cluster.locks.locked(changing(run))
        self.rotation.elsewhere = lambda run, insists: cluster.locks.locked(deciding(run), insists=insists)
        self.readers.announce, self.readers.elsewhere = cluster.holds.announce, cluster.holds.elsewhere
        cluster.holds.here = self.readers.places
        self.thinning.is_mine = lambda: cluster.duties.has(THINNING)
        self._publishing.absences = self._absences
        self._publishing.settle = cluster.rendezvous.settle

    def close(self) -> None:
        """Remove what is due, write the remaining records to the catalog, stop."""
        self.rotation.close()
        self.book.close()

    def recover(self, adopt: Callable[[], Collection[int]] = tuple) -> None:
        """At start: remove leftovers that were never committed, update the catalog from the directories, end old saves.

        Between the two, `adopt` takes over what an earlier daemon left in memory. Without a catalog only its part waits.
        """
        if self._cluster is None:  # else others may be writing there: see `RootCare`
            root_care.sweep(self.store, spared=wanted_places(self._catalog.database, self.store.files))
        self._following.start()
        self.book.unknown()
        while not self.book.settle() and self.book.trouble is None:
            pass
        adopt()
        why = "the daemon ended before this save was complete"
        self.book.tell(
            "which saves ended with the last daemon",
            lambda: self._catalog.abort_open_rounds(utc_now(), "round-aborted", why, keep=self._rounds.ids()),
        )

    def settle_staged(self) -> None:
        """Ranks have had time to come back: what the last daemon had staged, and is nowhere now, is lost, which is said."""
        self.staged_before.settle()

    def writers(self) -> set[str]:
        """The nodes whose daemons are up, this one among them."""
        members = () if self._cluster is None else self._cluster.membership.members()
        return {self._node, *(member.name for member in members if member.live)}

    def overtaken(self, runs: Collection[str]) -> Mapping[str, int]:
        """The newest attempts of these runs, of those that have begun on another node since this was last asked."""
        return self.attempts.refresh(runs) if isinstance(self.attempts, SharedAttempts) and runs else {}

    def settled_elsewhere(self, run: str, wait_s: float) -> bool:
        """Wait until no other node writes a save of this run of which all ranks have sealed; False when it takes longer."""
        return self.attempts.settled_elsewhere(run, wait_s)

    def _returned(self) -> None:
        before = missing.living(self._catalog)
        self._following.returned(self.claim)
        try:
            self.renaming.recover()
            self.trash.recover()
        except CatalogUnavailable:
            raise
        except CheckpointError as error:  # the next start tries again
            log.error("cannot finish what was begun with deleted and renamed runs: %s", error.detail)
        for run in roots.runs(self._tier):
            if self.store.replaced(run):  # an earlier daemon has not come to let go of it
                self.rotation.due(run)
        for run, step in missing.lost_since(self._catalog, before):
            log.error("%s: %s", run, missing.tell(self.events, run, step))

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
        self._following.learn_attempts(self.book)
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
        self._wishes.take(run, keep_last, attempt, new)
        if new:
            self.book.tell(f"that {run} is trained again", lambda: self.abouts.resumed(run))
        self.standing.learn(run)
        return attempt

    def launched(self, run: str, attempt: int, world: int, info: Mapping[str, Any]) -> None:
        """Remember what the trainer of an attempt says of it; returns at once where the catalog is away."""
        made = RunLaunch(attempt=attempt, at=utc_now(), world=world, info=dict(info))
        self.book.tell(f"what attempt {attempt} of {run} says of itself", lambda: self.abouts.launched(run, made))

    def admit_run(self, run: str, tenant: str) -> None:
        """`LimitExceeded` for a new run of a caller who has too many runs without a save."""
        self.empty_runs.admit(run, tenant)

    def denied(self, run: str, keep_last: int | None, owner: bool) -> tuple[str, ...]:
        """The notice for a rank whose `keep_last` is not in force without an admin."""
        return self._wishes.denied(run, keep_last, owner)

    def lives(self, here: Mapping[str, tuple[int, Life]]) -> dict[str, Lived]:
        """What is known of the ranks of all runs, with what is known `here` of those that came to this daemon."""
        return self._lives.by_run(here)

    def running(self) -> dict[str, int]:
        """The attempts whose ranks were here when it was last known."""
        return self._lives.running()

    def became(self, run: str, attempt: int, life: Life) -> None:
        """Record that the ranks of an attempt are running, ended or lost; durable, so that the next daemon knows it."""
        self._lives.became(run, attempt, life)

    def declared(self, run: str, launch: str, rank: int = 0, session: str = "", world: int = 0) -> bool:
        """Whether this launch has an attempt already, which this rank, spoken for by this checkpointer, can join."""
        return self.attempts.of(run, launch, Member(rank, session, world)) is not None

    def begin(
        self, run: str, step: int, attempt: int, world: int, intent: Intent = NO_INTENT, *, quiet: bool = False
    ) -> int:
        """Start the save of this step, or find it; `StaleAttempt` (I6) or `AlreadyCommitted` if it is not allowed. `quiet`:
        its lowest rank is on another node, which records how it goes on.
        """
        self._permits.check_new(run, step, attempt, intent)
        return self._rounds.open(run, step, attempt, world, quiet)

    def resume(self, run: str, step: int, attempt: int, world: int, intent: Intent | None = None) -> int:
        """Continue a save of an earlier daemon, or start it; refuses like `begin`, if the `intent` is known.

        A save that all ranks had sealed continues although a newer attempt waits for its end (I6).
        """
        self._permits.check_resumed(run, step, attempt, intent)
        return self._rounds.open(run, step, attempt, world)

    def committed(self, run: str, step: int) -> Launch | None:
        """The attempt that committed this step, and its turn; None when it is no checkpoint."""
        return self.standing.launch(run, step)

    def groups(self, run: str, step: int) -> Sequence[str]:
        """The groups of a checkpoint; none where they are not known."""
        return self.standing.groups(run, step)

    def sealed(self, round_id: int, ranks: int) -> None:
        self._rounds.seal(round_id, ranks)

    def plan(self, tables: Sequence[SlotTable]) -> WritePlan:
        return planner.plan(tables)

    def plan_share(self, parts: Sequence[tuple[str, DecodedPart]], me: int) -> SharePlan:
        return share_planner.plan_share(parts, me)

    def admit(self, plan: WritePlan) -> None:
        """Whether what is planned fits; `QuotaExceeded` or `NoSpace` with the numbers, before a byte of it is written."""
        self._admission.admit(plan)

    def quotas(self, run: str) -> Mapping[str, int]:
        """The quotas that a run counts against, its own and those of its teams, by their patterns."""
        return self._admission.quotas(run)

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
        if staged is None or commit.published_already(self.store, plan, staged) is None:
            self._admission.check_quotas(plan.run, plan.step, counted_bytes(plan))
        try:
            made = self._publishing.publish(plan, staged)
        except StorageFailed as error:
            if error.members.get("outcome") == "unknown":
                self.book.tell(
                    "which checkpoints are in the directories",
                    self._following.reconcile,
                )
            raise
        known = {**(measured or {}), "commit_s": time.monotonic() - began, "bytes": float(made.bytes)}
        self.standing.made(made)
        self.findings.made(made.run, made.step)
        self._records.committed(round_id, made, known, staged.place if staged else None)
        if plan.lacks_average:
            self._records.without_average(made)
        self._let_go(made.run, made.attempt)  # what all ranks have saved again, all of them have restored
        self.on_commit(made)
        return made

    def joined(self, round_id: int, run: str, step: int, attempt: int, measured: Mapping[str, float]) -> None:
        """Another node has committed a save in which ranks of this one took part."""
        self.findings.made(run, step)
        self.standing.look_again(run, step)
        self._rounds.left(round_id, measured)
        self._let_go(run, attempt)

    def written_for(self, made: Manifest, handover: ShareHandover) -> None:
        """A node has written the share of another one, which could not, of a checkpoint that several nodes have saved."""
        self._records.written_for(made, handover)

    def abort(
        self, round_id: int, error: CheckpointError, staging: Place | None, measured: Mapping[str, float] | None = None
    ) -> None:
        """End a save without a checkpoint and remove its staged files; leftovers are removed by the next sweep."""
        self._records.aborted(round_id, error, staging, measured)

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

    def mend_first(self, mend: Mend, copies: Copies) -> None:
        """What a restore would pass over is mended first, by `mend`; `copies` says which steps stand in which replicas."""
        self._mending.begin(mend, copies)

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
                    held.enter_context(self._cluster.locks.locked(repairing(run, step), asks=False))
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

    @property
    def node_of_many(self) -> str:
        """This node's name where several serve the root, else nothing."""
        return "" if self._cluster is None else self._node

    def imports(self) -> Imports:
        """How checkpoints from elsewhere are brought in."""
        imports = Imports(self.store, self._catalog, self.events, self._admission, self.standing.way)
        imports.on_commit = self.on_commit
        return imports

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
