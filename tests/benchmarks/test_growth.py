"""The growth benchmark: what it looks at, and that it notices."""

from __future__ import annotations

import gc
import mmap
import os
import socket
from pathlib import Path

from benchmarks import growth


def rows(**columns: object) -> list[dict[str, float]]:
    """Twenty rows in which each column follows a function of the row's number, or stays 1."""
    return [{name: columns.get(name, lambda i: 1.0)(i) for name in growth.COLUMNS} for i in range(20)]  # type: ignore[operator]


def test_growth_is_noticed_and_warming_up_is_not() -> None:
    """A leak shows, be it slow; a rise that ends in the first quarter and noise do not."""
    assert growth.growing(rows()) == {}
    assert growth.growing(rows(daemon_mib=lambda i: min(i, 4) * 50.0, threads=lambda i: 13.0)) == {}
    assert set(growth.growing(rows(daemon_mib=lambda i: 100 + 0.5 * i, threads=lambda i: 13 + i // 8))) == {
        "daemon_mib",
        "threads",
    }


def test_what_a_process_holds_is_counted() -> None:
    """A socket more is a descriptor and a socket more; a page touched in an arena is one more there."""
    fds, sockets = growth.descriptors(os.getpid())
    with socket.socket():
        assert growth.descriptors(os.getpid()) == (fds + 1, sockets + 1)
    gc.collect()  # arenas of tests before this one
    before = growth.own_bytes(os.getpid())[1]
    fd = os.memfd_create("holdfast-growth")
    os.ftruncate(fd, 3 * mmap.PAGESIZE)
    with mmap.mmap(fd, 3 * mmap.PAGESIZE) as memory:
        memory[0] = memory[mmap.PAGESIZE] = 1
        own, arena = growth.own_bytes(os.getpid())
    os.close(fd)
    assert own > 10 * growth.MIB and arena - before == 2 * mmap.PAGESIZE


def test_a_few_saves_are_measured(tmp_path: Path) -> None:
    """Every column has a value in every row, and the arena is as large as its slots."""
    found = growth.measure(tmp_path / "root", 4, 2**20, 7)
    assert [row["saves"] for row in found["rows"]] == [1, 2, 3, 4]
    assert all(set(row) == set(growth.COLUMNS) for row in found["rows"])
    assert 0.9 < found["rows"][-1]["arena_mib"] < 3 and found["daemon_peak_mib"] > 10
