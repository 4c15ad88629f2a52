"""Two daemons save, replace, remove and read at random in one store, whose calls may fail.

For each step it is kept which checkpoints may stand there: one, after an answer that was certain, and several after one that
was not. A look at the store past all faults must find one of these, whole, and makes it certain again.
"""

from __future__ import annotations

import itertools
import random
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from threading import Lock
from typing import TypeAlias

from holdfast_formats import naming
from holdfast_formats.errors import CheckpointError, NoSuchCheckpoint, NoSuchResource
from holdfast_formats.naming import Place
from holdfast_service.storage import Store
from tests.suites.store_suite import RUN, Sample, fill, path, sample

SIZES = (70_000, 40, 0)
Known: TypeAlias = "set[int | None]"  # by the samples' numbers; None is no checkpoint


class Steps:
    """The steps that one thread works at, and what may stand at each; whole stores are shared by all threads."""

    def __init__(self, world: Stress, steps: Sequence[int], seed: int) -> None:
        self._world, self._steps, self._chance = world, steps, random.Random(seed)
        self._known: dict[int, Known] = {step: {None} for step in steps}

    def go_on(self, operations: int) -> None:
        acts = {self._save: 6, self._replace: 3, self._remove: 3, self._read: 4, self._let_go: 2, self._sweep: 1}
        for _ in range(operations):
            (act,) = self._chance.choices([*acts], [*acts.values()])
            store = self._chance.choice(self._world.stores)
            step = self._chance.choice(self._steps)
            self._world.settled()
            act(store, step)
            if self._chance.random() < 0.5:
                self.look(step)

    def look(self, step: int) -> None:
        """What stands there, past all faults, is one of those that may, and is whole."""
        self._world.settled()
        found = self._world.standing(self._world.sound, step)
        assert found in self._known[step], f"step {step} has {found}, not one of {self._known[step]}"
        self._known[step] = {found}

    def look_at_all(self) -> None:
        for step in self._steps:
            self.look(step)

    def _save(self, store: Store, step: int, over: bool = False) -> None:
        world, known = self._world, self._known[step]
        number, place, made = world.next(step, joint=self._chance.random() < 0.5)
        with world.live(place):
            try:
                staged = store.begin(place)
                for name, data in made.files.items():
                    if name == "config.json":
                        staged.put(name, data)
                    else:
                        fill(staged.create(name, len(data)), data)
                said = store.commit(place, made.contents(), over)
            except CheckpointError as error:
                world.count(f"save raised {error.code}")  # and has made nothing visible
                with suppress(CheckpointError):
                    store.discard(place)
                return
        world.count(f"save {said.outcome}")
        if said.outcome == "published":
            assert over or None in known, f"step {step}: {number} was published where {known} stood: {said}"
            self._known[step] = {number}
        elif said.outcome == "unknown":
            known.add(number)
        else:
            assert said.outcome == "taken" and not over, said  # nothing has swept or discarded the place
            known.discard(None)
            assert known, f"step {step}: {number} found a checkpoint where none could be"
            with suppress(CheckpointError):
                store.discard(place)

    def _replace(self, store: Store, step: int) -> None:
        if None not in self._known[step]:
            self._save(store, step, over=True)

    def _remove(self, store: Store, step: int) -> None:
        with self._world.unswept:
            self._remove_and_perhaps_not(store, step)

    def _remove_and_perhaps_not(self, store: Store, step: int) -> None:
        before = self._known[step]
        try:
            removed = store.remove(RUN, step)
        except NoSuchCheckpoint:
            assert None in before, f"step {step} was not there, but {before} was"
            self._known[step] = {None}
            return
        except CheckpointError as error:
            self._world.count(f"remove raised {error.code}")
            before.add(None)
            return
        assert before != {None}, f"something was removed at step {step}, where nothing was"
        self._known[step] = {None}
        self._world.count("remove")
        self._world.settled()  # a deletion that arrives late would remove what is brought back, as from any bucket
        if self._chance.random() < 0.5:
            self._bring_back(store, step, removed, before - {None})
        elif self._chance.random() < 0.8:  # else a sweep frees it
            with suppress(CheckpointError):
                store.free(removed)

    def _bring_back(self, store: Store, step: int, removed: str, before: Known) -> None:
        try:
            back = store.bring_back(RUN, step, removed)
        except CheckpointError as error:
            self._world.count(f"bring back raised {error.code}")
            self._known[step] = before | {None}
            return
        assert back, f"step {step} was not brought back, where nothing had taken its place"
        self._known[step] = before
        self._world.count("bring back")

    def _read(self, store: Store, step: int) -> None:
        known = self._known[step]
        try:
            found = self._world.standing(store, step)
        except NoSuchResource as error:
            raise AssertionError(f"step {step}, one of {known}, misses a file") from error
        except CheckpointError as error:
            self._world.count(f"read raised {error.code}")
            return
        assert found in known, f"step {step} reads as {found}, not one of {known}"
        self._world.count("read")

    def _let_go(self, store: Store, step: int) -> None:
        """Of what was replaced at this step: for good, as after the new one was read back, or it comes back."""
        try:
            places = [place for place in store.replaced(RUN) if place.step == step]
            for place in places:
                if self._chance.random() < 0.7:
                    released = store.release(place)
                    if released is not None:
                        store.free(released)
                    self._world.count("release")
                    continue
                self._take_back(store, place)
                return  # the others may have other names now
        except CheckpointError as error:
            self._world.count(f"release raised {error.code}")

    def _take_back(self, store: Store, place: Place) -> None:
        number = self._world.number(self._world.sound.files.read(f"{place.path}/{naming.COMMIT}"))
        try:
            gone = store.take_back(place)
            self._known[place.step] = {number}
            self._world.count("take back")
            if gone is not None:
                store.free(gone)
        except CheckpointError as error:
            self._known[place.step].add(number)
            self._world.count(f"take back raised {error.code}")

    def _sweep(self, store: Store, step: int) -> None:
        """As a daemon that is not alone does it: what was written just now may be of a round that began since."""
        with self._world.unswept, suppress(CheckpointError):
            store.sweep(self._world.places(), idle_s=3600.0)
            self._world.count("sweep")


class Stress:
    """`stores` are those of two daemons, whose calls may fail; `sound` is one past all faults. `settled` waits until nothing
    that was sent is still under way.
    """

    def __init__(self, stores: Sequence[Store], sound: Store, settled: Callable[[], None], seed: int) -> None:
        self.stores, self.sound, self.settled, self._seed = stores, sound, settled, seed
        self._samples: dict[int, Sample] = {}
        self._numbers = itertools.count(1)
        self._lock = Lock()
        self.unswept = Lock()  # what was removed is not brought back after a sweep
        self._live: set[Place] = set()
        self.counts = Counter[str]()

    def run(self, threads: int, operations: int) -> None:
        """So many operations in each thread, each at steps of its own; then what stands is looked at."""
        workers = [Steps(self, range(3 * at, 3 * at + 3), self._seed + at) for at in range(threads)]
        with ThreadPoolExecutor(threads) as pool:
            for done in [pool.submit(worker.go_on, operations) for worker in workers]:
                done.result()
        for worker in workers:
            worker.look_at_all()

    def let_go_of_all(self) -> None:
        """As a daemon that has verified everything."""
        for place in self.sound.replaced(RUN):
            released = self.sound.release(place)
            if released is not None:
                self.sound.free(released)

    def next(self, step: int, joint: bool) -> tuple[int, Place, Sample]:
        """Another checkpoint of a step, and a place for it that no other has: of a round, or of one writer."""
        with self._lock:
            number = next(self._numbers)
            made = self._samples[number] = sample(number, SIZES)
        return number, Place(RUN, step, 1 if joint else number, number if joint else 0), made

    @contextmanager
    def live(self, place: Place) -> Iterator[None]:
        with self._lock:
            self._live.add(place)
        try:
            yield
        finally:
            with self._lock:
                self._live.discard(place)

    def places(self) -> list[Place]:
        with self._lock:
            return [*self._live]

    def number(self, commit: bytes) -> int:
        return next(number for number, made in self._samples.items() if made.commit == commit)

    def standing(self, store: Store, step: int) -> int | None:
        """Which checkpoint stands at a step, whole; None where there is none."""
        if store.files.size(path(naming.COMMIT, step)) is None:
            return None
        number = self.number(store.files.read(path(naming.COMMIT, step)))
        for name, data in self._samples[number].all().items():
            assert store.files.read(path(name, step)) == data, f"{name} of {number} at step {step}"
        return number

    def count(self, what: str) -> None:
        with self._lock:
            self.counts[what] += 1
