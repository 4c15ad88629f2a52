"""What only a bucket has: keys, requests, commit objects that others damage or change, late writers, and what is swept."""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
import pytest

from holdfast_files.objects import commit_objects
from holdfast_formats import lineage, naming
from holdfast_formats.disk import manifests
from holdfast_formats.disk.manifests import Manifest
from holdfast_formats.errors import CheckpointError, CorruptManifest, InvalidRequest, NoSuchCheckpoint, StorageFailed
from holdfast_formats.naming import Place
from holdfast_service.storage.objects import HONOURED, ConditionalPuts, ObjectStore, Uploads
from holdfast_service.storage.store import CommitContents
from tests.checkpoints import build
from tests.kit.memory_bucket import MemoryBucket
from tests.suites.store_suite import ALONE, ENTRY, FIRST, JOINT, LIVE, OTHER, RUN, SECOND, STEP, path, save, stage, standing

COMMIT_KEY = naming.commit_object_path(RUN, STEP)


def opened(bucket: MemoryBucket) -> ObjectStore:
    return ObjectStore(Uploads(bucket, part_bytes=2**16), ConditionalPuts(bucket, HONOURED))


@pytest.fixture
def bucket() -> MemoryBucket:
    return MemoryBucket()


@pytest.fixture
def store(bucket: MemoryBucket) -> ObjectStore:
    return opened(bucket)


def test_keys(bucket: MemoryBucket, store: ObjectStore) -> None:
    """A checkpoint's prefix has all its files, as a directory would; the commit object names it and says which manifest."""
    save(store, JOINT, FIRST)
    assert bucket.names() == sorted([COMMIT_KEY, *(f"run/data/step-00000007.a1.r5/{name}" for name in FIRST.all())])
    content = json.loads(bucket.read(COMMIT_KEY))
    assert content["checkpoint"] == {
        "data": "step-00000007.a1.r5",
        "manifest_sha256": FIRST.commit.decode(),
        "writer": "r5",
    }


def test_no_key_is_used_twice(bucket: MemoryBucket) -> None:
    """Two tries of one writer, and two daemons that know nothing of each other, have prefixes of their own."""
    for number in range(3):
        store = opened(bucket)
        stage(store, ALONE, FIRST)
        store.begin(ALONE).put("config.json", b"{}")
        assert len({name.split("/")[2] for name in bucket.names()}) == number + 1
    written = [key for act, key in bucket.requests if act in ("put", "complete")]
    assert len(set(written)) == len(written)


@pytest.mark.parametrize("place", [ALONE, JOINT], ids=["one node", "several"])
def test_requests_of_a_save(bucket: MemoryBucket, store: ObjectStore, place: Place) -> None:
    """At most one a part, four a file and six: no list among them, and the commit object is the last write."""
    bucket.requests.clear()
    save(store, place, FIRST)
    acts = [act for act, _ in bucket.requests]
    assert "list" not in acts and "uploads" not in acts
    parts = sum(-(-len(data) // 2**16) for data in FIRST.files.values() if len(data) > 2**16)
    assert acts.count("part") == parts
    assert len(acts) <= parts + 4 * len(FIRST.files | FIRST.small) + 6
    assert [request for request in bucket.requests if request[0] in ("put", "complete")][-1] == ("put", COMMIT_KEY)
    sizes = [key for act, key in bucket.requests if act == "head"]
    assert all(any(key.endswith(f"/{name}") for key in sizes) for name in FIRST.files)  # I20


def test_a_removal_begins_with_the_commit_object(bucket: MemoryBucket, store: ObjectStore) -> None:
    """I8."""
    save(store, ALONE, FIRST)
    bucket.requests.clear()
    store.free(store.remove(RUN, STEP))
    assert next(key for act, key in bucket.requests if act == "delete") == COMMIT_KEY


@pytest.mark.parametrize("data", [b"", b"{}", b'{"format": 1}', b"x" * 10_000])
def test_a_commit_object_that_cannot_be_read(bucket: MemoryBucket, store: ObjectStore, data: bytes) -> None:
    """It keeps its step, and all files that it may name: it is damage by name, until a checkpoint replaces it."""
    save(store, JOINT, FIRST)
    bucket.put(COMMIT_KEY, data)
    assert store.steps(RUN) == [STEP] and store.replaced(RUN) == []
    with pytest.raises(CorruptManifest, match=COMMIT_KEY):
        opened(bucket).files.read(path(naming.COMMIT))
    before = [name for name in bucket.names() if "/data/" in name]
    assert save(store, OTHER, SECOND).outcome == "taken"
    store.discard(OTHER)
    with pytest.raises(CorruptManifest):
        store.mend(OTHER, SECOND.manifest, SECOND.commit)
    store.sweep()
    assert set(before) <= set(bucket.names())
    assert store.commit(OTHER, SECOND.contents(), over=True).outcome == "published"
    assert standing(store) is SECOND and store.replaced(RUN) == []
    store.sweep()
    assert not set(before) & set(bucket.names()) and standing(store) is SECOND


def test_a_damaged_step_is_removed(bucket: MemoryBucket, store: ObjectStore) -> None:
    """Its files are garbage then."""
    save(store, JOINT, FIRST)
    bucket.put(COMMIT_KEY, b"")
    store.free(store.remove(RUN, STEP))
    assert store.steps(RUN) == []
    store.sweep()
    assert bucket.names() == []
    with pytest.raises(NoSuchCheckpoint):
        store.remove(RUN, STEP)


def test_a_round_that_is_discarded_while_it_is_committed(bucket: MemoryBucket, store: ObjectStore) -> None:
    """Between any two requests of the committer: afterwards it stands whole, or what it has replaced does."""
    for over in (False, True):
        for at in range(1, 100):
            made = MemoryBucket()
            if over:
                save(opened(made), OTHER, SECOND)
            committer = _Meanwhile(made, at, lambda made=made: opened(made).discard(JOINT))
            stage(opened(made), JOINT, FIRST)
            outcome = "raised"
            with suppress(CheckpointError):
                outcome = opened(committer).commit(JOINT, FIRST.contents(), over).outcome
            stands = standing(opened(made))
            assert stands is (FIRST if outcome == "published" else SECOND if over else None), (over, at, outcome)
            if committer.left > 0:
                assert at > 8
                break
            opened(made).sweep()
            assert standing(opened(made)) is stands


class _Meanwhile(MemoryBucket):
    """Another node acts before the `at`-th request."""

    def __init__(self, bucket: MemoryBucket, at: int, act: Any) -> None:
        super().__init__()
        self._objects, self._uploads, self.left, self._act = bucket._objects, bucket._uploads, at, act

    def _asked(self, act: str, key: str) -> Any:
        self.left -= 1
        if self.left == 0:
            self._act()
        return super()._asked(act, key)


def test_a_commit_between_the_lists_of_a_sweep(bucket: MemoryBucket) -> None:
    """What is committed meanwhile is no garbage: files are listed before commit objects are read."""
    for at in range(1, 100):
        made = MemoryBucket()
        save(opened(made), OTHER._replace(step=STEP + 1), SECOND)
        stage(opened(made), JOINT, FIRST)
        outcomes: list[str] = []

        def commit(made: MemoryBucket = made, outcomes: list[str] = outcomes) -> None:
            outcomes.append(opened(made).commit(JOINT, FIRST.contents()).outcome)

        sweeping = _Meanwhile(made, at, commit)
        opened(sweeping).sweep()
        if not outcomes:
            return
        assert standing(opened(made)) is (FIRST if outcomes == ["published"] else None), at
    raise AssertionError("the requests of a sweep did not end")


def test_foreign_objects_stay(bucket: MemoryBucket, store: ObjectStore) -> None:
    """A model below data/ that no round of ours has named is no checkpoint, and is not swept; nor is what lies elsewhere."""
    foreign = ["run/data/my-model/config.json", "run/data/step-7/x", "run/data/x", "elsewhere/y", "run/commits/notes.txt"]
    for key in foreign:
        bucket.put(key, b"x")
    stage(store, JOINT, FIRST)
    assert store.sweep() == ["run/data/step-00000007.a1.r5"]
    assert bucket.names() == sorted(foreign) and store.steps(RUN) == []


def test_unfinished_uploads_are_swept(bucket: MemoryBucket, store: ObjectStore) -> None:
    """Those of dead rounds, and of committed ones whose writer was killed and written for; not those of live ones, nor of
    others.
    """
    save(store, OTHER, FIRST)
    for place in (JOINT, OTHER, LIVE):
        upload = bucket.begin_upload(f"{naming.data_path(place)}/model.safetensors")
        bucket.put_part("", upload, 1, [memoryview(b"x" * 100)])
    bucket.begin_upload("run/data/my-model/x")
    assert store.sweep([LIVE], idle_s=3600.0) == [] and len(list(bucket.uploads(""))) == 4
    assert store.sweep([LIVE]) == ["run/data/step-00000007.a1.r5"]
    left = [upload.key for upload in bucket.uploads("")]
    assert left == ["run/data/my-model/x", f"{naming.data_path(LIVE)}/model.safetensors"] and standing(store) is FIRST


def test_a_discard_that_died_is_finished(bucket: MemoryBucket) -> None:
    """After any of its requests: a sweep leaves nothing, also of its fence; what was published meanwhile stands."""
    for at in range(1, 20):
        made = MemoryBucket()
        stage(opened(made), JOINT, FIRST)

        class Killed(BaseException):
            pass

        def kill() -> None:
            raise Killed

        dying = _Meanwhile(made, at, kill)
        with suppress(Killed):
            opened(dying).discard(JOINT)
        store = opened(made)
        if at == 3:  # its fence is there, and nothing else has happened
            assert store.commit(JOINT, FIRST.contents()).outcome == "gone"
        store.sweep()
        assert made.names() == []
        if dying.left > 0:
            assert at > 4
            return
    raise AssertionError("the requests of a discard did not end")


def test_ages_are_of_the_stores_own_clock(bucket: MemoryBucket, store: ObjectStore) -> None:
    """However wrong it is (I17)."""
    now = 1000.0
    bucket.clock = lambda: now
    stage(store, JOINT, FIRST)
    bucket.begin_upload(f"{naming.data_path(OTHER)}/model.safetensors")
    now += 59.0
    assert store.sweep(idle_s=60.0) == []
    now += 2.0
    assert len(store.sweep(idle_s=60.0)) == 2 and bucket.names() == [] and not list(bucket.uploads(""))


def test_uploads_that_may_not_be_listed(bucket: MemoryBucket, caplog: pytest.LogCaptureFixture) -> None:
    """A writer without that permission sweeps the rest, and says what it cannot."""

    class Forbidden(MemoryBucket):
        def uploads(self, prefix: str) -> Any:
            raise StorageFailed("access denied", answer="403 AccessDenied")

    store = opened(made := Forbidden())
    stage(store, JOINT, FIRST)
    with caplog.at_level(logging.WARNING):
        assert len(store.sweep()) == 1 and made.names() == []
    assert "unfinished uploads" in caplog.text and "access denied" in caplog.text


def test_a_place_without_a_round_is_known_to_its_writer_alone(bucket: MemoryBucket, store: ObjectStore) -> None:
    """Another process can neither commit nor discard it, and does not read it."""
    stage(store, ALONE, FIRST)
    other = opened(bucket)
    assert other.commit(ALONE, FIRST.contents()).outcome == "gone"
    other.discard(ALONE)
    assert other.files.size(f"{ALONE.path}/config.json") is None
    assert store.commit(ALONE, FIRST.contents()).outcome == "published"


def test_requests_of_a_start(bucket: MemoryBucket, store: ObjectStore) -> None:
    """A sweep, and the search for what was replaced, read no commit object of a step with one prefix."""
    for step in range(50):
        save(store, Place(RUN, step, 1), FIRST)
    bucket.requests.clear()
    fresh = opened(bucket)
    fresh.put_back(lambda run: nullcontext())
    fresh.sweep()
    assert fresh.replaced(RUN) == [] and len(fresh.stamps(RUN)) == 50
    assert len(bucket.requests) < 12


def test_a_stamp_changes_with_the_commit_object(bucket: MemoryBucket, store: ObjectStore) -> None:
    """It is the same in the list and alone."""
    save(store, JOINT, FIRST)
    before = store.stamps(RUN)
    assert store.stamps(RUN, STEP) == before and store.stamps(RUN, STEP + 1) == {}
    save(store, OTHER, SECOND, over=True)
    assert store.stamps(RUN)[STEP] != before[STEP]


def test_an_entry_of_the_trash_is_its_runs(store: ObjectStore) -> None:
    """Files of checkpoints stay below the run's name, so that it comes back under no other."""
    save(store, JOINT, FIRST)
    with pytest.raises(InvalidRequest):
        store.put_away(RUN, naming.trash_entry("other", 5))
    store.put_away(RUN, ENTRY)
    with pytest.raises(InvalidRequest):
        store.take_out(ENTRY, "other")
    store.take_out(ENTRY, RUN)
    assert standing(store) is FIRST


def test_control_files_go_to_the_trash_and_back(bucket: MemoryBucket, store: ObjectStore) -> None:
    """All that a run has, at the same names below the entry."""
    save(store, JOINT, FIRST)
    bucket.put("run/run.json", b"{}")
    bucket.put("run/layouts/abc", b"layout")
    store.put_away(RUN, ENTRY)
    assert bucket.read(f".holdfast.trash/{ENTRY}/run.json") == b"{}"
    assert {name.split("/")[1] for name in bucket.names() if name.startswith("run/")} == {"data"}
    store.sweep()
    store.take_out(ENTRY, RUN)
    assert bucket.read("run/run.json") == b"{}" and bucket.read("run/layouts/abc") == b"layout"
    assert not [name for name in bucket.names() if name.startswith(".holdfast.trash")] and standing(store) is FIRST


def test_a_sweep_spares_what_the_trash_names(bucket: MemoryBucket, store: ObjectStore) -> None:
    """Also where the same step of a new run of the name has garbage, or a checkpoint."""
    save(store, JOINT, FIRST)
    store.put_away(RUN, ENTRY)
    stage(store, OTHER, SECOND)
    assert store.sweep() == [naming.data_path(OTHER)]
    save(store, OTHER, SECOND)
    assert store.sweep() == [] and standing(store) is SECOND
    store.free(store.remove(RUN, STEP))
    store.take_out(ENTRY, RUN)
    assert standing(store) is FIRST


def test_a_purge_that_died_is_finished(bucket: MemoryBucket, store: ObjectStore) -> None:
    """From the note that lists what to remove on: nothing comes back, and nothing is left."""
    save(store, JOINT, FIRST)
    store.put_away(RUN, ENTRY)

    class Dying(MemoryBucket):
        def delete(self, keys: Sequence[str]) -> None:
            raise StorageFailed("the process was killed")

    dying = Dying()
    dying._objects, dying._uploads = bucket._objects, bucket._uploads
    with pytest.raises(StorageFailed):
        opened(dying).purge(ENTRY)
    with pytest.raises(CheckpointError):
        store.take_out(ENTRY, RUN)
    assert not store.purge(ENTRY)
    assert opened(dying).free_purged()[0][0] == naming.purged_entry(ENTRY)
    assert store.free_purged() == [] and bucket.names() == []


class TestMarks:
    """Marks of lines: whatever dies and whenever, what a commit object names has its mark, and its mark says its line."""

    @pytest.fixture
    def made(self, tmp_path: Path) -> Made:
        """Two checkpoints of a step; training continued from an older one before the second."""
        rewound = msgspec.structs.replace(
            build(tmp_path / "1" / "step", {"model": {"w": np.ones(3, np.float32)}}, run=RUN, step=STEP).manifest,
            restored=3,
            turn=1,
            rewinds=(lineage.Rewind(2, 1, 3),),
        )
        plain = msgspec.structs.replace(rewound, restored=None, turn=0, rewinds=())
        return Made(contents_of(plain), contents_of(rewound))

    def test_their_keys(self, bucket: MemoryBucket, store: ObjectStore, made: Made) -> None:
        """It is put before the commit object, stays while the files do, and is deleted with them, by no request more."""
        put(store, JOINT, made.plain)
        assert [key for act, key in bucket.requests if act == "put"][-2:] == [marked(JOINT, (0, 0)), COMMIT_KEY]
        put(store, OTHER, made.rewound, over=True)
        assert marks(bucket) == [marked(JOINT, (0, 0)), marked(OTHER, (2, 1))], "the first is kept until it is released"
        for place in store.replaced(RUN):
            store.free(str(store.release(place)))
        assert marks(bucket) == [marked(OTHER, (2, 1))]
        removed = store.remove(RUN, STEP)
        bucket.requests.clear()
        store.free(removed)
        assert [act for act, _ in bucket.requests] == ["read", "list", "delete"] and bucket.names() == []

    def test_a_death_at_any_request(self, made: Made) -> None:
        """Of a save, one in its place, a discard, a removal: a sweep leaves no mark without files."""

        class Killed(BaseException):
            pass

        def kill() -> None:
            raise Killed

        for at in range(1, 200):
            bucket = MemoryBucket()
            dying = _Meanwhile(bucket, at, kill)
            with suppress(Killed):
                store = opened(dying)
                put(store, JOINT, made.plain)
                put(store, OTHER, made.rewound, over=True)
                for place in store.replaced(RUN):
                    store.free(str(store.take_back(place)))
                store.discard(LIVE)
                store.free(store.remove(RUN, STEP))
            check_marks(bucket)
            opened(bucket).sweep()
            check_marks(bucket)
            data = {name.split("/")[2] for name in bucket.names() if f"/{naming.DATA}/" in name}
            assert {key.split("/")[2].partition("~")[0] for key in marks(bucket)} <= data
            if dying.left > 0:
                assert at > 30 and bucket.names() == []
                return
        raise AssertionError("the requests did not end")

    def test_a_round_that_was_discarded_meanwhile(self, made: Made) -> None:
        """By another node, before any request of a commit: what it withdraws leaves no mark."""
        for at in range(1, 100):
            bucket = MemoryBucket()
            begun(opened(bucket), JOINT, made.plain)
            committing = _Meanwhile(bucket, at, lambda bucket=bucket: opened(bucket).discard(JOINT))
            outcome = opened(committing).commit(JOINT, made.plain).outcome
            check_marks(bucket)
            opened(bucket).sweep()
            assert (marks(bucket) == [marked(JOINT, (0, 0))]) is (outcome == "published")
            if committing.left > 0:
                return
        raise AssertionError("the requests of a commit did not end")

    def test_a_commit_between_the_lists_of_a_sweep(self, made: Made) -> None:
        """A mark that is put meanwhile is not taken for garbage."""
        for at in range(1, 100):
            bucket = MemoryBucket()
            begun(opened(bucket), JOINT, made.plain)
            outcomes: list[str] = []

            def commit(bucket: MemoryBucket = bucket, outcomes: list[str] = outcomes) -> None:
                outcomes.append(opened(bucket).commit(JOINT, made.plain).outcome)

            opened(_Meanwhile(bucket, at, commit)).sweep()
            check_marks(bucket)
            if not outcomes:
                return
        raise AssertionError("the requests of a sweep did not end")

    def test_the_trash(self, bucket: MemoryBucket, store: ObjectStore, made: Made) -> None:
        """Marks stay beside the files of a deleted run, and go with them."""
        put(store, JOINT, made.plain)
        store.put_away(RUN, ENTRY)
        store.sweep()
        assert marks(bucket) == [marked(JOINT, (0, 0))]
        put(store, OTHER, made.rewound)
        assert store.purge(ENTRY) and store.free_purged() == []
        assert marks(bucket) == [marked(OTHER, (2, 1))]

    def test_a_repair(self, bucket: MemoryBucket, store: ObjectStore, made: Made) -> None:
        """Its new files have a mark, and the old ones none any more."""
        put(store, JOINT, made.rewound)
        mending = Place(RUN, STEP, naming.NO_ATTEMPT)
        staged = store.begin(mending)
        staged.put("config.json", b"{}")
        store.mend(mending, made.rewound.manifest, made.rewound.commit)
        assert marks(bucket) == [naming.line_mark(RUN, staged.prefix.rpartition("/")[2], (2, 1))]
        check_marks(bucket)


class Made(NamedTuple):
    plain: CommitContents
    rewound: CommitContents


def contents_of(manifest: Manifest) -> CommitContents:
    encoded = manifests.encode(manifest)
    return CommitContents({}, {"config.json": b"{}"}, encoded, manifests.encode_commit(manifest, encoded))


def begun(store: ObjectStore, place: Place, contents: CommitContents) -> None:
    store.begin(place).put("asset.txt", b"x")


def put(store: ObjectStore, place: Place, contents: CommitContents, over: bool = False) -> None:
    begun(store, place, contents)
    assert store.commit(place, contents, over).outcome == "published"


def marked(place: Place, line: lineage.Key) -> str:
    return naming.line_mark(RUN, naming.data_directory(place), line)


def marks(bucket: MemoryBucket) -> list[str]:
    return [name for name in bucket.names() if name.startswith(naming.line_marks(RUN))]


def check_marks(bucket: MemoryBucket) -> None:
    """All that the commit object names has its mark."""
    if COMMIT_KEY not in bucket.names():
        return
    for one in commit_objects.decode(bucket.read(COMMIT_KEY), RUN, STEP).kept:
        line = commit_objects.line_of(one)
        assert line is not None and naming.line_mark(RUN, one.data, line) in bucket.names()
