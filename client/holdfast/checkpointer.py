"""The `Checkpointer`: saves and restores a training state. Everything else is delegated."""

from __future__ import annotations

import logging
import os
import signal
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from os import PathLike
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, NoReturn, SupportsIndex, TypeVar

from holdfast.layout import model_form
from holdfast.layout.declared import declare
from holdfast.layout.rules_choice import LayoutSource, ParallelLayout
from holdfast.link.checkpoint_links import CheckpointLinks
from holdfast.link.session import RankIdentity, Session
from holdfast.restore import fallback
from holdfast.restore.load import RestoreReport, RestoringRank, WantedPart
from holdfast.stage import background_safe
from holdfast.stage.average_memory import AveragingRank
from holdfast.stage.averaging import Averaging, Ema
from holdfast.stage.daemon_requests import DaemonRequests
from holdfast.stage.from_master import FromMasters, ModelSource
from holdfast.stage.preparation import Preparation
from holdfast.stage.reservation import Reservation
from holdfast.stage.save_interval import SaveInterval
from holdfast.stage.save_request import (
    Check,
    SaveRequest,
    Wait,
    check_check,
    check_choices,
    check_flags,
    check_metrics,
    check_step,
)
from holdfast.stage.saves import Saves, SavingRank
from holdfast.stage.slot_contents import SlotContents
from holdfast.state import assets as asset_files
from holdfast.state import exclusion
from holdfast.state.masters import Masters
from holdfast.state.train_state import TrainState
from holdfast.threads.preemption import TrainingStop
from holdfast.threads.reentrancy import CLOSE, RESTORE, CallGuard, DeferredCall, is_in_hook
from holdfast_formats import naming
from holdfast_formats.disk.packing import FILE_BYTES_MAX
from holdfast_formats.errors import InvalidRequest
from holdfast_formats.lineage import Existing
from holdfast_formats.staging.average import GROUP as EMA
from holdfast_formats.staging.messages import Policy
from holdfast_formats.timestamps import check_seconds

from . import checkpointer_options as options
from . import launch as launches
from .link import address, run_info
from .link.run_info import RunInfo
from .tickets import SaveTicket, Tickets, settle

if TYPE_CHECKING:
    from typing_extensions import Unpack

log = logging.getLogger(__name__)

_Result = TypeVar("_Result")

SLOTS = 2
GRACE_S = 30.0  # what torchrun and Kubernetes give


class Checkpointer:
    """Saves and restores a training state through this machine's daemon.

    Every rank constructs one, with the same run and in the same order. Nothing is contacted before the first use.

    Args:
        run: The run's name, the same on all ranks.
        state: The state to save, by name: modules, optimizers, schedulers, EMA copies, stateful objects, tensors,
            mappings of tensors, and JSON values. It is read again at every save.
        at: The daemon: the directory that it serves (one is started there if none does), the path of its socket, which
            ends in .sock or exists, or its http:// or https:// address. Without it, the user's daemon is used; if none
            runs, one is started on ./holdfast-data.
        assets: Files that every checkpoint gets, by name, such as a config or a tokenizer: bytes, text, JSON values or
            paths.
        keep_last: How many of the newest checkpoints are kept; None leaves it to the run's retention policy.
        slots: How many saves can be in progress at a time, at most 64. Each that is in use takes shared memory of the
            state's size; a second one is used only while saves overlap, or may soon.
        policy: Which save is dropped if storage is slower than the saves: `newest-wins`, `oldest-durable` or `wait` (none).
        fenced: Set True if you call `fence()` before changing tensors outside of the step of an optimizer in the state.
            Everything is then copied in the background.
        file_bytes_max: Groups of more bytes than this are split into several files.
        layout: Describes plain tensors of the groups model, master and ema, and their optimizer state, as this rank's local
            parts: cut, fused and padded (`holdfast.layout.declared`). A `ParallelLayout` also selects rules and a
            config.json. DTensors and Fragments describe themselves.
        model: `"from-master"` is for mixed precision: BF16 and FP16 weights of the group model that have a float32 master
            of their name and shape in the group master are not copied. The daemon writes them from the masters, rounded to
            nearest even, so that checkpoints are the same. The first save, and the first after a restore, compares all bits
            and raises `StateMismatch` for other weights.
        ema: Has the daemon keep a moving average of a group, from updates every few optimizer steps. It is saved as the
            group `ema`, and `restore()` loads it into the daemon.
        info: Stored with the run: any mapping of JSON values, such as {"owner": …, "notes": …, "tags": […], "config": …},
            of at most 64 KiB. Git commit, command line (secrets are masked), user, host and versions are added; given keys
            replace them, and None removes one. Rank 0's is stored.

    Raises:
        InvalidRequest: For names, assets or options that are not allowed.

    Example:
        >>> with Checkpointer("llama3-8b", {"model": model, "optim": optimizer}) as checkpointer:
        ...     for step in range(checkpointer.restore() + 1, steps + 1):
        ...         train(step)
        ...         if step % 500 == 0:
        ...             checkpointer.save(step, metrics={"loss": loss.item()})
    """

    def __init__(  # noqa: PLR0913 - the public entry: two required arguments, eleven options, named
        self,
        run: str,
        state: Mapping[str, Any],
        *,
        at: str | PathLike[str] | None = None,
        assets: Any = None,
        keep_last: int | None = None,
        slots: int = SLOTS,
        policy: Policy = "newest-wins",
        fenced: bool = False,
        file_bytes_max: int = FILE_BYTES_MAX,
        layout: LayoutSource | ParallelLayout | None = None,
        model: ModelSource | None = None,
        ema: Ema | None = None,
        info: Mapping[str, Any] | None = None,
    ) -> None:
        self.run = naming.check_run(run)
        options.check(slots, policy, file_bytes_max, keep_last, model)
        laid_out, files = model_form.completed(state, options.declared_layout(layout), assets)
        daemon, self._policy = address.place(at), policy
        launch = self._launch = launches.current(run)
        asset_bytes = asset_files.collect(files) if launch.rank == 0 or laid_out is not None else {}
        declared = None if laid_out is None else declare(laid_out, launch, asset_bytes)
        self._state = TrainState(state, launch.rank, launch.world, declared, launch.mesh)
        rounded = None if model is None else FromMasters(state)
        self._tickets, self._rhythm, self._training_stop = Tickets(), SaveInterval(), TrainingStop()
        who = RankIdentity(run, launch.rank, launch.world, launch.name, keep_last)
        texts = run_info.check(info)
        described = RunInfo(texts) if who.rank == 0 else None
        self._session = Session(who, daemon, self._tickets, described, self._training_stop.asked)
        self._links = CheckpointLinks(run, self._session)
        self._reservation = Reservation(self._session, slots, launch.peers)
        self._hooks = background_safe.StepHooks(state, self._before_step, self._after_step)
        session, optimizers = self._session, self._hooks.optimizers
        self._requests, self._calls = DaemonRequests(lambda: session.heartbeat), CallGuard(optimizers)
        averaged = AveragingRank(run, launch.rank, launch.world, self._state, session, fenced, file_bytes_max)
        ask = self._requests.asking(self._calls)
        self._averaging = None if ema is None else Averaging(ema, averaged, ask, lambda: bool(optimizers))
        stored = asset_bytes if launch.rank == 0 else {}
        self._contents = SlotContents(self._state, stored, fenced, file_bytes_max, rounded, self._averaging)
        rank = SavingRank(run, launch, self._state, session, self._tickets, self._requests, self._calls)
        self._saves = Saves(rank, self._contents, self._reservation, self._averaging, self._hooks, policy)
        self._preparation = Preparation(rank, self._contents, self._saves)
        self.last_restore: RestoreReport | None = None
        self._hooks.renew()  # last: what is refused above leaves no hooks

    @classmethod
    def alone(cls, run: str, state: Mapping[str, Any], **chosen: Unpack[options.Options]) -> Checkpointer:
        """Make a Checkpointer for a process that saves and restores by itself.

        Use it in frameworks in which only rank 0 saves: on that rank, and on no other. It is rank 0 of a world of one,
        regardless of RANK, WORLD_SIZE, HOLDFAST_LAUNCH and torch.distributed, so it waits for no other rank. A second
        rank with the same run is refused as `RunBusy`. The state must be whole on this rank: `save()` raises
        `StateMismatch`, with the tensor's name, for a DTensor or Fragment that is only a part.

        Args:
            run: The run's name.
            state: What is saved, by name, as in the constructor.
            **chosen: The constructor's options.

        Returns:
            The Checkpointer.

        Raises:
            InvalidRequest: As the constructor.

        Example:
            >>> if rank == 0:
            ...     checkpointer = Checkpointer.alone("probe", {"model": model})
        """
        with launches.alone():
            return cls(run, state, **chosen)

    def __enter__(self) -> Checkpointer:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close(wait=error is None)

    def __reduce__(self) -> NoReturn:
        raise InvalidRequest(
            f"the Checkpointer of {self.run} cannot be copied or pickled: it holds a connection and memory of this process",
            hint="construct it where it is needed, or leave it out of the copied object",
        )

    def __repr__(self) -> str:
        parts = [f"rank {self._launch.rank} of {self._launch.world}"]
        if self.last_restore is not None:
            parts.append(f"restored step {self.last_restore.step}")
        parts += [f"step {ticket.step} {'staged' if ticket.staged else 'saving'}" for ticket in self._tickets.open()]
        parts += ["closed"] * self._calls.closed
        return f"<Checkpointer {self.run}: {', '.join(parts)}>"

    @property
    def notices(self) -> tuple[str, ...]:
        """Notices about saves and restores, one sentence each.

        They report values that saves left out, values that restores replaced or did not use, damaged steps, and memory
        for saves (fewer slots, staging through a disk, a state that grew).
        """
        return tuple(self._session.notices)

    @property
    def policy(self) -> Policy:
        """Which save is dropped if storage is slower than the saves."""
        return self._policy

    @property
    def world(self) -> int:
        """How many ranks save together."""
        return self._launch.world

    @property
    def ema(self) -> Averaging:
        """The average that the daemon keeps: its progress, and `update()` for steps that are not counted automatically.

        Raises `InvalidRequest` without `ema=`.
        """
        if self._averaging is None:
            raise InvalidRequest("this Checkpointer has no average", hint="construct it with ema=holdfast.Ema()")
        return self._averaging

    def root(self) -> Path | None:
        """The directory that the daemon serves. Starts a daemon where `save()` would.

        Returns:
            Its absolute path; None if it is not on this machine.

        Raises:
            DaemonGone: If no daemon answers, and none can be started.

        Example:
            >>> checkpointer.root()
            PosixPath('/fast/checkpoints')
        """
        return self._with_session("root()", self._session.root)

    def save(  # noqa: PLR0913 - all named and optional
        self,
        step: SupportsIndex,
        *,
        groups: Collection[str] | None = None,
        metrics: Mapping[str, float] | None = None,
        wait: Wait | None = None,
        check: Check | None = None,
        existing: Existing = "refuse",
        assets: Mapping[str, Any] | None = None,
        exclude: Sequence[str] = (),
        every: Mapping[str, SupportsIndex] | None = None,
    ) -> SaveTicket:
        """Save the current state and return at once; copying, writing and committing run in the background.

        Every rank calls it with the same step and groups. Tensors that forward and backward may change are copied
        before this returns. The rest is copied while they run: the next step of an optimizer in the state waits for the
        copy. Call `fence()` before changing parameters, optimizer state, masters or EMA in any other way; a tensor that
        changes between this call and its copy fails the save as `TornSnapshot`. Holdfast detects all changes that torch
        counts, other changes of 64 KiB in a row, and most scattered changes: it compares a word of every 512 bytes to
        32 KiB.

        If storage is slower than the saves and no slot is free, the policy decides which save is dropped, on all ranks:
        `newest-wins` drops an older one that is not being written yet, `oldest-durable` drops this one, `wait` waits and
        drops none. The ticket of a dropped save has `dropped`.

        Later failures, and the loss of a daemon without a successor within a minute, are reported by the ticket, and as a
        `SaveWarning` by the next save.

        Args:
            step: The training step, at least 0.
            groups: The groups to save; default: all.
            metrics: Numbers stored with the checkpoint, such as the loss; NaN and infinities too.
            wait: `"staged"` copies everything before it returns; over HTTP into memory of this process, which is lost with
                it. `"durable"` returns when the step is committed and raises if it is not; it waits for a slot under every
                policy.
            check: `"full"` compares every byte for changes during the copy; this call then reads the whole state.
            existing: What to do if the step is already a checkpoint: `"refuse"`, or `"same"` accepts one of this line
                of training as saved, `"replace"` replaces any. A launch that has restored none of the run's checkpoints
                needs one of these. Unhealthy and abandoned ones are always replaced, atomically.
            assets: Files of this step only, by name: bytes, text, JSON values or paths. Those of rank 0 are stored, in
                addition to the constructor's; a file of the same name replaces the constructor's.
            exclude: Patterns over `group/name` to leave out; trained state is refused.
            every: `{"optim": 5}` saves this group with every 5th of the saves that pass it, including the first.

        Returns:
            A ticket for the result of this save; its `notes` list what was left out.

        Raises:
            InvalidRequest: For arguments that are not allowed, before anything is staged.
            StateMismatch: For state that cannot be stored, before anything is staged.
            StateOverwritten: After a restore that failed half-way.
            AlreadyCommitted: For a step that exists, unless `existing` allows it.
            StaleAttempt: If a newer launch has begun.
            GenerationDropped: Only with `wait="staged"`, for what could not be staged.

        Example:
            >>> ticket = checkpointer.save(500, metrics={"loss": 2.31})
            >>> ticket.result().step
            500
        """
        check_choices(wait, existing)
        kept = asset_files.of_step(assets, self._launch.rank)
        left_out = exclusion.check(exclude, "exclude")
        ticket = SaveTicket(self.run, check_step(step), 0, self._session.until, self._session.copied)
        if every is not None:
            groups, note = self._rhythm.due(every, groups, self._contents.groups())
            ticket.notes = () if note is None else (note,)
        how = check_check("sampled" if check is None else check) == "full"
        return self._saves.carry_out(
            SaveRequest(ticket, groups, check_metrics(metrics or {}), wait, how, existing, kept, left_out)
        )

    def on_preemption(self, signals: Collection[int] = (signal.SIGTERM,), grace_s: float = GRACE_S) -> None:
        """Let these signals end the training at the same step on all ranks, where `should_stop()` returns True.

        Every rank calls it, in the main thread, before its first step. A signal that reaches any rank is enough,
        however often it comes. A handler that was set before is called too; `close()` restores it. While the signal is
        being handled, torch's DataLoader does not raise for workers that the signal has killed.

        Args:
            signals: The signals' numbers.
            grace_s: How many seconds the process has from the signal on.

        Raises:
            InvalidRequest: For signals that cannot be handled, and for NaN as `grace_s`.
            DaemonGone: If no daemon can be reached, through which several ranks agree.

        Example:
            >>> checkpointer.on_preemption(grace_s=90)
            >>> for step in range(first, steps + 1):
            ...     train(step)
            ...     if checkpointer.should_stop(step):
            ...         break
        """
        check_seconds(grace_s, "grace_s")
        self._calls.refuse_if_closed()
        session = self._session
        if self._launch.world == 1:
            self._training_stop.begin(signals, grace_s, None)
        else:
            reach = partial(self._with_session, "on_preemption()", lambda: session.connected(start=True))
            self._training_stop.begin(signals, grace_s, session.stopping, reach)

    def should_stop(self, step: SupportsIndex, *, metrics: Mapping[str, float] | None = None, save: bool = True) -> bool:
        """Whether training stops after this step, because a signal of `on_preemption()` has reached a rank.

        Call it at the end of every step, on every rank, with increasing steps; it costs microseconds. All ranks get
        True at the same step: the first at which all of them can stop. The step is saved then, on all ranks, and this
        returns when it is committed, or when the time is over and it is staged, with a `SaveWarning`.

        Args:
            step: The step that has just ended.
            metrics: Stored with the checkpoint, as in `save()`.
            save: False leaves the save to the loop.

        Returns:
            True at the step at which all ranks stop, else False.

        Raises:
            CheckpointError: What `save(wait="durable")` raises.
            DeadlineExceeded: With the ranks that have not answered in half of the time.

        Example:
            >>> if checkpointer.should_stop(step, metrics={"loss": loss.item()}):
            ...     break
        """
        number = check_step(step)

        def save_last(left_s: float) -> None:
            self._saves.carry_out_last(number, check_metrics(metrics or {}), left_s)

        return self._training_stop.after(number, save_last if save else None)

    @property
    def preempted(self) -> bool:
        """Whether `should_stop()` has returned True: the training ended early, at the same step on all ranks."""
        return self._training_stop.stopped

    def fence(self) -> None:
        """Return when the last save no longer reads the live state. Optimizer steps call it by themselves.

        Example:
            >>> checkpointer.fence()
            >>> model.load_state_dict(pruned)
        """
        self._saves.fence()

    def restore(  # noqa: PLR0913 - all named and optional
        self,
        step: SupportsIndex | None = None,
        *,
        groups: Collection[str] | None = None,
        needs: Collection[str] = (),
        strict: bool = True,
        healthy: bool = False,
        prove_first: bool = False,
        masters: Masters | None = None,
        cast: bool = False,
        exclude: Sequence[str] = (),
        keep: Sequence[str] = (),
        requantise: bool = False,
    ) -> int:
        """Load a checkpoint into the live state, in place, and return its step.

        Only the job that trains calls it, on every rank: it declares a launch, which is refused as `RunBusy` while
        another job of the run is alive. To read checkpoints in a notebook or an evaluation during training, use
        `holdfast.open()`.

        Without `step`, the newest sound checkpoint with the wanted groups is loaded. Every rank of a launch gets the
        same step, and continues when all of them have read it. If one is damaged, all take the previous one, and the
        log, `notices` and `last_restore` report it. Every byte is checked against its digest; bytes that fail never
        stay in your tensors. Different shapes and dtypes are refused before anything is overwritten, and so are files
        that are missing or too short.

        Args:
            step: Restore this step or raise.
            groups: The groups to restore; default: all, less those that `exclude` leaves out completely.
            needs: Groups that the checkpoint must have for a later restore, though they are not loaded now.
            strict: Raise `StateMismatch` for missing and unexpected names, and if no checkpoint has all groups. False
                reports names in `last_restore`, as it always does for the group `extra` of an imported checkpoint, and
                loads the newest checkpoint of those with the most groups.
            healthy: Restore the newest checkpoint that was verified and has no new NaN or infinities.
            prove_first: Verify everything before anything is overwritten, which reads it twice: use it to continue with the
                old state after an error.
            masters: `"from-model"` sets full-precision masters from weights that were saved without them. Without it,
                such a restore is refused, because the next step would undo it.
            cast: Round floats of another dtype, as torch's `.to` does, with notes.
            exclude: Patterns over `group/name` to leave out, as in `save()`.
            keep: Patterns over `key/name` of hyper-parameters of optimizers and settings of schedulers whose live values
                stay, such as `optim/lr` and `scheduler/T_max`.
            requantise: Quantise low-bit optimizer state again where this layout cuts its blocks in another way, with a
                note of how far values moved. Without it, such a restore is refused.

        Returns:
            The step that was restored; 0 if the run has no checkpoint yet.

        Raises:
            NoSuchCheckpoint: If the given step is not a checkpoint.
            StateMismatch: If names, shapes, dtypes or groups do not fit.
            CorruptExtent: With file, tensor and range, if a step was given, if nothing sound is left, or if ranks cannot
                agree on an older step any more. Live tensors may be partly overwritten then, with verified bytes or zeros:
                until a restore succeeds, `save()` and steps of optimizers in the state raise `StateOverwritten`.
            RunBusy: While another job trains the run.

        Example:
            >>> first = checkpointer.restore() + 1
            >>> checkpointer.restore(healthy=True, keep=["optim/lr"])
            1500
        """
        asked = None if step is None else check_step(step)
        left_out = exclusion.check(exclude, "exclude")
        check_flags(strict=strict, healthy=healthy, prove_first=prove_first, cast=cast, requantise=requantise)
        part = WantedPart(groups, left_out, strict, prove_first, masters, cast, exclusion.check(keep, "keep"), requantise)
        restored = self._calls.run(RESTORE, lambda: self._restore(asked, part, healthy, needs), _refuse_to_restore)
        if asked is None and groups is None:  # else training does not continue from here
            self._preparation.begin_unasked()
        return restored

    def goes_on_from(self, step: int) -> None:
        """Record, on all ranks, that a step of this run was loaded by other means than `restore()`.

        Args:
            step: The step that was loaded.

        Raises:
            InvalidRequest: If `step` is not a valid step number.

        Example:
            >>> checkpointer.goes_on_from(500)
        """
        self._contents.origin.restored(check_step(step), (), ())
        self._saves.restored()
        if self._averaging is not None:
            self._averaging.goes_on_from(check_step(step))

    def restore_random(self) -> None:
        """Install the random streams of the last restore once more.

        Call this last if something draws from them between the restore and the loop (a data loader outside of the state
        draws a seed when it is iterated, another model its weights), at the place in the loop where the save was made.

        Raises:
            InvalidRequest: If no streams were restored.

        Example:
            >>> batches = iter(loader)
            >>> checkpointer.restore_random()
        """
        self._state.random.install_again()

    def link(self, of: SaveTicket | SupportsIndex, path: str | PathLike[str], *, required: bool = True) -> None:
        """Make a symbolic link to the directory of a checkpoint. One rank calls it.

        Until the ticket's save is committed, the link leads nowhere; if it fails, the link is removed. While the link
        exists, its checkpoint is not removed; removing the link ends this protection. A link to another checkpoint of
        the run is replaced.

        Args:
            of: The ticket of a save, or a step.
            path: Where the link is made.
            required: False if training is to go on without the link: what is raised otherwise is a notice, once.

        Raises:
            InvalidRequest: If there is anything but a link at the path, or if the daemon's directory is not on this
                machine.
            NoSuchCheckpoint: If the step is not a checkpoint.

        Example:
            >>> checkpointer.link(checkpointer.save(500), "output/checkpoint-500")
        """
        self._calls.refuse_if_closed()
        target = of if isinstance(of, SaveTicket) else check_step(of)

        def put_off(during: str) -> None:
            self._calls.later(DeferredCall(during, lambda: self.link(target, path, required=required)))

        self._with_session("link()", lambda: self._links.make(target, path, required), put_off)

    def step_at(self, path: str | PathLike[str]) -> int | None:
        """The step whose directory this path is, or leads to as a link.

        Waits for a save of this step that this Checkpointer has begun.

        Args:
            path: A directory, or a link made by `link()`.

        Returns:
            The step; None if the path is no checkpoint of this run and root.

        Raises:
            NoSuchCheckpoint: For a link to a checkpoint that does not exist (yet).

        Example:
            >>> checkpointer.step_at("output/checkpoint-500")
            500
        """

        def look() -> int | None:
            step = naming.linked_step(self.run, os.path.realpath(path))
            under_way = None if step is None else self._tickets.awaited(step, ())
            if under_way is not None:
                settle(under_way)
            return self._links.step_at(path)

        return self._with_session("step_at()", look)

    def steps(self) -> list[int]:
        """The committed steps of this run, the newest last.

        Any rank may call it, and so may another process during training: it starts no daemon, and declares no launch.

        The list excludes saves of this process that are not committed yet. It includes steps that are damaged, or that
        training abandoned by restoring an older one: files are listed and not read, so a step that is listed may still
        fail to restore. `restore()` without a step skips damaged ones.

        Returns:
            Step numbers in ascending order; an empty list if the run has no checkpoint yet.

        Raises:
            InvalidRequest: After `close()`; before `restore()` or `save()` if `at` is a socket, or is not given and your
                daemon runs; or if neither the root's directory nor the daemon's HTTP address can be reached.
            DaemonGone: If `at` is an address and no daemon answers.

        Example:
            >>> checkpointer.steps()
            [500, 1000, 1500]
        """
        self._calls.refuse_if_closed()
        return sorted(self._with_session("steps()", self._session.steps))

    def latest_step(self) -> int | None:
        """The newest of `steps()`.

        `restore()` may return an older step, if this one is damaged, abandoned, or lacks a wanted group.

        Returns:
            The step; None if the run has no checkpoint yet.

        Raises:
            CheckpointError: What `steps()` raises.

        Example:
            >>> checkpointer.latest_step()
            1500
        """
        return max(self.steps(), default=None)

    def read_asset(self, step: SupportsIndex, name: str) -> bytes:
        """Read a file that was saved with a step as an asset, checked against its digest.

        Any rank may call it, and so may another process during training: it starts no daemon, and declares no launch.

        Args:
            step: The step of the checkpoint.
            name: The name of the asset.

        Returns:
            The file's content.

        Raises:
            NoSuchCheckpoint: If the step is not a checkpoint.
            StateMismatch: If the checkpoint has no file of this name.
            CheckpointError: What `steps()` raises.

        Example:
            >>> json.loads(checkpointer.read_asset(500, "config.json"))["hidden_size"]
            4096
        """
        self._calls.refuse_if_closed()
        number = check_step(step)
        return self._with_session("read_asset()", lambda: self._session.read_file(number, name))

    def prepare(self, wait: bool = False) -> None:
        """Reserve shared memory for the state and touch it, in the background: the first save is as fast as later ones.

        `restore()` of the newest checkpoint does it automatically, else the first step of an optimizer in the state. What
        an optimizer will add at its first step is estimated. Failures show at the first save.

        Args:
            wait: Return when the memory is ready, or cannot be reserved now.

        Example:
            >>> checkpointer.prepare(wait=True)
        """
        preparation = self._preparation.begin()
        if wait and preparation is not None:
            preparation.join()

    def close(self, wait: bool = True) -> None:
        """Disconnect from the daemon, which completes staged saves. The end of a `with` block calls it.

        Args:
            wait: First complete every save.

        Raises:
            CheckpointError: The error of a failed save that was not reported yet; a dropped save is no failure.

        Example:
            >>> checkpointer.close()
        """

        if self._calls.forked:  # it is its parent's to close
            return

        def put_off(during: str) -> None:
            if during != CLOSE:
                self._calls.later(DeferredCall(during, lambda: self.close(wait)))

        self._calls.run(CLOSE, lambda: self._close(wait), put_off)

    def _with_session(
        self, name: str, act: Callable[[], _Result], instead: Callable[[str], _Result] | None = None
    ) -> _Result:
        """Call `act` after a request to the daemon that runs: both use the session. `instead` is called in a signal handler
        that interrupted another call; without it, that raises.
        """

        def after() -> _Result:
            self._requests.wait()
            return act()

        return self._calls.run(name, after, _refuse_to_look if instead is None else instead)

    def _restore(self, step: int | None, part: WantedPart, healthy: bool, needs: Collection[str]) -> int:
        began = time.monotonic()
        self.fence()
        self._hooks.renew()
        self._requests.wait()
        self._saves.restored()
        groups = part.groups
        wanted = tuple(set(groups) - {EMA} if self._averaging else groups) if groups is not None else self._state.groups()
        needed = fallback.needed_groups(wanted, part, needs)
        asked = fallback.RestoreRequest(step, needed, part, step is None and groups is None, healthy)
        average = None if self._averaging is None else self._averaging.restored
        rank = RestoringRank(self.run, self._launch, self._session, self._state, average)
        restored = fallback.restore(rank, asked)
        if restored is not None:
            if self._averaging is not None:
                restored = restored._replace(notes=(*restored.notes, *self._averaging.taken_in()))
            self._contents.origin.restored(restored.step, wanted, self._state.groups())
            self.last_restore = restored._replace(seconds=time.monotonic() - began)
            self._session.warn_of(f"restore of {self.run}@{restored.step}", restored.notes)
            _log_restore(self.run, self.last_restore)
        return 0 if restored is None else restored.step

    def _close(self, wait: bool) -> None:
        self._calls.close()
        self._training_stop.close()
        self._preparation.stop()
        if not is_in_hook():  # else they stay, and do nothing
            self._hooks.remove()
        self._saves.leave_last()
        if wait:
            self._saves.see_all_through()
        if self._averaging is not None:
            self._averaging.close()
        if wait:
            self._saves.warn_of_lacking()
        self._links.close()
        self._reservation.close()
        self._session.close(ended=wait)
        failed = self._tickets.take_failure()
        if wait and failed is not None and failed.error is not None:
            raise failed.error

    def _before_step(self, *_: Any) -> None:
        """An optimizer is about to change what the last save may still be copying. At its first step the state is
        complete.
        """
        if not self._calls.closed and not self._calls.forked:  # a forked child has memory of its own
            self._saves.step_begins()
            self._state.wholeness.check()
            self._preparation.begin_unasked()
            self._saves.fence_step()

    def _after_step(self, *given: Any) -> None:
        """The state is consistent again: average it, and do the saves that signal handlers requested during the step."""
        if given and not self._calls.closed and not self._calls.forked:
            self._saves.step_ends()
            self._state.unsaved.stepped(given[0])
            if self._averaging is not None:
                self._averaging.optimizer_stepped(given[0], self._hooks.optimizers)
        self._calls.catch_up(stepped=True)


def _refuse_to_restore(during: str) -> NoReturn:
    raise InvalidRequest(
        f"restore() was called in a signal handler that interrupted {during}",
        hint="call restore() after the handler has returned",
    )


def _refuse_to_look(during: str) -> NoReturn:
    raise InvalidRequest(
        f"a signal handler that interrupted {during} cannot read files of a checkpoint",
        hint="read them after the handler has returned",
    )


def _log_restore(run: str, report: RestoreReport) -> None:
    rate = report.bytes / max(report.seconds, 1e-9) / 1e9
    log.info(
        "restored %s@%d: %d bytes in %.3f s, %.2f GB/s, from %s",
        run,
        report.step,
        report.bytes,
        report.seconds,
        rate,
        report.source,
    )
