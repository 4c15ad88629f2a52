"""A node of a joint save that cannot write: another node writes its share, from its slots, once in a round."""

from __future__ import annotations

import resource
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import psycopg
import pytest

from holdfast.rest.api import Api
from holdfast_formats import naming
from holdfast_formats.errors import CheckpointError, StorageFailed
from holdfast_service.daemon.checking.verifier import verify
from holdfast_service.storage.posix import PosixTier
from tests.daemons import wait_until
from tests.regressions.joint_worlds import Ranks, ranks
from tests.regressions.test_many_daemons import Daemon, Site, site, steps

__all__ = ["site"]
pytestmark = [
    pytest.mark.usefixtures("forked_programs"),
    pytest.mark.filterwarnings("ignore::holdfast.SaveWarning"),  # of saves that a test lets fail
]

SLOW = ("--write-bytes-per-second", "300000")  # a share takes some four seconds
OWN_MOUNTS = ("unshare", "--mount")


@contextmanager
def cannot_write(*daemons: Daemon) -> Iterator[None]:
    """Their limit on the size of files is low for the length of a block: every write of a file fails."""
    before = {daemon.process.pid: resource.prlimit(daemon.process.pid, resource.RLIMIT_FSIZE) for daemon in daemons}
    for pid, (_, hard) in before.items():
        resource.prlimit(pid, resource.RLIMIT_FSIZE, (64, hard))
    try:
        yield
    finally:
        for daemon in daemons:
            if daemon.process.poll() is None:
                resource.prlimit(daemon.process.pid, resource.RLIMIT_FSIZE, before[daemon.process.pid])


def wait_until_asked(site: Site, column: str = "unable") -> None:
    """Until this of the newest round's hand-over is known."""
    newest = f"SELECT {column} IS NOT NULL FROM joint_rounds ORDER BY id DESC LIMIT 1"
    with psycopg.connect(site.url.replace("postgresql+psycopg", "postgresql"), autocommit=True) as connection:
        wait_until(lambda: (connection.execute(newest).fetchone() or [False])[0])


def told(daemon: Daemon) -> list[dict[str, Any]]:
    """The events of it."""
    asked = {"run": "run", "kind": "share-handed-over"}
    found: list[dict[str, Any]] = httpx.get(f"{daemon.url}/v1/events", params=asked, trust_env=False).json()["items"]
    return found


def handed_over(daemon: Daemon) -> list[tuple[int | None, str, str, str]]:
    """Of which step, who could not, who has, and how loud it was said."""
    return [(one["step"], one["detail"]["unable"], one["detail"]["helper"], one["level"]) for one in told(daemon)]


def is_written(world: Ranks, step: int) -> None:
    for ticket in world.save(step):
        ticket.result()


def is_committed(site: Site, world: Ranks, tickets: list[Any], step: int) -> None:
    """All ranks hear it, every byte is there, and is what they hold."""
    for ticket in tickets:
        ticket.result(180)
    assert step in steps(site.root, "run")
    verify(PosixTier(site.root), naming.checkpoint_path("run", step))
    world.set(step + 1000)
    assert set(world.each(lambda rank, one: one.restore(step=step))) == {step}
    world.check(step)


def test_another_node_writes_the_share_of_one_that_cannot(site: Site) -> None:
    """Also the files of its ranks. The event says which node could not, why, and which one has; later it writes again."""
    a, b = site.start("a"), site.start("b")
    with ranks("run", [b, a, b], "first", assets={"config.json": {"hidden": 7}}) as world:
        is_written(world, 1)
        with cannot_write(b):
            is_written(world, 2)
        is_committed(site, world, [], 2)
        assert (site.root / naming.checkpoint_path("run", 2) / "config.json").read_bytes()
        wait_until(lambda: bool(handed_over(a)))
        assert handed_over(a) == handed_over(b) == [(2, "b", "a", "warning")]
        with Api(b.url) as api:
            (said,) = [event["text"] for event in told(b)]
            assert said.startswith("on node b: ") and "File too large" in said and "node a has written" in said
            wait_until(lambda: api.checkpoint("run", 2).verified)
        is_committed(site, world, world.save(3), 3)
        assert len(handed_over(a)) == 1


def test_a_save_that_no_node_can_write_names_both(site: Site) -> None:
    """It fails on all ranks alike, and the next one commits."""
    a, b = site.start("a"), site.start("b")
    with ranks("run", [a, b], "first") as world:
        is_written(world, 1)
        with cannot_write(a, b):
            whys = set()
            for ticket in world.save(2, wait=None):
                with pytest.raises(StorageFailed) as failed:
                    ticket.result(180)
                whys.add(failed.value.detail)
                assert "ulimit -f" in failed.value.hint
            (why,) = whys
            assert "on node a: " in why and "on node b: " in why
        is_committed(site, world, world.save(3), 3)
    assert steps(site.root, "run") == [1, 3] and handed_over(a) == []


@pytest.mark.cluster
def test_a_helper_whose_disk_is_full_too(site: Site) -> None:
    """It has written its own share, and cannot write the other one: the error names both, and who was to help."""
    a, b = site.start("a"), site.start("b", *SLOW)
    with ranks("run", [a, b], "first") as world:
        is_written(world, 1)
        tickets = world.save(2, wait=None)
        with psycopg.connect(site.url.replace("postgresql+psycopg", "postgresql"), autocommit=True) as connection:
            written = "SELECT count(*) FROM parts JOIN joint_rounds ON id = round_id WHERE step = 2 AND receipt IS NOT NULL"
            wait_until(lambda: (connection.execute(written).fetchone() or [0])[0] == 1)
        with cannot_write(a, b):
            for ticket in tickets:
                with pytest.raises(
                    StorageFailed, match=r"^on node b: .*; on node a: .*, while it wrote that share"
                ) as failed:
                    ticket.result(180)
                assert (failed.value.members["node"], failed.value.members["helper"]) == ("b", "a")
        is_committed(site, world, world.save(3), 3)


@pytest.mark.parametrize(
    "victim",
    [
        *(
            pytest.param(one, marks=pytest.mark.cluster)
            for one in ("the node that cannot write", "the helper before it begins")
        ),
        "the helper",
    ],
)
def test_a_daemon_is_killed_while_a_share_is_handed_over(site: Site, victim: str) -> None:
    """It is started again: what was said stands, so the share is written by the helper alone, and the save commits."""
    daemons = {"a": site.start("a", *SLOW), "b": site.start("b")}
    with ranks("run", [daemons["a"], daemons["b"]], "first") as world:
        is_written(world, 1)
        with cannot_write(daemons["b"]):
            tickets = world.save(2, wait=None)
            wait_until_asked(site, "helper" if victim == "the helper" else "unable")
        name = "b" if victim == "the node that cannot write" else "a"
        daemons[name].kill()
        daemons[name] = site.start(name, *(SLOW if name == "a" else ()))  # which could write now
        is_committed(site, world, tickets, 2)
        wait_until(lambda: handed_over(daemons["a"]) == [(2, "b", "a", "warning")])


@pytest.mark.cluster
def test_a_node_stands_still_after_it_has_asked(site: Site) -> None:
    """SIGSTOP, while the other one reads its slots, which takes seconds; the helper's own share needs them before."""
    a, b = site.start("a", *SLOW), site.start("b")
    with ranks("run", [a, b], "first") as world:
        is_written(world, 1)
        with cannot_write(b):
            tickets = world.save(2, wait=None)
            wait_until_asked(site, "helper")
        b.freeze()
        time.sleep(1)
        b.thaw()
        is_committed(site, world, tickets, 2)


@pytest.mark.cluster
@pytest.mark.parametrize("gone", ["b", "a"])
def test_a_daemon_is_gone_for_good_while_a_share_is_handed_over(site: Site, gone: str) -> None:
    """The save ends, with the reason for which there was something to hand over, and the names of both."""
    daemons = {"a": site.start("a", *SLOW), "b": site.start("b")}
    with ranks("run", [daemons["a"], daemons["b"]], "first") as world:
        is_written(world, 1)
        with cannot_write(daemons["b"]):
            tickets = world.save(2, wait=None)
            wait_until_asked(site, "helper" if gone == "a" else "unable")
        daemons[gone].kill()
        with pytest.raises(CheckpointError, match=r"on node b: .*; .*(node a|it was lost|node b did not send)"):
            tickets[gone == "a"].result(200)
        daemons[gone] = site.start(gone)
        is_committed(site, world, world.save(3), 3)


@pytest.mark.cluster
@pytest.mark.parametrize("who", ["b", "a"])
def test_a_daemon_stands_still_for_long_while_a_share_is_handed_over(site: Site, who: str) -> None:
    """The other one ends the save for both, and what the first writes later becomes no checkpoint."""
    daemons = {"a": site.start("a", *SLOW), "b": site.start("b")}
    with ranks("run", [daemons["a"], daemons["b"]], "first") as world:
        is_written(world, 1)
        with cannot_write(daemons["b"]):
            tickets = world.save(2, wait=None)
            wait_until_asked(site, "helper" if who == "a" else "unable")
        daemons[who].freeze()
        try:
            with pytest.raises(CheckpointError, match="on node b: "):
                tickets[who == "a"].result(200)
        finally:
            daemons[who].thaw()
        with pytest.raises(CheckpointError, match="on node b: "):
            tickets[who == "b"].result(180)
        is_committed(site, world, world.save(3), 3)
    assert steps(site.root, "run") == [1, 3]


def may_mount() -> bool:
    tried = [*OWN_MOUNTS, "mount", "--bind", "/tmp", "/tmp"]
    return shutil.which("nsenter") is not None and subprocess.run(tried, capture_output=True).returncode == 0


@pytest.mark.cluster
@pytest.mark.skipif(not may_mount(), reason="needs mounts of its own")
def test_a_node_whose_mount_is_read_only(site: Site) -> None:
    """As a file server, or a kernel after an error, has it: checkpoints go on, with its share written by the other node."""
    a = site.start("a")
    b = Daemon(site.root, "b", site.url, before=OWN_MOUNTS)
    site.daemons.append(b)
    run = str(site.root / "run")
    with ranks("run", [b, a], "first") as world:
        is_written(world, 1)
        inside = ["nsenter", "-t", str(b.process.pid), "-m", "sh", "-c"]
        subprocess.run([*inside, 'mount --bind "$0" "$0" && mount -o remount,bind,ro "$0"', run], check=True)
        for step in (2, 3):
            is_written(world, step)
        subprocess.run([*inside, 'umount -l "$0"', run], check=True)
        for step in (2, 3):
            is_committed(site, world, [], step)
        wait_until(lambda: {one[:2] for one in handed_over(a)} == {(2, "b"), (3, "b")})
        assert all("Read-only file system" in event["text"] for event in told(a))
