"""The jobs that make, thin, mend and copy checkpoints work in a bucket as in a directory: they have no other way than the
store's.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any

import pytest

from holdfast_files.objects.answers import PendingUpload
from holdfast_files.objects.object_files import ObjectFiles
from holdfast_files.opened import open_checkpoint
from holdfast_formats import naming
from holdfast_formats.disk import manifests
from holdfast_formats.disk.manifests import Manifest
from holdfast_formats.errors import CheckpointError, StorageFailed
from holdfast_formats.naming import CheckpointId, Place
from holdfast_formats.rest.retention import RetentionPolicy
from holdfast_service.control.catalog.catalog import Catalog
from holdfast_service.control.checkpoints.commit import publish_copy
from holdfast_service.control.control import Control
from holdfast_service.control.jobs.runner import Interrupted
from holdfast_service.daemon.checking.verifier import verify
from holdfast_service.daemon.copying.copies import CopyControl, carry, go_on
from holdfast_service.daemon.copying.progress import Quiet
from holdfast_service.daemon.copying.repair import RepairCandidates, Repairer, RepairOutcome, mend
from holdfast_service.daemon.copying.thinner import Thinner
from holdfast_service.storage import PosixTier, RootStorage, Store, stored_in
from holdfast_service.storage.objects import HONOURED, ConditionalPuts, ObjectRecords, ObjectStore, Uploads
from holdfast_service.wings.convert.import_jobs import Importer
from tests.checkpoints import build, build_root, trained_arrays
from tests.daemon.copies_world import RUN, CopiesWorld, contents, copies
from tests.daemons import wait_until
from tests.databases import sqlite_url
from tests.in_memory import in_memory, tmp_path
from tests.job_requests import an_import
from tests.kit.failing_bucket import FailingBucket, Switch
from tests.kit.memory_bucket import MemoryBucket
from tests.suites.store_suite import CALLS_MAX, Died, Fault, How
from tests.wings.convert.test_import_jobs import Stopping
from tests.wings.convert.test_jobs import ARRAYS
from tests.wings.convert.test_jobs import hugging_face as a_model

__all__ = ["tmp_path"]

STEPS, DIRECTORY = (5, 10, 15), naming.checkpoint_path(RUN, 5)
PART, SHORT = 2**12, 2**9


def stored(bucket: MemoryBucket, switch: Switch | None = None, part: int = PART) -> RootStorage:
    """A root in the bucket, as one more process has it, whose requests may fail."""
    reached: Any = bucket if switch is None else FailingBucket(bucket, switch)
    puts = ConditionalPuts(reached, HONOURED, None)
    uploads = Uploads(reached, part, memory_bytes=8 * part, connections=3)
    files = ObjectFiles(reached)
    return RootStorage(ObjectRecords(reached, puts, files), ObjectStore(uploads, puts, files), None)


def sent(bucket: MemoryBucket, begin: int, name: str) -> list[str]:
    """The objects of such a name of which bytes were sent since that request."""
    return [key for act, key in bucket.requests[begin:] if act in ("put", "part") and key.endswith(name)]


class BucketWorld:
    """A daemon's control over a root in a bucket, with a directory beside it that has the same checkpoints."""

    def __init__(self, directory: Path) -> None:
        self.bucket = MemoryBucket()
        self.storage = stored(self.bucket)
        self.catalog = Catalog.open(sqlite_url(directory / "catalog.sqlite"))
        self.control = Control(self.storage, self.catalog)
        self.control.recovery.recover()
        self.built = build_root(directory / "copy", {RUN: STEPS}, trained_arrays())
        self.copy = PosixTier(directory / "copy")
        for step in STEPS:
            source = PosixTier(directory / "copy" / naming.checkpoint_path(RUN, step))
            Importer(self.control).bring(source, an_import(RUN, step), Quiet())
        self.repairer = Repairer(self.control, lambda: {"copy": stored_in(self.copy)})

    @contextmanager
    def restarted(self, catalog: Path) -> Iterator[Control]:
        """One more process, whose catalog is new."""
        opened = Catalog.open(sqlite_url(catalog))
        control = Control(stored(self.bucket), opened)
        yield control
        control.close()
        opened.close()

    def keep(self, **rules: object) -> None:
        self.control.rotation.set_policy(RUN, RetentionPolicy(**rules), "*")  # type: ignore[arg-type]
        assert self.control.rotation.wait_until_applied()

    def files(self, step: int, run: str = RUN) -> dict[str, bytes]:
        files, directory = stored(self.bucket).store.files, naming.checkpoint_path(run, step)
        return {name: files.read(f"{directory}/{name}") for name in files.list(directory)}

    def verified(self, step: int, run: str = RUN) -> Manifest:
        return verify(stored(self.bucket).store.files, naming.checkpoint_path(run, step))

    def key(self, step: int, name: str) -> str:
        """The object of a file; of the first file of a group by the group's name."""
        below = f"{RUN}/data/step-{step:08d}."
        return next(key for key in sorted(self.bucket.sizes()) if key.startswith(below) and f"/{name}" in key)

    def places(self, run: str = RUN) -> set[str]:
        """The names below data/: each is of a checkpoint, if nothing is left over."""
        return {key.split("/")[2] for key in self.bucket.sizes() if key.startswith(f"{run}/data/")}


@pytest.fixture
def root(tmp_path: Path) -> Iterator[BucketWorld]:
    made = BucketWorld(tmp_path)
    yield made
    made.control.close()
    made.catalog.close()


def test_a_checkpoint_is_imported_as_it_is(root: BucketWorld) -> None:
    """Every byte of it, and nothing else is left in the bucket."""
    for step in STEPS:
        assert root.files(step) == contents(root.copy.root / naming.checkpoint_path(RUN, step))
    assert len(root.places()) == len(STEPS) and list(root.bucket.uploads("")) == []


def test_an_import_goes_on_where_it_was_stopped(root: BucketWorld, tmp_path: Path) -> None:
    """What was finished is not sent again; what was begun, and the records, are gone afterwards."""
    source = PosixTier(a_model(tmp_path / "hf", sharded=True))
    with pytest.raises(Interrupted):
        Importer(root.control).bring(source, an_import("mine", 40), Stopping(2, Interrupted))
    (place,) = root.places("mine")
    assert f"mine/data/{place}/model.safetensors" in root.bucket.sizes()
    assert [key for key in root.bucket.sizes() if ".progress/" in key]
    with root.restarted(tmp_path / "other.sqlite") as control:
        begun = len(root.bucket.requests)
        Importer(control).bring(source, an_import("mine", 40), Quiet(), again=True)
    assert sent(root.bucket, begun, "/model.safetensors") == [] != sent(root.bucket, begun, "/state.json")
    assert root.places("mine") == {place}
    assert {name for named in root.verified(40, "mine").tensors.values() for name in named} == set(ARRAYS)
    assert not [key for key in root.bucket.sizes() if ".progress" in key]


@pytest.mark.parametrize(("policy", "small"), [({"keep_full": 1}, False), ({"optim": "int8", "optim_full": 1}, True)])
def test_old_checkpoints_are_made_smaller(root: BucketWorld, policy: dict[str, object], small: bool) -> None:
    """Thinned, or stored in fewer bytes; what they replaced is gone."""
    before = sum(root.bucket.sizes().values())
    root.keep(**policy)
    assert Thinner(root.control.store, root.control.thinning).run_once(RUN) == [5, 10]
    for step in STEPS:
        made = root.verified(step)
        changed = made.compacted if small else made.thinned
        assert (changed is None) == (step == 15)
    assert len(root.places()) == len(STEPS) and root.storage.store.replaced(RUN) == []
    assert sum(root.bucket.sizes().values()) < before


@pytest.mark.parametrize("left", ["data/", "commits/", ""])
def test_what_was_removed_by_hand_is_copied_back(root: BucketWorld, left: str) -> None:
    """All objects of a step, or only those below data/ or its commit object: it is again what it was."""
    before = root.files(10)
    gone = [key for key in root.bucket.sizes() if "step-00000010" in key and not (left and f"/{left}" in key)]
    assert gone
    root.bucket.delete(gone)
    assert root.repairer.restore(RUN, 10)["repaired"]
    assert root.files(10) == before and root.verified(10).step == 10


@pytest.mark.parametrize("names", [("optim",), (naming.COMMIT,), (naming.MANIFEST, "model-", naming.STATE)])
def test_damage_is_mended_from_a_replica(root: BucketWorld, names: tuple[str, ...]) -> None:
    """Files of other bytes, of which some are gone: each is again what it was, and the place before is gone."""
    before = root.files(10)
    keys = [root.key(10, name) for name in names]
    for number, key in enumerate(keys):
        data = root.bucket.read(key)
        if number % 2:
            root.bucket.delete([key])
        else:
            root.bucket.put(key, data[:-1] + bytes([data[-1] ^ 1]))
    root.storage = stored(root.bucket)
    outcome = root.repairer.run(RUN, 10)
    assert outcome.left is None and {mended.file for mended in outcome.mended} == {key.rpartition("/")[2] for key in keys}
    assert root.files(10) == before and root.verified(10).step == 10
    assert len(root.places()) == len(STEPS)


def test_a_lost_checkpoint_is_brought_back(root: BucketWorld) -> None:
    """From a replica, because it was not removed."""
    before = root.files(10)
    root.bucket.delete([naming.commit_object_path(RUN, 10)])
    assert root.storage.store.steps(RUN) == [5, 15]
    assert root.repairer.run(RUN, 10).left is None
    assert root.files(10) == before
    root.storage.store.sweep()
    assert len(root.places()) == len(STEPS)


world = copies(STEPS, replicas=(), arrays=trained_arrays())


def test_a_replica_in_a_bucket(world: CopiesWorld) -> None:
    """Copies are made, follow what is thinned, are mended and removed; they mend the root, and bring back what is lost."""
    bucket = MemoryBucket()
    worker = world.attach("far", stored(bucket))
    directory = naming.checkpoint_path(RUN, 5)
    world.copy()

    def there(step: int) -> dict[str, bytes]:
        files, path = stored(bucket).store.files, naming.checkpoint_path(RUN, step)
        return {name: files.read(f"{path}/{name}") for name in files.list(path)}

    for step in STEPS:
        assert there(step) == contents(world.path(step)) and world.states(step) == {"far": "present"}
    world.keep(keep_full=1)
    assert world.thinner().run_once(RUN) == [5, 10] and world.control.record_queue.recorded(30)
    world.copy()
    for step in STEPS:
        assert there(step) == contents(world.path(step))
    (key,) = [key for key in bucket.sizes() if key.startswith(f"{RUN}/data/step-00000005.") and key.endswith("/config.json")]
    bucket.put(key, b"?")
    assert worker.check(RUN, 5) is None and there(5) == contents(world.path(5))
    before = contents(world.path(5))
    (world.path(5) / "config.json").unlink()
    assert world.repairer.run(RUN, 5).left is None and contents(world.path(5)) == before
    world.tier.remove_tree(directory)
    assert world.repairer.run(RUN, 5).left is None and contents(world.path(5)) == before
    world.control.rotation.remove(RUN, 5)
    world.copy()
    assert stored(bucket).store.steps(RUN) == [10, 15] and world.states(5) == {}
    assert len({key.split("/")[2] for key in bucket.sizes() if "/data/" in key}) == 2


def test_a_copy_of_a_run_gets_its_new_name(world: CopiesWorld) -> None:
    """By copies on the server: no byte of a file is sent."""
    bucket = MemoryBucket()
    world.attach("far", stored(bucket))
    world.copy()
    world.control.renaming.rename(RUN, "better")
    asked = len(bucket.requests)
    world.copy()
    storage = stored(bucket)
    assert storage.store.steps(RUN) == [] and storage.store.steps("better") == list(STEPS)
    made = verify(storage.store.files, naming.checkpoint_path("better", 5))
    assert open_checkpoint(world.tier, naming.checkpoint_path("better", 5)).manifest == made
    assert sent(bucket, asked, ".safetensors") == []


def test_a_checkpoint_of_the_same_step_is_not_overwritten(root: BucketWorld, tmp_path: Path) -> None:
    """An import finds the step taken, and what stands there stays."""
    build(tmp_path / "other", run="other", step=5)
    before = root.files(5)
    with pytest.raises(Exception, match="already committed"):
        Importer(root.control).bring(PosixTier(tmp_path / "other"), an_import(RUN, 5), Quiet())
    assert root.files(5) == before


class Copied:
    """A checkpoint in a directory, and a copy of it in a bucket, made as a replica's worker makes it."""

    def __init__(self, directory: Path) -> None:
        build(directory / DIRECTORY, run=RUN, step=5)
        self.tier = PosixTier(directory)
        self.pair = open_checkpoint(self.tier, DIRECTORY)
        self.files = contents(directory / DIRECTORY)

    def copy(self, store: Store) -> None:
        place = Place(RUN, 5, naming.NO_ATTEMPT)
        carry(self.tier, DIRECTORY, store.begin(place), self.pair.manifest, CopyControl())
        publish_copy(store, place, self.pair.encoded, self.pair.commit)

    def go_on(self, store: Store) -> None:
        """As a replica's worker does it that finds what an earlier one has left."""
        place = self.place
        store.sweep((place,))
        go_on(self.tier, DIRECTORY, store.begin(place), self.pair.manifest, CopyControl())
        publish_copy(store, place, self.pair.encoded, self.pair.commit)

    @property
    def place(self) -> Place:
        return naming.job_place(RUN, 5, manifests.stated_sha256(self.pair.commit))

    def mend(self, store: Store) -> RepairOutcome:
        elsewhere = RepairCandidates({"copy": self.tier}, lambda made: nullcontext(), None)
        return mend(store, CheckpointId(RUN, 5), None, elsewhere)

    def there(self, bucket: MemoryBucket) -> dict[str, bytes]:
        files = stored(bucket).store.files
        return {name: files.read(f"{DIRECTORY}/{name}") for name in files.list(DIRECTORY)}


@pytest.fixture(scope="module")
def copied() -> Iterator[Copied]:
    with in_memory() as directory:
        yield Copied(directory)


def swept(bucket: MemoryBucket) -> list[str]:
    """What is left below data/ after a sweep, and unfinished uploads."""
    stored(bucket).store.sweep()
    return [*{key.split("/")[2] for key in bucket.sizes() if "/data/" in key}, *(one.key for one in bucket.uploads(""))]


@pytest.mark.parametrize("how", ["fails", "answer lost", "dies"])
def test_every_request_of_a_copy(copied: Copied, how: How) -> None:
    """All of the copy stands there or nothing, a sweep leaves no more, and the next try makes it."""
    for at in range(1, CALLS_MAX):
        bucket, switch, fault = MemoryBucket(), Switch(), Fault(at, how)
        with switch.failing(fault), suppress(CheckpointError, Died):
            copied.copy(stored(bucket, switch).store)
        stands = copied.there(bucket)
        assert stands in ({}, copied.files), at
        assert len(swept(bucket)) == bool(stands) and copied.there(bucket) == stands, at
        if not stands:
            copied.copy(stored(bucket).store)
        assert copied.there(bucket) == copied.files, at
        if not fault.hit:
            assert at > 20
            return
    raise AssertionError("the requests of a copy did not end")


def bodies_sent(bucket: MemoryBucket) -> int:
    """How often bytes of tensors were received, by the part or by the file."""
    return sum(act in ("part", "put") and key.endswith(".safetensors") for act, key in bucket.requests)


@pytest.mark.parametrize("how", ["fails", "answer lost", "dies"])
def test_every_request_of_a_copy_that_goes_on(copied: Copied, how: How) -> None:
    """The next start sends what is missing, and at most one part twice: the one whose answer was lost."""
    whole = MemoryBucket()
    copied.go_on(stored(whole, part=SHORT).store)
    needed = bodies_sent(whole)
    assert needed > 30 and copied.there(whole) == copied.files
    for at in range(1, CALLS_MAX):
        bucket, switch, fault = MemoryBucket(), Switch(), Fault(at, how)
        first = stored(bucket, switch, SHORT)
        with switch.failing(fault), suppress(CheckpointError, Died):
            copied.go_on(first.store)
        first.close()
        stands = copied.there(bucket)
        assert stands in ({}, copied.files), at
        if not stands:
            copied.go_on(stored(bucket, part=SHORT).store)
        assert copied.there(bucket) == copied.files and len(swept(bucket)) == 1, at
        assert bodies_sent(bucket) <= needed + 1, at
        if not fault.hit:
            assert at > 20
            return
    raise AssertionError("the requests of a copy did not end")


def test_other_bytes_in_a_copy_that_goes_on(copied: Copied) -> None:
    """A file and a part that arrived with other bytes of the same size are sent again."""
    bucket = MemoryBucket()
    prefix, big = naming.data_path(copied.place), max(copied.files, key=lambda name: len(copied.files[name]))
    for name, data in copied.files.items():
        if name.endswith(".safetensors") and name != big:
            bucket.put(f"{prefix}/{name}", data[:-1] + b"?")
    key = f"{prefix}/{big}"
    upload, data = bucket.begin_upload(key), memoryview(copied.files[big])
    bucket.put_part(key, upload, 1, [data[:SHORT]])
    bucket.put_part(key, upload, 2, [memoryview(bytes(SHORT))])
    bucket.put_part(key, upload, 3, [data[2 * SHORT : 3 * SHORT - 1]])
    before = bodies_sent(bucket)
    copied.go_on(stored(bucket, part=SHORT).store)
    whole = MemoryBucket()
    copied.go_on(stored(whole, part=SHORT).store)
    assert copied.there(bucket) == copied.files and len(swept(bucket)) == 1
    assert bodies_sent(bucket) - before == bodies_sent(whole) - 1


def test_a_copy_that_may_not_list_uploads(copied: Copied) -> None:
    """It begins the file again, and not the checkpoint; what it does not finish is given up, as no later start finds it."""

    class Forbidding(MemoryBucket):
        forbids = True

        def uploads(self, prefix: str) -> Iterator[PendingUpload]:
            if self.forbids:
                raise StorageFailed("403 AccessDenied")
            return super().uploads(prefix)

    whole = MemoryBucket()
    copied.go_on(stored(whole, part=SHORT).store)
    files = [name for name in copied.files if name.endswith(".safetensors")]
    for at in (20, 30, 40):
        bucket, switch = Forbidding(), Switch()
        with switch.failing(Fault(at, "fails")), pytest.raises(StorageFailed):
            copied.go_on(stored(bucket, switch, SHORT).store)
        wait_until(lambda: not bucket._uploads)  # noqa: B023 - used at once
        copied.go_on(stored(bucket, part=SHORT).store)
        assert copied.there(bucket) == copied.files
        most = max(-(-len(copied.files[name]) // SHORT) for name in files)
        assert bodies_sent(bucket) <= bodies_sent(whole) + most


@pytest.mark.parametrize("how", ["fails", "answer lost", "dies"])
@pytest.mark.parametrize("name", ["model-00001-of-00002.safetensors", naming.MANIFEST])
def test_every_request_of_a_repair(copied: Copied, how: How, name: str) -> None:
    """The damaged file or the sound one stands there, and all others as they were; the next repair works."""
    wrong = copied.files | {name: copied.files[name][:-1] + b"?"}
    for at in range(1, CALLS_MAX):
        bucket, switch, fault = MemoryBucket(), Switch(), Fault(at, how)
        copied.copy(stored(bucket).store)
        (key,) = [key for key in bucket.sizes() if key.endswith(f"/{name}")]
        bucket.put(key, wrong[name])
        left: CheckpointError | None = StorageFailed("it raised")
        with switch.failing(fault), suppress(CheckpointError, Died):
            left = copied.mend(stored(bucket, switch).store).left
        stands = copied.there(bucket)
        assert stands == copied.files if left is None else stands in (wrong, copied.files), at
        assert len(swept(bucket)) == 1 and copied.there(bucket) == stands, at
        assert copied.mend(stored(bucket).store).left is None and copied.there(bucket) == copied.files, at
        if not fault.hit:
            assert at > 20
            return
    raise AssertionError("the requests of a repair did not end")
