"""The positions of accelerate's data loaders, so that training continues with the same rows and random numbers.

accelerate keeps no position of a plain loader: a script skips the batches that it has seen. For that the loader must
begin its epoch from the random streams from which it began before, and training must continue from those of the save,
at the fetch at which it was made. accelerate 1.15 offers no hook for this; it calls these methods of a loader itself:

    begin()                     an epoch begins; all streams are synchronised already
    base_dataloader.__iter__()  the iterator is made, which draws a seed
    _update_state_dict()        before each fetch: a loader fetches one batch ahead of the one that it yields
    end()                       the epoch is over
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch.utils.data import BatchSampler

from holdfast.state import rng
from holdfast_formats.errors import InvalidRequest

_USED = ("begin", "end", "base_dataloader", "_update_state_dict", "iteration", "end_of_dataloader")


class Moment(NamedTuple):
    streams: rng.RandomStreams
    generators: tuple[torch.Tensor, ...]  # of the loader and its sampler

    def state(self) -> dict[str, Any]:
        return {"tensors": self.streams.tensors, "residual": self.streams.residual, "generators": list(self.generators)}


def moment_of(state: Any) -> Moment | None:
    if state is None:
        return None
    return Moment(rng.RandomStreams(dict(state["tensors"]), dict(state["residual"])), tuple(state["generators"]))


class _Saved(NamedTuple):
    """A restored position: the epoch, whether all of it was yielded, and the streams of three moments."""

    iteration: int
    inside: bool
    finished: bool
    epoch: Moment | None
    fetch: Moment | None
    now: Moment


class LoaderPosition:
    """The position of one prepared loader; an entry of the state with `state_dict` and `load_state_dict`."""

    only_ours = True  # with accelerate's own checkpoints a script skips batches from the streams that it has then

    def __init__(self, loader: Any) -> None:
        """Raises `InvalidRequest` for a loader that accelerate did not prepare."""
        missing = [name for name in _USED if not hasattr(loader, name)]
        if missing:
            raise InvalidRequest(
                f"the data loader {type(loader).__name__} was not prepared by a known version of accelerate: it has no "
                f"{', '.join(missing)}",
                hint="attach after accelerator.prepare(), with accelerate 1.0 or newer",
            )
        self.prepared = loader
        self._current = loader  # or the one that skips batches of this epoch
        self._epoch: Moment | None = None
        self._fetch: Moment | None = None
        self._inside, self._iteration = False, 0
        self._restored: _Saved | None = None
        self._imported: Moment | None = None  # the streams of another program's checkpoint, which has no more of a position
        self._fetches_left = 0
        if getattr(loader.base_dataloader, "_initial_iter_for_state_dict", False):
            # accelerate reads a StatefulDataLoader's state in prepare(), which makes an iterator. The first epoch would
            # use it, with rows from before the streams were recorded: so a new one is made.
            loader.base_dataloader.load_state_dict({})
        self._follow(loader)

    def state_dict(self) -> dict[str, Any]:
        """The current position. Streams are tensors: each rank has its own."""
        loader = self._current
        epoch, fetch = self._epoch, self._fetch
        return {
            "iteration": loader.iteration,
            "inside": self._inside,
            "finished": bool(loader.end_of_dataloader),
            "epoch": None if epoch is None else epoch.state(),
            "fetch": None if fetch is None else fetch.state(),
            "now": self._take().state(),
            "loader": loader.state_dict() if _keeps_position(loader) else None,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take a position, for the next epoch that begins."""
        now = moment_of(state["now"])
        assert now is not None
        saved = _Saved(
            int(state["iteration"]),
            bool(state["inside"]),
            bool(state["finished"]),
            moment_of(state["epoch"]),
            moment_of(state["fetch"]),
            now,
        )
        self._current, self._inside = self.prepared, False
        self._restored, self._epoch, self._fetch = saved, saved.epoch, saved.fetch
        over = saved.inside and saved.finished  # the save was made in the last step of the epoch
        self.prepared.iteration = saved.iteration + over
        if len(saved.now.generators) == len(self._generators()):
            set_generators(self._generators(), saved.now.generators)
        if state["loader"] is not None and _keeps_position(self.prepared):
            self.prepared.load_state_dict(state["loader"])
            self.prepared.dl_state_dict = state["loader"]  # the state for a save before the next epoch

    def imported(self) -> None:
        """Take the process's streams now for those of a save within an epoch, if the script skips batches of it."""
        self._imported = self._take()

    def skipping(self, loader: Any, batches: int) -> None:
        """Follow a loader that accelerate made of the prepared one to skip so many batches."""
        if self._imported is not None and batches:
            self._restored = _Saved(self.prepared.iteration, True, False, None, None, self._imported)
        saved, self._current, self._imported = self._restored, loader, None
        self._follow(loader)
        if saved is None or not saved.inside:
            return
        loader.iteration = saved.iteration
        sampler: Any = getattr(loader, "batch_sampler", None)
        if hasattr(sampler, "skip_batches"):
            sampler.batch_sampler = _Until(sampler.batch_sampler, batches, lambda: self._set(saved.fetch))

    def _follow(self, loader: Any) -> None:
        begin, end, update = loader.begin, loader.end, loader._update_state_dict

        def begun() -> None:
            begin()
            self._begun(loader)

        def fetching() -> None:
            update()
            self._fetching()

        def ended() -> None:
            end()
            self._ended(loader)

        loader.begin, loader.end, loader._update_state_dict = begun, ended, fetching
        loader.base_dataloader.__iter__ = lambda: self._iterated(loader)

    def _begun(self, loader: Any) -> None:
        self._current, self._inside, self._iteration = loader, True, loader.iteration
        saved = self._restored
        if saved is not None and saved.inside and (loader is not self.prepared or self._takes_up(loader)):
            self._set(saved.epoch)
        self._fetches_left = self._fetches_until_saved(loader)
        self._epoch = self._take()

    def _iterated(self, loader: Any) -> Iterator[Any]:
        saved, base = self._restored, loader.base_dataloader
        if saved is not None and _keeps_position(loader) and not self._takes_up(loader):
            self._first_iterator_draws_nothing(base)
        iterator: Iterator[Any] = type(base).__iter__(base)
        if saved is not None and self._goes_on():
            if self._takes_up(loader):
                skip_now(iterator)
                self._set(saved.fetch)
            elif _dispatches(loader) and not loader.state.is_main_process:  # it fetches nothing
                self._set(saved.now)
        return iterator

    def _fetching(self) -> None:
        if self._fetches_left:
            self._fetches_left -= 1
            if not self._fetches_left and self._restored is not None:
                self._set(self._restored.now)
        self._fetch = self._take()

    def _ended(self, loader: Any) -> None:
        saved, self._restored, self._inside = self._restored, None, False
        if loader is self.prepared:
            return
        self.prepared.iteration = self._iteration + 1  # accelerate leaves the prepared loader in the epoch before
        self.prepared.end_of_dataloader = True
        self._current = self.prepared
        if saved is not None and saved.inside and saved.finished:  # nothing was left to fetch
            self._set(saved.now)

    def _goes_on(self) -> bool:
        """Whether the restored save was made within an unfinished epoch."""
        return self._restored is not None and self._restored.inside and not self._restored.finished

    def _takes_up(self, loader: Any) -> bool:
        return self._goes_on() and loader is self.prepared and _keeps_position(loader)

    def _fetches_until_saved(self, loader: Any) -> int:
        """The fetch of a resumed epoch from which on the save's streams are right; 0 for a new epoch."""
        if not self._goes_on():
            return 0
        skipped = int(getattr(loader, "skip_batches", 0) or 0)  # fetched and left out: those of an iterable dataset
        if loader is self.prepared and not _keeps_position(loader):
            return 0  # the script goes through the epoch once more
        if not _dispatches(loader):
            return skipped + 1
        together = 1 if loader.split_batches else loader.state.num_processes  # fetches for one batch of every process
        return together * (skipped + 1) + 1

    def _first_iterator_draws_nothing(self, base: Any) -> None:
        """Undo the seed that the iterator draws: training had drawn it long before."""
        make = base._get_iterator

        def first() -> Any:
            del base._get_iterator
            before = self._take()
            iterator = make()
            self._set(before)
            return iterator

        base._get_iterator = first

    def _generators(self) -> list[torch.Generator]:
        """Generators of the loader and its samplers, besides the process's own."""
        generators: list[torch.Generator] = []
        places: list[Any] = [self.prepared.base_dataloader, self.prepared]
        sampler = getattr(self.prepared, "batch_sampler", None)
        while sampler is not None and len(places) < 10:
            places.append(sampler)
            sampler = getattr(sampler, "batch_sampler", None) or getattr(sampler, "sampler", None)
        for place in places:
            for name in ("generator", "synchronized_generator"):
                generator = getattr(place, name, None)
                if isinstance(generator, torch.Generator) and all(generator is not one for one in generators):
                    generators.append(generator)
        return generators

    def _take(self) -> Moment:
        return Moment(rng.capture(), tuple(one.get_state() for one in self._generators()))

    def _set(self, moment: Moment | None) -> None:
        if moment is None:
            return
        rng.install(moment.streams)
        set_generators(self._generators(), moment.generators)


class _Until(BatchSampler):
    """Batches of another sampler; runs a callback once, before the batch of this number."""

    def __init__(self, batches: Any, number: int, act: Callable[[], object]) -> None:
        self._batches, self._number, self._act = batches, number, act

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._batches, name)

    def __iter__(self) -> Iterator[Any]:
        for index, batch in enumerate(self._batches):
            if index == self._number:
                self._act()
            yield batch

    def __len__(self) -> int:
        return len(self._batches)


def skip_now(iterator: Any) -> None:
    """Make a StatefulDataLoader's iterator skip yielded batches now, with the streams at the epoch's begin.

    A sampler without state is read from the beginning, at the first fetch (torchdata 0.11).
    """
    indices = getattr(iterator, "_sampler_iter", None)
    if isinstance(indices, itertools.islice) and not getattr(iterator, "_num_workers", 0):
        first = list(itertools.islice(indices, 1))
        iterator._sampler_iter = itertools.chain(first, indices)


def _keeps_position(loader: Any) -> bool:
    return getattr(loader, "use_stateful_dataloader", False) is True


def _dispatches(loader: Any) -> bool:
    return hasattr(loader, "slice_fn")


def set_generators(generators: list[torch.Generator], states: tuple[torch.Tensor, ...]) -> None:
    for generator, state in zip(generators, states, strict=False):
        generator.set_state(state)
