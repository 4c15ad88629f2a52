"""The attempts of a root's runs (I6), and which steps their ranks restore. See docs/format.md § 9.

They are stored in one small file of the root, which belongs to its only daemon. So launches are numbered, older ones are
shut out, and all ranks get the same answer, even without the catalog's database.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Collection, Mapping
from typing import Annotated, Literal, NamedTuple

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from holdfast_files.opened import read_bounded
from holdfast_formats import naming
from holdfast_formats.errors import CatalogUnavailable, Damaged, InvalidRequest, StaleAttempt
from holdfast_formats.lineage import Elsewhere, PlacedCheckpoint, Rewind, Way, line
from holdfast_formats.rest.measurements import Life
from holdfast_service.control.catalog.lineage_records import ListedCheckpoint
from holdfast_service.control.catalog.stored_life import StoredLife
from holdfast_service.storage import Records

log = logging.getLogger(__name__)

LAUNCH_LENGTH_MAX = 256
LAUNCHES_MAX, ANSWERS_MAX, OTHERS_MAX = 1000, 64, 1000  # of a run; the oldest are forgotten
SPOKEN_ATTEMPTS_MAX = 4  # attempts of a run whose speakers are kept
FILE_BYTES_MAX = 2**28
_Speaker = Annotated[str, Field(pattern=r"^[0-9]{1,19}\.[0-9]{1,19}$")]  # attempt.rank
_Attempt = Annotated[str, Field(pattern=r"^[0-9]{1,19}$")]
_Number = Annotated[int, Field(strict=True, ge=0, le=2**63 - 1)]
_Step = Annotated[int, Field(strict=True, ge=-1, le=2**63 - 1)]
_Rewind = tuple[_Number, _Number, _Step]

Ask = Callable[[Callable[[], "int | None"]], "int | None"]  # runs a query, and may give up


class RunAttempts(BaseModel):
    """A run: its newest attempt, the attempts of its launches, and answers by `attempt.turn`; only the newest of each are
    kept.

    `owed` are the steps, by attempt, that older attempts had sealed completely when the newest was declared: those are
    saved. `speakers` are, by `attempt.rank`, the checkpointer that speaks for a rank; `worlds`, by attempt, the number of
    ranks. `life` is the state of the newest attempt's ranks, `since` the time at which they finished or died. `others` are
    the attempts of other roots' launches, and `other_way` the rewinds to the newest of their lines, as found in tiers.
    `copies` are, by `attempt.step`, what launches restore and only replicas had: its attempt, turn and rewinds.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    attempt: _Number = 0
    launches: dict[str, _Number] = {}
    answers: dict[str, _Number | None] = {}
    owed: tuple[tuple[_Number, _Number], ...] = ()
    speakers: dict[_Speaker, str] = {}
    worlds: dict[_Attempt, _Number] = {}
    life: StoredLife | None = None
    since: str | None = None
    others: tuple[_Number, ...] = ()
    other_way: tuple[_Rewind, ...] = ()
    copies: dict[str, tuple[_Number, _Number, tuple[_Rewind, ...]]] = {}

    @property
    def elsewhere(self) -> Elsewhere:
        return Elsewhere(frozenset(self.others), tuple(Rewind(*one) for one in self.other_way))

    def found_elsewhere(self, attempts: Collection[int], way: Way) -> RunAttempts:
        """With these attempts of other roots' launches, and the newer one of both ways."""
        others = tuple(sorted({*self.others, *attempts})[-OTHERS_MAX:])
        newer = max(self.elsewhere.way, way, key=line)
        return self.model_copy(update={"others": others, "other_way": tuple(tuple(one) for one in newer)})

    def attempt_of(self, launch: str, member: Member) -> int | None:
        """The attempt in which this member speaks for its rank, or may because its rank has no speaker; None where it needs
        another one.

        Where another checkpointer speaks for its rank, or the launch had another number of ranks, the launch's name was used
        before: this is another start.
        """
        known = self.launches.get(launch)
        if not member.session:
            return known
        suffix = f".{member.rank}"
        mine = [
            int(key.partition(".")[0])
            for key, who in self.speakers.items()
            if who == member.session and key.endswith(suffix)
        ]
        if mine:
            return max(mine)
        if member.world and self.worlds.get(str(known), member.world) != member.world:
            return None
        return None if known is not None and f"{known}{suffix}" in self.speakers else known

    def spoken(self, attempt: int, member: Member) -> RunAttempts:
        """With this member as its rank's speaker in an attempt; the oldest attempts' speakers are dropped."""
        key = f"{attempt}.{member.rank}"
        if not member.session or self.speakers.get(key) == member.session:
            return self
        oldest = attempt - SPOKEN_ATTEMPTS_MAX
        speakers = {name: who for name, who in self.speakers.items() if int(name.partition(".")[0]) > oldest}
        worlds = {name: world for name, world in self.worlds.items() if int(name) > oldest}
        if member.world:
            worlds.setdefault(str(attempt), member.world)
        return self.model_copy(update={"speakers": {**speakers, key: member.session}, "worlds": worlds})

    def launched(self, launch: str, attempt: int, owed: Collection[tuple[int, int]]) -> RunAttempts:
        launches = dict(list({**self.launches, launch: attempt}.items())[-LAUNCHES_MAX:])
        return self.model_copy(update={"attempt": max(self.attempt, attempt), "launches": launches, "owed": tuple(owed)})

    def continued(self, attempt: int, copy: PlacedCheckpoint) -> RunAttempts:
        known = {**self.copies, f"{attempt}.{copy.step}": (copy.attempt, copy.turn, tuple(map(tuple, copy.rewinds)))}
        return self.model_copy(update={"copies": dict(list(known.items())[-ANSWERS_MAX:])})

    def answered(self, key: str, step: int | None) -> RunAttempts:
        return self.model_copy(update={"answers": dict(list({**self.answers, key: step}.items())[-ANSWERS_MAX:])})

    def merged(self, other: RunAttempts) -> RunAttempts:
        """The union of two records of one run."""
        return RunAttempts(
            attempt=max(self.attempt, other.attempt),
            launches=dict(sorted({**other.launches, **self.launches}.items(), key=lambda item: item[1])[-LAUNCHES_MAX:]),
            answers={**other.answers, **self.answers},
            owed=self.owed,
            speakers={**other.speakers, **self.speakers},
            worlds={**other.worlds, **self.worlds},
            life=self.life,
            since=self.since,
            others=self.others,
            other_way=self.other_way,
            copies=self.copies,
        )


class Member(NamedTuple):
    """A rank of a launch, the checkpointer that speaks for it ("" if unknown), and the number of ranks (0 if unknown).

    `take_over`: it may start although another job of its run is active on another node.
    """

    rank: int = 0
    session: str = ""
    world: int = 0
    take_over: bool = False


UNNAMED = Member()


def _readable(run: str, run_attempts: RunAttempts) -> RunAttempts:
    try:
        return RunAttempts.model_validate(run_attempts.model_dump())
    except ValidationError as error:
        raise InvalidRequest(f"the attempts of {run!r} cannot be recorded: {str(error)[:200]}") from None


class _File(BaseModel):
    model_config = ConfigDict(extra="forbid")

    format: Literal[1] = 1
    runs: dict[str, RunAttempts] = {}


class Attempts:
    """The attempts of one root. Thread-safe; queries never wait for the disk, and changes are durable when they return.

    Without its file they are not `complete` until `merge` has added those of the catalog.
    """

    def __init__(self, records: Records, path: str = naming.ATTEMPTS) -> None:
        """`path` is the file that stores them."""
        self._records, self._path = records, path
        self._writing = threading.Lock()  # of the file; taken before the other one
        self._lock = threading.Lock()  # of what is known; never held while the disk is written
        recorded = read(records, path)
        self._runs: dict[str, RunAttempts] = {} if recorded is None else recorded
        self._unwritten: set[str] = set()  # runs of which a rank has joined since the file was written
        self.complete = recorded is not None

    def newest(self, run: str) -> int:
        """The newest attempt of a run, 0 when there is none."""
        with self._lock:
            return self._runs.get(run, RunAttempts()).attempt

    def has(self, run: str) -> bool:
        """Whether the run has been launched and not deleted since, as far as known."""
        return self.newest(run) > 0 or not self.complete

    def of(self, run: str, launch: str, member: Member = UNNAMED) -> int | None:
        """The attempt of a launch; None before its first hello, and where this member belongs to another start."""
        with self._lock:
            return self._runs.get(run, RunAttempts()).attempt_of(launch, member)

    def known(self, runs: Collection[str] | None = None) -> dict[str, RunAttempts]:
        """These runs, or all."""
        with self._lock:
            return dict(self._runs) if runs is None else {run: self._runs[run] for run in runs if run in self._runs}

    def owes(self, run: str, step: int, attempt: int) -> bool:
        """Whether all ranks of this attempt had sealed this step when a newer one was declared."""
        with self._lock:
            return (step, attempt) in self._runs.get(run, RunAttempts()).owed

    def declare(
        self, run: str, launch: str, complete: Callable[[], Collection[tuple[int, int]]], member: Member = UNNAMED
    ) -> tuple[int, bool]:
        """The attempt of this launch, and whether it is new: then it gets the next number, which shuts out all older
        ones (I6).

        `complete` returns the steps, by attempt, that all ranks have sealed and that are still to be saved.

        It is durable when this returns: a number is never given out twice, even after a power failure.
        """
        self.check_names(run, launch)
        with self._writing:
            known = self.of(run, launch, member)
            if known is not None:
                before = self._of(run)
                spoken = before.spoken(known, member)
                if spoken is not before:
                    spoken = _readable(run, spoken)
                    with self._lock:  # written with the next answer, or before the first commit: see `keep_speakers`
                        self._runs = {**self._runs, run: spoken}
                        self._unwritten.add(run)
                return known, False
            if not self.complete:
                raise CatalogUnavailable(
                    f"the attempts of {run!r} are recorded only in the catalog, which does not respond",
                    hint="try again when it responds; later launches start without it",
                )
            before = self._of(run)
            attempt = max((before.attempt, *before.others)) + 1
            self._store({run: before.launched(launch, attempt, complete()).spoken(attempt, member)})
            return attempt, True

    @staticmethod
    def check_names(run: str, launch: str) -> None:
        """`InvalidRequest` for an invalid name of a run or a launch."""
        naming.check_run(run)
        if not (1 <= len(launch) <= LAUNCH_LENGTH_MAX and launch.isprintable()):
            raise InvalidRequest(
                f"{launch!r} is not a valid launch ID", hint=f"1 to {LAUNCH_LENGTH_MAX} printable characters"
            )

    def keep_speakers(self, run: str) -> None:
        """Write the speakers of a run's ranks, if a rank has joined since the file was written.

        Before an attempt's first commit all its ranks have joined. If the daemon and they are killed after it, the next
        start under the same name is another one, and does not get this one's answers.
        """
        with self._writing:
            if run in self._unwritten:
                self._store({})

    def refuse_older(self, run: str, attempt: int) -> None:
        """`StaleAttempt` for an attempt older than the newest (I6)."""
        newest = self.newest(run)
        if attempt < newest:
            raise StaleAttempt(
                f"attempt {attempt} of {run} is shut out: attempt {newest} has started",
                hint="a newer launch of this run is active; stop this one",
                newest=newest,
            )

    def saw(self, run: str, attempt: int) -> None:
        """Note an attempt found in a checkpoint or a slot, so that its number is not given out again."""
        if attempt <= self.newest(run):
            return
        with self._writing:
            before = self._of(run)
            self._store({run: before.model_copy(update={"attempt": max(before.attempt, attempt)})})

    def saw_elsewhere(self, run: str, attempts: Collection[int], way: Way) -> bool:
        """Note attempts of other roots' launches, found in a tier, and the way to their line: later launches exceed them,
        and a launch that is at work here goes on. False if all that is known.
        """
        with self._writing:
            before = self._of(run)
            after = before.found_elsewhere(attempts, way)
            if after == before:
                return False
            self._store({run: after})
            return True

    def elsewhere(self, run: str) -> Elsewhere:
        """What other roots have made of a run, as far as it was found in a tier."""
        with self._lock:
            return self._runs.get(run, RunAttempts()).elsewhere

    def is_own(self, run: str, attempt: int) -> bool:
        """Whether a launch of this root has this attempt, as far as launches are remembered."""
        with self._lock:
            return attempt in self._runs.get(run, RunAttempts()).launches.values()

    def became(self, run: str, attempt: int, life: Life, at: str) -> bool:
        """Record the state of a run's ranks, durably; False where it is known, or a newer attempt has begun."""
        with self._writing:
            before = self._of(run)
            if before.attempt != attempt or before.life == life:
                return False
            since = None if life == "running" else at
            self._store({run: before.model_copy(update={"life": life, "since": since})})
            return True

    def asked(self, run: str, attempt: int, turn: int) -> tuple[bool, int | None]:
        """Whether the `turn`-th question of an attempt has been answered, and the answer."""
        with self._lock:
            answers = self._runs.get(run, RunAttempts()).answers
        key = f"{attempt}.{turn}"
        return key in answers, answers.get(key)

    def answer(self, run: str, attempt: int, turn: int, step: int | None) -> int | None:
        """Store the answer unless there is one; return the stored one, durably."""
        with self._writing:
            known, stored = self.asked(run, attempt, turn)
            if known:
                return stored
            self._store({run: self._of(run).answered(f"{attempt}.{turn}", step)})
            return step

    def continues(self, run: str, attempt: int, copy: PlacedCheckpoint) -> None:
        """Store, durably, what a launch restores that only a replica has: what it saves continues from there."""
        with self._writing:
            self._store({run: self._of(run).continued(attempt, copy)})

    def continued(self, run: str, attempt: int, step: int) -> ListedCheckpoint | None:
        """What a launch has restored that only a replica had."""
        with self._lock:
            found = self._runs.get(run, RunAttempts()).copies.get(f"{attempt}.{step}")
        return None if found is None else ListedCheckpoint(step, *found[:2], [Rewind(*one) for one in found[2]])

    def merge(self, by_run: Mapping[str, RunAttempts]) -> None:
        """Add the attempts found in the catalog or the directories; the record is complete from here on."""
        with self._writing:
            before = self.known()
            merged = {run: before.get(run, RunAttempts()).merged(other) for run, other in by_run.items()}
            changed = {run: attempts for run, attempts in merged.items() if attempts != before.get(run)}
            if changed or not self.complete:
                self._store(changed)
            self.complete = True

    def refresh(self, runs: Collection[str]) -> dict[str, int]:
        """The newest attempts of these runs, of those that have begun on another node since this was last asked."""
        return {}

    def refuse_overtaken(self, run: str, attempt: int, ask: Ask) -> None:
        """`StaleAttempt` where a newer launch, on another node, has an answer about what to restore."""

    def settled_elsewhere(self, run: str, wait_s: float) -> bool:
        """Wait until no other node writes a save of this run that all ranks have sealed; False on timeout."""
        return True

    def forget(self, run: str) -> None:
        """Forget the run, durably: one without checkpoints that is not being trained."""
        with self._writing:
            if run in self.known():
                self._store({}, without=run)

    def rename(self, run: str, name: str) -> None:
        """Rename the run's record, durably; does nothing without one."""
        with self._writing:
            known = self.known().get(run)
            if known is not None:
                self._store({name: known.merged(self._of(name))}, without=run)

    def _of(self, run: str) -> RunAttempts:
        with self._lock:
            return self._runs.get(run, RunAttempts())

    def _store(self, changed: Mapping[str, RunAttempts], without: str | None = None) -> None:
        """Write the file, then update memory. The caller holds the file's lock."""
        readable = {run: _readable(run, attempts) for run, attempts in changed.items()}
        runs = {run: attempts for run, attempts in {**self.known(), **readable}.items() if run != without}
        self._records.replace(self._path, _File(runs=runs).model_dump_json().encode() + b"\n")
        with self._lock:
            self._runs = runs
            self._unwritten.clear()


def read(records: Records, path: str) -> dict[str, RunAttempts] | None:
    """The content of a file of attempts; None where it is missing or unreadable."""
    try:
        data = read_bounded(records, path, FILE_BYTES_MAX)
        return None if data is None else _File.model_validate_json(data).runs
    except (ValidationError, Damaged) as error:
        log.error("cannot read %s, rebuilding it from the catalog: %s", path, str(error)[:200])
        return None


def make_one(records: Records) -> None:
    """Merge what the daemons of several nodes know of attempts into the file of one that serves the root alone.

    The caller holds the root's lock, and the others have been stopped for good. No number is given out twice.
    """
    nodes = [name for name in records.list("") if naming.parse_attempts_file(name) is not None]
    claims = [claim for claim in map(naming.parse_claim_file, records.list(naming.CLAIMS)) if claim is not None]
    if not nodes and not claims:
        return
    alone = Attempts(records)
    alone.merge({})
    for name in nodes:
        alone.merge(read(records, name) or {})
    for run, attempt in claims:
        alone.saw(run, attempt)
    for name in nodes:
        records.remove_file(name)
    for name in records.list(naming.CLAIMS):
        records.remove_file(f"{naming.CLAIMS}/{name}")
    records.remove_empty(naming.CLAIMS)
