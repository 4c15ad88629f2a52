"""An attached Trainer's run: its resume point, its saves, and the links where transformers looks for them."""

from __future__ import annotations

import logging
import os
import tempfile
from collections.abc import Callable
from contextlib import contextmanager, suppress
from functools import partial
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypedDict

from holdfast.checkpointer import Checkpointer
from holdfast.config import uploads_checkpoints
from holdfast.integrations.transformers import refusals, resuming, trainer_state
from holdfast.integrations.transformers.data_streams import DataStreams
from holdfast.integrations.transformers.resuming import STATE_FILE, Wanted
from holdfast.state.exclusion import OwnPatterns
from holdfast_formats import naming
from holdfast_formats.errors import CheckpointError, InvalidRequest, NoSuchCheckpoint
from holdfast_formats.lineage import Existing
from holdfast_formats.staging.messages import Policy

if TYPE_CHECKING:
    from collections.abc import Iterator

    from holdfast.tickets import SaveTicket

log = logging.getLogger(__name__)

SENTINEL = "checkpoint-is-incomplete.txt"  # a JIT checkpoint makes the directory with this alone, since transformers 4.57
# Their on_save reads no files, unless W&B uploads checkpoints.
_CALLERS = ("WandbCallback", "TrackioCallback", "SwanLabCallback")


class TrainerOptions(TypedDict, total=False):
    """The options of a `Checkpointer` for an attached Trainer."""

    at: str | PathLike[str] | None
    assets: Any
    keep_last: int | None
    slots: int
    policy: Policy
    file_bytes_max: int


class ResumePoint(NamedTuple):
    """A training's resume point: a step of the run, and a directory with its trainer_state.json."""

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

    def __init__(self, trainer: Any, run: str, options: TrainerOptions) -> None:
        self.trainer, self.run, self._options = trainer, naming.check_run(run), options
        refusals.check(trainer, options)
        self.streams = DataStreams(trainer.args.world_size, self._install_streams)
        self.saved_step: int | None = None
        self._checkpointer: Checkpointer | None = None
        self._source: ResumePoint | None = None
        self._from_scratch = False
        self._trained = False
        self._saves: dict[int, SaveTicket] = {}

    def train(self, asked: object, start: Callable[[str | None], Any]) -> Any:
        """Resume as requested, and train with `start`, which takes the directory to resume from."""
        refusals.check(self.trainer, self._options)
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
                if self.trainer.args.neftune_noise_alpha is not None:  # train() would add its noise a second time
                    raise InvalidRequest(
                        f"the newest checkpoint of {self.run} is damaged, and NEFTune cannot be set up twice in a process",
                        hint=f"start again with resume_from_checkpoint={other.step}",
                    ) from other
                log.warning("step %d of %s is restored instead: training starts again", other.step, self.run)
                wanted = Wanted(step=other.step, needed=True)

    def is_source(self, directory: object) -> bool:
        """Whether this adapter made the directory to resume from, not transformers."""
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
            self._install_streams()
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
        self.streams.watch(loader)

    def save(self) -> None:
        """Save the step, and link it where transformers looks for it."""
        checkpointer, trainer = self._checkpointer, self.trainer
        if checkpointer is None:
            raise InvalidRequest("no training is running", hint="after training, call save_model() to write the model")
        trainer.store_flos()
        step: int = trainer.state.global_step
        self._note_best(step)
        if self._links:
            self._clear_way(checkpointer, step)
        groups = (trainer_state.model_group(trainer),) if trainer.args.save_only_model else None
        files = trainer_state.state_file(trainer) if trainer.is_world_process_zero() else {}
        with self.streams.as_of(step):
            ticket = checkpointer.save(
                step, groups=groups, metrics=trainer_state.metrics(trainer), existing=self._existing(step), assets=files
            )
        self._saves[step] = ticket
        self.saved_step = step
        if self._links:
            checkpointer.link(ticket, self._path(step))
            self._rotate(checkpointer)
        if trainer.args.push_to_hub or any(reads_files(one) for one in trainer.callback_handler.callbacks):
            ticket.result()
        if trainer.args.push_to_hub:
            trainer._push_from_checkpoint(str(self._path(step)))

    def load_best(self) -> bool:
        """Restore the weights of the best checkpoint; False if transformers wrote it."""
        trainer, checkpointer = self.trainer, self._checkpointer
        path = Path(trainer.state.best_model_checkpoint)
        if checkpointer is None or not path.is_symlink():
            return False
        checkpointer.restore(trainer.state.best_global_step, groups=(trainer_state.model_group(trainer),))
        return True

    def settle(self) -> None:
        for ticket in self._saves.values():
            with suppress(CheckpointError):  # close() raises it
                ticket.result()

    @property
    def _links(self) -> bool:
        return bool(self.trainer.is_world_process_zero()) and not refusals.is_remote(self._options)

    def _choose(self, wanted: Wanted, place: str) -> tuple[ResumePoint | None, str | None]:
        """The resume point, and the directory in which transformers reads trainer_state.json."""
        if wanted.directory is not None or wanted.from_scratch:
            return None, wanted.directory
        with self._probe() as probe:
            if wanted.place is not None and probe.step_at(wanted.place) is None:
                raise resuming.not_of(self.run, wanted.place)
            nothing = OwnPatterns(("extra/*",))
            step = probe.restore(wanted.step, groups=("extra",), exclude=nothing, strict=False, healthy=wanted.healthy)
            own = resuming.own_checkpoint(self.trainer.args.output_dir) if wanted == Wanted(needed=True) else None
            if own is not None and own[0] > step:
                log.info("%s is newer than the checkpoints of %s: transformers resumes from it", own[1], self.run)
                return None, own[1]
            if step == 0 and wanted.needed:
                raise NoSuchCheckpoint(
                    f"No valid checkpoint found in output directory ({self.trainer.args.output_dir}), and none in the run "
                    f"{self.run}",
                    hint="without resume_from_checkpoint, train() resumes if it can and starts over otherwise",
                )
            if step == 0:
                return None, None
            directory = Path(place, f"checkpoint-{step}")
            directory.mkdir()
            (directory / STATE_FILE).write_bytes(probe.read_asset(step, STATE_FILE))
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
            return result
        finally:
            self._end(done)

    def _end(self, done: bool) -> None:
        checkpointer, self._checkpointer, self._source = self._checkpointer, None, None
        self.streams.forget()
        if checkpointer is None:
            return
        alone = done and self._links and self._limit == 1 and self.trainer.state.best_model_checkpoint is not None
        links = self._own_links(checkpointer) if alone else {}
        checkpointer.close(wait=done)
        self._unlink(path for step, path in links.items() if step != self.trainer.state.best_global_step)

    def _construct(self) -> Checkpointer:
        state = trainer_state.live_objects(self.trainer) | {"data": self.streams}
        mine = self._options.get("assets")
        assets = [*trainer_state.assets(self.trainer), *([] if mine is None else [mine])]
        limit = self.trainer.args.save_total_limit
        given: Any = {"keep_last": limit if limit and limit > 0 else None, "policy": "wait"} | self._options
        self._checkpointer = Checkpointer(self.run, state, **(given | {"assets": assets}))
        return self._checkpointer

    def _install_streams(self) -> None:
        assert self._checkpointer is not None
        self._checkpointer.restore_random()

    def _existing(self, step: int) -> Existing:
        """A new start abandons the run's checkpoints; a restore abandons newer ones by itself.

        A run that had ended may save its last step again, at the end of its epoch: nothing was trained since.
        """
        if step in self._saves or (self._source is not None and step == self._source.step):
            return "same"
        return "replace" if self._from_scratch and not self._saves else "refuse"

    def _note_best(self, step: int) -> None:
        best, state = self.trainer.state.best_global_step, self.trainer.state
        if best and (best == step or best in self._saves or os.path.exists(self._path(best))):
            state.best_model_checkpoint = str(self._path(best))

    @property
    def _limit(self) -> int | None:
        limit = self.trainer.args.save_total_limit
        return limit if limit and limit > 0 else self._options.get("keep_last")

    def _path(self, step: int) -> Path:
        return Path(self.trainer.args.output_dir, f"checkpoint-{step}")

    def _own_links(self, checkpointer: Checkpointer) -> dict[int, Path]:
        """Links to checkpoints of this run in this root, by step; some may not be committed yet."""
        paths = resuming.links(self.trainer.args.output_dir, self.run)
        return {step: path for step, path in paths.items() if _leads_to(checkpointer, path)}

    def _clear_way(self, checkpointer: Checkpointer, step: int) -> None:
        """Make room for the link, and release abandoned checkpoints: a linked one is never replaced."""
        path = self._path(step)
        if path.is_dir() and not path.is_symlink() and os.listdir(path) in ([], [SENTINEL]):
            (path / SENTINEL).unlink(missing_ok=True)
            path.rmdir()
        if not self._saves:
            newest = step - 1 if self._source is None else self._source.step
            self._unlink(link for old, link in self._own_links(checkpointer).items() if old > newest)

    def _rotate(self, checkpointer: Checkpointer) -> None:
        """Remove the oldest links beyond the limit, except the newest and the best. Retention removes unlinked
        checkpoints.
        """
        limit = self._limit
        if limit is None:
            return
        links = self._own_links(checkpointer)
        kept = {max(links), self.trainer.state.best_global_step} & links.keys()
        others = [step for step in links if step not in kept]
        surplus = len(links) - max(limit, len(kept))
        self._unlink(links[step] for step in others[: max(surplus, 0)])

    def _unlink(self, links: Any) -> None:
        for link in links:
            log.info("removing the link %s", link)
            link.unlink(missing_ok=True)


def _leads_to(checkpointer: Checkpointer, path: Path) -> bool:
    try:
        return checkpointer.step_at(path) is not None
    except NoSuchCheckpoint:
        return True  # it is not committed yet


def reads_files(callback: Any) -> bool:
    """Whether a callback may read a checkpoint's directory in `on_save`."""
    from transformers import TrainerCallback

    if getattr(type(callback), "on_save", None) in (None, TrainerCallback.on_save):
        return False
    if type(callback).__module__.startswith(f"{__package__}."):
        return False  # our own
    if type(callback).__module__.startswith("transformers.") and type(callback).__name__ in _CALLERS:
        return type(callback).__name__ == _CALLERS[0] and uploads_checkpoints()
    return True
