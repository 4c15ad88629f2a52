"""Readers hold what they read, for a bounded time, against every removal."""

from __future__ import annotations

from typing import Any

import pytest

from holdfast_formats.errors import CatalogUnavailable, InUse, NoSuchCheckpoint
from holdfast_service.control.checkpoints.readers import CHECK, OPENED, READ_MAX_S, Readers
from tests.kit.clock import Clock


def free(readers: Readers, step: int = 5) -> bool:
    with readers.removing("run", step) as free:
        return free


def test_a_reader_holds_for_the_length_of_its_block_and_a_while() -> None:
    """Inside the block, and for what it lingers, nothing removes the checkpoint; its neighbours are not held."""
    clock = Clock(100.0)
    readers = Readers(clock)
    with readers.reading("run", 5, "HTTP", linger_s=60), readers.reading("run", 7, "the daemon"):
        assert not free(readers) and free(readers, 6)
        assert set(readers.held("run")) == {5, 7}
    assert readers.held("run") == {5: 60.0}
    assert not free(readers) and free(readers, 7)
    clock.now += 60
    assert free(readers)
    assert readers.held("run") == readers.held("other") == {}


def test_a_hold_is_renewed_and_bounded() -> None:
    """The same reader again holds for longer; a block that never ends holds for a day and no more."""
    clock = Clock(100.0)
    readers = Readers(clock)
    readers.hold("run", 5, "me", 10)
    clock.now += 9
    readers.hold("run", 5, "me", 10)
    clock.now += 9
    assert not free(readers)
    readers.release("run", 5, "me")
    readers.release("run", 5, "me")
    assert free(readers)
    with readers.reading("run", 5, "slow"):
        clock.now += READ_MAX_S
        assert free(readers)


def test_what_is_being_removed_is_not_read_any_more() -> None:
    """Who comes while a removal is under way is told so, and not handed half a checkpoint."""
    readers = Readers(Clock(100.0))
    with readers.removing("run", 5) as free_now:
        assert free_now
        with pytest.raises(NoSuchCheckpoint, match="run@5"):
            readers.hold("run", 5, "late", 1)
        readers.hold("run", 6, "another", 1)
    readers.hold("run", 5, "in time", 1)


def test_the_end_of_a_hold_is_told() -> None:
    """Every release names its run; one that ends by itself is not told."""
    readers = Readers(Clock(100.0))
    told: list[str] = []
    readers.freed.subscribe(told.append)
    with readers.reading("a", 1, "x"), readers.reading("b", 1, "x"):
        pass
    readers.release("a", 1, "nobody")
    assert told == ["b", "a"]


def test_who_has_it_open_holds_up_no_replacement() -> None:
    """A reader over HTTP reads on in what it has open: it keeps a checkpoint from removal, not from replacement."""
    readers = Readers()
    with readers.reading("r", 1, OPENED, linger_s=60):
        assert set(readers.held("r")) == {1} and readers.held("r", opened=False) == {}
        with readers.removing("r", 1) as free:
            assert not free
        with readers.removing("r", 1, opened=False) as free:
            assert free
    assert set(readers.held("r")) == {1} and readers.held("r", opened=False) == {}, "for the next range"
    readers.hold("r", 1, "attempt 3", 60)
    with readers.removing("r", 1, opened=False) as free:
        assert not free and set(readers.held("r", opened=False)) == {1}


def test_checks_end_when_a_save_waits_for_their_place() -> None:
    """While it waits no check begins, of this checkpoint alone; other readers come as before, and are not asked to end."""
    readers = Readers(Clock(100.0))
    with readers.reading("run", 5, CHECK), readers.awaited("run", 5):
        assert readers.is_awaited("run", 5) and not readers.is_awaited("run", 6)
        assert readers.only_checked("run", 5) and not free(readers)
        with pytest.raises(InUse, match="being replaced"), readers.reading("run", 5, CHECK):
            pass
        with readers.reading("run", 6, CHECK), readers.reading("run", 5, "the daemon"):
            assert not readers.only_checked("run", 5)
        assert readers.only_checked("run", 5)
    assert not readers.is_awaited("run", 5)
    with readers.reading("run", 5, CHECK):
        assert not free(readers)


class Elsewhere:
    """The other nodes: what they were told, and what they read."""

    def __init__(self) -> None:
        self.told: list[tuple[str, int, bool]] = []
        self.read: dict[bool, dict[int, float]] = {True: {}, False: {}}

    def announce(self, run: str, step: int, opened: bool) -> None:
        self.told.append((run, step, opened))

    def elsewhere(self, run: str, opened: bool) -> dict[int, float]:
        return self.read[opened]


def test_other_nodes_are_told_once_of_what_is_read_here() -> None:
    """Before it is read, and again when one comes who may not lose its place. Checks are not told."""
    clock = Clock(100.0)
    others: Any = Elsewhere()
    readers = Readers(clock, others)
    with readers.reading("run", 1, CHECK):
        assert others.told == [] and readers.places() == {}
    for _ in range(3):
        readers.hold("run", 1, f"{OPENED} x", 60)
    assert others.told == [("run", 1, True)] and readers.places() == {("run", 1): True}
    readers.hold("run", 1, "attempt 1", 60)
    readers.hold("run", 1, f"{OPENED} y", 60)
    assert others.told == [("run", 1, True), ("run", 1, False)] and readers.places() == {("run", 1): False}


def test_a_read_that_has_ended_is_announced_again() -> None:
    """When the next beat has ended it at the other nodes, not only after a while."""
    others: Any = Elsewhere()
    readers = Readers(Clock(100.0), others)
    for _ in range(2):
        with readers.reading("run", 1, OPENED):
            pass
    assert others.told == [("run", 1, True)]
    assert readers.places() == {}
    with readers.reading("run", 1, OPENED):
        assert others.told == [("run", 1, True)] * 2


def test_what_other_nodes_read_is_neither_removed_nor_replaced() -> None:
    """Who has it open elsewhere holds up no replacement, as here."""
    others: Any = Elsewhere()
    readers = Readers(shared=others)
    others.read = {True: {1: 9.0, 2: 5.0}, False: {2: 5.0}}
    assert readers.held("run") == {1: 9.0, 2: 5.0} and readers.held("run", opened=False) == {2: 5.0}
    for step, opened, expected in ((1, True, False), (1, False, True), (2, False, False), (3, True, True)):
        with readers.removing("run", step, opened) as free:
            assert free is expected


def test_a_replacement_does_not_fail_because_the_other_nodes_cannot_be_asked() -> None:
    """A removal does: it can wait."""

    class Away(Elsewhere):
        def elsewhere(self, run: str, opened: bool) -> dict[int, float]:
            raise CatalogUnavailable("away")

    away: Any = Away()
    readers = Readers(shared=away)
    with readers.removing("run", 1, opened=False) as free:
        assert free
    with pytest.raises(CatalogUnavailable), readers.removing("run", 1):
        pass
