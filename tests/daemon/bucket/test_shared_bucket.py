"""Daemons of several nodes on one bucket: joint saves, who is refused, and what a lost node leaves."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import pytest
from typer.testing import CliRunner

import holdfast
from holdfast.cli import app
from holdfast.rest.api import Api
from holdfast_formats import naming
from tests.daemons import RunningDaemon, wait_until
from tests.databases import Postgres, postgres
from tests.kit.bucket_sites import BucketSite, bucket_site
from tests.kit.objects import TestBucket, bucket, bucket_server, moto, moto_bucket, radosgw, seaweedfs, seaweedfs_bucket
from tests.kit.objects_proxy import faulty
from tests.regressions.joint_worlds import ranks, whole

__all__ = ["bucket", "bucket_server", "moto", "moto_bucket", "postgres", "radosgw", "seaweedfs", "seaweedfs_bucket"]

RUN = "llama"


@pytest.fixture
def site(
    moto_bucket: TestBucket, postgres: Postgres, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[BucketSite]:
    for key, value in moto_bucket.server.environment().items():
        monkeypatch.setenv(key, value)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state-home"))
    with bucket_site(moto_bucket, tmp_path, postgres) as made:
        yield made


def test_nodes_save_one_checkpoint_into_a_bucket(site: BucketSite) -> None:
    """Each file is uploaded by one node, both upload some, and a node that is back restores what both had; it is read back,
    listed by both, and read without a daemon.
    """
    a, b = site.start("a"), site.start("b")
    with ranks(RUN, [a, b], "first", file_bytes_max=400_000) as world:
        for step in (1, 2):
            for ticket in world.save(step):
                ticket.result(120)
    assert site.steps(RUN) == [1, 2]
    for daemon in (a, b):
        with Api(daemon.url) as api:
            wait_until(lambda api=api: [one.step for one in api.checkpoints(RUN)] == [2, 1])
            wait_until(lambda api=api: all(one.verified for one in api.checkpoints(RUN)))
    assert all(len(_written(daemon)) == 2 for daemon in (a, b))
    b.kill()
    b = site.start("b")
    with ranks(RUN, [b, a], "second") as world:
        assert set(world.each(lambda rank, one: one.restore())) == {2}
        world.check(2)
    with holdfast.open(f"{site.bucket.url}/{RUN}@2") as checkpoint:
        assert (checkpoint.read("alike") == whole(2)["alike"].numpy()).all()
    site.bucket.delete(naming.commit_object_path(RUN, 2))  # by hand: no node waits until it may see it
    with ranks(RUN, [b, a], "third") as world:
        assert set(world.each(lambda rank, one: one.restore())) == {1}
    assert not any("not visible here yet" in daemon.log.read_text() for daemon in (a, b))
    assert naming.OWNER not in site.bucket.sizes() and site.bucket.uploads() == []


def test_others_are_refused_by_name(site: BucketSite) -> None:
    """A daemon with another catalog, or with one of its own, would not know of the others: also when none of them runs."""
    a = site.start("a")
    other = site.postgres.take()
    for catalog in ("sqlite:///" + str(site.directory / "own.sqlite"), other):
        with pytest.raises(AssertionError, match="wrong-root") as refused:
            site.start("b", catalog=catalog)
        assert "is shared by the daemons of several nodes, with the catalog" in str(refused.value)
        assert "secret" not in str(refused.value)
    site.postgres.give_back(other)
    busy = CliRunner().invoke(app, ["catalog", "adopt", "--root", site.bucket.url, "--catalog", site.url])
    assert busy.exit_code == 4 and "daemons run that share the catalog" in busy.output and ": a" in busy.output
    a.stop()
    alone = ("--root", site.bucket.url, "--state", str(site.directory / "alone"))
    with pytest.raises(AssertionError, match=f"(?s)wrong-root.*catalog adopt --root {site.bucket.url}"):
        RunningDaemon(site.directory / "alone", *alone)
    assert naming.OWNER not in site.bucket.sizes()
    adopted = CliRunner().invoke(app, ["catalog", "adopt", "--root", site.bucket.url])
    assert adopted.exit_code == 0, adopted.output
    RunningDaemon(site.directory / "alone", *alone).stop()


@pytest.mark.parametrize("conditions", ["ignored", pytest.param("refused", marks=pytest.mark.objects)])
def test_a_bucket_without_conditions_is_shared_by_the_catalog(
    site: BucketSite, monkeypatch: pytest.MonkeyPatch, conditions: Literal["refused", "ignored"]
) -> None:
    """Which the daemons say; they need no word that nothing else writes."""
    with faulty(site.bucket.server.endpoint) as proxy:
        proxy.conditions = conditions
        monkeypatch.setenv("AWS_ENDPOINT_URL_S3", proxy.endpoint)
        a, b = site.start("a"), site.start("b")
        assert f"If-None-Match are {conditions}" in a.log.read_text() and "the catalog does" in a.log.read_text()
        with ranks(RUN, [a, b], "first") as world:
            for step in (1, 2):
                for ticket in world.save(step):
                    ticket.result(120)
        with Api(b.url) as api:
            assert {node.arbiter for node in api.nodes()} == {"catalog"}
        for daemon in (a, b):
            daemon.stop()
    assert site.steps(RUN) == [1, 2]


def _written(daemon: RunningDaemon) -> list[str]:
    """What a daemon has logged of its shares."""
    return [line for line in daemon.log.read_text().splitlines() if "bytes written by this node" in line]
