"""An attached Trainer's run: its resume point, its saves, and the links where its library looks for them."""

from __future__ import annotations

import logging
import os
import tempfile
from collections.abc import Callable
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from holdfast import launch
from holdfast.checkpointer import Checkpointer
from holdfast.integrations.trainers import exports, resuming
from holdfast.integrations.trainers.exports import Exports
from holdfast.integrations.trainers.links import OutputLinks
from holdfast.integrations.trainers.options import is_remote, keep_last, of_checkpointer
from holdfast.integrations.trainers.resuming import STATE_FILE, Wanted
from holdfast.link.checkpoint_links import unlink
from holdfast.state.exclusion import OwnPatterns
from holdfast_formats import naming
from holdfast_formats.errors import CheckpointError, InvalidRequest, NoSuchCheckpoint
from holdfast_formats.lineage import Existing

if TYPE_CHECKING:
    from collections.abc import Iterator

    from holdfast.integrations.trainers.framework import Framework
    from holdfast.integrations.trainers.options import TrainerOptions
    from holdfast.tickets import SaveTicket

log = logging.getLogger(__name__)

ANSWER_WAIT_S = 600.0  # for rank 0, which may still save


class ResumePoint(NamedTuple):
    """A training's resume point: a step of the run, and a directory with its state as the library reads it."""

    step: int
    directory: str
    named: bool  # this step, and no older one if it is damaged
    healthy: bool


class _OtherStep(Exception):
    """The chosen step was damaged, and an older one was restored: the training starts again from that."""

    def __init__(self, step: int) -> None:
        self.step = step


class TrainerRun:
    """The run of an attached Trainer. It holds no connection and no memory between trainings."""

    def __init__(self, trainer: Any, run: str, options: TrainerOptions, framework: Framework) -> None:
        self.trainer, self.run, self._options, self._framework = trainer, naming.check_run(run), options, framework
        self._refuse_second(getattr(trainer, "holdfast", None))
        framework.check(options)
        exports.check(options)
        self.streams = framework.streams
        self.saved_step: int | None = None
        self._checkpointer: Checkpointer | None = None
        self._exports: Exports | None = None
        self._source: ResumePoint | None = None
        self._from_scratch = False
        self._trained = False
        self._saves: dict[int, SaveTicket] = {}

    def train(self, asked: object, start: Callable[[str | None], Any]) -> Any:
        """Resume as requested, and train with `start`, which takes the directory to resume from."""
        self._framework.check(self._options)
        wanted = resuming.wanted(asked, self.run)
        if asked is None and self._trained:
            raise InvalidRequest(
                f"this Trainer has already trained the run {self.run}",
                hint="pass resume_from_checkpoint=True to continue or False to start over, or attach it to another run",
            )
        while True:
            try:
                with tempfile.TemporaryDirectory(prefix="holdfast-resume-") as place:
                    source, directory = self._choose(wanted, place)
                    elsewhere = source is None and directory is not None  # it resumes from files outside the run
                    return self._train(source, wanted.from_scratch or elsewhere, partial(start, directory))
            except _OtherStep as other:
                self._framework.check_repeat(other.step)
                log.warning("step %d of %s is restored instead: training starts again", other.step, self.run)
                wanted = Wanted(step=other.step, needed=True)

    def _refuse_second(self, first: TrainerRun | None) -> None:
        """Refuse another run of a Trainer that has not trained the first: that one would get no checkpoint."""
        if first is not None and not first._trained and first.run != self.run:
            raise InvalidRequest(
                f"this Trainer is attached to the run {first.run} already, and has not trained it",
                hint=f"attach each Trainer once: construct another one for the run {self.run}",
            )

    @property
    def source(self) -> ResumePoint | None:
        """The step from which this training resumes; None if it begins, or resumes from files of the library."""
        return self._source

    def is_source(self, directory: object) -> bool:
        """Whether this adapter made the directory to resume from, not the library."""
        return self._source is not None and directory is not None and str(directory) == self._source.directory

    def restore(self) -> None:
        """Restore everything; all objects exist now."""
        assert self._source is not None
        source, checkpointer = self._source, self._construct()
        restored = checkpointer.restore(source.step if source.named else None, healthy=source.healthy)
        if restored != source.step:
            raise _OtherStep(restored)
        report = checkpointer.last_restore
        log.info("resumed %s@%d from the %s", self.run, restored, "" if report is None else report.source)

    def go_on(self) -> None:
        """Install the random streams, unless the data loader has done it at the position of the save."""
        if not self.streams.reached:
            self.install_streams()
        self.streams.forget()
        epochs = float(self.trainer.state.epoch or 0)
        if epochs.is_integer():  # the save ended an epoch: the next one begins with these streams
            self.streams.epoch_begins()

    def begin(self, loader: object) -> None:
        """The first step is next, and everything that trains exists."""
        if self._checkpointer is None:
            if self._source is not None:
                raise InvalidRequest(
                    f"{type(self.trainer).__name__}._load_optimizer_and_scheduler() does not call super()",
                    hint="nothing was restored: call super()._load_optimizer_and_scheduler() in your override",
                )
            self._construct()
        if not is_remote(self._options) and self._strategy != "no":
            launch.answer_of_rank_0(f"trainer/{self.run}/output", self._check_output, ANSWER_WAIT_S)
        if self._exports is not None and self._source is not None:
            self._exports.of(self._source.step)
        self.streams.watch(loader)

    def prepare(self) -> None:
        """Reserve memory for saves now, and not while the data loader's thread draws from the random streams."""
        assert self._checkpointer is not None
        self._checkpointer.prepare()

    def save(self) -> None:
        """Save the step, and link it where the library looks for it."""
        checkpointer, framework = self._checkpointer, self._framework
        if checkpointer is None:
            raise InvalidRequest("no training is running", hint="after training, call save_model() to write the model")
        framework.before_save()
        step: int = self.trainer.state.global_step
        self._note_best(step)
        if self._links:
            self._clear_way(checkpointer, step)
        files = {STATE_FILE: framework.state_file()} if self.trainer.is_world_process_zero() else {}
        with self.streams.as_of(step):
            ticket = checkpointer.save(
                step, groups=framework.groups(), metrics=framework.metrics(), existing=self._existing(step), assets=files
            )
        self._saves[step] = ticket
        self.saved_step = step
        linked = not self._links or self._output.link(checkpointer, ticket)
        if self._links:
            self._output.rotate(checkpointer, keep_last(self.trainer.args, self._options), framework.best_step())
        if self._exports is not None:
            self._exports.after(ticket)
        if framework.reads_files():
            self._publish(ticket, linked)

    def _publish(self, ticket: SaveTicket, linked: bool) -> None:
        """Wait for the files of a step, which others read. Training continues also without them."""
        try:
            ticket.result()
        except CheckpointError as error:
            log.warning("step %d was not saved, so callbacks find no files of it: %s", ticket.step, error)
            return
        if linked:
            self._framework.published(self._output.path(ticket.step))
        else:
            log.warning("step %d has no link, so callbacks find no files of it, and nothing is pushed to a hub", ticket.step)

    def has_best(self) -> bool:
        """Whether the best checkpoint is one of this run, and was saved. All ranks ask, and rank 0 answers: it makes the
        links.
        """

        def found() -> bool:
            best, step = self.trainer.state.best_model_checkpoint, self._framework.best_step()
            save = None if step is None else self._saves.get(step)
            return best is not None and (Path(best).is_symlink() if save is None else save.error is None)

        if self._checkpointer is None:
            return False
        return bool(launch.answer_of_rank_0(f"trainer/{self.run}/best", found, ANSWER_WAIT_S))

    def load_best(self) -> bool:
        """Restore the weights of the best checkpoint; False if the library itself wrote it."""
        checkpointer = self._checkpointer
        if checkpointer is None or not self.has_best():
            return False
        self._framework.restore_best(checkpointer)
        return True

    def settle(self) -> None:
        for ticket in self._saves.values():
            with suppress(CheckpointError):  # close() raises it
                ticket.result()

    def install_streams(self) -> None:
        """Continue the random streams of the save that was restored."""
        assert self._checkpointer is not None
        self._checkpointer.restore_random()

    @property
    def _links(self) -> bool:
        return bool(self.trainer.is_world_process_zero()) and not is_remote(self._options)

    @property
    def _output(self) -> OutputLinks:
        return OutputLinks(self.trainer.args.output_dir, self.run)

    @property
    def _strategy(self) -> str:
        strategy = self.trainer.args.save_strategy
        return str(getattr(strategy, "value", strategy))

    def _check_output(self) -> None:
        assert self._checkpointer is not None
        state = self.trainer.state
        self._output.check_free(self._checkpointer, state.global_step, state.max_steps)

    def _choose(self, wanted: Wanted, place: str) -> tuple[ResumePoint | None, str | None]:
        """The resume point, and the directory in which the library reads its TrainerState."""
        if wanted.directory is not None or wanted.from_scratch:
            return None, wanted.directory
        with self._probe() as probe:
            if wanted.place is not None and probe.step_at(wanted.place) is None:
                raise resuming.not_of(self.run, wanted.place)
            nothing = OwnPatterns(("extra/*",))
            step = probe.restore(wanted.step, groups=("extra",), exclude=nothing, strict=False, healthy=wanted.healthy)
            output, files = self.trainer.args.output_dir, self._framework.own_files
            own = resuming.own_checkpoint(output, files) if wanted == Wanted(needed=True) else None
            if own is not None and own[0] > step:
                log.info(
                    "%s is newer than the checkpoints of %s: %s resumes from it", own[1], self.run, self._framework.library
                )
                return None, own[1]
            if step == 0 and wanted.needed:
                raise NoSuchCheckpoint(
                    f"No valid checkpoint found in output directory ({output}), and none in the run {self.run}",
                    hint="without resume_from_checkpoint, train() resumes if it can and starts over otherwise",
                )
            if step == 0:
                return None, None
            directory = Path(place, f"checkpoint-{step}")
            directory.mkdir()
            self._framework.write_state(directory, probe.read_asset(step, STATE_FILE))
        return ResumePoint(step, str(directory), wanted.step is not None, wanted.healthy), str(directory)

    @contextmanager
    def _probe(self) -> Iterator[Checkpointer]:
        """A Checkpointer without models and optimizers, to inspect checkpoints. In-memory checkpoints stay."""
        probe = Checkpointer(self.run, {}, at=self._options.get("at"))
        try:
            yield probe
        finally:
            probe.close(wait=False)

    def _train(self, source: ResumePoint | None, from_scratch: bool, start: Callable[[], Any]) -> Any:
        self._source, self._from_scratch, self._saves = source, from_scratch, {}
        done = False
        try:
            result = start()
            done = self._trained = True
            self._warn_if_unsaved(0 if source is None else source.step)
            return result
        finally:
            self._end(done)

    def _warn_if_unsaved(self, first: int) -> None:
        """A training that ends before its first save leaves nothing behind, unless it was told to."""
        args, step = self.trainer.args, self.trainer.state.global_step
        if step > first and not self._saves and self._strategy != "no":
            log.warning(
                "%s trained from step %d to %d, and none of them was saved (save_strategy=%s, save_steps=%s): lower "
                "save_steps",
                self.run,
                first,
                step,
                self._strategy,
                args.save_steps,
            )

    def _end(self, done: bool) -> None:
        checkpointer, self._checkpointer, self._source = self._checkpointer, None, None
        made, self._exports = self._exports, None
        self.streams.forget()
        if checkpointer is None:
            return
        best = self._framework.best_step()
        limit = keep_last(self.trainer.args, self._options)
        alone = done and self._links and limit == 1 and self.trainer.state.best_model_checkpoint is not None
        links = self._output.own(checkpointer) if alone else {}
        try:
            checkpointer.close(wait=done)
        finally:
            if made is not None:
                made.close(wait=done)
        unlink(path for step, path in links.items() if step != best)

    def _construct(self) -> Checkpointer:
        framework, args = self._framework, self.trainer.args
        state = framework.live() | {"data": self.streams}
        mine = self._options.get("assets")
        assets = [*framework.assets(), *([] if mine is None else [mine])]
        given: Any = (
            {"keep_last": keep_last(args, {}), "policy": "wait"} | framework.given() | of_checkpointer(self._options)
        )
        self._checkpointer = Checkpointer(self.run, state, **(given | {"assets": assets}))
        if not is_remote(self._options):  # on every rank: none waits in a collective while another one starts the daemon
            self._output.check_place(self._checkpointer)
        if self._options.get("exports") and self.trainer.is_world_process_zero():
            limit = keep_last(args, self._options)
            self._exports = Exports(self.run, self._checkpointer.root(), self._options, limit, framework.best_step)
        return self._checkpointer

    def _existing(self, step: int) -> Existing:
        """A new start abandons the run's checkpoints; a restore abandons newer ones by itself.

        A run that had ended may save its last step again, at the end of its epoch: nothing was trained since.
        """
        if step in self._saves or (self._source is not None and step == self._source.step):
            return "same"
        return "replace" if self._from_scratch and not self._saves else "refuse"

    def _note_best(self, step: int) -> None:
        best, state = self._framework.best_step(), self.trainer.state
        if best and (best == step or best in self._saves or os.path.exists(self._output.path(best))):
            state.best_model_checkpoint = str(self._output.path(best))

    def _clear_way(self, checkpointer: Checkpointer, step: int) -> None:
        self._output.clear_way(step)
        if not self._saves:
            self._output.release_after(checkpointer, step - 1 if self._source is None else self._source.step)
