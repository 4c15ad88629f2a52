"""The attempts of a root that several daemons serve (I6): the catalog numbers them, and each daemon keeps a copy in a file
of its own.

A number is claimed by creating a file of its name in the root, which storage lets only one node do. So launches can start
and be distinguished while the catalog is away, or was restored from a backup.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress

import msgspec
from sqlalchemy import delete, func, select
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.orm import Session

from holdfast_formats import decoding, naming
from holdfast_formats.errors import (
    CatalogUnavailable,
    CheckpointError,
    CorruptManifest,
    NoSuchResource,
    RunBusy,
    StaleAttempt,
)
from holdfast_formats.lineage import Way
from holdfast_formats.timestamps import utc_now
from holdfast_service.control.catalog.attempts import (
    LAUNCH_LENGTH_MAX,
    SPOKEN_ATTEMPTS_MAX,
    UNNAMED,
    Ask,
    Attempts,
    Member,
    RunAttempts,
    read,
)
from holdfast_service.control.database.cluster_schema import SpeakerRow
from holdfast_service.control.database.run_rows import lock_run
from holdfast_service.control.database.schema import AnswerRow, AttemptRow, RoundRow, RunRow
from holdfast_service.storage import Records
from holdfast_service.wings.cluster.joint_rounds import JointRounds
from holdfast_service.wings.cluster.membership import Membership, members
from holdfast_service.wings.cluster.node_ranks import ConnectedNodes, NodeRanks

log = logging.getLogger(__name__)

CLAIMS_MAX = 4  # of a run: older numbers are below those
ANSWER_BYTES_MAX = 32
SEEN_S, SEEN_POLL_S = 60.0, 0.5  # how long a name that another node has made may take to be seen on this machine
SETTLE_POLL_S = 0.2
BUSY_HINT = (
    "stop the other job, or use another run name; to only read checkpoints, use holdfast.open(). "
    "HOLDFAST_TAKE_OVER=1 takes over the run and shuts out the other job"
)


_decode_answer = decoding.decoder(int | None)  # type: ignore[arg-type]


def _directly(question: Callable[[], int | None]) -> int | None:
    return question()


class SharedAttempts(Attempts):
    """As `Attempts`, for one daemon of several. Thread-safe."""

    def __init__(self, records: Records, membership: Membership, node_ranks: ConnectedNodes, rounds: JointRounds) -> None:
        super().__init__(records, naming.attempts_file(membership.me.name))
        self._node, self._database = membership.me.name, membership.database
        self._node_ranks, self._rounds = node_ranks, rounds
        if not self.complete:
            before = read(records, naming.ATTEMPTS)  # of the time when one daemon served this root alone
            self._runs = {} if before is None else before

    def declare(
        self, run: str, launch: str, complete: Callable[[], Collection[tuple[int, int]]], member: Member = UNNAMED
    ) -> tuple[int, bool]:
        """As `Attempts.declare`. `RunBusy` where ranks of another launch are connected to another node; that is unknown
        while the catalog is away.
        """
        self.check_names(run, launch)
        if self._is_known(run, launch, member):
            known = self.of(run, launch, member)
            assert known is not None
            return known, False
        try:
            attempt, new = self._declared(run, launch, member)
        except CatalogUnavailable as away:
            log.warning("assigning an attempt number to a launch of %s without the catalog: %s", run, away.detail)
            attempt, new = self._claimed(run, launch, member)
        with self._writing:
            before = self._of(run)
            owed = complete() if new else before.owed
            self._store({run: before.launched(launch, attempt, owed).spoken(attempt, member)})
            self.complete = True
        return attempt, new

    def answer(self, run: str, attempt: int, turn: int, step: int | None) -> int | None:
        """Store the answer unless there is one, from this node or another; return the stored one, durably."""
        known, stored = self.asked(run, attempt, turn)
        if known:
            return stored
        try:
            with self._database.apart() as session:
                lock_run(session, run)
                row = session.get(AnswerRow, (run, attempt, turn))
                if row is None:
                    session.add(AnswerRow(run=run, attempt=attempt, turn=turn, step=step))
                else:
                    step = row.step
        except CatalogUnavailable as away:
            log.warning(
                "the step that attempt %s of %s restores is recorded only in the root: %s", attempt, run, away.detail
            )
        return super().answer(run, attempt, turn, self._stated(naming.answer_file(run, attempt, turn), step))

    def _stated(self, path: str, step: int | None) -> int | None:
        """The answer of the first of several nodes, decided by exclusive file creation: works without the catalog."""
        if self._records.put_first(path, msgspec.json.encode(step)):
            return step
        limit = time.monotonic() + SEEN_S
        while True:
            try:
                return _decode_answer(self._records.read(path, 0, ANSWER_BYTES_MAX))
            except NoSuchResource:  # there, but not to be seen on this machine yet
                if time.monotonic() > limit:
                    raise
                time.sleep(SEEN_POLL_S)
            except msgspec.DecodeError as error:
                raise CorruptManifest(f"{path} cannot be read: {error}", hint="start the launch again") from error

    def saw_elsewhere(self, run: str, attempts: Collection[int], way: Way) -> bool:
        """Later launches exceed them. Lines stay as the nodes of this root have them: all must place a save alike."""
        self.saw(run, max(attempts, default=0))
        return False

    def has(self, run: str) -> bool:
        """As `Attempts.has`; another node may have deleted the run, so the catalog is asked. Raises `CatalogUnavailable`."""
        with self._database.apart() as session:
            return session.get(RunRow, run) is not None

    def refresh(self, runs: Collection[str]) -> dict[str, int]:
        """As `Attempts.refresh`; the catalog is asked."""
        if not runs:
            return {}
        with self._database.apart() as session:
            rows = session.execute(select(RunRow.name, RunRow.attempt).where(RunRow.name.in_(runs))).all()
        newer = {run: attempt for run, attempt in rows if attempt > self.newest(run)}
        for run, attempt in newer.items():
            self.saw(run, attempt)
        return newer

    def refuse_overtaken(self, run: str, attempt: int, ask: Ask = _directly) -> None:
        """`StaleAttempt` where a newer launch has an answer about what to restore: it does not include what an older launch
        commits now.

        Without the catalog, the files of the other daemons are read. `ask` runs the query, and may give up.
        """

        def answered() -> int | None:
            with self._database.apart() as session:
                newer = select(func.max(AnswerRow.attempt)).where(AnswerRow.run == run, AnswerRow.attempt > attempt)
                return session.scalar(newer)

        try:
            newest = ask(answered)
        except CatalogUnavailable as away:
            log.info("reading the attempts of %s from the other daemons' files: %s", run, away.detail)
            newest = self._answered_elsewhere(run, attempt)
        if newest is not None:
            raise StaleAttempt(
                f"attempt {attempt} of {run} is shut out: attempt {newest} has started on another node from an older step",
                hint="a newer launch of this run is active; stop this one",
                newest=newest,
            )

    def forget(self, run: str) -> None:
        """As `Attempts.forget`; the catalog has forgotten the run already."""
        super().forget(run)

    def _answered_elsewhere(self, run: str, attempt: int) -> int | None:
        attempts = []
        for name in self._records.list(""):
            if naming.parse_attempts_file(name) in (None, self._node):
                continue
            others: Mapping[str, RunAttempts] = read(self._records, name) or {}
            answers = others.get(run, RunAttempts()).answers
            attempts += [int(key.partition(".")[0]) for key in answers]
        return max((number for number in attempts if number > attempt), default=None)

    def _is_known(self, run: str, launch: str, member: Member) -> bool:
        """Whether this very checkpointer got its attempt here, or ranks send no checkpointer."""
        known = self.of(run, launch, member)
        if known is None:
            return False
        spoken = self.known().get(run, RunAttempts()).speakers.get(f"{known}.{member.rank}")
        return not member.session or spoken == member.session

    def _declared(self, run: str, launch: str, member: Member) -> tuple[int, bool]:
        with self._database.apart() as session:
            row = lock_run(session, run)
            declared = _told(session, run, launch, member)
            if declared is None:  # unless a node gave it one while the catalog was away
                given = [number for number in self._claims(run) if self._launch_of(run, number) == launch]
                declared = RunAttempts(launches={launch: max(given)} if given else {})
            attempt = declared.attempt_of(launch, member)
            node_ranks = self._node_ranks.elsewhere(session, run)
            new = attempt is None
            if attempt is None:
                _refuse_busy(run, node_ranks, member)
                while attempt is None:
                    attempt = self._give_out(run, launch, max(row.attempt, self.newest(run)), self._claims(run))
                row.raise_attempt(attempt)
                attempt_row = AttemptRow(run=run, launch=launch, attempt=attempt, world=member.world, declared=utc_now())
                session.merge(attempt_row)
                old = (SpeakerRow.run == run, SpeakerRow.attempt <= attempt - SPOKEN_ATTEMPTS_MAX)
                session.execute(delete(SpeakerRow).where(*old))
            if member.session:
                speaks = insert(SpeakerRow).values(run=run, attempt=attempt, rank=member.rank, session=member.session)
                session.execute(speaks.on_conflict_do_nothing())
            self._node_ranks.arrive(session, run, NodeRanks(attempt, member.world, 1))
        return attempt, new

    def _claimed(self, run: str, launch: str, member: Member) -> tuple[int, bool]:
        """Without the catalog: the attempt that a node has given this launch, or a new one."""
        while True:
            claims = self._claims(run)
            attempt = self._given(run, launch, member, claims)
            if attempt is not None:
                return attempt, False
            made = self._give_out(run, launch, self.newest(run), claims)
            if made is not None:
                return made, True

    def _given(self, run: str, launch: str, member: Member, claims: Sequence[int]) -> int | None:
        """The attempt that a node has given this launch, unless this member belongs to another start."""
        local = self.known().get(run, RunAttempts())
        given = [attempt for attempt in claims if self._launch_of(run, attempt) == launch]
        attempts = local.model_copy(update={"launches": {**local.launches, launch: max(given)}}) if given else local
        return attempts.attempt_of(launch, member)

    def _give_out(self, run: str, launch: str, newest: int, claims: Sequence[int]) -> int | None:
        """Claim the number after `newest` and all `claims` for this launch; None if another node has claimed it since those
        were read.
        """
        attempt = max([newest, *claims]) + 1
        if not self._records.put_first(naming.claim_file(run, attempt), launch.encode()):
            return None
        for old in claims[: -CLAIMS_MAX + 1]:
            with suppress(CheckpointError):  # another node has just removed it
                self._records.remove_file(naming.claim_file(run, old))
        for answer in map(naming.parse_answer_file, self._records.list(naming.CLAIMS)):
            if answer is not None and answer[0] == run and answer[1] <= attempt - CLAIMS_MAX:
                with suppress(CheckpointError):
                    self._records.remove_file(naming.answer_file(*answer))
        return attempt

    def _claims(self, run: str) -> list[int]:
        """The claimed numbers of a run, ascending, without old ones."""
        claims = map(naming.parse_claim_file, self._records.list(naming.CLAIMS))
        return sorted(claim[1] for claim in claims if claim is not None and claim[0] == run)

    def _launch_of(self, run: str, attempt: int) -> str | None:
        try:
            return self._records.read(naming.claim_file(run, attempt), 0, LAUNCH_LENGTH_MAX * 4).decode(errors="replace")
        except CheckpointError as error:
            log.info("cannot read which launch has attempt %s of %s: %s", attempt, run, error.detail)
            return None

    def settled_elsewhere(self, run: str, wait_s: float) -> bool:
        """As `Attempts.settled_elsewhere`; does not wait while the catalog is away."""
        limit = time.monotonic() + wait_s
        while self._is_writing_elsewhere(run):
            if time.monotonic() >= limit:
                return False
            time.sleep(SETTLE_POLL_S)
        return True

    def _is_writing_elsewhere(self, run: str) -> bool:
        try:
            return self.sealed_elsewhere(run) or self._rounds.is_writing(run)
        except CatalogUnavailable:
            return False

    def sealed_elsewhere(self, run: str) -> bool:
        """Whether another member node still writes a save of this run that all ranks have sealed."""
        going = (RoundRow.run == run, RoundRow.state == "sealed", RoundRow.node != self._node)
        try:
            with self._database.apart() as session:
                nodes = set(session.scalars(select(RoundRow.node).where(*going)))
                return any(node in nodes for node in self._live(session))
        except CheckpointError as error:
            log.info("cannot find what other nodes are writing of %s: %s", run, error.detail)
            return False

    def _live(self, session: Session) -> list[str]:
        return [member.name for member in members(session) if member.live]


def _told(session: Session, run: str, launch: str, member: Member) -> RunAttempts | None:
    """The catalog's record of a launch for one rank; None without one."""
    row = session.get(AttemptRow, (run, launch))
    if row is None:
        return None
    spoken = select(SpeakerRow).where(SpeakerRow.run == run, SpeakerRow.rank == member.rank)
    return RunAttempts(
        launches={launch: row.attempt},
        speakers={f"{found.attempt}.{found.rank}": found.session for found in session.scalars(spoken)},
        worlds={str(row.attempt): row.world} if row.world else {},
    )


def _refuse_busy(run: str, node_ranks: Mapping[str, NodeRanks], member: Member) -> None:
    """As `run_busy.let_in`, for ranks at other nodes."""
    living = {node: rank_set for node, rank_set in node_ranks.items() if rank_set.left_s != 0}
    if not living or member.take_over:
        return
    node, rank_set = max(living.items(), key=lambda item: item[1].attempt)
    left = [rank_set.left_s for rank_set in living.values()]
    raise RunBusy(
        f"another job is training {run!r} on node {node}: attempt {rank_set.attempt}, {rank_set.ranks} of {rank_set.world} "
        f"ranks are "
        "connected there",
        hint=BUSY_HINT,
        attempt=rank_set.attempt,
        ranks=rank_set.ranks,
        node=node,
        retry_after_s=0.0 if None in left else round(max(0.1, *filter(None, left)), 1),
    )
