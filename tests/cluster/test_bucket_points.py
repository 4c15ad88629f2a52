"""Four nodes save one checkpoint into a bucket, and a daemon is killed at each named point of a joint save.

At most the round is lost in which it is killed, for all ranks alike; the next save commits; what is committed is right; and
a sweep leaves nothing else.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from holdfast_files.objects import client
from holdfast_files.objects.object_files import ObjectFiles
from holdfast_files.objects.probe import HONOURED
from holdfast_formats import naming
from holdfast_service.daemon.checking.verifier import verify
from holdfast_service.storage.objects.conditional_puts import ConditionalPuts
from holdfast_service.storage.objects.object_store import ObjectStore
from holdfast_service.storage.objects.uploads import Uploads
from tests.cluster.test_joint_rounds import NODES, how_it_ended
from tests.cluster.test_named_points import EARLY, EXCHANGING, LAST, Marks, marks_at
from tests.databases import Postgres
from tests.kit.bucket_sites import BucketNode, BucketSite, bucket_site
from tests.kit.objects import TestBucket
from tests.regressions import joint_worlds
from tests.regressions.joint_worlds import Ranks, ranks

pytestmark = [
    pytest.mark.objects,
    pytest.mark.filterwarnings("ignore::holdfast.SaveWarning"),  # of saves that a kill has ended
]

UPLOADING = ("a part is sent", "before parts are put together", "parts are put together")
WRITING = ("before planning", *EXCHANGING, "mid share", *UPLOADING, "share written", "before delivering", "delivered")
PUBLISHING = ("a small object is put", "before COMMIT is put", "before the commit object", "the commit object is put")
COMMITTING = ("claimed", "before the joint manifest", *PUBLISHING, "before the place is cleared")
POINTS = (*EARLY, *WRITING, *COMMITTING, *LAST)
FILE_BYTES_MAX = 1_000_000  # each long tensor has a file of its own
ROWS = 3600  # with which it has two parts

marks = marks_at(POINTS)


@pytest.fixture
def site(
    seaweedfs_bucket: TestBucket, postgres: Postgres, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[BucketSite]:
    for key, value in seaweedfs_bucket.server.environment().items():
        monkeypatch.setenv(key, value)
    monkeypatch.setattr(joint_worlds, "ROWS", ROWS)
    with bucket_site(seaweedfs_bucket, tmp_path, postgres) as made:
        yield made


def test_a_daemon_is_killed_at_every_point(site: BucketSite, marks: Marks) -> None:
    """It is started again at once."""
    daemons = {name: site.start(name) for name in NODES}
    ends: Counter[tuple[str, str]] = Counter()
    committed: list[int] = []
    with ranks("run", [daemons[name] for name in NODES], "killed", slots=3, file_bytes_max=FILE_BYTES_MAX) as world:
        for number, point in enumerate(POINTS):
            step = 2 * number + 1
            end = _killed(site, world, daemons, marks, point, step)
            ends[point, end] += 1
            print(f"{point}: {end}", flush=True)
            assert end in ("committed", "round-aborted"), (point, end)
            stands = step in site.steps("run")
            assert stands == (end == "committed"), (point, step, end)
            for ticket in world.save(step + 1):
                ticket.result()
            committed += [step] * stands + [step + 1]
    lost = sum(count for (_, end), count in ends.items() if end != "committed")
    print(f"\n{len(POINTS)} kills, one at each point, {lost} rounds lost: {dict(ends)}", flush=True)
    assert site.steps("run") == committed
    with ranks("run", [daemons["a"], daemons["c"], daemons["d"]], "after") as world:
        for step in (committed[-1], committed[len(committed) // 2]):
            assert set(world.each(lambda rank, one: one.restore(step=step))) == {step}  # noqa: B023 - used at once
            world.check(step)
    for daemon in daemons.values():
        daemon.stop()
    _sound(site, committed)


@pytest.mark.parametrize("point", ["claimed", "the commit object is put", "before the end is told"])
def test_a_committer_is_not_needed(site: BucketSite, marks: Marks, point: str) -> None:
    """It is not started again: another node commits once its claim has ended, and the ranks there hear it."""
    daemons = {name: site.start(name) for name in NODES}
    with ranks("run", [daemons[name] for name in NODES], "killed", file_bytes_max=FILE_BYTES_MAX) as world:
        for ticket in world.save(1):
            ticket.result()
        marks.arm(point)
        tickets = world.save(2, wait=None)
        victim = marks.victim(daemons)
        daemons[victim].kill()
        for name, ticket in zip(NODES, tickets, strict=True):
            if name != victim:
                ticket.result()
        assert site.steps("run") == [1, 2]
        daemons[victim] = site.start(victim)
        assert how_it_ended(tickets[NODES.index(victim)]) in ("committed", "daemon-gone")  # its rank may have given up
        for ticket in world.save(3):
            ticket.result()
    for daemon in daemons.values():
        daemon.stop()
    _sound(site, [1, 2, 3])


def _killed(site: BucketSite, world: Ranks, daemons: dict[str, BucketNode], marks: Marks, point: str, step: int) -> str:
    """How the save of a step ends in which a daemon is killed at a point, and started again."""
    marks.arm(point)
    tickets = world.save(step, wait=None)
    victim = marks.victim(daemons)
    daemons[victim].kill()
    daemons[victim] = site.start(victim)
    heard = {how_it_ended(ticket) for ticket in tickets}
    assert len(heard) == 1, (point, step, heard)
    return heard.pop()


def _sound(site: BucketSite, committed: list[int]) -> None:
    """What is committed is right, and one sweep removes all the rest."""
    bucket = client.opened(site.bucket.url)
    uploads = Uploads(bucket)
    try:
        for step in committed:
            verify(ObjectFiles(bucket), naming.checkpoint_path("run", step))
        swept = ObjectStore(uploads, ConditionalPuts(bucket, HONOURED)).sweep()
        print(f"one sweep removed {len(swept)} prefixes", flush=True)
        top = f"run/{naming.DATA}/"
        left = {key.removeprefix(top).partition("/")[0] for key in site.bucket.sizes(top)}
        assert len(left) == len(committed) and site.bucket.uploads() == []
    finally:
        uploads.close()
        bucket.close()
