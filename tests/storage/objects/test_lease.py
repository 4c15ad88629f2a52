"""The lease on a bucket: one holder, the death of a holder, and answers that are lost."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from holdfast_files.objects import client
from holdfast_files.objects.client import Bucket, WriteOutcome
from holdfast_formats import naming
from holdfast_formats.errors import RootBusy
from holdfast_formats.root_files import decode, encode
from holdfast_service.storage.objects import HONOURED, ConditionalPuts, ObjectStore, Uploads, lease
from holdfast_service.storage.objects.lease import BucketLease, OwnerFile
from tests.daemons import wait_until
from tests.kit.memory_bucket import MemoryBucket
from tests.kit.objects import TestBucket
from tests.kit.objects_proxy import Stall, faulty
from tests.storage.objects import reaching
from tests.suites.store_suite import ALONE, ENTRY, FIRST, RUN, STEP, save

TICK_S = 0.05


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"BUSY_S": TICK_S, "IDLE_S": 3 * TICK_S, "LATE_S": 600.0, "LOOK_S": TICK_S / 5}.items():
        monkeypatch.setattr(lease, name, value)


@pytest.fixture
def bucket() -> MemoryBucket:
    return MemoryBucket()


def take(bucket: Bucket, directory: Path, node: str = "one") -> BucketLease:
    directory.mkdir(exist_ok=True)
    return BucketLease.take(bucket, node, directory)


def owner(bucket: Bucket) -> OwnerFile | None:
    return decode(OwnerFile, bucket.read_tagged(naming.OWNER, 4096)[0])


def elsewhere(bucket: Bucket) -> OwnerFile:
    """A holder on another machine, which does not write any more."""
    own = OwnerFile(node="far", state="boot 1 2", process="boot pid:[1] 7 9", renews_s=TICK_S, count=3)
    bucket.put(naming.OWNER, encode(own))
    return own


def test_a_second_daemon_is_refused_and_the_first_goes_on(bucket: Bucket, tmp_path: Path) -> None:
    first = take(bucket, tmp_path / "one")
    with pytest.raises(RootBusy, match="in use by the daemon of one"):
        take(bucket, tmp_path / "two", "two")
    assert first.lost(busy=True) == ""
    first.close()
    assert bucket.head(naming.OWNER) is None
    take(bucket, tmp_path / "two", "two").close()


def test_who_stands_still_loses_it(bucket: Bucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After twice its interval and the allowance, by the clock of the one that waits."""
    monkeypatch.setattr(lease, "LATE_S", 10 * TICK_S)
    elsewhere(bucket)
    began = time.monotonic()
    held = take(bucket, tmp_path / "one")
    assert time.monotonic() - began >= 2 * TICK_S + 10 * TICK_S
    found = owner(bucket)
    assert found is not None and found.node == "one"
    held.close()


def test_a_dead_process_of_this_machine_is_not_waited_for(bucket: Bucket, tmp_path: Path) -> None:
    """Whether its directory is still there or not. Its pid may be another process's by now."""
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    for pid in (ended.pid, 1):
        process = f"{lease._process(pid).rpartition(' ')[0]} 1"
        bucket.put(naming.OWNER, encode(OwnerFile(node="x", state="gone", process=process, renews_s=60, count=1)))
        take(bucket, tmp_path / "one").close()
    state = lease._state(tmp_path / "one")
    bucket.put(naming.OWNER, encode(OwnerFile(node="x", state=state, process="boot pid:[1] 7 9", renews_s=60, count=1)))
    take(bucket, tmp_path / "one").close()


def test_a_lost_lease_is_told(bucket: Bucket, tmp_path: Path) -> None:
    """Another daemon took it while this one stood still; it does not take it back, and does not remove it at its end."""
    held = take(bucket, tmp_path / "one")
    other = elsewhere(bucket)
    limit = time.monotonic() + 180
    while not held.lost(busy=True):
        assert time.monotonic() < limit
        time.sleep(TICK_S)
    assert "far serves" in held.lost(busy=True)
    held.close()
    assert owner(bucket) == other


def test_a_daemon_that_stood_still_removes_nothing_of_the_next_one(
    bucket: Bucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its threads go on at once, and its lease is renewed later: the removal asks first. Without a pause it asks nothing."""
    monkeypatch.setattr(lease, "BUSY_S", 3600.0)  # no renewal while this test runs
    ahead_s = [0.0]
    monkeypatch.setattr(lease, "_now_s", lambda: time.monotonic() + ahead_s[0])
    held = take(bucket, tmp_path / "one")
    store = ObjectStore(Uploads(bucket), ConditionalPuts(bucket, HONOURED), confirm=held.confirm)
    save(store, ALONE, FIRST)
    bucket.requests.clear()
    held.confirm()
    assert not bucket.requests
    ahead_s[0] = 10_000
    before = owner(bucket)
    held.confirm()
    renewed = owner(bucket)
    assert before is not None and renewed is not None and renewed.word != before.word
    assert renewed == before.model_copy(update={"count": before.count + 1, "word": renewed.word})
    ahead_s[0] = 20_000
    elsewhere(bucket)
    names = bucket.names()
    for remove in (
        lambda: store.remove(RUN, STEP),
        lambda: store.free(f"{naming.commit_object_path(RUN, STEP)} gone"),
        lambda: store.put_away(RUN, ENTRY),
        lambda: store.take_out(ENTRY, RUN),
        lambda: store.purge(ENTRY),
        store.free_purged,
    ):
        with pytest.raises(RootBusy, match="far serves"):
            remove()
    assert bucket.names() == names
    held.close()


def test_daemons_that_will_share_the_root_wait_for_each_other(bucket: Bucket, tmp_path: Path) -> None:
    """The first one has the lease until it has marked the root; others wait for that, and need none then.
    One that would serve the root alone, or with another catalog, is refused meanwhile.
    """
    marked: list[bool] = []
    (tmp_path / "one").mkdir()
    (tmp_path / "two").mkdir()

    def share(directory: str, catalog: str = "db:5432/x") -> BucketLease | None:
        return BucketLease.take_until_shared(bucket, directory, tmp_path / directory, catalog, lambda: bool(marked))

    first = share("one")
    assert first is not None
    for refused in (lambda: take(bucket, tmp_path / "two", "two"), lambda: share("two", "db:5432/other")):
        with pytest.raises(RootBusy, match="in use by the daemon of one"):
            refused()
    with ThreadPoolExecutor(1) as pool:
        second = pool.submit(share, "two")
        found = owner(bucket)
        assert found is not None
        wait_until(lambda: owner(bucket).count > found.count + 1)
        assert not second.done()
        marked.append(True)
        assert second.result() is None
    first.close()
    assert share("two") is None and bucket.head(naming.OWNER) is None


@pytest.mark.parametrize("data", [b"", b"{}", b"no JSON", b'{"node": 1}'])
def test_what_is_no_owner_file_is_replaced(bucket: Bucket, tmp_path: Path, data: bytes) -> None:
    bucket.put(naming.OWNER, data)
    take(bucket, tmp_path / "one").close()


def test_lost_answers_are_read_back(bucket: MemoryBucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the first write and of renewals: it is held all the same."""
    put: Callable[..., WriteOutcome] = bucket.put

    def losing(*arguments: object, **options: object) -> WriteOutcome:
        put(*arguments, **options)
        return WriteOutcome("unknown", detail="the answer was lost")

    monkeypatch.setattr(bucket, "put", losing)
    held = take(bucket, tmp_path / "one")
    limit = time.monotonic() + 180
    while (found := owner(bucket)) is None or not found.count:
        assert time.monotonic() < limit
        time.sleep(TICK_S)
    assert held.lost(busy=True) == ""
    held.close()


def test_a_lost_renewal_with_another_interval_is_its_own(
    seaweedfs_bucket: TestBucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The bucket stands still: it carries out a renewal and does not answer, nor to the question what stands. Meanwhile the
    ranks end, so that the next renewal states another interval.
    """
    monkeypatch.setattr(client, "SILENCE_S", 1.0)
    with (
        faulty(seaweedfs_bucket.server.endpoint) as proxy,
        reaching.opened(seaweedfs_bucket, monkeypatch, proxy.endpoint) as opened,
    ):
        held = take(opened.using(retry_s=0.0), tmp_path / "one")
        lost, unread = proxy.on(Stall(done=True), "put", naming.OWNER), proxy.on(Stall(), "get", naming.OWNER)
        wait_until(lambda: unread.hits == 1)
        assert held.lost(busy=False) == "" and lost.hits == 1
        wait_until(lambda: held.lost(busy=False) or ((found := owner(opened)) and found.renews_s == lease.IDLE_S))
        assert held.lost(busy=False) == ""
        held.close()
    assert seaweedfs_bucket.sizes() == {}


def test_a_lost_renewal_is_given_back(bucket: Bucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """So that another machine need not wait."""
    monkeypatch.setattr(lease, "BUSY_S", 3600.0)  # no renewal while this test runs
    held = take(bucket, tmp_path / "one")
    own = owner(bucket)
    assert own is not None
    bucket.put(naming.OWNER, encode(own.model_copy(update={"renews_s": lease.IDLE_S, "count": own.count + 1})))
    held.close()
    assert bucket.head(naming.OWNER) is None


def test_of_two_copies_of_a_running_machine_one_loses_it(
    bucket: Bucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They have the same process, directory, count and tag of the object: a machine that was cloned while it ran."""
    monkeypatch.setattr(lease, "BUSY_S", 3600.0)  # no renewal but these
    first = take(bucket, tmp_path)
    clone = BucketLease(bucket, first._own, first._etag)
    first._renew_now()
    clone._renew_now()
    first._renew_now()
    assert first.lost(busy=True) == ""
    assert "serves" in clone.lost(busy=True)
    with pytest.raises(RootBusy):
        clone.confirm()
    clone.close()
    assert bucket.head(naming.OWNER) is not None
    first.close()
    assert bucket.head(naming.OWNER) is None
