"""Data loaders with a generator of their own: saved unasked, and set after iterators have drawn from it."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import (
    DataLoader,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from holdfast.left_out import LeftOutNote
from holdfast.state.train_state import TrainState
from holdfast_formats.errors import StateMismatch
from tests.client.checkpoint_in_memory import restore, save

ROWS, EPOCHS = 7, 3


class Loader:
    """Shuffles as torchdata's StatefulDataLoader without workers does.

    Its state comes of an iterator, which is made where there is none. A new iterator draws the order, and then a seed; one
    that goes on puts the generator back to where it was before the order, and draws that.
    """

    def __init__(self, generator: torch.Generator | None, sampler: Any = None) -> None:
        self.generator, self.sampler = generator, sampler
        self._own = generator or torch.Generator().manual_seed(5)
        self._order: list[int] | None = None
        self._fresh = False
        self._before, self._yielded = self._own.get_state(), 0
        self._next: dict[str, Any] | None = None

    def _make(self) -> None:
        self._before, self._yielded = self._own.get_state(), 0
        self._order = torch.randperm(ROWS, generator=self._own).tolist()
        torch.empty((), dtype=torch.int64).random_(generator=self.generator)
        if self._next is not None:
            self._before, self._yielded = self._next["before"], self._next["yielded"]
            self._own.set_state(self._before)
            self._order = torch.randperm(ROWS, generator=self._own).tolist()
            self._next = None

    def __iter__(self) -> Iterator[int]:
        if not self._fresh:
            self._make()
        self._fresh = False
        assert self._order is not None
        while self._yielded < ROWS:
            self._yielded += 1
            yield self._order[self._yielded - 1]

    def state_dict(self) -> dict[str, Any]:
        if self._order is None:
            self._make()
            self._fresh = True
        return {"before": self._before, "yielded": self._yielded}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._order, self._fresh, self._next = None, False, state


def made(seed: int, listed: str) -> dict[str, Any]:
    """A state with a loader, and its generator before it, after it, or only in the loader."""
    generator = torch.Generator().manual_seed(seed)
    state: dict[str, Any] = {"loader": Loader(generator)}
    if listed == "before":
        return {"shuffle": generator, **state}
    return state | ({"shuffle": generator} if listed == "after" else {})


@pytest.mark.parametrize("listed", ["before", "after", "in the loader alone"])
@pytest.mark.parametrize("at", [0, 3, ROWS, ROWS + 2])
def test_all_rows_are_those_of_the_undisturbed_run(at: int, listed: str) -> None:
    """Of this epoch and the next ones, wherever the generator stands in the state, and whenever it was saved."""
    whole, resumed = made(3, listed), made(77, listed)
    rows: list[int] = []
    checkpoint = save(whole) if at == 0 else None
    for _ in range(EPOCHS):
        for row in whole["loader"]:
            rows.append(row)
            if len(rows) == at:
                checkpoint = save(whole)
                bits = whole["loader"].generator.get_state()
    assert checkpoint is not None
    done = restore(checkpoint, resumed)
    assert not done.notes
    if at:
        assert torch.equal(resumed["loader"].generator.get_state(), bits)
    again = rows[:at]
    while len(again) < len(rows):
        again += resumed["loader"]
    assert again == rows


def test_a_generator_is_saved_once() -> None:
    """As an entry, if it is one; with the loader, if not. A loader without one has nothing more than its state."""
    texts = [set(TrainState(state, 0, 1).snapshot().values["extra"]) for state in (made(1, "after"), made(1, ""))]
    assert texts == [{"loader", "shuffle", "rng"}, {"loader", "loader/generator", "rng"}]
    assert set(TrainState({"loader": Loader(None)}, 0, 1).snapshot().values["extra"]) == {"loader", "rng"}


def test_it_goes_with_its_loader() -> None:
    """Left out with it by `exclude`, and each rank's own."""
    state = TrainState(made(1, ""), 0, 1)
    assert not {"loader", "loader/generator"} & state.snapshot(exclude=("extra/loader",)).values["extra"].keys()
    ranks = [TrainState(made(seed, ""), seed, 2).snapshot() for seed in (0, 1)]
    names = [{leaf.name for leaf in taken.leaves if "generator" in leaf.name} for taken in ranks]
    assert names == [{f"ranks/0000{rank}/loader/generator/torch.Generator"} for rank in (0, 1)]
    live = made(9, "")
    restore(save(made(1, "")), live, ignore=("extra/loader",))
    assert torch.equal(live["loader"].generator.get_state(), torch.Generator().manual_seed(9).get_state())


def test_a_checkpoint_from_before_has_none() -> None:
    """The loader goes on with its own, and a warning says so."""
    done = restore(save({"loader": Loader(None)}), made(1, ""))
    assert done.notes == ["the checkpoint has no state of the generator of extra/loader: it keeps its own"]
    assert isinstance(done.notes[0], LeftOutNote)


@pytest.mark.parametrize(
    "sampler",
    [
        RandomSampler(range(3)),
        RandomSampler(range(3), generator=torch.Generator()),
        SubsetRandomSampler([1, 2]),
        WeightedRandomSampler([1.0, 1.0], 2),
    ],
)
def test_a_sampler_without_a_state_is_named(sampler: Any) -> None:
    """Its order is drawn anew in the epoch that had begun. One that does not draw, or has a state, is not meant."""
    for outer in (Loader(None, sampler), Loader(None)):
        outer.batch_sampler = type("Batches", (), {"sampler": sampler})()  # type: ignore[attr-defined]
        (note,) = TrainState({"loader": outer}, 0, 1).snapshot().notes
        assert isinstance(note, LeftOutNote)
        assert note.startswith(f"extra/loader shuffles by a {type(sampler).__name__}") and "shuffle=True" in note
    stateful = type("Stateful", (type(sampler),), {"state_dict": dict})
    sampler.__class__ = stateful
    for fine in (sampler, SequentialSampler(range(3)), None):
        assert not TrainState({"loader": Loader(None, fine)}, 0, 1).snapshot().notes


class Counting(DataLoader[int]):
    """Knows its position in rows, as torchdata's loaders do."""

    def __init__(self, data: Any, **more: Any) -> None:
        super().__init__(data, **more)
        self.given: list[dict[str, Any]] = []

    def state_dict(self) -> dict[str, Any]:
        return self.given[-1] if self.given else {"position": 3}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.given.append(state)


class Stream(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(ROWS))


class Owned(list[int]):
    """Data with a state of their own, which may say how many rows there are."""

    def state_dict(self) -> dict[str, Any]:
        return {}


def test_a_position_in_other_data_is_refused() -> None:
    """With the line that begins them at their start, which works."""
    checkpoint = save({"loader": Counting(list(range(ROWS)))})
    longer = {"loader": Counting(list(range(ROWS + 3)))}
    with pytest.raises(StateMismatch, match=f"had {ROWS} rows at the save, and has {ROWS + 3}") as refused:
        restore(checkpoint, longer)
    assert "exclude=('extra/loader',)" in refused.value.hint
    restore(checkpoint, longer, ignore=("extra/loader",))
    assert longer["loader"].given == []
    same = {"loader": Counting(list(range(ROWS)), batch_size=2)}
    restore(checkpoint, same)
    assert same["loader"].given == [{"position": 3}]


@pytest.mark.parametrize("data", [Stream(), Owned([1, 2])])
def test_data_without_a_number_of_rows_are_not_compared(data: Any) -> None:
    checkpoint = save({"loader": Counting(data)})
    assert "loader/rows" not in checkpoint.stored().values["extra"]
    restore(checkpoint, {"loader": Counting(data)})


MAIN = {
    "_index_sampler_state": None,
    "_sampler_iter_state": {"samples_yielded": 24},
    "_sampler_iter_yielded": 6,
    "_IterableDataset_len_called": None,
    "_shared_seed": None,
}
NOTHING = {"dataset_state": None, "fetcher_state": None}
ALONE = {**MAIN, "_num_yielded": 6, **NOTHING, "_iterator_finished": False}


def with_workers(count: int, **of_each: Any) -> dict[str, Any]:
    """As torchdata 0.11 writes it after six batches."""
    workers = {f"worker_{number}": {"worker_id": number, **NOTHING, **of_each} for number in range(count)}
    main = {**MAIN, "_num_workers": count, "_base_seed": 7}
    snapshot = {
        "_snapshot_step": 6,
        "_last_yielded_worker_id": count - 1,
        "_main_snapshot": main,
        "_worker_snapshots": workers,
    }
    return {"_snapshot": snapshot, "_steps_since_snapshot": 0, "_iterator_finished": False}


def restored(stored: dict[str, Any], workers: int) -> dict[str, Any]:
    """What a loader with so many workers is given of a saved state."""
    saved, live = Counting([1]), Counting([1])
    live.num_workers = workers  # the constructor warns of more than there are cores
    saved.given.append(stored)
    restore(save({"loader": saved}), {"loader": live})
    return live.given[-1]


def test_a_position_goes_on_with_other_workers() -> None:
    assert restored(ALONE, 0) == ALONE
    assert restored(with_workers(2), 2) == with_workers(2)
    assert restored(with_workers(2), 0) == ALONE
    assert restored(with_workers(2), 3) == with_workers(3)
    made = restored(ALONE, 2)
    assert made["_snapshot"]["_main_snapshot"].pop("_base_seed") == torch.initial_seed() % 2**63
    assert made == {**with_workers(2), "_snapshot": made["_snapshot"]}
    assert made["_snapshot"]["_worker_snapshots"] == with_workers(2)["_snapshot"]["_worker_snapshots"]


@pytest.mark.parametrize(
    ("stored", "workers"),
    [
        (with_workers(2, dataset_state={"i": 12}), 3),
        (with_workers(2, fetcher_state={"fetcher_ended": False}), 0),
        ({**with_workers(2), "_steps_since_snapshot": 1}, 0),
        ({**ALONE, "dataset_state": {"i": 24}}, 1),
    ],
)
def test_a_position_that_is_in_the_workers_is_refused(stored: dict[str, Any], workers: int) -> None:
    """Before anything changes, with both ways on."""
    saved = 2 if "_snapshot" in stored else 0
    with pytest.raises(StateMismatch, match=f"saved with num_workers={saved} and has {workers} now") as refused:
        restored(stored, workers)
    assert f"set num_workers={saved}" in refused.value.hint
    assert "exclude=('extra/loader',)" in refused.value.hint


def test_the_state_of_another_loader_is_given_as_it_is() -> None:
    """Whatever it has under torchdata's names."""
    for stored in ({"_snapshot": 3, "_iterator_finished": True}, {"_iterator_finished": False}, {"position": 1}):
        assert restored(stored, 2) == stored


class BufferShuffledExamplesIterable:
    """As in `datasets`."""

    buffer_size, ex_iterable = 1000, None


def test_a_shuffle_buffer_is_named() -> None:
    """Of a loader's data, and of data that are an entry themselves, wherever in the pipeline it is."""
    buffered = BufferShuffledExamplesIterable()
    step = type("MappedExamplesIterable", (), {"ex_iterable": buffered})()
    for entry, pipeline in itertools.product((True, False), (buffered, step)):
        data = Loader(None)
        data._ex_iterable = pipeline  # type: ignore[attr-defined]
        loader = Loader(None)
        loader.dataset = data  # type: ignore[attr-defined]
        (note,) = TrainState({"data": data if entry else loader}, 0, 1).snapshot().notes
        assert isinstance(note, LeftOutNote)
        assert note.startswith("extra/data reads through a shuffle buffer of 1000 rows")
    data._ex_iterable = type("Other", (), {"ex_iterable": None})()  # type: ignore[attr-defined]
    assert not TrainState({"data": data}, 0, 1).snapshot().notes
