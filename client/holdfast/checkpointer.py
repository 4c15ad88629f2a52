"""The trainer's hook: hand over the state, get it back. Everything else is delegated."""

from __future__ import annotations

import logging
import math
import threading
import time
import warnings
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, get_args

from holdfast_formats import naming, wire
from holdfast_formats.errors import CheckpointError, DaemonGone, GenerationDropped, InvalidRequest
from holdfast_formats.packing import FILE_BYTES_MAX
from holdfast_formats.table import digests_bytes

from . import assets as asset_files
from . import collecting, device, falling_back, settled, staging
from . import launch as launches
from .claims import Claims
from .declared import declare
from .growth import Need
from .handover import Handover, Sealable
from .leaves import is_ignored
from .masters import Masters
from .place import open_checkpoint, place
from .preparation import Preparation
from .restoring import RestoreReport, Wanted, load
from .routes import Routes
from .rulebook import LayoutSource, RulesSource
from .session import Choice, Session, Who
from .slots import Slots
from .state import Snapshot, TrainState
from .tickets import SaveTicket, Tickets

log = logging.getLogger(__name__)

SLOTS = 2
SLOT_WAIT_S = 3600.0
TABLE_BYTES_A_TENSOR = 256

Wait = Literal["staged", "durable"]
Check = Literal["sampled", "full"]


class SaveWarning(UserWarning):
    """An earlier save failed in the background, or was dropped; the checkpoints before it are untouched."""


class Checkpointer:
    """Saves and restores a training state through this machine's daemon.

    `state` maps names to modules, optimizers, schedulers, EMA copies, stateful objects, tensors, mappings of tensors and
    JSON values; it is read anew at every save. Every rank constructs one, with the same run and in the same order. The
    daemon is found by `root` (its directory; one is started there if none serves it), `socket` or `url`; with none of
    them, the user's daemon is used, else one is started on ./holdfast-data. `fenced` is the caller's promise to call
    `fence()` before changing any tensor of the state, except in the step of an optimizer that is part of it. `check` is
    how saves look for tensors that change under the copy all the same, see `save`.

    `layout` says that plain tensors of the groups model, master and ema, and what optimizers keep of them, are this rank's
    local ones: cut, fused and padded as it says (`holdfast.declared`). `rules` extends the tables of architectures, `config`
    is the model's config.json, if it is not among the assets. DTensors and Fragments go on saying themselves where they lie.
    """

    def __init__(  # noqa: PLR0913 - the public entry: two required arguments, the rest named and optional
        self,
        run: str,
        state: Mapping[str, Any],
        *,
        root: str | Path | None = None,
        socket: str | Path | None = None,
        url: str | None = None,
        assets: Any = None,
        keep_last: int | None = None,
        launch: str | None = None,
        slots: int = SLOTS,
        policy: wire.Policy = "newest-wins",
        fenced: bool = False,
        check: Check = "sampled",
        file_bytes_max: int = FILE_BYTES_MAX,
        layout: LayoutSource | None = None,
        rules: RulesSource = None,
        config: Mapping[str, Any] | None = None,
    ) -> None:
        """Nothing is contacted yet. Raises `InvalidRequest` for names, assets or options that are not allowed."""
        self.run = naming.check_run(run)
        if slots < 1 or file_bytes_max < 1 or (keep_last is not None and keep_last < 1):
            raise InvalidRequest("slots, file_bytes_max and keep_last must be at least 1")
        if policy not in get_args(wire.Policy):
            raise InvalidRequest(f"policy must be one of {', '.join(get_args(wire.Policy))}, not {policy!r}")
        self._launch = launches.current(run, launch)
        found = asset_files.collect(assets) if self._launch.rank == 0 or layout is not None else {}
        declared = None if layout is None else declare(layout, self._launch, (config, found), rules)
        self._state = TrainState(state, self._launch.rank, self._launch.world, declared)
        self._assets = found if self._launch.rank == 0 else {}
        self._fenced, self._file_bytes_max, self._policy = fenced, file_bytes_max, policy
        self._check = _check_check(check)
        self._lock = threading.RLock()
        self._tickets = Tickets()
        who = Who(run, self._launch.rank, self._launch.world, self._launch.name, keep_last)
        self._session = Session(who, place(root, socket, url), self._tickets, slots)
        self._handover: Handover | None = None
        self._preparation: Preparation | None = None
        self._asked_to_prepare = False
        self._closed = False
        self._layout = staging.NOTHING  # of the last save: what has not changed since is not looked at again
        self._routes, self._claims = Routes(), Claims(state, self._launch.world)
        self._hooks = settled.StepHooks(state, self._before_step)
        self.last_restore: RestoreReport | None = None

    def __enter__(self) -> Checkpointer:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close(wait=error is None)

    @property
    def notices(self) -> tuple[str, ...]:
        """What to know: of memory for saves (fewer slots, staging through a disk, a state that grew), of damaged steps."""
        return tuple(self._session.notices)

    def save(
        self,
        step: int,
        *,
        groups: Collection[str] | None = None,
        metrics: Mapping[str, float] | None = None,
        wait: Wait | None = None,
        check: Check | None = None,
    ) -> SaveTicket:
        """Take the state as it is now and return at once; copying, writing and committing go on in the background.

        What forward and backward may change is copied before this returns. The rest is copied while they run: the next
        step of an optimizer in the state waits for what is not copied yet. Who changes parameters, optimizer state, masters
        or EMA otherwise calls `fence()` first; a tensor that is seen to change between this call and the copy of it fails
        the save as `TornSnapshot`. Seen is whatever torch counts, other changes of 64 KiB in a row, and most scattered ones:
        a word of every 512 bytes to 32 KiB is compared. With `check="full"` every byte is, for which this call reads all.
        `wait="staged"` copies everything before it returns.

        Where storage is slower than the saves and no slot is free, the policy decides which save is dropped, for all ranks
        alike: `newest-wins` drops an older one that is not being written yet, `oldest-durable` drops this one, `wait` waits
        and drops none. The ticket of a dropped save says `dropped`; this raises `GenerationDropped` only with
        `wait="staged"`, for what could not be staged. `wait="durable"` waits for a slot under every policy.

        Every rank calls it with the same step and groups (default: all). `metrics` are remembered with the checkpoint.
        Raises `InvalidRequest` or `StateMismatch`, before anything is staged, for state that cannot be stored;
        `StateOverwritten` after a restore that failed half-way; `AlreadyCommitted` for a step that exists; `StaleAttempt`
        when a newer launch of the run has begun. What fails later, or because the daemon died and none comes for it within
        seconds, is told by the ticket and as a `SaveWarning` by the next save. `wait="durable"` returns when the step is
        committed and raises if it is not.
        """
        naming.check_step(step)
        kept = _check_metrics(metrics or {})
        if wait not in (None, "staged", "durable"):
            raise InvalidRequest(f"wait must be 'staged' or 'durable', not {wait!r}")
        how = _check_check(check or self._check)
        with self._lock:
            self._refuse_if_closed()
            if self._handover is not None:  # a slot that was given back may be leased anew: nothing still writes into it
                self.fence()
                self._handover.join()
            began = time.monotonic()
            self._tell_failures()
            self._state.wholeness.check()
            self._hooks.renew()
            snapshot = self._state.snapshot(groups)
            layout = self._lay_out(snapshot)
            try:
                ticket = SaveTicket(self.run, step, self._session.connected(start=True).attempt)
                part = self._part(ticket, snapshot, layout, kept, wait)
                handover = Handover(ticket, part._replace(full=how == "full"), self._tickets, self._routes)
            except DaemonGone as gone:
                return self._missed(step, gone, wait)
            except GenerationDropped as dropped:
                if wait is not None:
                    raise
                self._tickets.fail(ticket, dropped)
                return ticket
            if wait is None:
                handover.begin()
                self._handover = handover
            else:
                handover.complete()
        if wait == "durable" or (wait == "staged" and ticket.dropped):
            ticket.result()
        handover.held(time.monotonic() - began, last=wait is not None)
        return ticket

    def fence(self) -> None:
        """Return when the last save needs nothing of the live state any more. Optimizer steps call it by themselves."""
        handover = self._handover
        if handover is not None:
            began = time.monotonic()
            handover.fence()
            handover.held(time.monotonic() - began, last=True)

    def restore(  # noqa: PLR0913 - all named and optional
        self,
        step: int | None = None,
        *,
        groups: Collection[str] | None = None,
        ignore: Sequence[str] = (),
        strict: bool = True,
        healthy: bool = False,
        prove_first: bool = False,
        masters: Masters | None = None,
    ) -> int:
        """Load a checkpoint into the live state, in place, and return its step; 0 when there is none yet.

        With no `step`, the newest one that is sound and has the wanted groups, less those that `ignore` excludes whole:
        `StateMismatch` where there are checkpoints and none has all of them, unless `strict` is False: then the newest of
        those that have the most. Or with `healthy` the newest of those that
        were read back and have no new NaN or infinities: every rank of a launch gets the same answer, and goes on when
        all of them have read it. Where one turns out damaged, all take the one before it, and the log,
        `notices` and `last_restore` say so; a step that is named is restored or it is an error. `ignore` takes patterns over
        `group/name`. With `strict`, missing and unexpected names raise `StateMismatch`; without it they
        are in `last_restore`. Shapes and dtypes that differ are always refused, before anything is touched, and so are
        files that are missing or too short. Every byte is proven before it is handed over. `CorruptExtent` names file,
        tensor and range; it is raised where a step was named, where nothing sound is left, and where ranks cannot agree on
        an older step any more. Live tensors may be overwritten in part then, with what was proven or zeros: its hint says
        so, and until a restore succeeds, `save()` and steps of optimizers in the state raise `StateOverwritten`. With
        `prove_first` everything is proven before anything is overwritten, which reads it twice: for who would go on with
        the old state. Weights restored without their full-precision masters are refused, for the next step would undo it:
        `masters="from-model"` sets the masters from them.
        """
        began = time.monotonic()
        with self._lock:
            self.fence()
            wanted = tuple(groups) if groups is not None else self._state.groups()
            needed = tuple(group for group in wanted if not is_ignored(group, ignore))
            asked = falling_back.Asked(step, needed, step is None and groups is None, healthy, strict)
            part = Wanted(groups, ignore, strict, prove_first, masters)
            loading = falling_back.Loading(lambda found: self._load(found, part), self._state.wholeness.take_back)
            restored = falling_back.restore(self._session, self._launch.world, asked, loading)
            if restored is not None:
                self.last_restore = restored._replace(seconds=time.monotonic() - began)
                for note in restored.notes:
                    log.info("restore of %s@%s: %s", self.run, restored.step, note)
            self._prepare_unasked(step, groups)
            return 0 if restored is None else restored.step

    def prepare(self, wait: bool = False) -> None:
        """Get shared memory for the state and touch it, in the background, so that the first save costs what others cost.

        `restore()` of the newest checkpoint does it unasked, else the first step of an optimizer in the state. What an
        optimizer will add at its first step is estimated. Failures show at the first save. With `wait`, return when the
        memory is ready, or cannot be had now.
        """
        self._asked_to_prepare = True
        with self._lock:
            snapshot = self._state.snapshot()
            layout = self._lay_out(snapshot)
            who = staging.SaveIdentity(self.run, 0, 0, self._launch.rank, self._launch.world)
            table = staging.encode_table(who, snapshot, layout, {}, self._file_bytes_max)
            more = settled.expected_growth(self._state.state)
        table_bytes = len(table) + digests_bytes(len(layout.copies)) + more.tensors * TABLE_BYTES_A_TENSOR
        need = Need(layout.data_bytes + more.bytes, table_bytes, layout.leaves)
        self._preparation = Preparation(lambda: self._reserved(need), device.homes(layout.leaves))
        if wait:
            self._preparation.join()

    def close(self, wait: bool = True) -> None:
        """Part from the daemon, which goes on with what is staged. With `wait`, first see every save through.

        Raises the error of a save that failed and that nobody was told of; one that was dropped is no failure.
        """
        with self._lock:
            self._closed = True
            if self._preparation is not None:
                self._preparation.stop()
            self._hooks.remove()
            if self._handover is not None:
                self.fence()
                self._handover.join()
            if wait:
                for ticket in self._tickets.open():
                    _settled(ticket)
            self._session.close(ended=wait)
            failed = self._tickets.take_failure()
        if wait and failed is not None and failed.error is not None:
            raise failed.error

    def _load(self, found: Choice, wanted: Wanted) -> RestoreReport:
        assert found.step is not None
        with collecting.paused(), open_checkpoint(found.root, found.url, self.run, found.step) as reader:
            return load(reader, self._state, (self._session, self._launch), wanted)

    def _prepare_unasked(self, step: int | None = None, groups: Collection[str] | None = None) -> None:
        """Training goes on from here, unless a certain step or a part of the state was asked for."""
        if step is None and groups is None and not self._asked_to_prepare:
            try:
                self.prepare()
            except CheckpointError as error:
                log.info("not prepared for saves: %s", error.detail)  # the first save says so, where it matters

    def _reserved(self, need: Need) -> Slots:
        with self._lock:
            self._refuse_if_closed()
            self._session.connected(start=True)
            slots = self._session.room_for(need)
            self._routes.lay_ahead(slots, self._layout)
            return slots

    def _refuse_if_closed(self) -> None:
        if self._closed:
            raise InvalidRequest("the checkpointer is closed", hint="construct a new one")

    def _before_step(self, *_: Any) -> None:
        """An optimizer is about to change what the last save may still be copying. At its first step the state stands."""
        self._state.wholeness.check()
        self.fence()
        self._prepare_unasked()

    def _missed(self, step: int, gone: DaemonGone, wait: Wait | None) -> SaveTicket:
        """The daemon died and none has come for it yet: the save has failed, training goes on.

        Where there never was a daemon it is raised: then something is set up wrongly.
        """
        attempt = self._session.attempt
        if attempt is None or wait == "durable":
            raise gone
        ticket = SaveTicket(self.run, step, attempt)
        self._tickets.fail(ticket, gone)
        return ticket

    def _lay_out(self, snapshot: Snapshot) -> staging.Layout:
        judge = settled.Judge(self._state.state, self._fenced)
        self._layout = staging.lay_out(snapshot, self._assets, judge, self._layout, self._file_bytes_max)
        return self._layout

    def _part(
        self,
        ticket: SaveTicket,
        snapshot: Snapshot,
        layout: staging.Layout,
        metrics: Mapping[str, float],
        wait: Wait | None,
    ) -> Sealable:
        who = staging.SaveIdentity(self.run, ticket.step, ticket.attempt, self._launch.rank, self._launch.world)
        table = staging.encode_table(who, snapshot, layout, metrics, self._file_bytes_max)
        says = self._claims.of(layout, ticket)
        need = Need(layout.data_bytes, len(table) + (says.table_bytes if says is not None else 0), layout.leaves)
        slots = self._session.room_for(need, self._handover)
        policy: wire.Policy = "wait" if wait == "durable" else self._policy
        with self._tickets.beginning(ticket):
            slot = slots.lease(ticket.step, ticket.attempt, SLOT_WAIT_S if policy == "wait" else 0.0, policy)
        return Sealable(slot, layout, table, says)

    def _tell_failures(self) -> None:
        failed, dropped = self._tickets.take_failure(), self._tickets.take_drop()
        if failed is not None:
            warnings.warn(f"the save of {self.run}@{failed.step} failed: {failed.error}", SaveWarning, stacklevel=3)
        if dropped is not None:
            text = f"the save of {self.run}@{dropped.step} was dropped, and others may be, which only the log tells"
            warnings.warn(f"{text}: {dropped.error}", SaveWarning, stacklevel=3)


def _settled(ticket: SaveTicket) -> None:
    """Wait for the end of a save, whatever it is."""
    try:
        ticket.result()
    except CheckpointError as error:
        how = "was dropped" if ticket.dropped else "failed"
        log.warning("the save of %s@%s %s: %s", ticket.run, ticket.step, how, error.detail)


def _check_check(check: str) -> str:
    if check not in get_args(Check):
        raise InvalidRequest(f"check must be one of {', '.join(get_args(Check))}, not {check!r}")
    return check


def _check_metrics(metrics: Mapping[str, float]) -> dict[str, float]:
    for name, value in metrics.items():
        if not isinstance(name, str) or isinstance(value, bool) or not isinstance(value, int | float):
            raise InvalidRequest(f"metric {name!r} must be a number, not {type(value).__name__}")
        if not math.isfinite(value):
            log.warning("metric %s is %s, which JSON cannot say: it is not remembered", name, value)
    return {name: float(value) for name, value in metrics.items() if math.isfinite(value)}
