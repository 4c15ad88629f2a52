"""The exam every `Store` takes. A new store's test subclasses `StoreSuite` and hands over the fixture `fresh`.

It is written so that an object store can pass it: nothing is looked at but through the store; files are written in equal
parts, in order, the last one shorter; several nodes fill one file only where the store says that they can. `Storage` is what
a subclass says of what lies below: how much is kept there, and how calls to it fail.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext, suppress
from typing import Literal, NamedTuple, Protocol

import numpy as np
import pytest

from holdfast_formats import naming
from holdfast_formats.errors import (
    AlreadyCommitted,
    CheckpointError,
    InvalidRequest,
    NoSpace,
    NoSuchCheckpoint,
    NoSuchResource,
)
from holdfast_formats.naming import Place
from holdfast_service.storage import CommitContents, FileWriter, Publication, StagedCheckpoint, Store
from tests.daemons import wait_until

RUN, STEP, PART = "run", 7, 2**16
ALONE, JOINT, OTHER = Place(RUN, STEP, 1), Place(RUN, STEP, 1, 5), Place(RUN, STEP, 1, 6)
LIVE = Place(RUN, STEP + 1, 1, 8)
ENTRY = naming.trash_entry(RUN, 1000)  # of the trash
JOB, MENDING = naming.job_place(RUN, STEP, "f" * 16), Place(RUN, STEP, naming.NO_ATTEMPT)
CALLS_MAX = 2000

How = Literal["fails", "answer lost", "dies"]


class Died(BaseException):
    """The process has ended: no call has an effect any more."""


class Fault:
    """The `at`-th call to what lies below `fails` without an effect, or has its effect and its `answer` is `lost`, or the
    process `dies` before it. `hit` says whether there were so many.
    """

    def __init__(self, at: int, how: How) -> None:
        self.at, self.how, self.seen = at, how, 0
        self._lock = threading.Lock()

    @property
    def hit(self) -> bool:
        return self.seen >= self.at

    def due(self) -> bool:
        """Called before each call: whether this one is it; `Died` once the process has ended."""
        with self._lock:
            self.seen += 1
            if self.how == "dies" and self.hit:
                raise Died
            return self.seen == self.at


class Storage(Protocol):
    """What lies below the stores of several nodes."""

    def open(self) -> Store:
        """The store of one more node, or of a process that was started again."""

    def used(self) -> int:
        """The bytes of all that is kept, whether it can be seen or not: files, staged ones, parts of uploads."""

    def lose(self, path: str) -> None:
        """Somebody removes this file, or all below this path, by hand."""

    def failing(self, fault: Fault) -> AbstractContextManager[None]:
        """While this lasts, calls go by way of `fault`. What fails is translated as always."""

    def full(self) -> AbstractContextManager[None]:
        """While this lasts, there is no room for another byte."""


class Sample(NamedTuple):
    """A checkpoint. The store asks nothing of manifest and COMMIT but that they are kept."""

    files: dict[str, bytes]
    small: dict[str, bytes]
    manifest: bytes
    commit: bytes

    def contents(self) -> CommitContents:
        sizes = {name: len(data) for name, data in self.files.items()}
        return CommitContents(sizes, self.small, self.manifest, self.commit)

    def all(self) -> dict[str, bytes]:
        return self.files | self.small | {naming.MANIFEST: self.manifest, naming.COMMIT: self.commit}


def sample(seed: int, sizes: tuple[int, ...] = (2 * PART + 100, PART, 17)) -> Sample:
    chance = np.random.default_rng(seed)
    files = {f"model-{number}.safetensors": chance.bytes(size) for number, size in enumerate(sizes)}
    files["config.json"] = b"{}"
    manifest = f"manifest of {seed}".encode()
    small = {naming.STATE: b'{"step": 7}', "model.safetensors.index.json": chance.bytes(50)}
    return Sample(files, small, manifest, hashlib.sha256(manifest).hexdigest().encode())


FIRST, SECOND = sample(1), sample(2)


def fill(writer: FileWriter, data: bytes, begin: int = 0, end: int | None = None) -> None:
    """A range in equal parts, in order."""
    try:
        for offset in range(begin, len(data) if end is None else end, PART):
            writer.write(offset, [data[offset : offset + PART]])
        writer.finish()
    finally:
        writer.discard()


def stage(store: Store, place: Place, made: Sample) -> StagedCheckpoint:
    staged = store.begin(place)
    for name, data in made.files.items():
        if name == "config.json":
            staged.put(name, data)
        else:
            fill(staged.create(name, len(data)), data)
    if not place.round_id:
        staged.put_receipt("node", b"a receipt")
    return staged


def save(store: Store, place: Place, made: Sample, over: bool = False) -> Publication:
    stage(store, place, made)
    return store.commit(place, made.contents(), over)


def mend(store: Store, files: dict[str, bytes]) -> None:
    """Repair the checkpoint `FIRST` with these files."""
    staged = store.begin(MENDING)
    for name, data in files.items():
        fill(staged.create(name, len(data)), data)
    store.mend(MENDING, FIRST.manifest, FIRST.commit)


def path(name: str, step: int = STEP, run: str = RUN) -> str:
    return f"{naming.checkpoint_path(run, step)}/{name}"


def standing(store: Store, step: int = STEP) -> Sample | None:
    """Which of the two samples stands at a step, whole; None where nothing can be seen."""
    if store.files.size(path(naming.COMMIT, step)) is None:
        assert step not in store.steps(RUN), "something without COMMIT stands there"
        with pytest.raises(NoSuchResource):
            store.files.read(path("model-0.safetensors", step))
        return None
    assert step in store.steps(RUN)
    commit = store.files.read(path(naming.COMMIT, step))
    found = {FIRST.commit: FIRST, SECOND.commit: SECOND}[commit]
    for name, data in found.all().items():
        assert store.files.size(path(name, step)) == len(data), name
        assert store.files.read(path(name, step)) == data, name
    return found


def restart(storage: Storage, live: tuple[Place, ...] = ()) -> Store:
    """What a start does before anything else; and when it has read back what stands, it lets go of what that replaced."""
    store = storage.open()
    store.put_back(lambda run: nullcontext())
    store.sweep(live)
    if standing(store) is not None:
        let_go(store)
    return store


def let_go(store: Store) -> None:
    for place in store.replaced(RUN):
        released = store.release(place)
        assert released is not None
        store.free(released)


class StoreSuite:
    """Subclasses give the fixture `fresh`: a function that makes an empty `Storage`."""

    @pytest.fixture
    def storage(self, fresh: Callable[[], Storage]) -> Storage:
        return fresh()

    @pytest.fixture
    def store(self, storage: Storage) -> Store:
        return storage.open()

    # what can be seen

    @pytest.mark.parametrize("place", [ALONE, JOINT], ids=["one node", "several"])
    def test_nothing_is_visible_before_the_commit(self, store: Store, place: Place) -> None:
        """All is staged, durably: no step, no file. After the commit all of it is there, and no receipt."""
        stage(store, place, FIRST)
        assert standing(store) is None and store.steps(RUN) == []
        assert store.commit(place, FIRST.contents()) == Publication("published")
        assert standing(store) is FIRST
        assert store.files.size(path(f"{naming.RECEIPTS}/node.json")) is None

    def test_steps_are_those_of_a_run_in_order(self, store: Store) -> None:
        """Of each run its own, by number and not by name."""
        for run, step in ((RUN, 10), (RUN, 2), (RUN, 123456789), ("other", 5)):
            assert save(store, Place(run, step, 1), FIRST).outcome == "published"
        assert store.steps(RUN) == [2, 10, 123456789]
        assert store.steps("other") == [5] and store.steps("nobody") == []

    @pytest.mark.parametrize("size", [0, 1, PART - 1, PART, PART + 1, 3 * PART])
    def test_sizes(self, store: Store, size: int) -> None:
        """Files without a byte, with one part, and with a last part that is not whole."""
        made = sample(1, (size,))
        assert save(store, ALONE, made).outcome == "published"
        assert store.files.read(path("model-0.safetensors")) == made.files["model-0.safetensors"]

    def test_threads_fill_a_file_in_order(self, store: Store) -> None:
        """Ranges are handed out in order, and written by whoever comes to it."""
        data = np.random.default_rng(3).bytes(20 * PART + 5)
        made = sample(1, (len(data),))
        made.files["model-0.safetensors"] = data
        staged = store.begin(ALONE)
        writer = staged.create("model-0.safetensors", len(data))
        with ThreadPoolExecutor(3) as pool:
            list(pool.map(lambda at: writer.write(at, [data[at : at + PART]]), range(0, len(data), PART)))
        writer.finish()
        staged.put("config.json", made.files["config.json"])
        assert store.commit(ALONE, made.contents()).outcome == "published"
        assert store.files.read(path("model-0.safetensors")) == data

    def test_several_nodes_fill_a_file(self, storage: Storage) -> None:
        """Each its own parts, or files where a file cannot be shared, through a store of its own; each that is there may
        commit.
        """
        a, b = storage.open(), storage.open()
        first, second = a.begin(JOINT), b.begin(JOINT)
        data = FIRST.files["model-0.safetensors"]
        if a.shares_files:
            writers = [staged.create("model-0.safetensors", len(data)) for staged in (first, second)]
            fill(writers[1], data, PART)
            fill(writers[0], data, 0, PART)
        else:
            fill(first.create("model-0.safetensors", len(data)), data)
        for name in ("model-1.safetensors", "model-2.safetensors"):
            fill(second.create(name, len(FIRST.files[name])), FIRST.files[name])
        first.put("config.json", b"{ }")  # by an earlier boot of this node
        first.put("config.json", FIRST.files["config.json"])
        assert b.commit(JOINT, FIRST.contents()).outcome == "published"
        assert standing(a) is FIRST

    def test_an_earlier_try_of_one_node_leaves_nothing(self, storage: Storage) -> None:
        """Who begins anew at a place without a round has it empty: what only the earlier try wrote is in no checkpoint."""
        store = storage.open()
        stage(store, ALONE, sample(3, (PART, PART, PART, PART)))
        assert save(storage.open(), ALONE, FIRST).outcome == "published"
        assert standing(store) is FIRST and store.files.size(path("model-3.safetensors")) is None

    def test_receipts_are_those_of_the_place(self, store: Store) -> None:
        """Whoever commits reads what was written for it."""
        stage(store, ALONE, FIRST)
        assert store.receipts(ALONE) == [b"a receipt"]
        assert store.receipts(Place(RUN, STEP, 2)) == []

    # jobs

    @pytest.mark.parametrize("place", [ALONE, JOINT, JOB], ids=["one node", "several", "job"])
    def test_what_is_staged_is_read_back_before_the_commit(self, store: Store, place: Place) -> None:
        """Under the place's own path, by whom has begun it; what was not finished is not asked for."""
        staged = stage(store, place, FIRST)
        assert staged.path == place.path
        for name, data in FIRST.files.items():
            staged.sync(name)
            assert staged.files.size(f"{place.path}/{name}") == len(data)
            assert store.files.read(f"{place.path}/{name}", 3, 40) == data[3:43]
        assert set(FIRST.files) <= set(store.files.list(place.path))
        assert standing(store) is None

    def test_a_job_goes_on_where_it_was_killed(self, storage: Storage) -> None:
        """It finds what it had finished, drops the rest, and writes that again."""
        done, begun = "model-0.safetensors", "model-1.safetensors"
        first = storage.open().begin(JOB)
        fill(first.create(done, len(FIRST.files[done])), FIRST.files[done])
        first.create(begun, len(FIRST.files[begun])).discard()
        first.put("config.json", b"other")
        store = storage.open()
        staged = store.begin(JOB)
        assert staged.files.read(f"{JOB.path}/{done}") == FIRST.files[done]
        for name in ("model-1.safetensors", "model-2.safetensors", "config.json"):
            staged.drop(name)
            assert store.files.size(f"{JOB.path}/{name}") is None
        for name in ("model-1.safetensors", "model-2.safetensors"):
            fill(staged.create(name, len(FIRST.files[name])), FIRST.files[name])
        staged.put("config.json", FIRST.files["config.json"])
        assert store.commit(JOB, FIRST.contents()).outcome == "published"
        assert standing(storage.open()) is FIRST

    def test_a_copy_goes_on_where_it_was_killed(self, storage: Storage) -> None:
        """A sweep spares it by its place. Files that were finished are there, and can be written again; the others are."""
        begun, names = "model-0.safetensors", ("model-1.safetensors", "model-2.safetensors", "config.json")
        store = storage.open()
        staged = store.begin(JOB)
        assert staged.go_on() == {}
        for name in names:
            fill(staged.create(name, len(FIRST.files[name])), SECOND.files[name])
        writer = staged.create(begun, len(FIRST.files[begun]))
        writer.write(0, [FIRST.files[begun][: 2 * PART]])
        writer.discard()
        restarted = storage.open()
        assert restarted.job_places(RUN) == [JOB] and restarted.job_places("other") == []
        assert JOB.path not in restarted.sweep((JOB,))
        staged = restarted.begin(JOB)
        left = staged.go_on()
        assert {name: left[name] for name in names} == {name: len(FIRST.files[name]) for name in names}
        for name, data in FIRST.files.items():
            if FIRST.files[name] != SECOND.files[name]:
                fill(staged.create(name, len(data)), data)
        assert restarted.commit(JOB, FIRST.contents()).outcome == "published"
        assert standing(storage.open()) is FIRST

    @pytest.mark.parametrize("how", ["sweep", "discard", "clear"])
    def test_a_copy_that_is_not_gone_on_with(self, storage: Storage, how: str) -> None:
        """Nothing of it takes room after a sweep, or when it is given up."""
        empty = storage.used()
        staged = storage.open().begin(JOB)
        staged.go_on()
        fill(staged.create("config.json", 2), b"{}")
        writer = staged.create("model-0.safetensors", 2 * PART + 1)
        writer.write(0, [bytes(2 * PART)])
        writer.discard()

        def is_gone() -> bool:
            """A part may still be on its way, and the upload begin with it."""
            store = storage.open()
            {"sweep": store.sweep, "discard": lambda: store.discard(JOB), "clear": store.begin(JOB).clear}[how]()
            return storage.used() == empty and store.job_places(RUN) == []

        assert storage.used() > empty
        wait_until(is_gone)

    @pytest.mark.parametrize("place", [ALONE, JOB], ids=["one node", "job"])
    def test_what_is_staged_is_cleared(self, storage: Storage, place: Place) -> None:
        """Nothing of it takes room any more, and the place is used again."""
        store = storage.open()
        empty = storage.used()
        staged = stage(store, place, SECOND)
        staged.clear()
        staged.clear()
        assert storage.used() == empty and store.files.list(place.path) == []
        assert save(store, place, FIRST).outcome == "published" and standing(store) is FIRST

    @pytest.mark.parametrize("place", [JOINT, JOB], ids=["several", "job"])
    def test_what_was_published_is_not_cleared(self, storage: Storage, place: Place) -> None:
        """A job that fails behind its commit clears its place, and discards it: its checkpoint stays."""
        store = storage.open()
        staged = stage(store, place, FIRST)
        assert store.commit(place, FIRST.contents()).outcome == "published"
        for each in (staged, storage.open().begin(place)):
            each.clear()
            assert standing(store) is FIRST
        for at in (store, storage.open()):
            at.discard(place)
            assert standing(at) is FIRST

    def test_a_job_makes_again_what_was_removed(self, storage: Storage) -> None:
        """In the same place, before the bytes of the removed one are freed: these are not the new one's."""
        store = storage.open()
        assert save(store, JOB, FIRST).outcome == "published"
        removed = store.remove(RUN, STEP)
        staged = store.begin(JOB)
        staged.clear()
        assert save(store, JOB, FIRST).outcome == "published"
        store.free(removed)
        store.sweep()
        assert standing(storage.open()) is FIRST

    def test_a_job_that_died_in_its_commit_commits_again(self, fresh: Callable[[], Storage]) -> None:
        """With another manifest, whose time is the new one, if the first one was not published."""
        earlier = FIRST.contents()._replace(manifest=SECOND.manifest, commit=SECOND.commit)
        for at in range(1, CALLS_MAX):
            storage = fresh()
            store = storage.open()
            stage(store, JOB, FIRST)
            fault = Fault(at, "dies")
            with storage.failing(fault), suppress(Died):
                store.commit(JOB, earlier)
            after = storage.open()
            done = after.commit(JOB, FIRST.contents())
            if after.files.read(path(naming.COMMIT)) == FIRST.commit:
                assert done.outcome == "published" and standing(after) is FIRST, at
            else:
                assert done.outcome in ("taken", "gone"), at
                assert after.files.read(path(naming.MANIFEST)) == SECOND.manifest
            if not fault.hit:
                assert at > 3 and done.outcome == "taken"
                return
        raise AssertionError("the calls of a commit did not end")

    def test_a_file_that_was_taken_is_written_again(self, storage: Storage) -> None:
        """Dropped first, it has nothing to do with the checkpoint any more that it was taken from."""
        store = storage.open()
        assert save(store, ALONE, FIRST).outcome == "published"
        place = naming.job_place(RUN, STEP + 1, "e" * 16)
        staged = store.begin(place)
        for each in FIRST.files:
            staged.take(each, STEP)
            staged.drop(each)
        for each, data in SECOND.files.items():
            fill(staged.create(each, len(data)), data)
        assert store.commit(place, SECOND.contents()).outcome == "published"
        assert standing(store) is FIRST and standing(store, STEP + 1) is SECOND

    def test_a_file_is_taken_from_another_run(self, store: Store) -> None:
        """As a run that was renamed takes its copies along."""
        assert save(store, Place("other", STEP, 1), FIRST).outcome == "published"
        staged = store.begin(ALONE)
        left = [name for name in FIRST.files if not staged.take(name, STEP, "other")]
        for name in left:
            staged.drop(name)
            fill(staged.create(name, len(FIRST.files[name])), FIRST.files[name])
        assert store.commit(ALONE, FIRST.contents()).outcome == "published"
        assert standing(store) is FIRST
        store.free(store.remove("other", STEP))
        assert standing(store) is FIRST

    # repair

    @pytest.mark.parametrize("lost", [("model-0.safetensors",), ("model-1.safetensors", "config.json"), ()])
    def test_lost_files_are_mended(self, storage: Storage, lost: tuple[str, ...]) -> None:
        """One after the other, and nothing else is touched; it takes no more room afterwards than it did."""
        store = storage.open()
        assert save(store, ALONE, FIRST).outcome == "published"
        kept = storage.used()
        for name in lost:
            storage.lose(path(name))
        for name in lost:
            mend(store, {name: FIRST.files[name]})
            assert store.files.read(path(name)) == FIRST.files[name]
        if not lost:
            mend(store, {})
        assert standing(storage.open()) is FIRST and store.replaced(RUN) == []
        store.sweep()
        assert storage.used() == kept and standing(store) is FIRST

    def test_damaged_files_are_mended(self, storage: Storage) -> None:
        """One of two, with the manifest, and then the other; what is staged is not seen before."""
        store = storage.open()
        damaged = FIRST.files | {name: SECOND.files[name] for name in ("model-0.safetensors", "model-1.safetensors")}
        wrong = FIRST._replace(files=damaged, manifest=SECOND.manifest)
        assert save(store, ALONE, wrong).outcome == "published"
        kept = storage.used()
        sound = FIRST.files["model-0.safetensors"]
        fill(store.begin(MENDING).create("model-0.safetensors", len(sound)), sound)
        assert store.files.read(path("model-0.safetensors")) == SECOND.files["model-0.safetensors"]
        store.mend(MENDING, FIRST.manifest, FIRST.commit)
        assert store.files.read(path(naming.MANIFEST)) == FIRST.manifest
        assert store.files.read(path("model-0.safetensors")) == sound
        assert store.files.read(path("model-1.safetensors")) == SECOND.files["model-1.safetensors"]
        mend(store, {"model-1.safetensors": FIRST.files["model-1.safetensors"]})
        assert standing(storage.open()) is FIRST and store.replaced(RUN) == []
        store.sweep()
        assert storage.used() == kept

    def test_what_is_not_there_is_not_mended(self, storage: Storage) -> None:
        """A repair makes no checkpoint of a step without one, and leaves nothing."""
        store = storage.open()
        empty = storage.used()
        with pytest.raises(NoSuchCheckpoint):
            mend(store, dict(FIRST.files))
        store.discard(MENDING)
        assert standing(store) is None and storage.used() == empty

    def test_a_repair_keeps_what_was_replaced(self, store: Store) -> None:
        """It is kept until the one in its place was read back, damaged or not."""
        assert save(store, ALONE, SECOND).outcome == "published"
        assert save(store, OTHER, FIRST, over=True).outcome == "published"
        kept = store.replaced(RUN)
        mend(store, {"model-0.safetensors": FIRST.files["model-0.safetensors"]})
        assert store.replaced(RUN) == kept and len(kept) == 1 and standing(store) is FIRST
        (place,) = kept
        assert store.files.read(f"{place.path}/model-0.safetensors") == SECOND.files["model-0.safetensors"]

    @pytest.mark.parametrize("how", ["fails", "answer lost", "dies"])
    def test_every_call_of_a_repair(self, fresh: Callable[[], Storage], how: How) -> None:
        """Readers find each file as it was or mended, the next repair makes it whole, and a sweep leaves nothing else."""
        name = "model-0.safetensors"
        old, new = SECOND.files[name], FIRST.files[name]
        for at in range(1, CALLS_MAX):
            storage = fresh()
            store = storage.open()
            wrong = FIRST._replace(files=FIRST.files | {name: old}, manifest=SECOND.manifest)
            save(store, ALONE, wrong)
            fault = Fault(at, how)
            with storage.failing(fault), suppress(CheckpointError, Died):
                mend(store, {name: new})
            after = storage.open()
            after.put_back(lambda run: nullcontext())
            after.sweep()
            assert after.steps(RUN) == [STEP] and after.files.read(path(name)) in (old, new), at
            assert after.files.read(path(naming.MANIFEST)) in (SECOND.manifest, FIRST.manifest), at
            for each, data in FIRST.all().items():
                assert each in (name, naming.MANIFEST) or after.files.read(path(each)) == data, (at, each)
            mend(after, {name: new})
            assert standing(storage.open()) is FIRST, at
            after.sweep()
            assert storage.used() == size_of(FIRST), at
            if not fault.hit:
                assert at > 5
                return
        raise AssertionError("the calls of a repair did not end")

    # who commits

    def test_two_committers_of_one_round(self, storage: Storage) -> None:
        """Both write the same bytes, and both succeed, one after the other (I12)."""
        a, b = storage.open(), storage.open()
        stage(a, JOINT, FIRST)
        assert [each.commit(JOINT, FIRST.contents()).outcome for each in (a, b, a)] == ["published"] * 3
        assert standing(b) is FIRST

    def test_a_race_of_two_committers(self, fresh: Callable[[], Storage]) -> None:
        """Of one round, both succeed; of two rounds of a step one does, and the other one's is not what stands (I13)."""
        for number in range(20):
            places = (JOINT, JOINT) if number % 2 else (JOINT, OTHER)
            storage = fresh()
            made = (FIRST, FIRST) if number % 2 else (FIRST, SECOND)
            for place, one in dict(zip(places, made, strict=True)).items():
                stage(storage.open(), place, one)
            start = threading.Barrier(2)

            def commit(place: Place, one: Sample) -> Publication:
                store = storage.open()  # noqa: B023 - the threads of this race
                start.wait()  # noqa: B023
                return store.commit(place, one.contents())

            with ThreadPoolExecutor(2) as pool:
                done = list(pool.map(commit, places, made))
            outcomes = [one.outcome for one in done]
            assert outcomes.count("published") == (2 if number % 2 else 1), done
            assert set(outcomes) <= {"published", "taken"}
            assert standing(storage.open()) is made[outcomes.index("published")]

    @pytest.mark.parametrize("places", [(JOINT, OTHER), (ALONE, Place(RUN, STEP, 2)), (ALONE, JOINT)])
    def test_the_later_of_two_rounds_finds_the_step_taken(self, store: Store, places: tuple[Place, Place]) -> None:
        """What stands there stays, byte for byte."""
        assert save(store, places[0], FIRST).outcome == "published"
        done = save(store, places[1], SECOND)
        assert done.outcome == "taken" and done.detail
        assert standing(store) is FIRST

    def test_other_bytes_of_the_same_round(self, store: Store) -> None:
        """They are not what was published: it is not said that they were."""
        assert save(store, JOINT, FIRST).outcome == "published"
        assert store.commit(JOINT, SECOND.contents()).outcome == "taken"
        assert standing(store) is FIRST

    def test_a_round_that_was_given_up(self, store: Store) -> None:
        """Nothing of it can be committed any more, also by one who was held up (I11)."""
        stage(store, JOINT, FIRST)
        store.discard(JOINT)
        store.discard(JOINT)
        assert store.commit(JOINT, FIRST.contents()).outcome == "gone"
        assert standing(store) is None

    @pytest.mark.parametrize("name", ["model-0.safetensors", "model-2.safetensors", "config.json"])
    def test_a_file_that_is_missing_or_has_another_size(self, store: Store, name: str) -> None:
        """A round that not all nodes have written is no checkpoint (I1)."""
        contents = FIRST.contents()
        stage(store, JOINT, FIRST)
        longer = {**contents.staged, name: contents.staged[name] + 1}
        assert store.commit(JOINT, contents._replace(staged=longer)).outcome == "gone"
        stage(store, OTHER, Sample({k: v for k, v in FIRST.files.items() if k != name}, {}, b"", b""))
        assert store.commit(OTHER, contents).outcome == "gone"
        assert standing(store) is None

    def test_a_writer_of_a_round_that_has_ended_does_no_harm(self, storage: Storage) -> None:
        """It stood still while its round was given up and the next one was committed, and goes on: what it writes, and
        commits, goes where nobody publishes from (I11), and one sweep removes it.
        """
        zombie, store = storage.open(), storage.open()
        staged = stage(zombie, JOINT, SECOND)
        writer = staged.create("model-0.safetensors", len(SECOND.files["model-0.safetensors"]))
        store.discard(JOINT)
        assert save(store, OTHER, FIRST).outcome == "published"
        kept = storage.used()

        data = SECOND.files["model-1.safetensors"]
        with suppress(CheckpointError):  # that its round is gone may be said to it
            fill(writer, SECOND.files["model-0.safetensors"])
        with suppress(CheckpointError):
            staged.put("config.json", b"late")
        with suppress(CheckpointError):
            fill(staged.create("model-1.safetensors", len(data)), data)
        assert zombie.commit(JOINT, SECOND.contents()).outcome in ("taken", "gone")
        assert standing(store) is FIRST
        store.sweep()
        assert standing(store) is FIRST and storage.used() == kept

    # in the place of another

    @pytest.mark.parametrize("place", [Place(RUN, STEP, 2), OTHER], ids=["one node", "several"])
    def test_a_checkpoint_is_replaced(self, storage: Storage, place: Place) -> None:
        """Another one of its step stands there; what it replaced is kept, through a sweep too, until it is released."""
        store = storage.open()
        assert save(store, JOINT, FIRST).outcome == "published"
        kept = storage.used()
        assert save(store, place, SECOND, over=True).outcome == "published"
        store.discard(place)
        assert store.sweep() == []
        assert standing(store) is SECOND and store.replaced(RUN) == [naming.replaced_place(RUN, STEP)]
        let_go(store)
        assert standing(store) is SECOND and store.replaced(RUN) == []
        assert storage.used() == kept - sum(map(len, FIRST.all().values())) + sum(map(len, SECOND.all().values()))

    @pytest.mark.parametrize("place", [Place(RUN, STEP, 2), OTHER], ids=["one node", "several"])
    def test_what_is_not_whole_replaces_nothing(self, storage: Storage, place: Place) -> None:
        """A file that was staged is gone before the commit: what stands there is left alone."""
        store = storage.open()
        assert save(store, ALONE, FIRST).outcome == "published"
        left = {name: data for name, data in SECOND.files.items() if name != "model-0.safetensors"}
        stage(store, place, Sample(left, {}, b"", b""))
        assert store.commit(place, SECOND.contents(), over=True).outcome == "gone"
        assert standing(store) is FIRST and store.replaced(RUN) == []

    def test_what_was_replaced_is_taken_back(self, storage: Storage) -> None:
        """In the place of what stands there, or where nothing does; what stood there goes."""
        store = storage.open()
        save(store, ALONE, FIRST)
        kept = storage.used()
        save(store, OTHER, SECOND, over=True)
        (place,) = store.replaced(RUN)
        gone = store.take_back(place)
        assert gone is not None
        store.free(gone)
        assert standing(store) is FIRST and store.replaced(RUN) == [] and storage.used() == kept
        save(store, OTHER, SECOND, over=True)
        storage.lose(naming.checkpoint_path(RUN, STEP))
        assert store.take_back(*store.replaced(RUN)) is None
        assert standing(store) is FIRST and store.replaced(RUN) == [] and storage.used() == kept

    def test_of_several_replacements_the_first_and_the_newest_are_kept(self, storage: Storage) -> None:
        """The first may be the last one that was read back; a removal of the step takes all of them."""
        store = storage.open()
        for number in range(4):
            save(store, Place(RUN, STEP, 1, number + 1), (FIRST, SECOND)[number % 2], over=number > 0)
        assert store.replaced(RUN) == [naming.replaced_place(RUN, STEP, 1), naming.replaced_place(RUN, STEP)]
        store.free(store.remove(RUN, STEP))
        assert storage.used() == 0 and store.replaced(RUN) == []

    def test_a_file_is_taken_from_a_committed_checkpoint(self, store: Store) -> None:
        """It takes no room twice, if that is possible, and stays when that checkpoint is removed."""
        assert save(store, JOINT, FIRST).outcome == "published"
        place, name = Place(RUN, STEP + 1, 1), "model-0.safetensors"
        staged = store.begin(place)
        if staged.take(name, STEP):
            store.free(store.remove(RUN, STEP))
            contents = FIRST.contents()._replace(staged={name: len(FIRST.files[name])})
            assert store.commit(place, contents).outcome == "published"
            assert store.files.read(path(name, STEP + 1)) == FIRST.files[name]
        with pytest.raises(InvalidRequest):
            staged.take("../file", STEP)

    def test_two_names_of_the_same_bytes_are_known_as_such(self, store: Store) -> None:
        """Staged and committed ones, until the first is removed; where files are copied, none is another one's."""
        assert save(store, JOINT, FIRST).outcome == "published"
        place, name = Place(RUN, STEP + 1, 1), "model-0.safetensors"
        staged = store.begin(place)
        assert store.identities(place.path) == {}
        if not staged.take(name, STEP) or not (mine := store.identities(place.path)):
            return
        assert mine == {name: store.identities(naming.checkpoint_path(RUN, STEP))[name]} and mine[name].names == 2
        store.free(store.remove(RUN, STEP))
        assert store.identities(place.path) == {name: mine[name]._replace(names=1)}

    def test_a_late_committer_of_a_replacement(self, storage: Storage) -> None:
        """It finds its own bytes there, and replaces nothing by anything."""
        a, b = storage.open(), storage.open()
        assert save(a, JOINT, FIRST).outcome == "published"
        assert save(a, OTHER, SECOND, over=True).outcome == "published"
        assert b.commit(OTHER, SECOND.contents(), over=True).outcome == "published"
        assert standing(b) is SECOND

    # removal

    def test_removal(self, storage: Storage) -> None:
        """It is gone at once, its bytes with the second half or a sweep; its step can be saved anew; others stay."""
        store = storage.open()
        empty = storage.used()
        save(store, ALONE, FIRST)
        assert store.bring_back(RUN, STEP, store.remove(RUN, STEP)) and store.steps(RUN) == [STEP]
        removed = store.remove(RUN, STEP)
        assert standing(store) is None
        assert save(store, Place(RUN, STEP, 2), SECOND).outcome == "published"
        store.free(removed)
        again = store.remove(RUN, STEP)
        assert again and store.steps(RUN) == [] and storage.used() > empty
        store.sweep()
        assert storage.used() == empty
        store.free(again)
        for step in (STEP, STEP + 1):
            with pytest.raises(NoSuchCheckpoint):
                store.remove(RUN, step)

    def test_a_run_goes_to_the_trash_and_comes_back(self, storage: Storage) -> None:
        """As a whole, whatever is saved under its name meanwhile; no sweep of what lies beside it frees its bytes."""
        store = storage.open()
        save(store, ALONE, FIRST)
        save(store, Place(RUN, STEP + 1, 1, 3), SECOND)
        store.put_away(RUN, ENTRY)
        assert store.steps(RUN) == [] and standing(store) is None
        with pytest.raises(NoSuchResource):
            store.put_away(RUN, naming.trash_entry(RUN, 2000))
        kept = storage.used()
        assert save(store, Place(RUN, STEP, 2), SECOND).outcome == "published"
        with pytest.raises(AlreadyCommitted):
            store.put_away(RUN, ENTRY)
        with pytest.raises(AlreadyCommitted):
            store.take_out(ENTRY, RUN)
        assert standing(store) is SECOND
        store.free(store.remove(RUN, STEP))
        with suppress(NoSuchResource):  # without directories, nothing is left of the run
            store.put_away(RUN, naming.trash_entry(RUN, 2000))
        store.put_back(lambda run: nullcontext())
        store.sweep()
        assert storage.used() == kept
        store.take_out(ENTRY, RUN)
        assert (standing(store), standing(store, STEP + 1)) == (FIRST, SECOND) and store.steps(RUN) == [STEP, STEP + 1]
        with pytest.raises(NoSuchResource):
            store.take_out(ENTRY, RUN)

    def test_what_is_purged_is_gone(self, storage: Storage) -> None:
        store = storage.open()
        empty = storage.used()
        save(store, ALONE, FIRST)
        store.put_away(RUN, ENTRY)
        save(store, Place(RUN, STEP, 2), SECOND)
        assert store.purge(ENTRY) and not store.purge(ENTRY)
        with pytest.raises(NoSuchResource):
            store.take_out(ENTRY, "other")
        assert store.free_purged() == [] and standing(store) is SECOND
        assert storage.used() == empty + size_of(SECOND)

    def test_a_store_says_what_is_free(self, store: Store) -> None:
        free = store.free_bytes()
        assert free is None or free > 0

    # failures

    @pytest.mark.parametrize("way", ["there", "back"])
    def test_death_at_every_call_of_a_deletion(self, fresh: Callable[[], Storage], way: str) -> None:
        """After the next start the run is complete in one of the two places, and in the other one there is nothing."""
        for at in range(1, CALLS_MAX):
            storage = fresh()
            store = storage.open()
            save(store, ALONE, FIRST)
            save(store, Place(RUN, STEP + 1, 1, 3), SECOND)
            if way == "back":
                store.put_away(RUN, ENTRY)
            died = False
            with storage.failing(Fault(at, "dies")):
                try:
                    store.put_away(RUN, ENTRY) if way == "there" else store.take_out(ENTRY, RUN)
                except Died:
                    died = True
            after = restart(storage)
            if not after.steps(RUN):
                after.take_out(ENTRY, RUN)
            assert (standing(after), standing(after, STEP + 1)) == (FIRST, SECOND), at
            with pytest.raises(NoSuchResource):
                after.take_out(ENTRY, "other")
            if not died:
                assert at > 1
                return
        raise AssertionError("the calls of a deletion did not end")

    @pytest.mark.parametrize("place", [ALONE, JOINT], ids=["one node", "several"])
    @pytest.mark.parametrize("over", [False, True], ids=["new", "replaced"])
    @pytest.mark.parametrize("how", ["fails", "answer lost"])
    def test_every_call_fails_once(self, fresh: Callable[[], Storage], place: Place, over: bool, how: How) -> None:
        """What is raised has made nothing visible, what is said to be published stands, and there is never a part of one.
        The next start finds the one or the other, and the next save works.
        """
        for at in range(1, CALLS_MAX):
            storage = fresh()
            store = storage.open()
            if over:
                save(store, OTHER, SECOND)
            before = standing(store)
            fault = Fault(at, how)
            outcome = "raised"
            with storage.failing(fault), suppress(CheckpointError):
                outcome = save(store, place, FIRST, over).outcome
            assert outcome in ("raised", "published", "unknown"), (at, outcome)
            if outcome != "unknown":
                assert standing(storage.open()) is (FIRST if outcome == "published" else before), (at, outcome)
            now = standing(restart(storage))
            assert now is (FIRST if outcome == "published" else before) or outcome == "unknown", (at, outcome)
            again = save(storage.open(), Place(RUN, STEP, 3, 9), FIRST, over or now is not None)
            assert again.outcome == "published" and standing(store) is FIRST
            if not fault.hit:
                assert outcome == "published" and at > 10
                return
        raise AssertionError("the calls of a save did not end")

    def test_a_lost_answer_is_asked_for(self, fresh: Callable[[], Storage]) -> None:
        """Whichever call of a commit loses its answer: this node, or another, commits the round again, and it is published
        (I14).
        """
        at, ways = 0, set()
        while True:
            at += 1
            storage = fresh()
            store = storage.open()
            stage(store, JOINT, FIRST)
            fault = Fault(at, "answer lost")
            with storage.failing(fault):
                try:
                    ways.add(store.commit(JOINT, FIRST.contents()).outcome)
                except CheckpointError:
                    ways.add("raised")
            assert storage.open().commit(JOINT, FIRST.contents()).outcome == "published", at
            assert standing(storage.open()) is FIRST
            if not fault.hit:
                break
        assert "published" in ways and "raised" in ways and "taken" not in ways and "gone" not in ways

    @pytest.mark.parametrize("place", [ALONE, JOINT], ids=["one node", "several"])
    @pytest.mark.parametrize("over", [False, True], ids=["new", "replaced"])
    def test_death_at_every_call(self, fresh: Callable[[], Storage], place: Place, over: bool) -> None:
        """All or nothing of it stands, one sweep removes the rest, and touches nothing of a round that goes on: that is
        committed afterwards (I1, I16).
        """
        seen = set()
        for at in range(1, CALLS_MAX):
            storage = fresh()
            store = storage.open()
            if over:
                save(store, OTHER, SECOND)
                store.sweep()
            data = SECOND.files["model-0.safetensors"]
            fill(store.begin(LIVE).create("model-0.safetensors", len(data)), data)
            kept = storage.used() - (size_of(SECOND) if over else 0)
            fault = Fault(at, "dies")
            died = False
            with storage.failing(fault):
                try:
                    save(store, place, FIRST, over)
                except Died:
                    died = True
            after = restart(storage, (LIVE,))
            now = standing(after)
            assert now is FIRST or (died and now is (SECOND if over else None)), at
            seen.add(now and now.commit)
            assert storage.used() == kept + (size_of(now) if now else 0), at
            assert save(after, LIVE, SECOND).outcome == "published" and standing(after, LIVE.step) is SECOND
            if not died:
                assert at > 10 and len(seen) == 2
                return
        raise AssertionError("the calls of a save did not end")

    @pytest.mark.parametrize("place", [ALONE, JOINT], ids=["one node", "several"])
    def test_death_at_every_call_of_a_removal(self, fresh: Callable[[], Storage], place: Place) -> None:
        """The checkpoint is there, whole, or gone; a sweep frees what was gone."""
        seen = set()
        for at in range(1, CALLS_MAX):
            storage = fresh()
            store = storage.open()
            empty = storage.used()
            save(store, place, FIRST)
            died = False
            with storage.failing(Fault(at, "dies")):
                try:
                    store.free(store.remove(RUN, STEP))
                except Died:
                    died = True
            now = standing(restart(storage))
            seen.add(now and now.commit)
            assert now is None or (died and now is FIRST)
            assert storage.used() == empty + (size_of(FIRST) if now else 0)
            if not died:
                assert seen == {None, FIRST.commit}
                return
        raise AssertionError("the calls of a removal did not end")

    @pytest.mark.parametrize("place", [ALONE, JOINT], ids=["one node", "several"])
    def test_a_full_disk(self, storage: Storage, place: Place) -> None:
        """It is said by name, nothing becomes visible, and what is staged commits once there is room."""
        store = storage.open()
        with storage.full(), pytest.raises(NoSpace):
            stage(store, place, FIRST)
        stage(store, place, FIRST)
        with storage.full(), pytest.raises(NoSpace):
            store.commit(place, FIRST.contents())
        assert standing(store) is None
        store.sweep()
        assert save(store, place, FIRST).outcome == "published" and standing(store) is FIRST

    # what is swept

    def test_a_sweep_spares_what_lives(self, storage: Storage) -> None:
        """What is at a live place, what was written to just now where others write, and all that is committed."""
        store = storage.open()
        save(store, ALONE, FIRST)
        kept = storage.used()
        for place in (LIVE, OTHER):
            stage(store, place, SECOND)
        assert store.sweep(idle_s=3600.0) == []
        assert len(store.sweep([LIVE])) == 1
        assert storage.used() == kept + sum(map(len, SECOND.files.values()))
        assert store.commit(LIVE, SECOND.contents()).outcome == "published"
        assert standing(store) is FIRST and standing(store, LIVE.step) is SECOND
        assert store.sweep() == []

    # names

    @pytest.mark.parametrize(
        "name",
        [
            *("../outside", "/etc/passwd", "a/b", "", ".", "..", ".hidden", "a\0b", "a\nb"),
            *(naming.COMMIT, naming.MANIFEST, naming.RECEIPTS),
        ],
    )
    def test_file_names_that_lead_out(self, store: Store, name: str) -> None:
        """A file has a plain name, and nothing is written under another; COMMIT in what is staged could make a checkpoint
        of it (I1).
        """
        staged = store.begin(JOINT)
        for act in (
            lambda: staged.create(name, 1),
            lambda: staged.put(name, b"x"),
            lambda: staged.drop(name),
            lambda: staged.sync(name),
            lambda: staged.take(name, STEP),
        ):
            with pytest.raises(InvalidRequest):
                act()

    @pytest.mark.parametrize("node", ["../up", "a/b", "", ".x"])
    def test_node_names_that_lead_out(self, store: Store, node: str) -> None:
        """A receipt is kept under a plain name too."""
        with pytest.raises(InvalidRequest):
            store.begin(ALONE).put_receipt(node, b"x")

    @pytest.mark.parametrize(
        "place",
        [
            Place("../up", 1, 1),
            Place("a/b", 1, 1),
            Place("", 1, 1),
            Place(".", 1, 1),
            Place(RUN, -1, 1),
            Place(RUN, 1, -1),
            Place(RUN, 1, 1, -1),
            Place(RUN, 1, 1, 10**18),
        ],
        ids=str,
    )
    def test_places_that_lead_out(self, storage: Storage, place: Place) -> None:
        """No call takes them."""
        store, before = storage.open(), storage.used()
        calls = [
            lambda: store.begin(place),
            lambda: store.receipts(place),
            lambda: store.commit(place, FIRST.contents()),
            lambda: store.mend(place, FIRST.manifest, FIRST.commit),
            lambda: store.discard(place),
            lambda: store.sweep([place]),
        ]
        if place.attempt == 1 and not place.round_id:
            calls += [lambda: store.remove(place.run, place.step)]
        for call in calls:
            with pytest.raises(InvalidRequest):
                call()
        assert storage.used() == before

    @pytest.mark.parametrize(("offset", "data"), [(5, b"xyz"), (-1, b"x"), (8, b"")])
    def test_writes_outside_of_a_file(self, store: Store, offset: int, data: bytes) -> None:
        """A file never gets more bytes than it was made for."""
        writer = store.begin(ALONE).create("model-0.safetensors", 7)
        with pytest.raises(InvalidRequest):
            writer.write(offset, [data])
        writer.discard()


def size_of(made: Sample) -> int:
    return sum(map(len, made.all().values()))
