"""How far Lightning's loops have come, and what a save may store of it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch.utils.data import IterableDataset

from holdfast.integrations.lightning.loaders import has_cycled, is_stateful
from holdfast_formats.errors import InvalidRequest


class LoopProgress:
    """Reads the counts of a Trainer's loops, its loaders and its schedulers (Lightning 2.6)."""

    def __init__(self, trainer: Any) -> None:
        self._trainer, self._fit, self._loop = trainer, trainer.fit_loop, trainer.fit_loop.epoch_loop

    @property
    def between_epochs(self) -> bool:
        progress = self._fit.epoch_progress.current
        return bool(progress.processed == progress.started) and not self.is_cut

    @property
    def is_cut(self) -> bool:
        """Whether Lightning has ended an epoch before its last batch (max_steps, should_stop), and can continue it."""
        epochs, batches = self._fit.epoch_progress.current, self._loop.batch_progress
        done = batches.current.processed
        if epochs.processed != epochs.started or not done or batches.is_last_batch:
            return False
        return not done % self._trainer.accumulate_grad_batches and self.refusal() is None

    @property
    def in_flight(self) -> bool:
        """Whether a batch has begun that does not count as trained yet."""
        progress = self._loop.batch_progress.current
        return not self.between_epochs and bool(progress.ready > progress.processed)

    def goes_on_by_itself(self) -> bool:
        """Whether an epoch ended early on a stateful iterable dataset of this process, which may continue in the next
        epoch, as in Lightning's own resume.
        """
        fetcher, combined = self._fit._data_fetcher, self._fit._combined_loader
        if not self.between_epochs or combined is None or not self._loop.batch_progress.current.processed:
            return False
        if getattr(fetcher, "done", False) and self._loop.batch_progress.current.processed < self._fit.max_batches:
            return False  # all of it was read
        return any(
            is_stateful(loader)
            and isinstance(loader.dataset, IterableDataset)
            and is_stateful(loader.dataset)
            and not loader.num_workers
            for loader in combined.flattened
        )

    def refusal(self) -> InvalidRequest | None:
        """Why a position within this epoch could not be restored; None if it could."""
        fetcher, combined = self._fit._data_fetcher, self._fit._combined_loader
        if combined is None:
            return None
        if type(fetcher).__name__ == "_DataLoaderIterDataFetcher":
            return InvalidRequest(
                "training_step() takes a dataloader_iter, so Holdfast cannot record the position in the data",
                hint="change training_step() to take a batch, or save at the end of epochs (every_n_epochs=1)",
            )
        stateful = {is_stateful(loader) for loader in combined.flattened}
        if len(stateful) > 1:
            return InvalidRequest(
                "some data loaders have their own state and others have none, so a save within an epoch cannot "
                "record their positions",
                hint="use loaders of one kind, or save at the end of epochs (every_n_epochs=1)",
            )
        if stateful == {False} and has_cycled(combined, self._loop.batch_progress.current.processed):
            return InvalidRequest(
                "a data loader restarted within the epoch because others are longer: its order cannot be restored",
                hint="use loaders with their own state (StatefulDataLoader), or save at the end of epochs",
            )
        return None

    def plateaus(self) -> dict[int, float]:
        """Schedulers that step on a metric at the end of the epoch, after the save there, and the metric."""
        progress = self._fit.epoch_progress.current
        if not self.between_epochs or progress.completed == progress.processed:
            return {}
        if not self._loop._num_ready_batches_reached():
            return {}
        due = {}
        for index, config in enumerate(self._trainer.lr_scheduler_configs):
            metric = self._trainer.callback_metrics.get(config.monitor) if config.reduce_on_plateau else None
            if metric is not None and (self._trainer.current_epoch + 1) % config.frequency == 0:
                due[index] = float(metric)
        return due if self._trainer.lightning_module.automatic_optimization else {}

    def finish_plateaus(self, due: Mapping[int, float]) -> None:
        """Step the schedulers that had yet to step when this was saved."""
        for index, metric in due.items():
            scheduler = self._trainer.lr_scheduler_configs[index].scheduler
            self._trainer.lightning_module.lr_scheduler_step(scheduler, metric)
