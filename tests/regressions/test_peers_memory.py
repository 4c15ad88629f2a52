"""A launch on other nodes, or in another arrangement, restores from the memory of the nodes that saved; the root need not be
read, and is there for whatever memory does not give.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import pytest

from holdfast.rest.api import Api
from holdfast_formats import naming
from tests.daemons import wait_until
from tests.regressions.joint_worlds import Ranks, ranks
from tests.regressions.test_many_daemons import Daemon, Site, nodes, site

__all__ = ["site"]
pytestmark = pytest.mark.usefixtures("forked_programs")

RUN = "run"


@pytest.fixture(autouse=True)
def take_over(monkeypatch: pytest.MonkeyPatch) -> None:
    """A launch need not wait until it is known on all nodes that the ranks of the one before are gone."""
    monkeypatch.setenv("HOLDFAST_TAKE_OVER", "1")


def saved(site: Site, places: Sequence[Daemon], step: int = 3) -> None:
    """A launch has saved this step, all of it was read back, and the launch is gone without a farewell."""
    with ranks(RUN, places, f"saved-{step}") as world:
        for ticket in world.save(step):
            ticket.result()
        lost(world)
    with Api(places[0].url) as api:
        wait_until(lambda: api.checkpoint(RUN, step).verified)


def lost(world: Ranks) -> None:
    world.each(lambda rank, one: one.close(wait=False))


def spoil(site: Site, step: int = 3) -> None:
    """No tensor of the step is right in the root any more: who hands one over has it from memory. As on a disk, no time of a
    file says that it happened.
    """
    directory = site.root / naming.checkpoint_path(RUN, step)
    for file in directory.glob("*.safetensors"):
        before, data = file.stat(), bytearray(file.read_bytes())
        start = 8 + int.from_bytes(data[:8], "little")
        data[start:] = bytes(byte ^ 0x55 for byte in data[start:])
        with file.open("r+b") as opened:  # the same file: what is open elsewhere sees it
            opened.write(data)
        os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))


def origins(world: Ranks) -> dict[str, int]:
    """Bytes of the last restore of all ranks, by where they came from."""
    found: dict[str, int] = {}
    for one in world.checkpointers:
        assert one.last_restore is not None
        assert sum(one.last_restore.bytes_by.values()) == one.last_restore.bytes_read
        for origin, size in one.last_restore.bytes_by.items():
            found[origin] = found.get(origin, 0) + size
    return found


def restored(places: Sequence[Daemon], name: str, step: int = 3) -> dict[str, int]:
    """A new launch restores the step, bit for bit; from where its bytes came."""
    with ranks(RUN, places, name) as world:
        assert set(world.each(lambda rank, one: one.restore())) == {step}
        world.check(step)
        found = origins(world)
        lost(world)
    return found


def test_any_arrangement_restores_from_memory_alone(site: Site) -> None:
    """Four nodes of two ranks saved. With every tensor of the root spoiled, three nodes of two, one of four, and one process
    on a node that had no part in it get every bit: rows, columns, flat ranges, replicas, and what is a rank's own.
    """
    a, b, c, d = (site.start(name) for name in "abcd")
    saved(site, [a, a, b, b, c, c, d, d])
    e = site.start("e")
    spoil(site)
    for number, places in enumerate(([b, b, c, c, e, e], [d, d, c, c, b, b, a, a], [e], [d, d, d, d])):
        found = restored(places, f"new-{number}")
        assert found["peers"] > 0 and found["directory"] == 0, (number, found)
        assert (found["slot"] > 0) == (places != [e]), (number, found)


def test_ranks_where_they_were_ask_nobody(site: Site) -> None:
    """Own memory comes first: with ranks at the nodes that they saved from, no byte comes from elsewhere but of a replica
    that another rank is listed for.
    """
    a, b = site.start("a"), site.start("b")
    saved(site, [a, a, b, b])
    spoil(site)
    found = restored([a, a, b, b], "again")
    assert found["slot"] > 0 and found["directory"] == 0
    assert found["peers"] < found["slot"]


def test_what_memory_does_not_give_comes_from_the_root(site: Site) -> None:
    """A daemon that was killed and started again still holds its part, and says so. Of a node that is gone, and without
    PostgreSQL of all other nodes, the root gives what is missing; every restore is right.
    """
    a, b, c = (site.start(name) for name in "abc")
    saved(site, [a, a, b, b])
    a.kill()
    a = site.start("a")
    held = {"run": RUN, "step": 3, "attempt": 1, "ranks": 2}
    for name in ("a", "b"):
        wait_until(lambda name=name: [_told(one) for one in nodes(c)[name]["memory"]] == [held])
    spoil(site)
    found = restored([b, a], "restarted")
    assert found["slot"] > 0 and found["directory"] == 0, found
    spoil(site)  # back to what it was
    a.kill()
    found = restored([b, c], "lost")
    assert min(found["slot"], found["peers"], found["directory"]) > 0, found
    site.postgres.stop()
    try:
        found = restored([b], "away")
    finally:
        site.postgres.start()
    assert found["slot"] > 0 and found["directory"] > 0 and found["peers"] == 0, found


def _told(one: dict[str, Any]) -> dict[str, Any]:
    assert one.pop("bytes") > 100_000
    return one
