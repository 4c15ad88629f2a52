"""The audit log in the catalog: written behind, kept within bounds, and what a flood may push out of it."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from holdfast_formats import timestamps
from holdfast_formats.errors import CatalogUnavailable
from holdfast_service.control.access import audit as module
from holdfast_service.control.access.audit import Act, Audit, WantedEntries
from holdfast_service.control.catalog.catalog import Catalog
from holdfast_service.control.database.database import Database
from tests.daemons import wait_until

NOW = "2026-06-01T00:00:00.000Z"
ACT = Act("ci", "token", "10.0.0.1", "http", "pin-set", "PUT", "/v1/runs/r/checkpoints/5/pin", 204, "id", "r", 5)


class World:
    """An audit log over a catalog, and a clock."""

    def __init__(self, catalog: Catalog) -> None:
        self.catalog = catalog
        self.now = NOW
        self.audit = Audit(self.catalog.database, "node-1", lambda: self.now, days=30)

    def kinds(self, **wanted: str) -> list[str]:
        return [entry.kind for entry in self.audit.page(WantedEntries(**wanted), None, 1000).items]  # type: ignore[arg-type]


@pytest.fixture
def world(catalog: Catalog) -> Iterator[World]:
    made = World(catalog)
    yield made
    made.audit.close()


def test_an_entry_is_there_as_soon_as_it_is_asked_for(world: World) -> None:
    """With everything that was said of it, and with any text that somebody may have sent."""
    world.audit.add(ACT)
    world.audit.add(
        ACT._replace(kind="other", who="x\0\ud800" * 99, path="/" + "é" * 999, run="../etc", step=-1, target="\0")
    )
    odd, plain = world.audit.page(WantedEntries(), None, 10).items
    assert (plain.at, plain.node, plain.who, plain.run, plain.step, plain.status) == (NOW, "node-1", "ci", "r", 5, 204)
    assert (odd.run, odd.step, odd.target, len(odd.who), len(odd.path)) == (None, None, "\\x00", 128, 200)


def test_entries_are_removed_by_age(world: World) -> None:
    """Those that are older than was said, when the next batch has been written."""
    for day in range(45):
        world.now = timestamps.later(NOW, day * 86_400)
        world.audit.record(ACT._replace(kind=f"day-{day}"))
    world.audit._untrimmed = module.TRIM_EVERY
    world.audit.add(ACT._replace(kind="newest"))
    wait_until(lambda: world.kinds() == ["newest", *(f"day-{day}" for day in range(44, 13, -1))])


@pytest.mark.parametrize("apart_s", [7200.0, 400 * 86_400.0], ids=["hours", "a year"])
def test_no_clock_empties_it(world: World, apart_s: float) -> None:
    """Of two nodes one is hours, or a year, ahead; then the clock of the other one jumps, too."""
    other = Audit(world.catalog.database, "node-2", lambda: timestamps.later(world.now, apart_s), days=30)
    for minute in range(60):
        world.now = timestamps.later(NOW, minute * 60)
        world.audit.record(ACT)
        other.record(ACT)
    world.now = timestamps.later(NOW, 900 * 86_400)
    world.audit.record(ACT)
    world.audit._trim()
    assert len(world.kinds()) == 121


def test_a_flood_pushes_out_itself(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """One author's many entries of one kind make room; that author's others, and everybody else's, stay."""
    monkeypatch.setattr(module, "ENTRIES_MAX", 40)
    world.audit.add(ACT._replace(who="alice", kind="policy-set"))
    world.audit.add(ACT._replace(who="mallory", kind="checkpoint-removed"))
    world.audit.add(ACT._replace(who="mallory", kind="pin-set", status=403))
    assert world.audit.settle(30)
    for number in range(100):
        world.audit.add(ACT._replace(who="mallory", kind="pin-set", step=number))
    assert world.audit.settle(30)
    world.audit._trim()
    left = world.audit.page(WantedEntries(), None, 1000).items
    assert len(left) == 40
    assert {(entry.who, entry.kind, entry.status) for entry in left} >= {
        ("alice", "policy-set", 204),
        ("mallory", "checkpoint-removed", 204),
        ("mallory", "pin-set", 403),
    }
    assert left[0].step == 99  # the newest of the flood stay


def test_adding_waits_for_nothing(catalog: Catalog, monkeypatch: pytest.MonkeyPatch) -> None:
    """While the catalog is away, entries wait, so many; what is more is counted; and all that waited is there afterwards."""
    made = World(catalog)
    back, write = threading.Event(), Database.write

    def away(self: Database, hasty: bool = False):  # type: ignore[no-untyped-def]
        if not back.is_set():
            raise CatalogUnavailable("away")
        return write(self, hasty)

    monkeypatch.setattr(Database, "write", away)
    monkeypatch.setattr(module, "WAITING_MAX", 10)
    monkeypatch.setattr(module, "RETRY_S", 0.01)
    for number in range(15):
        made.audit.add(ACT._replace(step=number))
    assert (made.audit.waiting, made.audit.lost) == (10, 5)
    back.set()
    assert made.audit.settle(30) and len(made.kinds()) == 10
    made.audit.close()
    made.audit.add(ACT)
    assert made.audit.lost == 6
