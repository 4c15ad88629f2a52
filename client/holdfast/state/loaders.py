"""Data loaders of a state: their own random generators, and the order of their restoration.

A loader with a generator of its own draws from it when its iterator is made, as torchdata's StatefulDataLoader does. So
restored iterators are made first, and all generators are set after that.

A position is what the loader's own state says. It is of the data that the loader had, so the number of rows is saved beside
it. torchdata's loaders know theirs in samples, whatever the size of a batch, but refuse the state of a loader with another
number of workers, which is the same position in another form if no worker has a state.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch.utils.data import DataLoader, IterableDataset, RandomSampler, SubsetRandomSampler, WeightedRandomSampler

from holdfast.left_out import LeftOutNote
from holdfast.state.extras import GROUP, Stateful
from holdfast.state.streams import CheckedEntry, HeldGenerator
from holdfast.tensors import json_values, trees
from holdfast.tensors.leaves import Content, OfferedLeaves, PartPlan, Selection
from holdfast_formats.errors import StateMismatch

_SAMPLERS = ("sampler", "batch_sampler.sampler")
_DEPTH_MAX = 64  # of the steps of a pipeline of `datasets`
_STATELESS = (RandomSampler, SubsetRandomSampler, WeightedRandomSampler)  # those of torch; torchdata has others


class LoaderGenerator(NamedTuple):
    """A loader's generator that is no entry of the state: saved with the loader automatically, for each rank."""

    key: str
    stream: Stateful

    @property
    def groups(self) -> frozenset[str]:
        return frozenset({GROUP})

    def collect(self, content: Content) -> None:
        self.stream.collect(content)

    def plan(self, stored: OfferedLeaves, selection: Selection) -> PartPlan:
        """Want the generator's state. A checkpoint with the loader but without its generator is noted."""
        if stored.value(GROUP, self.stream.key) is not None or not selection.takes(GROUP, self.key):
            return self.stream.plan(stored, selection)
        note = LeftOutNote(f"the checkpoint has no state of the generator of {GROUP}/{self.key}: it keeps its own")
        return PartPlan(notes=[note] if stored.value(GROUP, self.key) is not None else [])


class LoaderIterators(NamedTuple):
    """Loaders by key. Before any generator is set, restored loaders are asked for their state: if they make their iterator
    for that, they draw from generators, as the interrupted training had.
    """

    loaders: Mapping[str, Any]

    @property
    def groups(self) -> frozenset[str]:
        return frozenset({GROUP})

    def collect(self, content: Content) -> None:
        """The loaders are entries of their own."""

    def plan(self, stored: OfferedLeaves, selection: Selection) -> PartPlan:
        return PartPlan(actions=[loader.state_dict for key, loader in self.loaders.items() if selection.takes(GROUP, key)])


class LoaderRows(NamedTuple):
    """How many rows the data of a loader has, beside its position: in other data, the position would be another one."""

    key: str
    loader: Any

    @property
    def groups(self) -> frozenset[str]:
        return frozenset({GROUP})

    @property
    def _name(self) -> str:
        return f"{self.key}/rows"

    def collect(self, content: Content) -> None:
        rows = rows_of(self.loader)
        if rows is not None:
            content.add_value(GROUP, self._name, trees.grow(rows, self._name, self._name).text)

    def plan(self, stored: OfferedLeaves, selection: Selection) -> PartPlan:
        """Raises `StateMismatch` for a position in data of another length."""
        text = stored.value(GROUP, self._name)
        if text is None:
            return PartPlan()
        rows, now = json_values.loads(text, self._name, _no_tensor), rows_of(self.loader)
        if selection.takes(GROUP, self.key) and now is not None and rows != now:
            raise StateMismatch(
                f"the data of {GROUP}/{self.key} had {rows} rows at the save, and has {now}: the saved position is not one "
                "in these data",
                hint=f"restore(exclude=({f'{GROUP}/{self.key}'!r},)) begins the present data at their start",
            )
        return PartPlan(documents=[(GROUP, self._name)])


class HeldLoader(CheckedEntry):
    """A loader as an object with a state, which goes on with another number of workers where its position allows it."""

    def __init__(self, key: str, loader: Any) -> None:
        self._key, self._loader = key, loader

    def state_dict(self) -> Any:
        return self._loader.state_dict()

    def refuse_unfit(self, stored: Any) -> None:
        """Raise `StateMismatch` for a position that this number of workers cannot go on from."""
        self._fitting(stored)

    def load_state_dict(self, stored: Any) -> None:
        self._loader.load_state_dict(self._fitting(stored))

    def _fitting(self, stored: Any) -> Any:
        saved, now = _workers_of(stored), getattr(self._loader, "num_workers", None)
        if saved is None or saved == now or not isinstance(now, int):
            return stored
        snapshot = stored.get(_SNAPSHOT, {})
        parts = [stored] if not saved else snapshot["_worker_snapshots"].values()
        if stored.get("_steps_since_snapshot") or any(part.get(name) for part in parts for name in _OF_THE_DATA):
            raise StateMismatch(
                f"{GROUP}/{self._key} was saved with num_workers={saved} and has {now} now: its position is in the workers, "
                "each of which has its own part of the data",
                hint=f"set num_workers={saved}, or restore(exclude=({f'{GROUP}/{self._key}'!r},)) to begin the data at "
                "their start",
            )
        step = snapshot["_snapshot_step"] if saved else stored["_num_yielded"]
        return _with_workers(snapshot["_main_snapshot"] if saved else stored, now, step, stored["_iterator_finished"])


# The state of torchdata's StatefulDataLoader: with workers, a snapshot of the main process and one of each worker.
_SNAPSHOT, _OF_THE_DATA = "_snapshot", ("dataset_state", "fetcher_state")
_MAIN = (
    "_index_sampler_state",
    "_sampler_iter_state",
    "_sampler_iter_yielded",
    "_IterableDataset_len_called",
    "_shared_seed",
)


def _workers_of(stored: Any) -> int | None:
    """With how many workers torchdata's loader was saved; None for the state of anything else."""
    if not isinstance(stored, dict) or not isinstance(stored.get("_iterator_finished"), bool):
        return None
    try:
        workers = stored[_SNAPSHOT]["_main_snapshot"]["_num_workers"] if _SNAPSHOT in stored else 0
        known = _MAIN if workers else (*_MAIN, "_num_yielded", *_OF_THE_DATA)
        main = stored[_SNAPSHOT]["_main_snapshot"] if workers else stored
        return workers if set(known) <= set(main) else None
    except (KeyError, TypeError):
        return None


def _with_workers(main: Mapping[str, Any], workers: int, step: int, finished: bool) -> dict[str, Any]:
    """A position after `step` batches, for so many workers. If it has no seed for them, they get torch's initial one."""
    kept = {name: main[name] for name in _MAIN}
    nothing = dict.fromkeys(_OF_THE_DATA)
    if not workers:
        return {**kept, "_num_yielded": step, **nothing, "_iterator_finished": finished}
    seed = main.get("_base_seed", torch.initial_seed() % 2**63)
    snapshot = {
        "_snapshot_step": step,
        "_last_yielded_worker_id": workers - 1,
        "_main_snapshot": {**kept, "_num_workers": workers, "_base_seed": seed},
        "_worker_snapshots": {f"worker_{number}": {"worker_id": number, **nothing} for number in range(workers)},
    }
    return {_SNAPSHOT: snapshot, "_steps_since_snapshot": 0, "_iterator_finished": finished}


def rows_of(loader: Any) -> int | None:
    """The rows of a torch loader's data. None for data without a length, and for data with a state of their own."""
    data: Any = loader.dataset if isinstance(loader, DataLoader) else None
    if data is None or isinstance(data, IterableDataset) or hasattr(data, "state_dict"):
        return None
    try:
        rows: int = len(data)
    except (TypeError, NotImplementedError):
        return None
    return rows


def _no_tensor(kind: str, name: str) -> None:
    """Rows are a number."""


def is_loader(target: Any) -> bool:
    return hasattr(type(target), "__iter__")


def own_generator(key: str, loader: Any, state: Mapping[str, Any], rank: int) -> LoaderGenerator | None:
    """A loader's generator, unless it is an entry of the state itself."""
    generator = _attribute(loader, "generator")
    if not isinstance(generator, torch.Generator) or any(value is generator for value in state.values()):
        return None
    name = f"{key}/generator"
    return LoaderGenerator(key, Stateful(name, HeldGenerator(name, generator), rank))


def note_of(key: str, loader: Any) -> LeftOutNote | None:
    """A note on what the position of a loader, or of data, leaves out: the order that a torch sampler has drawn for an
    epoch, or the rows in a shuffle buffer of `datasets`.
    """
    rows = _buffered(_attribute(loader, "dataset")) or _buffered(loader)
    if rows:
        return LeftOutNote(
            f"{GROUP}/{key} reads through a shuffle buffer of {rows} rows of `datasets`, whose state does not have these "
            "rows: after a restore within an epoch, those that are in the buffer now do not come any more. Save between "
            "epochs, or shuffle data that can be indexed instead"
        )
    samplers = (_attribute(loader, path) for path in _SAMPLERS)
    sampler = next((one for one in samplers if isinstance(one, _STATELESS)), None)
    if sampler is None or callable(_attribute(sampler, "state_dict")):
        return None
    return LeftOutNote(
        f"{GROUP}/{key} shuffles by a {type(sampler).__name__} of torch, which has no state: after a restore, the "
        "rest of an interrupted epoch has other rows. Save between epochs, or give torchdata's StatefulDataLoader "
        "shuffle=True instead of this sampler"
    )


def _buffered(data: Any) -> int:
    """The rows of the shuffle buffer of an `IterableDataset` of `datasets`, by the names in versions 2 to 5; 0 if none."""
    part = _attribute(data, "_ex_iterable")
    for _ in range(_DEPTH_MAX):
        if part is None:
            break
        size = _attribute(part, "buffer_size")
        if type(part).__name__ == "BufferShuffledExamplesIterable" and type(size) is int:
            return size
        part = _attribute(part, "ex_iterable")
    return 0


def _attribute(value: Any, path: str) -> Any:
    for name in path.split("."):
        try:
            value = getattr(value, name, None)
        except Exception:  # a property of another class may raise anything
            return None
    return value
