"""Records the random streams at a Trainer's batches, and restores them when training resumes.

Paddle's data loader fetches batches in a thread, a few ahead of the training, and its Trainer skips the epoch's earlier
batches, or fetches them once more. If datasets or collators draw from the generators of Python and numpy, their numbers
come from three moments: when the epoch began, when the last batch that was trained had just been fetched, and the save.
Each is restored at its place. A stream is the loader's if the first fetch of an epoch moves it, for which the training
waits. With workers, batches are fetched in other processes, and only the first and the last matter here.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Literal, NamedTuple

import torch

from holdfast.integrations.paddle.random_streams import TRACKED, PaddleStreams
from holdfast.state import rng
from holdfast.state.rng import RandomStreams

log = logging.getLogger(__name__)

FETCH_MAX_S = 60.0  # how long a save waits for a fetch that draws random numbers
LOOK_EVERY_S = 0.05
_NAMES = ("python", "numpy", "torch")
Resumed = Literal["within", "again", "next"]  # in an epoch; in it, which begins again; where one has ended
_NONE = RandomStreams({}, {})


class StreamMoment(NamedTuple):
    """All streams of this process at one moment: Paddle's by themselves."""

    streams: RandomStreams
    paddle: dict[str, Any]


class SavedEpoch(NamedTuple):
    """Where an epoch stands: its beginning, the save, the batches that were trained, and what the loader draws from."""

    epoch: StreamMoment | None = None
    saved: StreamMoment | None = None
    trained: int = 0  # batches of the epoch
    fetch: RandomStreams = _NONE  # those of the loader alone, before the next fetch


class ParallelForm(NamedTuple):
    """How many ranks share the data, the tensors and the layers, and in which order of the dimensions."""

    data: int = 1
    tensor: int = 1
    stages: int = 1
    order: str = ""


class TrainerStreams(PaddleStreams):
    """Paddle's streams in a Trainer, which seeds its tracker by itself: of other named streams, this rank keeps its own."""

    def refuse_unfit(self, stored: Any) -> None:
        super().refuse_unfit(self._fit(stored))

    def load_state_dict(self, stored: dict[str, Any]) -> None:
        super().load_state_dict(self._fit(stored))

    def _fit(self, stored: Any) -> Any:
        if not isinstance(stored, dict) or not isinstance(stored.get(TRACKED), dict):
            return stored
        own = self.state_dict()[TRACKED]
        return {**stored, TRACKED: {name: stored[TRACKED].get(name, states) for name, states in own.items()}}


class LoaderStreams:
    """An entry of the state, with the position in the epoch. Each rank has its own."""

    only_ours = True  # Paddle's own checkpoints have the streams of the save alone
    reached = False

    def __init__(self, form: ParallelForm, samplers: Any) -> None:
        self._form = form
        kinds = ("DistributedBatchSampler", "MappingBatchSampler", "MappingDistributedBatchSampler")
        self._skipping = tuple(getattr(samplers, name) for name in kinds if hasattr(samplers, name))
        self._epoch: StreamMoment | None = None
        self._trained = 0
        self._awaited: SavedEpoch | None = None  # until the first epoch begins
        self._due: SavedEpoch | None = None  # until the first batch is trained
        self._fetches = _Fetches()
        self._skips = False  # the sampler skips batches without fetching them
        self._resumed: Resumed = "within"

    def state_dict(self) -> dict[str, Any]:
        return {
            "form": list(self._form),
            "epoch": _as_values(self._epoch),
            "saved": _as_values(_now()),
            "trained": self._trained,
            "fetch": _of_streams(self._fetches.before(self._trained + 1)),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take the saved position. In another form of parallelism the batches differ, and the streams of the save alone go
        on (`successors`).
        """
        if ParallelForm(*state["form"]) == self._form:
            epoch, saved = _of_values(state["epoch"]), _of_values(state["saved"])
            self._awaited = SavedEpoch(epoch, saved, state["trained"], _streams(state["fetch"]))

    def watch(self, loader: Any) -> None:
        """Note what each fetch of the loader draws from, unless worker processes fetch."""
        self._skips = isinstance(getattr(loader, "batch_sampler", None), self._skipping)
        self._fetches = _Fetches()
        if getattr(loader, "num_workers", 1) == 0 and callable(getattr(loader, "collate_fn", None)):
            loader.collate_fn = _Collated(loader.collate_fn, self._fetches)
            _announce(loader.batch_sampler, self._fetches)

    def resumes(self, where: Resumed) -> None:
        """Say where the training goes on in its data."""
        self._resumed = where

    def epoch_begins(self) -> None:
        awaited, self._awaited, self._trained = self._awaited, None, 0
        if awaited is None or awaited.epoch is None or awaited.saved is None:
            self._epoch = _now()
        elif self._resumed == "within":
            _install(awaited.epoch)
            self._epoch, self._due = awaited.epoch, awaited
            if self._skips:
                self._trained = awaited.trained
                rng.install(awaited.fetch)
        else:
            _install(awaited.saved)
            if self._resumed == "again":
                rng.install(awaited.fetch)
                self._due = awaited if self._skips else None
            self._epoch = _now()
        self._fetches.begin(self._trained)

    def trains(self) -> None:
        """The next batch was fetched, and is trained."""
        self._trained += 1

    def go_on(self) -> None:
        """Continue with the streams of the save, less those that only the loader draws from. Paddle calls it once more in
        each later epoch, where it means nothing.
        """
        due, self._due = self._due, None
        if due is not None and due.saved is not None:
            rng.install(_part(due.saved.streams, set(_NAMES) - _names(due.fetch)))
            PaddleStreams().load_state_dict(due.saved.paddle)

    def forget(self) -> None:
        self._awaited = self._due = None

    def as_of(self, step: int) -> AbstractContextManager[None]:
        """Within this block the loader fetches nothing, if it draws from streams that a save puts back as it found them."""
        return self._fetches.paused()


class _Fetches:
    """What the loader's thread notes: the streams before each fetch that is not trained yet."""

    def __init__(self) -> None:
        self._lock = threading.Condition()
        self._fetching: threading.Thread | None = None
        self._paused = False
        self._before: dict[int, RandomStreams] = {}
        self._fetched = 0
        self._first: RandomStreams | None = None
        self._loaders: set[str] = set()

    def begin(self, fetched: int) -> None:
        with self._lock:
            self._before, self._fetched, self._first, self._loaders = {}, fetched, rng.capture(), set()

    @contextmanager
    def paused(self) -> Iterator[None]:
        until = time.monotonic() + FETCH_MAX_S
        with self._lock:
            self._paused = bool(self._loaders)
            while self._paused and self._fetching is not None and self._fetching.is_alive():
                if time.monotonic() > until:
                    log.warning("a fetch of the data loader takes over %.0f s: its random numbers may repeat", FETCH_MAX_S)
                    break
                self._lock.wait(LOOK_EVERY_S)  # a thread whose data have ended says nothing
        try:
            yield
        finally:
            with self._lock:
                self._paused = False
                self._lock.notify_all()

    def fetches(self) -> None:
        """The loader's thread begins a fetch, which waits for a save."""
        with self._lock:
            self._lock.wait_for(lambda: not self._paused)
            self._fetching = threading.current_thread()

    def fetched(self) -> None:
        with self._lock:
            self._fetching = None
            self._lock.notify_all()
            now = rng.capture()
            if self._first is not None:
                self._loaders = {name for name in _NAMES if not _same(_part(self._first, {name}), _part(now, {name}))}
                self._first = None
            self._fetched += 1
            self._before[self._fetched + 1] = now

    def before(self, number: int) -> RandomStreams:
        """The streams before this fetch, of those that are the loader's. Earlier fetches are forgotten."""
        with self._lock:
            self._before = {later: streams for later, streams in self._before.items() if later >= number}
            return _part(self._before.get(number, _NONE), self._loaders)


def _announce(sampler: Any, fetches: _Fetches) -> None:
    """Let a batch sampler report each fetch before it. It stays of its kind, by which the Trainer knows it."""
    kind = type(sampler)

    def announced(self: Any) -> Iterator[Any]:
        batches = kind.__iter__(self)
        while True:
            fetches.fetches()
            try:
                batch = next(batches)
            except StopIteration:
                return
            yield batch

    sampler.__class__ = type(kind.__name__, (kind,), {"__iter__": announced, "__module__": kind.__module__})


class _Collated:
    """A collate function that reports each fetch."""

    def __init__(self, inner: Callable[..., Any], fetches: _Fetches) -> None:
        self._inner, self._fetches = inner, fetches

    def __call__(self, *given: Any, **named: Any) -> Any:
        batch = self._inner(*given, **named)
        self._fetches.fetched()
        return batch


def _now() -> StreamMoment:
    return StreamMoment(rng.capture(), PaddleStreams().state_dict())


def _install(moment: StreamMoment) -> None:
    rng.install(moment.streams)
    PaddleStreams().load_state_dict(moment.paddle)


def _part(streams: RandomStreams, names: set[str]) -> RandomStreams:
    kept = {name: tensor for name, tensor in streams.tensors.items() if name in names}
    return RandomStreams(kept, {name: value for name, value in streams.residual.items() if name in names})


def _names(streams: RandomStreams) -> set[str]:
    return streams.tensors.keys() | streams.residual.keys()


def _same(one: RandomStreams, other: RandomStreams) -> bool:
    same = all(torch.equal(tensor, other.tensors[name]) for name, tensor in one.tensors.items())
    return same and one.residual == other.residual


def _of_streams(streams: RandomStreams) -> dict[str, Any]:
    return {"tensors": streams.tensors, "residual": streams.residual}


def _streams(values: Mapping[str, Any]) -> RandomStreams:
    return RandomStreams(dict(values["tensors"]), dict(values["residual"]))


def _as_values(moment: StreamMoment | None) -> dict[str, Any] | None:
    if moment is None:
        return None
    return {**_of_streams(moment.streams), "paddle": moment.paddle}


def _of_values(values: Mapping[str, Any] | None) -> StreamMoment | None:
    return None if values is None else StreamMoment(_streams(values), dict(values["paddle"]))
