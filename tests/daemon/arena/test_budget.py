"""What memory the arena may have, of the limits that were found."""

from __future__ import annotations

from pathlib import Path

import pytest

from holdfast_formats.errors import LimitExceeded
from holdfast_formats.memory_bounds import Bound
from holdfast_formats.staging.room import SegmentRoom
from holdfast_service.daemon.arena.budget import Budget
from tests.limited_machine import GIB, Machine


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


def test_more_than_there_is_cannot_be_declared(machine: Machine) -> None:
    """The start is refused with what was declared, what limits it, and how much of that is free."""
    machine.member("0::/a", "32 23 0:29 / {at} rw - cgroup2 cgroup rw")
    machine.unified("a", 10 * GIB, 4 * GIB)
    with pytest.raises(
        LimitExceeded, match=rf"is {11 * GIB}, but memory.max of .*/a allows {10 * GIB} .* {7 * GIB} are free"
    ):
        Budget(11 * GIB, machine.bounds)
    assert Budget(10 * GIB, machine.bounds).bytes_max == 10 * GIB
    assert Budget(None, machine.bounds).bytes_max == 10 * GIB * 94 // 100


def test_the_narrowest_limit_sets_the_room() -> None:
    """The budget less what is taken, or what is free less a spare part and less what was promised and not touched yet."""
    budget = Budget(50, lambda: [Bound("machine", 100, 60)])
    assert budget.room(0, 0) == SegmentRoom(50, "--arena-bytes-max, 50 bytes")
    assert budget.room(30, 30) == SegmentRoom(20, "--arena-bytes-max, 50 bytes")
    assert budget.room(40, 0).bytes == 10
    crowded = Budget(50, lambda: [Bound("machine", 100, 40), Bound("group", 80, 60)])
    assert crowded.room(10, 10) == SegmentRoom(35, "machine, 100 bytes")
    assert crowded.room(10, 0) == SegmentRoom(25, "machine, 100 bytes")
    assert crowded.room(50, 0).bytes == 0
