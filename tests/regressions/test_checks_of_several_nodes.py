"""What several nodes have saved together, all of them read back: each a portion, whoever dies, is late, or meets damage."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psycopg
import pytest
import torch
from typer.testing import CliRunner

from holdfast import Fragment, cli
from holdfast.rest.api import Api
from tests.daemons import wait_until
from tests.regressions.joint_worlds import Ranks, ranks
from tests.regressions.test_many_daemons import Daemon, Site, site, steps

__all__ = ["site"]
pytestmark = [
    pytest.mark.usefixtures("forked_programs"),
    pytest.mark.filterwarnings("ignore::holdfast.SaveWarning"),  # of saves that a test lets fail
]
RUN = "run"


def verified(daemon: Daemon, step: int) -> dict[str, object]:
    """What the check of this step says of itself, once it is verified."""
    with Api(daemon.url) as api:
        wait_until(lambda: api.checkpoint(RUN, step).verified)
        return api.checkpoint(RUN, step).check or {}


def saved(world: Ranks, *numbers: int) -> None:
    for step in numbers:
        for ticket in world.save(step):
            ticket.result()


def test_every_node_reads_a_portion(site: Site) -> None:
    """Of 96 MiB, a third each, past the page cache: what the kernel says that each process has read from storage."""
    daemons = [site.start(name) for name in "abc"]
    states = [{"model": {f"layer.{n}": torch.full((2**20,), float(n + rank)) for n in range(8)}} for rank in range(3)]
    with ranks(RUN, daemons, "first") as world:
        for rank in range(3):
            world.states[rank]["model"].update(_shards(states[rank]["model"], rank))
        before = [_read(daemon) for daemon in daemons]
        for ticket in world.each(lambda rank, one: one.save(1, wait="durable")):
            ticket.result()
        check = verified(daemons[0], 1)
        read = [_read(daemon) - was for daemon, was in zip(daemons, before, strict=True)]
    assert check["nodes"] == 3
    wait_until(lambda: left(site) == 0)
    size = int(str(check["bytes"]))
    print(f"a checkpoint of {size} bytes was verified by three nodes: {read}")
    assert sum(read) < size * 1.7  # manifests, and the layouts that are tried


@pytest.mark.cluster
def test_a_node_that_stands_still_and_one_that_is_killed(site: Site) -> None:
    """A third node holds no ranks of the save. It is stopped, so others read its portion; then killed, as is another one as
    soon as it has saved: the one that is left reads everything.
    """
    a, b, c = (site.start(name) for name in "abc")
    with ranks(RUN, [a, b], "first") as world:
        saved(world, 1)
        assert verified(a, 1)["nodes"] == 3
        with standing_still(c):
            saved(world, 2)
            assert verified(a, 2)["nodes"] == 2
            saved(world, 3)
            # Who dies between the commit and the begin of its check leaves that to the scrub, which looks twice in 120 s.
            wait_until(lambda: _begun_by(site, 3) is not None)
            b.kill()
            assert verified(a, 3)["layouts"]
    assert left(site) == 0 and steps(site.root, RUN) == [1, 2, 3]


def test_the_node_that_committed_is_killed(site: Site) -> None:
    """While a third node holds the check up: whoever is left ends it."""
    a, b, c = (site.start(name) for name in "abc")
    with ranks(RUN, [a, b], "first") as world:
        with standing_still(c):
            saved(world, 1)
            wait_until(lambda: _begun_by(site, 1) is not None)
            (a if _begun_by(site, 1) == "a" else b).kill()
        alive = a if a.process.poll() is None else b
        verified(alive, 1)
        wait_until(lambda: left(site) == 0)


def test_a_catalog_that_is_away_while_it_is_checked(site: Site) -> None:
    """What is proven waits; when it is back the checkpoint is verified."""
    a, b, c = (site.start(name) for name in "abc")
    with ranks(RUN, [a, b], "first") as world:
        with standing_still(c):
            saved(world, 1)
            wait_until(lambda: left(site) > 0)
            site.postgres.stop()
        time.sleep(3)
        site.postgres.start()
        assert verified(a, 1)["nodes"] and verified(b, 1)["nodes"]
        assert "verified by" in printed("show", f"{RUN}@1", "--url", a.url)
        wait_until(lambda: left(site) == 0)


def _shards(tensors: dict[str, torch.Tensor], rank: int) -> dict[str, Fragment]:
    """Each is a third of a tensor, by rows."""
    return {
        name: Fragment(tensor, (3 * tensor.numel(),), offset=(rank * tensor.numel(),)) for name, tensor in tensors.items()
    }


def _read(daemon: Daemon) -> int:
    """The bytes that a daemon has read from storage."""
    lines = Path(f"/proc/{daemon.process.pid}/io").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("read_bytes")).split()[1])


def _begun_by(site: Site, step: int) -> str | None:
    """The node that has begun a check of this step that still goes on."""
    with psycopg.connect(_plain(site)) as connection:
        found = connection.execute("SELECT node FROM shared_checks WHERE step = %s", (step,)).fetchone()
        return None if found is None else str(found[0])


def printed(*arguments: str) -> str:
    done = CliRunner().invoke(cli.app, list(arguments))
    assert done.exit_code == 0, done.output
    return " ".join(done.output.split())


@contextmanager
def standing_still(daemon: Daemon) -> Iterator[None]:
    """It does nothing for the length of the block, and does not know of it."""
    os.kill(daemon.process.pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(daemon.process.pid, signal.SIGCONT)


def _plain(site: Site) -> str:
    return site.url.replace("postgresql+psycopg", "postgresql")


def left(site: Site) -> int:
    """How many rows of shared checks there are."""
    with psycopg.connect(_plain(site)) as connection:
        found = connection.execute(
            "SELECT (SELECT count(*) FROM portions) + (SELECT count(*) FROM shared_checks)"
        ).fetchone()
        assert found is not None
        return int(found[0])
