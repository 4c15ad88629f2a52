"""A rank's session with its daemon: identity and attempt. Replaced for a new daemon."""

from __future__ import annotations

import logging
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

from holdfast import launch
from holdfast.config import default_socket, take_over
from holdfast.left_out import LeftOutNote, LeftOutWarning
from holdfast.link import roots
from holdfast.link.address import DaemonAddress
from holdfast.link.background_requests import BackgroundRequests
from holdfast.link.busy_runs import until_free
from holdfast.link.connect import connect, none_on_full_disk
from holdfast.link.run_info import RunInfo
from holdfast.read.bucket_root import BucketRoot
from holdfast.read.checkpoint_root import CheckpointRoot, root_of
from holdfast.read.copies import CheckpointCopy
from holdfast.read.directory_root import DirectoryRoot
from holdfast.read.reader import CheckpointReader
from holdfast.read.root_directory import (
    CheckpointIdentity,
    listed_steps,
    living_steps,
    open_checkpoint,
    open_nearest,
    source_at,
)
from holdfast.save_warning import warn
from holdfast.threads.daemon_heartbeat import DaemonHeartbeat
from holdfast.threads.latch import Latch
from holdfast.tickets import Tickets
from holdfast.transport import Transport
from holdfast_files.objects import address
from holdfast_formats import naming, restore_refusals
from holdfast_formats.errors import (
    CheckpointError,
    DaemonGone,
    Damaged,
    DeadlineExceeded,
    InvalidRequest,
    NoSpace,
    NoSuchCheckpoint,
    StateMismatch,
    from_problem,
)
from holdfast_formats.root_files import RootMark
from holdfast_formats.staging import wire
from holdfast_formats.staging.messages import CopyAnswer, CopyPlace

log = logging.getLogger(__name__)

SETTLE_WAIT_S = 3600.0
ENDED_WAIT_S = 3600.0  # how long the other ranks' restores are waited for
REPLY_SPARE_S = 60.0
NONE: Mapping[str, CheckpointError] = MappingProxyType({})
TELL_S = 10.0  # interval of notices about what a restore waits for


class RankIdentity(NamedTuple):
    """The identity of a rank."""

    run: str
    rank: int
    world: int
    launch: str
    keep_last: int | None


class Choice(NamedTuple):
    """The step to restore (None: there is none) and where to read it. `turn` numbers the daemon's answer; `notes` name
    skipped newer steps. What the root lacks is in the `copies`.
    """

    step: int | None
    root: CheckpointRoot | None
    url: str | None
    turn: int | None = None
    notes: tuple[str, ...] = ()
    served: str = ""  # what the daemon, of this machine, names as its root
    copies: tuple[CheckpointCopy, ...] = ()
    created: str = ""  # of the checkpoint, if the root lacks it

    def open(self, run: str, problems: dict[str, CheckpointError]) -> CheckpointReader:
        """The checkpoint in the nearest place where it can be read; adds the problems of those passed over, by name."""
        assert self.step is not None
        place = (self.root, self.url, run, self.step, self.served)
        if not self.copies:
            return open_checkpoint(*place)
        copies = (CheckpointCopy("", partial(source_at, *place)), *self.copies)
        return open_nearest(copies, CheckpointIdentity(run, self.step, self.created), problems)


class RestoreVerdictReply(NamedTuple):
    """The verdict on a restore: read `again`, fail, or (neither set) continue."""

    again: bool = False
    error: CheckpointError | None = None
    late: bool = False  # it failed here, and others have gone on
    newest: int | None = None  # where a step was named and failed: the newest one that is not known to be damaged


class Session:
    """Not thread-safe: guarded by its owner's lock. Outcomes of saves go to `tickets`, on the link's thread.

    `notices` tell the user about the daemon and the staging memory.
    """

    def __init__(
        self,
        who: RankIdentity,
        place: DaemonAddress,
        tickets: Tickets,
        info: RunInfo | None = None,
        stop: Callable[[], object] = bool,
    ) -> None:
        """Connects nothing yet. `info` describes this launch; `stop` is called on the link's thread when another rank
        is to stop.
        """
        self._who, self._place, self._tickets, self._info, self._stop = who, place, tickets, info, stop
        self._id = uuid.uuid4().hex
        self._link: BackgroundRequests | None = None
        self._welcome: wire.Welcome | None = None
        self._turn = 0
        self._stored = place.readable
        self._bucket: BucketRoot | None = None  # the daemon's
        self._places: dict[str, CheckpointRoot] = {}  # of copies, by what the daemon calls them
        self._chosen: Choice | None = None
        self.notices: list[str] = []

    @property
    def attempt(self) -> int | None:
        """The attempt number of this launch, once a daemon has assigned it."""
        return None if self._welcome is None else self._welcome.attempt

    @property
    def link(self) -> Transport | None:
        return self._link

    @property
    def heartbeat(self) -> DaemonHeartbeat | None:
        """Checks whether the daemon answers; None before the first contact."""
        return None if self._link is None else self._link.heartbeat

    def until(self, ended: Latch, timeout: float | None = None, awaits: int | None = None) -> bool:
        """Wait as `DaemonHeartbeat.until`. This rank begins no save before the one of step `awaits` has ended: this daemon
        and         its successors are told so.
        """
        if self._link is None:
            return ended.wait(timeout)
        return self._link.heartbeat.until(ended, timeout, bool if awaits is None else lambda: self.waits(awaits))

    def waits(self, step: int | None = None) -> None:
        """Report that this rank begins no save before this one has ended; without a step, that it waits no more."""
        if self._link is not None:
            self._link.notify(wire.Waits(id=self._link.next_id(), step=step))

    def connected(self, start: bool) -> wire.Welcome:
        """The daemon's welcome. Connects or reconnects if necessary; `start` allows starting a daemon."""
        if self._link is not None and self._welcome is not None and self._link.alive:
            return self._welcome
        if self._link is not None:
            self._link.close()
        link_events = (self._tickets.outcome, self._tickets.lost)
        with nullcontext() if self._welcome is None else none_on_full_disk():
            made = connect(self._place, self._who.run, start, link_events, self._greet, self._stop)
        for note in (*made.notes, *made.welcome.notices):
            if note not in self.notices:
                self.warn(note)
        self._link, self._welcome = BackgroundRequests(made.link), made.welcome
        return made.welcome

    def stopping(self, passed: int, step: int | None) -> wire.StopAt:
        """Report how far this rank is, because its launch is to stop. Thread-safe."""
        link = self._link
        if link is None:
            raise DaemonGone("there is no connection to a daemon")
        return link.request(wire.Stopping(id=link.next_id(), passed=passed, step=step), wire.StopAt)

    def copied(self, step: int, tier: str) -> CopyAnswer:
        """Whether a step of the run is in a tier. Thread-safe; connects to no daemon."""
        link = self._link
        if link is None:
            raise DaemonGone("there is no connection to a daemon")
        return link.request(wire.CopyOf(id=link.next_id(), step=step, tier=tier), wire.CopyFound)

    def _greet(self, link: Transport, meant: RootMark | None) -> wire.Welcome:
        if meant is None and self._welcome is not None:  # wherever it answers now, it serves the root that it did before
            meant = RootMark(id=self._welcome.mark.id)
        hello = wire.Hello(
            id=0,
            root=meant,
            process=launch.this_process(),
            session=self._id,
            take_over=take_over(),
            info=None if self._info is None else self._info.document(),
            **self._who._asdict(),
        )
        asking = BackgroundRequests(link)
        return until_free(lambda: asking.request(hello.model_copy(update={"id": link.next_id()}), wire.Welcome))

    def root(self) -> Path | None:
        """The directory of the daemon's root, if it is on this machine."""
        root = self._readable(self.connected(start=True))
        return root.path if isinstance(root, DirectoryRoot) else None

    @property
    def has_catalog(self) -> bool:
        """Whether a daemon has served this directory, so that its catalog knows what was there."""
        directory = self._place.directory
        return directory is not None and (directory / naming.CATALOG).is_file()

    def watch_links(self, directory: str) -> None:
        """Register a directory whose links keep checkpoints of the run."""
        assert self._link is not None
        self._link.request(wire.WatchLinks(id=self._link.next_id(), directory=directory), wire.Done)

    def _readable(self, welcome: wire.Welcome) -> CheckpointRoot | None:
        """The daemon's root if it is readable here: the same directory or bucket, not another one at its path."""
        if address.is_address(welcome.root):
            if self._bucket is None:
                stored = self._stored
                if isinstance(stored, BucketRoot) and stored.label == welcome.root:
                    self._bucket = stored
                else:
                    self._bucket = BucketRoot(address.parse(welcome.root))
            return self._bucket if self._bucket.is_root(welcome.mark.id) else None
        places = [self._place.root, Path(welcome.root) if welcome.root else None]
        found = (path for path in places if path is not None and roots.is_at(path, welcome.mark))
        return next(map(DirectoryRoot, found), None)

    def choose(
        self,
        step: int | None,
        groups: tuple[str, ...],
        start: bool = False,
        below: int | None = None,
        healthy: bool = False,
    ) -> Choice:
        """The step to restore: the daemon's choice, or without a daemon the newest step in the directory with these
        groups.

        `start` allows starting a daemon. In a directory, a step older than the damaged step `below` is chosen. Only a
        daemon knows which checkpoints are healthy, so `healthy` always starts one.
        """
        try:
            self.connected(start or healthy)
        except (DaemonGone, NoSpace) as gone:
            root = self._stored
            if root is None or healthy:
                raise
            if start:
                log.info("no daemon is available to agree on a step: %s", gone.detail)
            return Choice(_newest(root, self._who.run, step, groups, below), root, None)
        turn, self._turn = self._turn, self._turn + 1
        return self._asked(wire.Choose(id=0, turn=turn, step=step, groups=groups, healthy=healthy, wait_s=SETTLE_WAIT_S))

    def brought(self, choice: Choice) -> Choice:
        """The same choice once the daemon has copied its checkpoint back to the root: this rank cannot read the copies."""
        assert choice.turn is not None
        return self._asked(wire.Choose(id=0, turn=choice.turn, step=choice.step, in_root=True, wait_s=SETTLE_WAIT_S))

    def _asked(self, question: wire.Choose) -> Choice:
        assert self._link is not None and self._welcome is not None
        welcome, chosen = self._welcome, _patiently(self._link, question)
        copies = () if chosen.step is None else tuple(self._copy(at, chosen.step) for at in chosen.copies)
        root = self._readable(welcome)
        place = (root, welcome.url, question.turn, chosen.notes, welcome.root)
        self._chosen = Choice(chosen.step, *place, copies, chosen.created)
        return self._chosen

    def _copy(self, place: CopyPlace, step: int) -> CheckpointCopy:
        if place.at not in self._places:
            self._places[place.at] = root_of(place.at)
        return CheckpointCopy(place.name, partial(source_at, self._places[place.at], None, self._who.run, step))

    def ended(
        self, choice: Choice, error: CheckpointError | None, alone: bool, passed_over: Mapping[str, CheckpointError] = NONE
    ) -> RestoreVerdictReply:
        """Report how the restore of a choice ended, and the problems of copies that were passed over; returns the verdict
        once all ranks of the launch have reported.

        Without a daemon each rank decides for itself. `alone` concerns only this rank.
        """
        own = RestoreVerdictReply(error=error, late=self._who.world > 1, newest=self._other(choice, error))
        if choice.turn is None or choice.step is None or self._link is None:
            return own
        problem = None if error is None else error.problem()
        message = wire.Ended(
            id=self._link.next_id(),
            turn=choice.turn,
            step=choice.step,
            problem=problem,
            alone=alone,
            wait_s=ENDED_WAIT_S,
            passed_over={name: problem.problem() for name, problem in passed_over.items()},
        )
        try:
            judged = self._link.request(message, wire.Judged, ENDED_WAIT_S + REPLY_SPARE_S)
        except CheckpointError as failure:
            log.warning(
                "the end of the restore of step %d could not be reported to the daemon: %s", choice.step, failure.detail
            )
            return own
        return RestoreVerdictReply(
            judged.again, None if judged.problem is None else from_problem(judged.problem), judged.late, judged.newest
        )

    def _other(self, choice: Choice, error: CheckpointError | None) -> int | None:
        """The newest step in the root except the damaged one, without a daemon."""
        if error is None or choice.turn is not None or choice.root is None:
            return None
        return next((step for step in living_steps(choice.root, self._who.run) if step != choice.step), None)

    def steps(self) -> list[int]:
        """The committed steps of the run, newest first. Declares no launch: see `_unconnected`."""
        at = self._unconnected(None)
        return listed_steps(at.root, at.url, self._who.run, at.served)

    def read_file(self, step: int, name: str) -> bytes:
        """A file of a committed checkpoint, checked against its digest. Declares no launch: see `_unconnected`.

        Raises `NoSuchCheckpoint`, and `StateMismatch` if the checkpoint has no file of this name.
        """
        at, chosen = self._unconnected(step), self._chosen
        if chosen is not None and chosen.step == step:
            at = at._replace(copies=chosen.copies, created=chosen.created)
        with at.open(self._who.run, {}) as reader:
            if reader.manifest.file(name) is None:
                raise StateMismatch(
                    f"{reader.source.label} has no file {name!r}",
                    hint="pass the name of an asset that was saved at this step",
                )
            return reader.read_file(name)

    def _unconnected(self, step: int | None) -> Choice:
        """Where the run's checkpoints are read. Neither starts a daemon nor connects to one as a rank: that would declare a
        launch, and shut out the one that trains.

        Raises `InvalidRequest` if only a connection could tell where the checkpoints are.
        """
        place, welcome = self._place, self._welcome
        if welcome is not None:
            return Choice(step, self._readable(welcome), welcome.url, served=welcome.root)
        root = self._stored
        if place.fallback is not None and roots.answers(default_socket()):
            root = None
        if root is None and place.url is None:
            raise InvalidRequest(
                f"the location of the checkpoints of {self._who.run} is unknown until restore() or save() has "
                "connected to the daemon",
                hint="call restore() or save() first, or construct the Checkpointer with the root's directory "
                "or the daemon's address: at=",
            )
        return Choice(step, root, place.url)

    def warn(self, notice: str) -> None:
        log.warning("rank %d of %s: %s", self._who.rank, self._who.run, notice)
        self.notices.append(notice)

    def warn_of(self, of: str, notes: Sequence[str]) -> None:
        """Log notes of a save or restore. A note about something left out is a notice and a warning, too."""
        left_out = [f"{of}: {note}" for note in notes if isinstance(note, LeftOutNote)]
        self.notices += left_out
        for note in notes:
            log.info("%s: %s", of, note)
        for text in left_out:  # last, for warnings may be errors
            warn(text, LeftOutWarning)

    def close(self, ended: bool = False) -> None:
        """Disconnect. `ended`: a regular end, so the daemon keeps no in-memory checkpoint for a restart."""
        if self._link is not None:
            self._link.close(ended)
            self._link = None
        for root in (self._stored, self._bucket, *self._places.values()):
            if root is not None:
                root.close()


def _patiently(link: BackgroundRequests, question: wire.Choose) -> wire.Chosen:
    """Repeat the question while the daemon reports a repair; raises if it does not answer."""
    limit = time.monotonic() + SETTLE_WAIT_S
    told_at = 0.0
    while True:
        try:
            asked = question.model_copy(update={"id": link.next_id()})
            return link.request(asked, wire.Chosen, max(limit - time.monotonic(), REPLY_SPARE_S))
        except DeadlineExceeded as waits:
            if "repairing" not in waits.members or time.monotonic() > limit:
                raise
            if time.monotonic() > told_at + TELL_S:
                told_at = time.monotonic()
                log.warning("restore waits: %s", waits.detail)


def _newest(
    root: CheckpointRoot, run: str, step: int | None, groups: tuple[str, ...], below: int | None = None
) -> int | None:
    if step is not None:
        steps = root.published_steps(run)
        if step not in steps:
            raise NoSuchCheckpoint(f"{root.label} has no checkpoint {run}@{step}", hint=f"available steps: {steps[:10]}")
        return step
    offers: dict[int, Sequence[str]] = {}
    living = living_steps(root, run, root.published_steps(run))
    for candidate in (found for found in living if below is None or found < below):
        try:
            with open_checkpoint(root, None, run, candidate) as reader:
                if set(groups) <= set(reader.manifest.groups):
                    return candidate
                offers[candidate] = reader.manifest.groups
        except Damaged:  # loading it reports the damage
            return candidate
    if offers:
        raise restore_refusals.lacking(run, offers, groups)
    return None
