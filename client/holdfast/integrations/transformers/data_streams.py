"""Records the random streams at a Trainer's batch fetches, and restores them when training resumes.

A Trainer fetches one batch ahead, and skips the epoch's earlier batches. If a dataset, collator or sampler draws from
the global generators, its numbers come from three moments: when the epoch's iterator was made, just before the newest
batch was fetched, and the save itself. All three are restored, each at its place. With workers, batches are fetched in
other processes, and only the first and the last matter here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

from torch.utils.data import BatchSampler, DataLoader

from holdfast.state import rng
from holdfast.state.rng import RandomStreams


class Position(NamedTuple):
    """An epoch's fetched batches, and the streams on the way."""

    epoch: RandomStreams | None = None  # before the epoch's iterator was made
    fetch: RandomStreams | None = None  # before the newest batch was fetched
    fetched: int = 0  # batches; 0 if the loader is not watched


class StepStart(NamedTuple):
    """The moment before a step's batches were fetched: `step` steps were done."""

    step: int
    position: Position
    streams: RandomStreams


class DataStreams:
    """An entry of the state, with the position in the epoch. Each rank has its own."""

    only_ours = True  # transformers' own checkpoints have the streams of the save alone

    def __init__(self, world: int, go_on: Callable[[], None]) -> None:
        self._world, self._go_on = world, go_on
        self._now = Position()
        self._shown: Position | None = None
        self._awaited: Position | None = None
        self._start: StepStart | None = None
        self.reached = False  # the loader was where the save was, so that all streams are installed

    def state_dict(self) -> dict[str, Any]:
        shown = self._shown or self._now
        return {
            "world": self._world,
            "epoch": _as_values(shown.epoch),
            "fetch": _as_values(shown.fetch),
            "fetched": shown.fetched,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take the saved position. With another number of ranks the batches differ, and their streams are useless."""
        if state["world"] == self._world:
            self._awaited = Position(_of_values(state["epoch"]), _of_values(state["fetch"]), state["fetched"])

    def watch(self, loader: object) -> None:
        """Record each fetch of a loader prepared by accelerate. Others, and loaders with workers, stay as they are.

        accelerate 1.15.0 keeps torch's loader in `base_dataloader`, whose batch sampler it uses to skip batches. torch
        refuses to set a loader's batch sampler, hence `vars`.
        """
        base = getattr(loader, "base_dataloader", None)
        if type(base) is not DataLoader or base.num_workers > 0 or not isinstance(base.batch_sampler, BatchSampler):
            return
        inner = base.batch_sampler
        vars(base)["batch_sampler"] = _Fetches(inner.inner if isinstance(inner, _Fetches) else inner, self)

    def epoch_begins(self) -> None:
        if self._awaited is not None and self._awaited.epoch is not None:
            rng.install(self._awaited.epoch)
        self._now = Position(rng.capture())

    def fetches(self) -> None:
        fetched = self._now.fetched + 1
        if self._awaited is not None and fetched == self._awaited.fetched and self._awaited.fetch is not None:
            rng.install(self._awaited.fetch)
        elif self._awaited is not None and fetched == self._awaited.fetched + 1 and fetched > 1:
            self._arrive()
        self._now = Position(self._now.epoch, rng.capture(), fetched)

    def ended(self) -> None:
        if self._awaited is not None and 0 < self._awaited.fetched == self._now.fetched:
            self._arrive()

    def forget(self) -> None:
        self._awaited, self.reached = None, False

    def step_begins(self, step: int) -> None:
        """Keep this moment: a save during the next step belongs to the completed steps."""
        self._start = StepStart(step, self._now, rng.capture())

    @contextmanager
    def as_of(self, step: int) -> Iterator[None]:
        """Within this block the streams are those after so many steps, even if the next one has begun."""
        start = self._start
        if start is None or start.step != step:
            yield
            return
        now = rng.capture()
        self._shown = start.position
        rng.install(start.streams)
        try:
            yield
        finally:
            self._shown = None
            rng.install(now)

    def _arrive(self) -> None:
        self._awaited, self.reached = None, True
        self._go_on()


class _Fetches(BatchSampler):
    """A batch sampler that reports each batch before its fetch, and otherwise delegates."""

    def __init__(self, inner: BatchSampler, streams: DataStreams) -> None:
        self.inner, self._streams = inner, streams

    def __iter__(self) -> Iterator[list[int]]:
        for batch in self.inner:
            self._streams.fetches()
            yield batch
        self._streams.ended()

    def __len__(self) -> int:
        return len(self.inner)

    def __getattr__(self, name: str) -> Any:
        if name == "inner":  # while it is copied or unpickled
            raise AttributeError(name)
        return getattr(self.inner, name)


def _as_values(streams: RandomStreams | None) -> dict[str, Any] | None:
    return None if streams is None else {"tensors": streams.tensors, "residual": streams.residual}


def _of_values(values: Mapping[str, Any] | None) -> RandomStreams | None:
    return None if values is None else RandomStreams(dict(values["tensors"]), dict(values["residual"]))
