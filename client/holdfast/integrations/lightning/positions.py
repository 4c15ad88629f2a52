"""Where Lightning's training stands in its data, so that it goes on with the same rows and random numbers.

Lightning begins an epoch anew with a plain loader, and keeps no random streams. These are the methods of its loops that say
where it is (2.6):

    fit_loop._load_combined_loader_states()   the first iterator is made next, before any hook of the epoch
    fit_loop.on_advance_start()               an epoch begins
    epoch_loop.on_run_start(fetcher)          later epochs' iterators are made; batches are next
    epoch_loop._on_before_fetch()             a batch is fetched next; one ahead where a loader has no length

A training that resumes within an epoch makes the iterator with the streams from which it was made before, leaves out what
was trained with those of the epoch's first fetch, and goes on with those of the save.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch.utils.data import DataLoader, IterableDataset

from holdfast.integrations.lightning import framework
from holdfast.integrations.loader_positions import Moment, moment_of, set_generators, skip_now
from holdfast.state import rng
from holdfast_formats.errors import InvalidRequest


class _Saved(NamedTuple):
    """What a restore found. `over`: no batch of the running epoch was left, or it had ended; moments are None elsewhere."""

    between: bool
    over: bool
    batches: int
    epoch: Moment | None
    first: Moment | None
    fetch: Moment | None
    generators: tuple[torch.Tensor, ...]
    plateaus: dict[int, float]


class EpochPosition:
    """An entry of the state: the position of one Trainer's training data. Each rank has its own."""

    def __init__(self, trainer: Any, go_on: Callable[[], None]) -> None:
        """`go_on` installs the random streams of the restored save."""
        self._trainer, self._fit, self._loop, self._go_on_streams = (
            trainer,
            trainer.fit_loop,
            trainer.fit_loop.epoch_loop,
            go_on,
        )
        self._epoch: Moment | None = None
        self._first: Moment | None = None
        self._fetch: Moment | None = None
        self._loaders_before: list[Any] | None = None  # states of the loaders before the newest fetch
        self._steps_at_fetch = 0
        self._awaited: _Saved | None = None
        self._leaving_out: _LeavingOut | None = None
        for target, method, around in (
            (self._fit, "run", self._around_run),
            (self._fit, "_load_combined_loader_states", self._around_first_iterator),
            (self._fit, "on_advance_start", self._around_epoch),
            (self._loop, "on_run_start", self._around_batches),
            (self._loop, "_on_before_fetch", self._around_fetch),
        ):
            setattr(target, method, around(getattr(target, method)))

    @property
    def between_epochs(self) -> bool:
        """Whether the newest epoch is over, or none has begun."""
        progress = self._fit.epoch_progress.current
        return bool(progress.processed == progress.started)

    @property
    def in_flight(self) -> bool:
        """Whether a batch was fetched that is not trained yet."""
        progress = self._loop.batch_progress.current
        return not self.between_epochs and bool(progress.ready > progress.processed)

    def state_dict(self) -> dict[str, Any]:
        progress = self._loop.batch_progress
        return {
            "world": self._trainer.world_size,
            "between": self.between_epochs,
            "over": bool(progress.is_last_batch) and not self.in_flight,
            "batches": progress.current.processed,
            "epoch": _state(self._epoch),
            "first": _state(self._first),
            "fetch": _state(self._fetch),
            "generators": [one.get_state() for one in self._generators()],
            "plateaus": self._plateaus(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Await the position. With another number of ranks the batches are others, and the moments mean nothing."""
        known = state["world"] == self._trainer.world_size
        epoch, first, fetch = (moment_of(state[name]) if known else None for name in ("epoch", "first", "fetch"))
        self._awaited = _Saved(
            bool(state["between"]),
            bool(state["over"]),
            int(state["batches"]),
            epoch,
            first,
            fetch,
            tuple(state["generators"]),
            dict(state["plateaus"]),
        )

    def forget(self) -> None:
        """Training begins without the restored position."""
        self._awaited = None

    def check(self) -> None:
        """Raise `InvalidRequest` for a position within an epoch that could not be taken up again."""
        fetcher, combined = self._fit._data_fetcher, self._fit._combined_loader
        if self.between_epochs or combined is None:
            return
        if type(fetcher).__name__ == "_DataLoaderIterDataFetcher":
            raise InvalidRequest(
                "training_step() takes a dataloader_iter, and fetches as it likes: no position in it can be stored",
                hint="take batches in training_step(), or save at the end of epochs (every_n_epochs=1)",
            )
        if self.in_flight and self._trainer.global_step != self._steps_at_fetch:
            raise InvalidRequest(
                "a save in the middle of a training step: the optimizer has stepped, and the batch counts as not trained",
                hint="the newest checkpoint of the run is one step older",
            )
        stateful = {_is_stateful(loader) for loader in combined.flattened}
        if len(stateful) > 1:
            raise InvalidRequest(
                "some of the data loaders have a state of their own, and some have none: a save within an epoch cannot say "
                "where they are",
                hint="use loaders of one kind, or save at the end of epochs (every_n_epochs=1)",
            )
        if stateful == {False} and self._cycles(combined):
            raise InvalidRequest(
                "a data loader has begun anew within the epoch, because others are longer: its order cannot be found again",
                hint="use loaders with a state of their own (StatefulDataLoader), or save at the end of epochs",
            )

    @contextmanager
    def as_of_last_batch(self) -> Iterator[None]:
        """Within this block the streams are those after the last batch that was trained, even if another one has begun."""
        if not self.in_flight or self._fetch is None:
            yield
            return
        now = self._take()
        self._set(self._fetch)
        try:
            yield
        finally:
            self._set(now)

    def correct_loops(self, loops: dict[str, Any]) -> None:
        """A loader without a length is one batch ahead of training: store its state before that one was fetched."""
        held = loops.get("fit_loop", {}).get("state_dict", {})
        if "combined_loader" in held and self._loaders_before is not None and not self.between_epochs:
            held["combined_loader"] = self._loaders_before

    def _around_run(self, own: Callable[[], None]) -> Callable[[], None]:
        def run() -> None:
            saved = self._awaited
            if saved is not None:
                self._finish_plateaus(saved)
                if saved.between:  # Lightning would take a run with max_steps for one within the epoch
                    framework.part("loops.loop")._Loop.restarting.fset(self._fit, False)
            own()

        return run

    def _around_first_iterator(self, own: Callable[[], None]) -> Callable[[], None]:
        def next_is_an_iterator() -> None:
            own()
            saved, loaders = self._awaited, self._fit._combined_loader.flattened
            for loader in loaders:  # with workers, the sampler is asked for rows before the epoch begins
                framework.fabric("utilities.data")._set_sampler_epoch(loader, self._fit.epoch_progress.current.processed)
            if saved is not None and not saved.between:
                ahead = self._is_ahead() and all(map(_is_stateful, loaders))
                self._set(saved.fetch if ahead else saved.epoch)
                if saved.batches and not saved.over and len(loaders) == 1 and _has_indices(loaders[0]):
                    self._leaving_out = _LeavingOut(loaders[0], saved.batches)
            self._begins()
            if saved is not None and not saved.between:
                self._epoch = saved.epoch

        return next_is_an_iterator

    def _around_epoch(self, own: Callable[[], None]) -> Callable[[], None]:
        def epoch_begins() -> None:
            saved = self._awaited
            if saved is not None and saved.over and self.between_epochs:  # Lightning has ended that epoch
                self._awaited = saved = saved._replace(between=True)
            if saved is not None and saved.between:
                self._go_on(saved)
            own()

        return epoch_begins

    def _around_batches(self, own: Callable[[Any], None]) -> Callable[[Any], None]:
        def batches_begin(fetcher: Any) -> None:
            if self._trainer.current_epoch > 0 and not self._fit.is_resuming and not self._loop.restarting:
                self._begins()  # Lightning makes an iterator under the same condition
            own(fetcher)
            saved, self._awaited = self._awaited, None
            if saved is None:
                return
            if saved.between:
                if all(isinstance(loader, DataLoader) for loader in self._fit._combined_loader.flattened):
                    self._begins()
                    iter(fetcher)  # the one of before was made ahead of the epoch's hooks
                return
            self._first, self._fetch = saved.first, saved.fetch
            if not saved.over:
                self._leave_out(saved, fetcher)
            self._go_on(saved)
            self._fit._restarting = False  # else Lightning leaves out the epoch's step of ReduceLROnPlateau

        return batches_begin

    def _around_fetch(self, own: Callable[[], None]) -> Callable[[], None]:
        def fetch_begins() -> None:
            self._fetch = self._take()
            self._first = self._first or self._fetch
            self._steps_at_fetch = self._trainer.global_step
            if self._is_ahead() and any(map(_is_stateful, self._fit._combined_loader.flattened)):
                self._loaders_before = copy.deepcopy(self._fit._combined_loader._state_dicts())
            own()

        return fetch_begins

    def _begins(self) -> None:
        """An iterator is made next."""
        self._epoch, self._first, self._fetch, self._loaders_before = self._take(), None, None, None

    def _leave_out(self, saved: _Saved, fetcher: Any) -> None:
        """Bring the fresh iterators to where the save was."""
        combined = self._fit._combined_loader
        leaving_out, self._leaving_out = self._leaving_out, None
        ahead = fetcher.length is None
        if all(map(_is_stateful, combined.flattened)):
            if not ahead:
                self._set(saved.first)
                for iterator in combined._iterator.iterators:
                    skip_now(iterator)
        elif leaving_out is not None:
            self._set(saved.first)
            leaving_out.end()
        elif ahead:  # the first batch was fetched with the iterator
            for batch in range(saved.batches):
                if batch == saved.batches - 1:
                    self._set(saved.fetch)
                next(fetcher)
        else:
            self._set(saved.first)
            for _ in range(saved.batches):
                next(fetcher.iterator)

    def _go_on(self, saved: _Saved) -> None:
        self._go_on_streams()
        if len(saved.generators) == len(self._generators()):
            set_generators(self._generators(), saved.generators)

    def _plateaus(self) -> dict[int, float]:
        """Schedulers that step on a metric at the end of the epoch, after the save that is made there, and the metric."""
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

    def _finish_plateaus(self, saved: _Saved) -> None:
        for index, metric in saved.plateaus.items():
            scheduler = self._trainer.lr_scheduler_configs[index].scheduler
            self._trainer.lightning_module.lr_scheduler_step(scheduler, metric)

    def _is_ahead(self) -> bool:
        """Whether a batch is fetched one ahead, because the number of batches is not known."""
        combined = self._fit._combined_loader
        unsized = [framework.fabric("utilities.data").sized_len(loader) is None for loader in combined.flattened]
        return all(unsized) if combined._mode == "min_size" else any(unsized)

    def _cycles(self, combined: Any) -> bool:
        sizes = [framework.fabric("utilities.data").sized_len(loader) for loader in combined.flattened]
        shortest = min((size for size in sizes if size is not None), default=None)
        trained = self._loop.batch_progress.current.processed
        return len(sizes) > 1 and combined._mode == "max_size_cycle" and shortest is not None and trained > shortest

    def _generators(self) -> list[torch.Generator]:
        """The generators that loaders and samplers draw from, besides the process's own."""
        found: list[torch.Generator] = []
        combined = self._fit._combined_loader
        for loader in combined.flattened if combined is not None else ():
            batches = getattr(loader, "batch_sampler", None)
            for place in (loader, getattr(loader, "sampler", None), batches, getattr(batches, "sampler", None)):
                generator = getattr(place, "generator", None)
                if isinstance(generator, torch.Generator) and all(generator is not one for one in found):
                    found.append(generator)
        return found

    def _take(self) -> Moment:
        return Moment(rng.capture(), tuple(one.get_state() for one in self._generators()))

    def _set(self, moment: Moment | None) -> None:
        if moment is not None:
            rng.install(moment.streams)
            set_generators(self._generators(), moment.generators)


class _LeavingOut:
    """In the place of a loader's sampler while one iterator is made: leaves out so many batches, and reads no rows."""

    def __init__(self, loader: Any, batches: int) -> None:
        """torch refuses to set a sampler, hence `vars`."""
        self._loader, self._batches = loader, batches
        self._name = "batch_sampler" if loader.batch_sampler is not None else "sampler"
        self._inner = vars(loader)[self._name]
        self._made: _Indices | None = None
        vars(loader)[self._name] = self

    def __iter__(self) -> Iterator[Any]:
        self._made = _Indices(iter(self._inner), self)
        return self._made

    def __len__(self) -> int:
        return len(self._inner)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._inner, name)

    def take(self) -> int:
        """How many batches are still to be left out; none when asked again.

        Counted when the first is asked for: with workers, torch makes two iterators of the sampler, and uses the second.
        """
        batches, self._batches = self._batches, 0
        return batches

    def end(self) -> None:
        """Leave out now what is not left out yet, and give the loader its sampler back."""
        if self._made is not None:
            self._made.leave_out()
        vars(self._loader)[self._name] = self._inner


class _Indices(Iterator[Any]):
    def __init__(self, inner: Iterator[Any], owner: _LeavingOut) -> None:
        self._inner, self._owner = inner, owner

    def __next__(self) -> Any:
        self.leave_out()
        return next(self._inner)

    def leave_out(self) -> None:
        for _ in range(self._owner.take()):
            next(self._inner, None)


def _is_stateful(loader: object) -> bool:
    return callable(getattr(loader, "state_dict", None)) and callable(getattr(loader, "load_state_dict", None))


def _has_indices(loader: object) -> bool:
    return isinstance(loader, DataLoader) and not isinstance(loader.dataset, IterableDataset) and not _is_stateful(loader)


def _state(moment: Moment | None) -> dict[str, Any] | None:
    return None if moment is None else moment.state()
