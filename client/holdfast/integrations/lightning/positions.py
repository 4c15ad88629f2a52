"""The position of Lightning's training in its data, to continue with the same rows and random numbers.

With a plain loader, Lightning restarts the epoch, and keeps no random streams. These methods of its loops mark the
position (2.6):

    fit_loop._load_combined_loader_states()   the first iterator is made next, before any hook of the epoch
    fit_loop.on_advance_start()               an epoch begins
    epoch_loop.on_run_start(fetcher)          later epochs' iterators are made; batches are next
    epoch_loop._on_before_fetch()             a batch is fetched next; one ahead if a loader has no length

A training that resumes within an epoch makes the iterator with the streams from which it was made before, skips trained
batches with those of the epoch's first fetch, and continues with those of the save.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch

from holdfast.integrations.lightning import framework
from holdfast.integrations.lightning.loaders import (
    LeavingOut,
    SameOrder,
    distributed_over,
    generators,
    has_indices,
    is_stateful,
    is_warm,
)
from holdfast.integrations.lightning.loop_progress import LoopProgress
from holdfast.integrations.lightning.steps import OptimizerSteps
from holdfast.integrations.loader_positions import Moment, moment_of, set_generators, skip_now
from holdfast.integrations.replaced_method import ReplacedMethod
from holdfast.state import rng
from holdfast_formats.errors import InvalidRequest


class _Saved(NamedTuple):
    """A restored position.

    `goes_on`: the next epoch begins where the loaders were. `over`: no batch of the running epoch was left, or it had
    ended. Moments are None otherwise.
    """

    between: bool
    goes_on: bool
    over: bool
    batches: int
    epoch: Moment | None
    first: Moment | None
    fetch: Moment | None
    generators: tuple[torch.Tensor, ...]
    warm: tuple[bool, ...]  # by loader: persistent workers were there already, so that no seed was drawn for them
    plateaus: dict[int, float]
    accumulates: int  # batches a step: GradientAccumulationScheduler sets it only at the beginning of an epoch


class EpochPosition:
    """An entry of the state: each rank's position in its Trainer's training data."""

    only_ours = True  # Lightning's own files have the counts of batches alone

    def __init__(self, trainer: Any, go_on: Callable[[], None]) -> None:
        self._trainer, self._fit, self._loop = trainer, trainer.fit_loop, trainer.fit_loop.epoch_loop
        self._go_on_streams = go_on
        self.progress = LoopProgress(trainer)
        self._epoch: Moment | None = None
        self._first: Moment | None = None
        self._fetch: Moment | None = None
        self._loaders_before: list[Any] | None = None  # states of the loaders before the newest fetch
        self.steps, self._steps_at_fetch = OptimizerSteps(), 0
        self._warm: tuple[bool, ...] = ()
        self._awaited: _Saved | None = None
        self._leaving_out: LeavingOut | None = None
        self._states: list[Any] = []  # of the loaders, as restored
        self._same_order: list[SameOrder] = []
        self._ahead = 0  # batches that the fetcher fetches ahead, when it may
        self._at_fetch: Moment | None = None  # to install before the next batch is fetched
        for target, method, around in (
            (self._fit, "run", self._around_run),
            (self._fit, "_load_combined_loader_states", self._around_first_iterator),
            (self._fit, "on_advance_start", self._around_epoch),
            (self._loop, "on_run_start", self._around_batches),
            (self._loop, "_on_before_fetch", self._around_fetch),
        ):
            own = getattr(target, method)
            setattr(target, method, ReplacedMethod(own, around(own)))

    @property
    def awaited(self) -> bool:
        return self._awaited is not None

    @property
    def mid_step(self) -> bool:
        """Whether an optimizer steps, or has stepped for a batch that does not count as trained yet."""
        return self.progress.in_flight and (self.steps.running or self.steps.taken != self._steps_at_fetch)

    def state_dict(self) -> dict[str, Any]:
        progress = self._loop.batch_progress
        return {
            "world": self._trainer.world_size,
            "between": self.progress.between_epochs,
            "goes_on": self.progress.goes_on_by_itself(),
            "over": bool(progress.is_last_batch) and not self.progress.in_flight,
            "batches": progress.current.processed,
            "epoch": _state(self._epoch),
            "first": _state(self._first),
            "fetch": _state(self._fetch),
            "generators": [one.get_state() for one in generators(self._fit._combined_loader)],
            "warm": list(self._warm),
            "plateaus": self.progress.plateaus(),
            "accumulates": self._trainer.accumulate_grad_batches,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take a position. With another number of ranks the batches differ, and the moments are useless."""
        known = state["world"] == self._trainer.world_size
        epoch, first, fetch = (moment_of(state[name]) if known else None for name in ("epoch", "first", "fetch"))
        self._awaited = _Saved(
            bool(state["between"]),
            bool(state.get("goes_on")),
            bool(state["over"]),
            int(state["batches"]),
            epoch,
            first,
            fetch,
            tuple(state["generators"]),
            tuple(state["warm"]),
            dict(state["plateaus"]),
            int(state.get("accumulates", 0)),
        )

    def forget(self) -> None:
        self._awaited = None

    def check(self) -> None:
        """Raise `InvalidRequest` for a position within an epoch that could not be restored."""
        refusal = None if self.progress.between_epochs else self.progress.refusal()
        if refusal is None and self.mid_step:
            refusal = InvalidRequest(
                "the save is in the middle of a training step: the optimizer has stepped, but the batch is not counted yet",
                hint="use the newest checkpoint of the run, which is one step older",
            )
        if refusal is not None:
            raise refusal

    @contextmanager
    def as_of_last_batch(self) -> Iterator[None]:
        """Within this block the streams are those after the last trained batch, even if another batch has begun."""
        if not self.progress.in_flight or self._fetch is None:
            yield
            return
        now = self._take()
        self._set(self._fetch)
        try:
            yield
        finally:
            self._set(now)

    def correct_loops(self, loops: dict[str, Any]) -> None:
        """Store a loader without a length, which is a batch ahead, as before that batch; and a cut epoch as a running
        one.
        """
        held = loops.get("fit_loop", {}).get("state_dict", {})
        if "combined_loader" in held and self._loaders_before is not None and not self.progress.between_epochs:
            held["combined_loader"] = self._loaders_before
        if self.progress.is_cut:
            for count in loops["fit_loop"]["epoch_progress"].values():
                count["processed"], count["completed"] = count["started"] - 1, count["ready"] - 1

    def _around_run(self, own: Callable[[], None]) -> Callable[[], None]:
        def run() -> None:
            saved = self._awaited
            if saved is not None:
                self.progress.finish_plateaus(saved.plateaus)
                if saved.between:  # Lightning would take a run with max_steps for one within the epoch
                    framework.part("loops.loop")._Loop.restarting.fset(self._fit, False)
            self.steps.watch(self._trainer.strategy.optimizers)
            try:
                own()
            finally:
                self.steps.leave()
                leaving_out, self._leaving_out = self._leaving_out, None
                if leaving_out is not None:  # no batch was requested
                    leaving_out.end()

        return run

    def _around_first_iterator(self, own: Callable[[], None]) -> Callable[[], None]:
        def next_is_an_iterator() -> None:
            states = self._fit._combined_loader_states_to_load
            own()
            saved, loaders = self._awaited, self._fit._combined_loader.flattened
            for loader in loaders:  # with workers, the sampler is read before the epoch begins
                framework.fabric("utilities.data")._set_sampler_epoch(loader, self._fit.epoch_progress.current.processed)
            if saved is not None and saved.goes_on and states:
                self._fit._combined_loader._load_state_dicts(states)
            if saved is not None and not saved.between:
                self._states = states
                leaves_out = saved.batches and not saved.over and len(loaders) == 1 and has_indices(loaders[0])
                self._leaving_out = LeavingOut(loaders[0]) if leaves_out else None
                for loader, warm in zip(loaders, saved.warm, strict=False):
                    if warm and loader._iterator is None:
                        iter(loader)
                if self._leaving_out is not None:
                    self._leaving_out.batches = saved.batches
                self._set(saved.epoch)
                hidden = filter(None, (distributed_over(loader) for loader in loaders if is_stateful(loader)))
                self._same_order = [SameOrder(one) for one in hidden if hasattr(one._sampler, "generator")]
            self._begins()
            if saved is not None and not saved.between:
                self._epoch, self._warm = saved.epoch, saved.warm
            if saved is not None and saved.between:
                self._fetch_nothing_yet()

        return next_is_an_iterator

    def _fetch_nothing_yet(self) -> None:
        """Keep Lightning's next fetcher from prefetching a batch.

        Another iterator is made when the epoch begins, and a dataset may remember reads.
        """
        place = framework.part("loops.fit_loop")
        own = place._select_data_fetcher

        def select(*given: Any, **named: Any) -> Any:
            place._select_data_fetcher = own
            fetcher = own(*given, **named)
            self._ahead, fetcher.prefetch_batches = getattr(fetcher, "prefetch_batches", 0), 0
            return fetcher

        place._select_data_fetcher = select

    def _around_epoch(self, own: Callable[[], None]) -> Callable[[], None]:
        def epoch_begins() -> None:
            saved = self._awaited
            if saved is not None and saved.over and self.progress.between_epochs:  # Lightning has ended that epoch
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
                fetcher.prefetch_batches = self._ahead
                self._begins()
                iter(fetcher)  # the one of before was made ahead of the epoch's hooks
                return
            self._first, self._fetch = saved.first, saved.fetch
            scheduler = framework.part("callbacks").GradientAccumulationScheduler
            if saved.accumulates and any(isinstance(one, scheduler) for one in self._trainer.callbacks):
                self._trainer.accumulate_grad_batches = saved.accumulates
            if not saved.over:
                self._leave_out(saved, fetcher)
            for order in self._same_order:
                order.end()
            self._same_order = []
            self._go_on(saved)
            self._fit._restarting = False  # else Lightning leaves out the epoch's step of ReduceLROnPlateau

        return batches_begin

    def _around_fetch(self, own: Callable[[], None]) -> Callable[[], None]:
        def fetch_begins() -> None:
            at_fetch, self._at_fetch = self._at_fetch, None
            self._set(at_fetch)
            self._fetch = self._take()
            self._first = self._first or self._fetch
            self._steps_at_fetch, self.steps.torn = self.steps.taken, False  # a scaler may have left out a step
            if self._fit._data_fetcher.length is None and any(map(is_stateful, self._fit._combined_loader.flattened)):
                self._loaders_before = copy.deepcopy(self._fit._combined_loader._state_dicts())
            own()

        return fetch_begins

    def _begins(self) -> None:
        self._epoch, self._first, self._fetch, self._loaders_before = self._take(), None, None, None
        combined = self._fit._combined_loader
        self._warm = tuple(is_warm(loader) for loader in combined.flattened)

    def _leave_out(self, saved: _Saved, fetcher: Any) -> None:
        """Move the fresh iterators to the position of the save."""
        combined = self._fit._combined_loader
        leaving_out, self._leaving_out = self._leaving_out, None
        ahead = fetcher.length is None
        if all(map(is_stateful, combined.flattened)):
            states, self._states = self._states, []
            if ahead and states:  # the batch that was fetched with the iterator was fetched with other random numbers
                combined._load_state_dicts(states)
                self._at_fetch = saved.fetch
                iter(fetcher)
            elif not ahead:
                self._set(saved.first)
                for iterator in combined._iterator.iterators:
                    skip_now(iterator)
        elif leaving_out is not None:
            self._set(saved.first)
            for _ in range(leaving_out.end()):  # its iterator was made before: its rows have to be read
                next(fetcher.iterator)
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
        if len(saved.generators) == len(generators(self._fit._combined_loader)):
            set_generators(generators(self._fit._combined_loader), saved.generators)

    def _take(self) -> Moment:
        return Moment(rng.capture(), tuple(one.get_state() for one in generators(self._fit._combined_loader)))

    def _set(self, moment: Moment | None) -> None:
        if moment is not None:
            rng.install(moment.streams)
            set_generators(generators(self._fit._combined_loader), moment.generators)


def _state(moment: Moment | None) -> dict[str, Any] | None:
    return None if moment is None else moment.state()
