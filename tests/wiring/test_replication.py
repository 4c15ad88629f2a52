"""`--replica`: what it may say, and where else it can be said."""

from __future__ import annotations

import shutil
import subprocess
from contextlib import closing
from pathlib import Path

import httpx
import pytest

from holdfast.rest.api import Api
from holdfast_files.objects.address import BucketAddress
from holdfast_formats import naming
from holdfast_formats.errors import InvalidRequest, RootBusy, StorageFailed
from holdfast_service.config import check_apart, parse
from holdfast_service.control.retention.tier_retention import TierRetention
from holdfast_service.storage.objects import lease
from holdfast_service.wiring import replication
from holdfast_service.wiring.replication import Reached, ReachedBucket, RunsInTiers
from tests.daemon.copies_world import copies_world
from tests.daemons import running, wait_until
from tests.kit.objects import TestBucket, moto, moto_bucket

__all__ = ["moto", "moto_bucket"]

READ_ONLY = 'mount --bind "$0" "$0" && mount -o remount,bind,ro "$0" && exec "$@"'  # as ProtectSystem=strict does it
OWN_MOUNTS = ("unshare", "--map-root-user", "--mount")


@pytest.mark.parametrize(
    ("flags", "environment", "found"),
    [
        ([], {}, ()),
        (["--replica", "/mnt/nas"], {}, (("nas", Path("/mnt/nas")),)),
        (
            ["--replica", "a=/x", "--replica", "b=/y, /mnt/c"],
            {},
            (("a", Path("/x")), ("b", Path("/y")), ("c", Path("/mnt/c"))),
        ),
        ([], {"HOLDFAST_REPLICA": "a=/x,b=/y"}, (("a", Path("/x")), ("b", Path("/y")))),
        (["--replica", "a=/x"], {"HOLDFAST_REPLICA": "b=/y"}, (("a", Path("/x")),)),
    ],
)
def test_replicas_are_named(flags: list[str], environment: dict[str, str], found: tuple[tuple[str, Path], ...]) -> None:
    """Several times, separated by commas, or in the environment; the name is the directory's unless it is said."""
    assert parse(flags, environment).replica == found


@pytest.mark.parametrize("flag", ["a=", "=/x", "a b=/x", "/", "..=/x", "a=/x,/y/a"])
def test_a_name_that_is_none(flag: str) -> None:
    """It is refused by the flag's name."""
    with pytest.raises(InvalidRequest, match="--replica"):
        parse(["--replica", flag], {})


@pytest.mark.parametrize("flags", [["--replica", "n=s3://b/p"], ["--replica", "gs://b"], ["--state", "s3://b/p"]])
def test_an_address_is_no_directory(flags: list[str]) -> None:
    """It is refused by the flag's name; as a path it would be a directory `s3:` below the current one."""
    with pytest.raises(InvalidRequest, match=f"{flags[0]}.*is a URL"):
        parse(flags, {})


@pytest.mark.parametrize(
    ("flags", "found"),
    [
        (["s3://bkt/team"], (("team", BucketAddress("bkt", "team")),)),
        (["s3://bucket/"], (("bucket", BucketAddress("bucket", "")),)),
        (["far=s3://bkt/a=b, /mnt/c"], (("far", BucketAddress("bkt", "a=b")), ("c", Path("/mnt/c")))),
    ],
)
def test_tiers_are_buckets_or_directories(flags: list[str], found: tuple[tuple[str, object], ...]) -> None:
    """The name is the last part of the prefix, else the bucket's, unless it is said."""
    assert parse([one for flag in flags for one in ("--tier", flag)], {}).tier == found


@pytest.mark.parametrize(
    ("flags", "why"),
    [
        (["--tier", "s3:/b"], "--tier: s3:/b is not a well-formed address"),
        (["--tier", "n=gs://b"], "--tier: gs://b cannot be opened"),
        (["--tier", "a b=s3://bkt/p"], "--tier: .* is not NAME=PLACE"),
        (["--tier", "s3://bkt/p", "--tier", "/mnt/p"], "two places have the name 'p'"),
        (["--tier", "s3://bkt/p", "--replica", "/mnt/p"], "a tier and a replica have the name 'p'"),
        (["--tier", "/mnt/p", "--encryption", "AES256"], "only what is written to a bucket"),
        (["--tier", "s3://bkt/p", "--encryption", "AES"], "--encryption: 'AES' is no encryption"),
        (["--tier", "s3://bkt/p", "--tier-storage-class", "GLACIER"], "--tier-storage-class: .* could not be read"),
        (["--tier", "/mnt/p", "--tier-storage-class", "STANDARD_IA"], "only a tier in a bucket"),
        (["--tier", "s3://bkt/p", "--storage-class", "STANDARD_IA"], "there is --tier-storage-class"),
        (["--tier", "/mnt/p", "--alone"], "needs --alone"),
    ],
)
def test_a_tier_that_is_none(flags: list[str], why: str) -> None:
    """It is refused by the flag's name, with the form to write."""
    with pytest.raises(InvalidRequest, match=why):
        parse(flags, {})


def test_one_daemon_at_a_time_drains_to_a_prefix(
    moto_bucket: TestBucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another one is refused by name while the first lives, and takes over afterwards; the first one notices that."""
    for key, value in moto_bucket.server.environment().items():
        monkeypatch.setenv(key, value)
    monkeypatch.setattr(lease, "BUSY_S", 0.2)
    monkeypatch.setattr(lease, "IDLE_S", 0.2)
    places = []
    for node in ("one", "two"):
        (tmp_path / node).mkdir()
        config = parse(["--root", str(tmp_path / node), "--node", node, "--tier", f"{moto_bucket.url}/team"], {})
        places.append(ReachedBucket(BucketAddress(moto_bucket.name, "team"), config))
    first, second = places
    with closing(first), closing(second):
        storage = first()
        assert first() is storage and storage.records.size(naming.ROOT_FILE)
        with pytest.raises(RootBusy, match="is in use by the daemon of one"):
            second()
        moto_bucket.delete(f"team/{naming.OWNER}")  # as if it had stood still for too long
        second()
        wait_until(lambda: storage.lease is not None and storage.lease.lost(busy=False))
        with pytest.raises(RootBusy, match="/team"):
            first()
        second.close()
        assert first() is not storage


def test_no_run_begins_before_a_tier_was_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run that is new to the root is refused while a tier cannot be asked, as that may have checkpoints of it: unless the
    root has drained there before, and so knows what is there. A replica is not waited for.
    """
    with copies_world(tmp_path) as world:
        far = world.replicators["far"]
        silent = [""]
        tiers = RunsInTiers(world.replicators, world.records, lambda name, since_s: silent[0])
        tiers.await_known("new")
        far.tier = TierRetention("far", None, world.catalog, world.control.files, world.records.lost)
        monkeypatch.setattr(replication, "ASK_S", 0.0)
        with pytest.raises(
            StorageFailed, match=r"'new' is new here, and the tier far may have checkpoints of it: its .* listed"
        ):
            tiers.await_known("new")
        silent[0] = "it is away"
        with pytest.raises(StorageFailed, match="it is away"):
            tiers.await_known("new")
        world.copy()
        far._opened = None  # as after a restart
        tiers.await_known("new")


def test_an_empty_mount_point_is_not_the_disk(tmp_path: Path) -> None:
    """A disk that is gone is named, also where a directory stands in its place; back again, it is taken up again."""
    far, away = tmp_path / "far", tmp_path / "away"
    place = Reached(far)
    tier = place()
    assert place() is tier
    with pytest.raises(RootBusy):
        Reached(far)()
    far.rename(away)
    for make in (lambda: None, far.mkdir):
        make()
        with pytest.raises(StorageFailed, match="its disk may be unmounted"):
            place()
    assert list(far.iterdir()) == []
    far.rmdir()
    away.rename(far)
    assert place() is tier
    far.rename(away)
    shutil.copytree(away, far)
    assert place() is not tier, "another mount of it"
    place.close()
    again = Reached(far)
    again()
    again.close()


@pytest.mark.parametrize("inside", ["", "copies"], ids=["directory", "parent"])
def test_a_replica_that_is_read_only_is_told_of_at_the_start(tmp_path: Path, inside: str) -> None:
    """Before anything was saved: an error that is an alert and an event, with the line that the unit lacks."""
    if subprocess.run([*OWN_MOUNTS, "true"], check=False, capture_output=True).returncode:
        pytest.skip("no mounts of one's own here")
    far = tmp_path / "far"
    far.mkdir()
    before = (*OWN_MOUNTS, "sh", "-c", READ_ONLY, str(far))
    with running(tmp_path / "root", "--replica", f"far={far / inside}", listen="127.0.0.1:0", before=before) as daemon:
        with Api(daemon.url) as api:
            wait_until(lambda: api.nodes()[0].replicas["far"] is not None)
        (alert,) = httpx.get(f"{daemon.url}/v1/alerts").json()["items"]
        events = httpx.get(f"{daemon.url}/v1/events?kind=replica-failed").json()["items"]
        assert (alert["code"], alert["level"], alert["subject"]) == ("replica-lost", "error", "far")
        assert "Read-only file system" in alert["text"] and "ReadWritePaths=" in alert["text"]
        assert [one["level"] for one in events] == ["error"] and "ReadWritePaths=" in daemon.log.read_text()


def test_replicas_stand_apart(tmp_path: Path) -> None:
    """None is in the root, around it, in another one, or reached there by a link."""
    root, far = tmp_path / "root", tmp_path / "far"
    root.mkdir()
    (tmp_path / "link").symlink_to(root)
    check_apart(root, (("far", far), ("near", tmp_path / "near")))
    for wrong in (root, root / "in", tmp_path, tmp_path / "link", far / "in"):
        with pytest.raises(InvalidRequest, match="is inside the other"):
            check_apart(root, (("far", far), ("wrong", wrong)))
    bucket = BucketAddress("b", "team")
    check_apart(bucket, (("other", BucketAddress("b", "teams")), ("far", BucketAddress("c", "team")), ("near", far)))
    for inside in (bucket, BucketAddress("b", ""), BucketAddress("b", "team/in")):
        with pytest.raises(InvalidRequest, match=r"s3://b.* is inside the other"):
            check_apart(bucket, (("wrong", inside),))
